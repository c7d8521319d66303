"""The verbs: torch.distributed's words, for more than tensors."""
