"""Collective and point-to-point operations on tensors, arrays, numbers and pytrees, under torch.distributed's names."""
