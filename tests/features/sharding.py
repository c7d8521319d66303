"""What the tests of sharded tensors share."""

from __future__ import annotations

import torch


def shard_of(whole: torch.Tensor, index: int, count: int, dim: int = 0) -> torch.Tensor:
    """Return a rank's part of a tensor, as torch shards it: there may be fewer chunks than ranks."""
    chunks = whole.detach().chunk(count, dim)
    return chunks[index] if index < len(chunks) else whole.detach().narrow(dim, 0, 0)
