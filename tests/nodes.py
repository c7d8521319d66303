"""Groups whose tensors go by way of the memory of a node, however small they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

KINDS = ("direct", "segment", "two nodes")
"""The ranks read each other's memory, or share some; or every two of them are as if on a node of their own."""


def lead_by(kind: str, handle: dist.ProcessGroup) -> None:
    """Let a new group's tensors go a certain way."""
    handle._at_once.all_reduce = lambda _tensors, _opts: None  # type: ignore[attr-defined]
    path: Any = handle._engine.node  # type: ignore[attr-defined]
    path.is_worth_it = lambda _operation, _nbytes: True
    if kind == "segment":
        path.connect = by_segment
    elif kind == "two nodes":
        path.split_by_node = lambda comm: comm.Split(comm.rank // 2, comm.rank)


def by_segment(node_comm: Any) -> Any:
    from mpicomm.node import bysegment, segment

    return bysegment.BySegment(node_comm, segment.make(node_comm, bysegment.segment_bytes(node_comm.size)))
