"""What the tests of sharded tensors and meshes share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@contextlib.contextmanager
def temporary_groups() -> Iterator[None]:
    """Destroy at the end the groups that were made meanwhile: a mesh makes some, and never destroys them.

    DTensor remembers by which operation it came to which placements, and with them a mesh; the next that is equal would
    get the groups of one that is gone.
    """
    before = set(dist.distributed_c10d._world.pg_map)
    yield
    for group in [group for group in dist.distributed_c10d._world.pg_map if group not in before]:
        dist.destroy_process_group(group)
    _clear_sharding_prop_cache()


def shard_of(whole: torch.Tensor, index: int, count: int, dim: int = 0) -> torch.Tensor:
    """Return a rank's part of a tensor, as torch shards it: there may be fewer chunks than ranks."""
    chunks = whole.detach().chunk(count, dim)
    return chunks[index] if index < len(chunks) else whole.detach().narrow(dim, 0, 0)
