"""A named operation that this rank has submitted to a process set, and its arguments as the other ranks see them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpicomm.horovod.gpu_order import Events
from mpicomm.horovod.reduce_op import NAMES, Sum

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL = "allreduce", "allgather", "broadcast", "alltoall"
REDUCESCATTER, BARRIER, JOIN = "reducescatter", "barrier", "join"

ANY_ROWS = -1
"""The first dimension, in `Layout.shape`, of a tensor whose number of rows may differ between ranks and calls."""


class Layout(NamedTuple):
    """The properties of a tensor that must be equal on all ranks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    """The type of its device."""


class Signature(NamedTuple):
    """The arguments of an operation that must be equal on all ranks."""

    kind: str
    layouts: tuple[Layout, ...] = ()
    op: int = Sum
    root: int = 0
    """The rank, within the process set, that broadcasts."""

    prescale: float = 1.0
    postscale: float = 1.0

    def to_json(self) -> list[Any]:
        """Return the arguments as JSON can represent them."""
        layouts = [[str(each.dtype).removeprefix("torch."), list(each.shape), each.device] for each in self.layouts]
        return [self.kind, layouts, *self[2:]]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Signature:
        """Return the arguments that `to_json` represented."""
        kind, layouts, *rest = fields
        return cls(
            kind, tuple(Layout(getattr(torch, name), tuple(shape), device) for name, shape, device in layouts), *rest
        )


class Submission:
    """The handle of an operation: `hvd.poll(handle)`, `hvd.synchronize(handle)`."""

    __slots__ = (
        "engine",
        "error",
        "events",
        "is_cacheable",
        "is_done",
        "is_grouped",
        "name",
        "outputs",
        "result",
        "signature",
        "splits",
        "start",
        "tensors",
    )

    def __init__(
        self,
        name: str,
        signature: Signature,
        tensors: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        splits: torch.Tensor | None = None,
        *,
        is_grouped: bool = False,
        is_cacheable: bool = True,
    ) -> None:
        self.name, self.signature, self.splits = name, signature, splits
        self.is_grouped, self.is_cacheable = is_grouped, is_cacheable
        self.tensors: Sequence[torch.Tensor] = tensors
        self.outputs: Sequence[torch.Tensor] = outputs
        self.engine: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.events: Events = []
        """Of the inputs; once the operation is complete, of the outputs."""

        self.start = time.monotonic()
        self.is_done = False

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Complete the operation."""
        self.result, self.error, self.is_done = result, error, True


def difference(signatures: dict[int, Signature]) -> str:
    """Return how the arguments of the ranks differ; empty if they are equal.

    Args:
        signatures: The arguments by rank in the job.
    """
    (first, expected), *others = sorted(signatures.items(), key=lambda item: item[0])
    for rank, got in others:
        if got == expected:
            continue
        what, mine, other = _first_difference(expected, got)
        return f"{what}: rank {first} has {mine}, rank {rank} has {other}"
    return ""


def _first_difference(one: Signature, other: Signature) -> tuple[str, Any, Any]:
    if one.kind != other.kind:
        return "the operations differ", one.kind, other.kind
    if len(one.layouts) != len(other.layouts):
        return "the numbers of tensors differ", len(one.layouts), len(other.layouts)
    for mine, its in zip(one.layouts, other.layouts, strict=True):
        if mine.dtype != its.dtype:
            return "the data types differ", mine.dtype, its.dtype
        if mine.shape != its.shape:
            return "the tensor shapes differ", _shape(mine.shape), _shape(its.shape)
        if mine.device != its.device:
            return "the devices differ", mine.device, its.device
    if one.op != other.op:
        return "the reduction operations differ", NAMES[one.op], NAMES[other.op]
    if one.root != other.root:
        return "the root ranks differ", one.root, other.root
    factors = [(each.prescale, each.postscale) for each in (one, other)]
    return "the prescale and postscale factors differ", factors[0], factors[1]


def _shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join("any" if each == ANY_ROWS else str(each) for each in shape) + ")"
