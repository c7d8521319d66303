"""The `torch.distributed` backend over MPI."""
