"""PyTorch's own tests of `torch.distributed` backends, run on this backend under mpirun."""
