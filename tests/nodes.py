"""Groups whose tensors use the shared memory of a node regardless of their size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

KINDS = ("slots", "two nodes")
"""Slots in the memory of one node, and the hierarchical all-reduce of simulated nodes of two ranks each."""


def require(kind: str) -> None:
    """Skip the test if this kind of group needs the C library, which was not built."""
    import pytest

    if kind in KINDS and not has_library():
        pytest.skip("the C library was not built")


def lead_by(kind: str, handle: dist.ProcessGroup) -> None:
    """Let the tensors of a new group use shared memory at every size."""
    path: Any = handle._executor.algorithms  # type: ignore[attr-defined]
    path._choices = _all_sizes(handle.size())
    if kind == "two nodes":
        path.split_by_node = lambda comm: comm.Split(comm.rank // 2, comm.rank)


def _all_sizes(size: int) -> Any:
    """Return algorithms that are used for tensors of every size, by the operations that have them."""
    from mpicomm.backend.transfer.algorithms import Choices

    class AllSizes(Choices):
        def replace(self, algorithm: Any, table: Any) -> None:
            super().replace(algorithm, dict.fromkeys(table, 0))

    return AllSizes(size)


def has_library() -> bool:
    from mpicomm.native import c_library

    return c_library.load() is not None
