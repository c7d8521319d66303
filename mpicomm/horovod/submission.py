"""A named operation that this rank has submitted to a process set, and its arguments as the other ranks see them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from mpicomm.devices import accelerator
from mpicomm.errors import MpicommError

ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL = "allreduce", "allgather", "broadcast", "alltoall"
REDUCESCATTER, BARRIER, JOIN = "reducescatter", "barrier", "join"

Average, Sum, Adasum, Min, Max, Product = range(6)  # Horovod's own numbers: programs store them
OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")

ANY_ROWS = -1
"""The first dimension, in `Layout.shape`, of a tensor whose number of rows may differ between ranks and calls."""


class HorovodInternalError(MpicommError):
    """A collective operation failed: its arguments differ between ranks, or the ranks can no longer communicate."""


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
        layouts = [
            [str(layout.dtype).removeprefix("torch."), list(layout.shape), layout.device] for layout in self.layouts
        ]
        return [self.kind, layouts, *self[2:]]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Signature:
        """Return the arguments that `to_json` represented."""
        kind, layouts, *others = fields
        layouts = [Layout(getattr(torch, dtype), tuple(shape), device) for dtype, shape, device in layouts]
        return cls(kind, tuple(layouts), *others)

    def difference(self, other: Signature) -> tuple[str, Any, Any]:
        """Return the first property that differs from that of another rank, and its two values."""
        pairs: list[tuple[str, Any, Any]] = [
            ("the operations differ", self.kind, other.kind),
            ("the numbers of tensors differ", len(self.layouts), len(other.layouts)),
        ]
        for own, its in zip(self.layouts, other.layouts, strict=False):
            pairs += [
                ("the data types differ", own.dtype, its.dtype),
                ("the tensor shapes differ", _shown(own.shape), _shown(its.shape)),
                ("the devices differ", own.device, its.device),
            ]
        pairs += [
            ("the reduction operations differ", OP_NAMES[self.op], OP_NAMES[other.op]),
            ("the root ranks differ", self.root, other.root),
            (
                "the prescale and postscale factors differ",
                (self.prescale, self.postscale),
                (other.prescale, other.postscale),
            ),
        ]
        return next(pair for pair in pairs if pair[1] != pair[2])


def _shown(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join("any" if length == ANY_ROWS else str(length) for length in shape) + ")"


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Submission:
    """The handle of an operation: `hvd.poll(handle)`, `hvd.synchronize(handle)`."""

    name: str
    signature: Signature
    tensors: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    splits: torch.Tensor | None = None
    _: dataclasses.KW_ONLY
    is_grouped: bool = False
    is_cacheable: bool = True
    engine: Any = None
    result: Any = None
    error: BaseException | None = None
    events: list[torch.Event] = dataclasses.field(default_factory=list)
    """Of the GPUs of the inputs; once the operation is complete, of those of the outputs."""

    start: float = dataclasses.field(default_factory=time.monotonic)
    is_done: bool = False

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Complete the operation."""
        self.result, self.error, self.is_done = result, error, True

    def record_events(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record an event in the current stream of each GPU that holds one of the tensors.

        The streams of the program and of the engine's thread differ: events order their work on the tensors.
        """
        self.events = [accelerator.end_of_work(device) for device in accelerator.devices_of(tensors)]

    def wait_for_events(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current streams wait for the recorded events, before they use tensors of other streams.

        The calling thread does not wait.
        """
        for event in self.events:
            event.wait(accelerator.current_stream(event.device))
        for tensor in tensors:
            if not tensor.is_cpu:  # torch's allocator must know of a stream other than that of the allocation
                tensor.record_stream(accelerator.current_stream(tensor.device))
