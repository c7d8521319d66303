"""PyTorch's own tests of `torch.distributed` back ends, run on this one under mpirun."""
