"""The measured operations: buffers, exact inputs and results, and the calls of torch.distributed and mpi4py.

Sizes and factors are those of nccl-tests (doc/PERFORMANCE.md there): the size is that of the larger of the two buffers
of a rank; the bus bandwidth is the bandwidth that the links between the ranks must carry.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import mpi, torch_internals
from mpicomm.backend.transfer import dtypes
from mpicomm.bench import known_inputs

_ROOT = 0
# The contents of a buffer: data without parts, one part for each rank, or a single one of these parts.
_WHOLE, _PARTS, _PART = "whole", "parts", "part"
Rows = Sequence[torch.Tensor]
"""Contents of a buffer: for each of its equal parts, the pattern that it repeats."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Parameters of one measurement."""

    name: str
    """The name of the operation."""
    nbytes: int
    """Size of the larger of a rank's two buffers, before rounding to a multiple of the number of ranks."""
    dtype: torch.dtype
    device: torch.device
    in_place: bool
    """Whether the operation runs in place: the send and the receive buffer share memory."""
    rank: int
    size: int

    def __str__(self) -> str:
        return f"{self.name}, {dtypes.short(self.dtype)}, {self.nbytes} B"


@dataclasses.dataclass(frozen=True)
class OperationKind:
    """The contents of the buffers of an operation, and its calls."""

    name: str
    by_torch: Callable[..., Any]
    """Calls torch.distributed; its arguments are the `MeasuredOperation`, `group` and `async_op`."""
    by_mpi4py: Callable[[MeasuredOperation, Any, Any, Any], Sequence[Any]]
    """Returns mpi4py's function and its arguments; given the communicator, and both buffers, IN_PLACE for the first."""
    places: tuple[bool, ...] = (False,)
    """Supported modes: out of place (False), in place (True), or both."""
    sends: str = _WHOLE
    receives: str = _WHOLE
    reduces: bool = False
    averages: bool = False
    from_root: bool = False
    """Whether only the root has an input."""
    to_root: bool = False
    """Whether only the root has a result."""
    has_data: bool = True
    transfers: int = 1
    """How many times the data cross the links between ranks: an all_reduce is a reduce_scatter and an all_gather."""
    repeats: int = 1
    """How many times a call runs the operation, one after the other."""
    source_of: Callable[[int, int], int] = lambda _rank, _size: _ROOT
    """Returns the only rank whose data a rank receives, unless it receives data of all ranks."""

    @property
    def has_parts(self) -> bool:
        """Whether the larger buffer has one part for each rank."""
        return _PARTS in (self.sends, self.receives)

    def count_of(self, case: Case) -> int:
        """Return the number of elements of the larger buffer."""
        if not self.has_data:
            return 0
        count = max(1, case.nbytes // case.dtype.itemsize)
        return max(1, count // case.size) * case.size if self.has_parts else count

    def averaged(self) -> OperationKind:
        """Return the same reduction with AVG in place of SUM."""
        return dataclasses.replace(self, name=f"{self.name}_avg", averages=True)


class MeasuredOperation:
    """An operation on buffers of its own.

    Attributes:
        send: The send buffer of this rank.
        receive: The receive buffer; in place the same tensor, or a part of it.
        source: The only rank whose data this rank receives, unless it receives data of all ranks.
    """

    def __init__(self, case: Case) -> None:
        """Allocate the buffers."""
        self.case = case
        self.kind = kind = OPERATIONS[case.name]
        self.rank: int = case.rank
        self.size: int = case.size
        self.source: int = kind.source_of(case.rank, case.size)
        self.count = kind.count_of(case)
        self.share = self.count // case.size
        if case.in_place:
            whole = self._allocate(self.count)
            own = whole[self.rank * self.share :][: self.share]
            self.send = own if kind.sends == _PART else whole
            self.receive = own if kind.receives == _PART else whole
        else:
            self.send = self._allocate(self.share if kind.sends == _PART else self.count)
            self.receive = self._allocate(self.share if kind.receives == _PART else self.count)

    @property
    def nbytes(self) -> int:
        """Size of the larger buffer in bytes."""
        return self.count * self.case.dtype.itemsize

    @property
    def load(self) -> float:
        """Ratio of bus bandwidth to algorithm bandwidth."""
        is_shared = self.kind.has_parts or self.kind.transfers > 1
        return self.kind.transfers * (self.size - 1) / self.size if is_shared else 1.0

    @property
    def reduction(self) -> Any:
        """The operator of torch."""
        return dist.ReduceOp.AVG if self.kind.averages else dist.ReduceOp.SUM

    @functools.cached_property
    def send_parts(self) -> list[torch.Tensor] | None:
        """The parts of the send buffer, which torch takes as a list at the root; None at other ranks."""
        return list(self.send.split(self.share)) if self.rank == _ROOT else None

    @functools.cached_property
    def receive_parts(self) -> list[torch.Tensor] | None:
        """The parts of the receive buffer, which torch takes as a list at the root; None at other ranks."""
        return list(self.receive.split(self.share)) if self.rank == _ROOT else None

    @property
    def has_result(self) -> bool:
        """Whether this rank has a result."""
        # In pingpong, the last of an odd number of ranks has no partner.
        return (not self.kind.to_root or self.rank == _ROOT) and self.source < self.size

    def prepare(self) -> None:
        """Write the inputs, and fill the receive buffer with a value that no result contains."""
        self.receive.fill_(known_inputs.POISON)
        self.write_inputs()

    def write_inputs(self) -> None:
        """Write the inputs of this rank."""
        if not self.kind.from_root or self.rank == _ROOT:
            known_inputs.fill(self.send, self._sent)

    def wrong(self) -> int:
        """Return the number of wrong elements in this rank's result."""
        return known_inputs.wrong(self.receive, self._received()) if self.has_result else 0

    def by_torch(self, group: Any, *, starts: bool = False) -> Any:
        """Run the operation with torch.distributed; with `starts` return its handle without waiting."""
        return self.kind.by_torch(self, group=group, async_op=starts)

    def by_mpi4py(self, comm: Any) -> Callable[[], Any]:
        """Return the call of mpi4py, with its arguments.

        Raises:
            NotImplementedError: If MPI has no such call, cannot reduce this dtype, or the tensors are not on the CPU.
        """
        if self.kind.averages:
            raise NotImplementedError("MPI defines no averaging reduction")
        dtype = self.case.dtype
        datatype = dtypes.arithmetic(dtype) if self.kind.reduces else dtypes.carrier(dtype)
        if datatype is None or self.case.device.type != "cpu":
            raise NotImplementedError

        def buffer(tensor: torch.Tensor) -> list[Any]:
            return [mpi.api().memory.fromaddress(tensor.data_ptr(), tensor.nbytes), datatype]

        sent = mpi.api().IN_PLACE if self.case.in_place else buffer(self.send)
        function, *arguments = self.kind.by_mpi4py(self, comm, sent, buffer(self.receive))
        return functools.partial(function, *arguments)

    def _received(self) -> Rows:
        part = self.rank if self.kind.sends == _PARTS else 0
        if self.kind.reduces:
            return [known_inputs.summed(part, self.size).double() / (self.size if self.kind.averages else 1)]
        sources = range(self.size) if self.kind.receives == _PARTS else [self.source]
        return [known_inputs.pattern(source, part, self.size) for source in sources]

    @functools.cached_property
    def _sent(self) -> Rows:
        parts = range(self.size if self.kind.sends == _PARTS else 1)
        patterns = [known_inputs.pattern(self.rank, part, self.size) for part in parts]
        return [pattern.to(self.case.device, self.case.dtype) for pattern in patterns]

    def _allocate(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=self.case.dtype, device=self.case.device)


# -- calls of more than one function -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _All:
    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Waits for a message, and then sends the answer."""

    received: Any
    send: Callable[[], Any]

    def wait(self) -> None:
        self.received.wait()
        self.send().wait()


def _reduce_by_mpi4py(operation: MeasuredOperation, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
    pair = (sent, received) if operation.rank == _ROOT else (received, None)
    return comm.Reduce, *pair, mpi.api().SUM, _ROOT


def _reduce_scatter_by_mpi4py(operation: MeasuredOperation, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
    if operation.case.in_place:  # MPI writes the result to the start of the buffer, torch to the rank's own part
        raise NotImplementedError
    return comm.Reduce_scatter_block, sent, received


def _send_to_next(operation: MeasuredOperation, *, group: Any, async_op: bool) -> Any:
    """Send to the next rank of a ring, and receive from the previous one."""
    # As a batch, since NCCL executes messages in the order of the calls, and all ranks would send first.
    pair = [
        dist.P2POp(dist.isend, operation.send, (operation.rank + 1) % operation.size, group),
        dist.P2POp(dist.irecv, operation.receive, operation.source, group),
    ]
    both = _All(dist.batch_isend_irecv(pair))
    return both if async_op else both.wait()


def _ping_pong(operation: MeasuredOperation, *, group: Any, async_op: bool) -> Any:
    """Each even rank sends to the next rank, which answers; the latency is half the round trip."""
    if not operation.has_result:
        return _All([])
    is_first, partner = operation.rank % 2 == 0, operation.source
    if async_op:
        send = functools.partial(dist.isend, operation.send, partner, group)
        receive = functools.partial(dist.irecv, operation.receive, partner, group)
        return _All([send(), receive()]) if is_first else _Answer(receive(), send)
    steps = [(dist.send, operation.send), (dist.recv, operation.receive)]
    for function, tensor in steps if is_first else reversed(steps):
        function(tensor, partner, group)
    return None


def _ping_pong_by_mpi4py(operation: MeasuredOperation, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
    steps = [(comm.Send, sent), (comm.Recv, received)]
    if operation.rank % 2:
        steps.reverse()

    def exchange() -> None:
        for function, buffer in steps:
            function(buffer, operation.source)

    return (exchange if operation.has_result else lambda: None,)


# -- the table ---------------------------------------------------------------------------------------------------------

_ALL_REDUCE = OperationKind(
    "all_reduce",
    lambda operation, **options: dist.all_reduce(operation.receive, operation.reduction, **options),
    lambda _operation, comm, sent, received: (comm.Allreduce, sent, received),
    places=(True,), reduces=True, transfers=2,
)  # fmt: skip
_REDUCE = OperationKind(
    "reduce",
    lambda operation, **options: dist.reduce(operation.receive, _ROOT, operation.reduction, **options),
    _reduce_by_mpi4py,
    places=(True,), reduces=True, to_root=True,
)  # fmt: skip
_REDUCE_SCATTER = OperationKind(
    "reduce_scatter",
    lambda operation, **options: torch_internals.reduce_scatter_single(
        operation.receive, operation.send, operation.reduction, **options
    ),
    _reduce_scatter_by_mpi4py,
    places=(False, True), sends=_PARTS, receives=_PART, reduces=True,
)  # fmt: skip
_KINDS = (
    _ALL_REDUCE,
    _ALL_REDUCE.averaged(),
    _REDUCE,
    _REDUCE.averaged(),
    OperationKind(
        "broadcast",
        lambda operation, **options: dist.broadcast(operation.receive, _ROOT, **options),
        lambda _operation, comm, _sent, received: (comm.Bcast, received, _ROOT),
        places=(True,), from_root=True,
    ),
    OperationKind(
        "all_gather",
        lambda operation, **options: torch_internals.all_gather_single(operation.receive, operation.send, **options),
        lambda _operation, comm, sent, received: (comm.Allgather, sent, received),
        places=(False, True), sends=_PART, receives=_PARTS,
    ),
    _REDUCE_SCATTER,
    _REDUCE_SCATTER.averaged(),
    OperationKind(
        "all_to_all",
        lambda operation, **options: dist.all_to_all_single(operation.receive, operation.send, **options),
        lambda _operation, comm, sent, received: (comm.Alltoall, sent, received),
        sends=_PARTS, receives=_PARTS,
    ),
    OperationKind(
        "gather",
        lambda operation, **options: dist.gather(operation.send, operation.receive_parts, _ROOT, **options),
        lambda operation, comm, sent, received: (comm.Gather, sent, received if operation.has_result else None, _ROOT),
        sends=_PART, receives=_PARTS, to_root=True,
    ),
    OperationKind(
        "scatter",
        lambda operation, **options: dist.scatter(operation.receive, operation.send_parts, _ROOT, **options),
        lambda operation, comm, sent, received: (
            comm.Scatter, sent if operation.rank == _ROOT else None, received, _ROOT),
        sends=_PARTS, receives=_PART, from_root=True,
    ),
    OperationKind(
        "sendrecv",
        _send_to_next,
        lambda operation, comm, sent, received: (
            comm.Sendrecv, sent, (operation.rank + 1) % operation.size, 0, received, operation.source, 0),
        source_of=lambda rank, size: (rank - 1) % size,
    ),
    OperationKind(
        "pingpong", _ping_pong, _ping_pong_by_mpi4py, repeats=2, source_of=lambda rank, _size: rank ^ 1,
    ),
    OperationKind(
        "barrier",
        lambda _operation, **options: dist.barrier(**options),
        lambda _operation, comm, _sent, _received: (comm.Barrier,),
        has_data=False,
    ),
)  # fmt: skip
OPERATIONS = {kind.name: kind for kind in _KINDS}
