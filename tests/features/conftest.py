"""Tests of PyTorch features that use the backend: all of them run on every rank of a world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor, debug

import mpicomm


@pytest.fixture(autouse=True)
def groups_go(world: mpicomm.World) -> Iterator[None]:
    """Destroy, at the end of a test, the groups that it created: a mesh creates groups, and never destroys them.

    DTensor caches the placements of each operation together with their mesh: the next equal mesh would get the groups
    of a destroyed one.
    """
    before = set(dist.distributed_c10d._world.pg_map)
    yield
    for group in [group for group in dist.distributed_c10d._world.pg_map if group not in before]:
        dist.destroy_process_group(group)
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()  # type: ignore[attr-defined]
    if (clear := getattr(debug, "_clear_fast_path_sharding_prop_cache", None)) is not None:  # torch 2.10 and later
        clear()


@pytest.fixture
def mesh(world: mpicomm.World) -> dist.DeviceMesh:
    """A one-dimensional mesh of all ranks."""
    return dist.init_device_mesh("cpu", (world.size,))


@pytest.fixture
def compiler(world: mpicomm.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile with an empty cache, which the ranks share, and without compiler processes: a rank must not fork."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", mpicomm.broadcast_object(str(tmp_path), src=0))
    from torch import _dynamo, _inductor

    _dynamo.reset()
    with _inductor.config.patch(compile_threads=1):
        yield
    _dynamo.reset()
