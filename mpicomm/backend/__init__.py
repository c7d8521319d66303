"""The `torch.distributed` back end over MPI."""
