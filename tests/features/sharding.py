"""A helper function for the tests of sharded tensors."""

from __future__ import annotations

import torch


def shard_of(whole: torch.Tensor, index: int, count: int, dim: int = 0) -> torch.Tensor:
    """Return a rank's shard of a tensor, as torch shards it: the number of chunks may be smaller than that of ranks."""
    chunks = whole.detach().chunk(count, dim)
    return chunks[index] if index < len(chunks) else whole.detach().narrow(dim, 0, 0)
