"""The operations: torch.distributed's words, for more than tensors."""
