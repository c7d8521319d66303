"""The description of one call of a collective operation, from which the executor runs, records and compares it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from mpicomm.backend import buffers, dtypes
from mpicomm.backend.buffers import Tensors
from mpicomm.backend.gpu_transport import Transport
from mpicomm.backend.staging import Call, Use


@dataclasses.dataclass(frozen=True)
class CollectiveStep:
    """A part of a collective that runs on its own: one for each tensor of a coalesced operation."""

    run: Callable[..., None]
    """Runs the step on dense tensors in memory that MPI can access, in the order of `tensors`."""

    tensors: Tensors
    """The tensors of the call, of any layout and on any device."""

    uses: Sequence[Use]
    """How the step uses each tensor."""

    num_blocks: int | None = 1
    """The largest number of per-rank blocks in a tensor on any rank; None if not all ranks know the tensors' sizes."""

    def prepared(self, transport: Transport) -> Call:
        """Return the call that runs the step; tensors that are not dense are packed now, on the caller's thread."""
        make = functools.partial(_packed, self.run, self.uses)
        return transport.prepare(make, self.tensors, self.uses, num_blocks=self.num_blocks)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One call of a collective operation."""

    name: str
    steps: Sequence[CollectiveStep]

    results: Tensors
    """The tensors that the operation writes on this rank."""

    compared: Tensors
    """The tensors to compare between ranks: equal dtypes, and equal shapes unless `any_size`."""

    root: int | None = None
    also: str = ""
    """Further text that must be equal on all ranks."""

    any_size: bool = False
    inputs: Tensors | None = None
    """The inputs to report to the profiler; None for the compared tensors."""

    @property
    def count(self) -> int:
        """The number of elements to record."""
        return sum(each.numel() for each in self.compared)

    @property
    def signature(self) -> str:
        """The text that must be equal on all ranks, e.g. `broadcast float32[4] (root: rank 0 of the group)`."""
        shown = [dtypes.short(each.dtype) + ("" if self.any_size else str(list(each.shape))) for each in self.compared]
        root = "" if self.root is None else f"(root: rank {self.root} of the group)"
        return " ".join(filter(None, [self.name, self.also, ", ".join(shown), root]))

    def prepared(self, transport: Transport) -> Call:
        """Return the call that runs all steps in order."""
        calls = [step.prepared(transport) for step in self.steps]
        return calls[0] if len(calls) == 1 else functools.partial(_run_all, calls)


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _packed(run: Callable[..., None], uses: Sequence[Use], *tensors: torch.Tensor) -> Call:
    """Return a call that runs a step on dense tensors, with the content of those that it reads."""
    if all(buffers.is_dense(tensor) for tensor in tensors):
        return functools.partial(run, *tensors)
    dense = [
        buffers.pack(tensor) if use.reads else buffers.output_buffer(tensor)
        for tensor, use in zip(tensors, uses, strict=True)
    ]

    def call() -> None:
        run(*dense)
        for buffer, tensor, use in zip(dense, tensors, uses, strict=True):
            if use.writes:
                buffers.unpack(buffer, tensor)

    return call
