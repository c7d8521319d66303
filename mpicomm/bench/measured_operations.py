"""The measured operations: buffers, exact inputs and results, and the calls of torch.distributed and mpi4py.

Sizes and factors are those of nccl-tests (doc/PERFORMANCE.md there): the size is that of the larger of the two buffers
of a rank; the bus bandwidth is the bandwidth that the links between the ranks must carry.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import dtypes
from mpicomm.bench import known_inputs

_ROOT = 0
# The contents of a buffer: data without parts, one part for each rank, or a single one of these parts.
_WHOLE, _PARTS, _PART = "whole", "parts", "part"
# torch 2.13 renamed these, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
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


class MeasuredOperation:
    """An operation on buffers of its own.

    Attributes:
        send: The send buffer of this rank.
        receive: The receive buffer; in place the same tensor, or a part of it.
    """

    name: ClassVar[str]
    places: ClassVar[tuple[bool, ...]] = (False,)
    """Supported modes: out of place (False), in place (True), or both."""
    sends: ClassVar[str] = _WHOLE
    receives: ClassVar[str] = _WHOLE
    reduces: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    from_root: ClassVar[bool] = False
    """Whether only the root has an input."""
    to_root: ClassVar[bool] = False
    """Whether only the root has a result."""
    repeats: ClassVar[int] = 1
    """How many times a call runs the operation, one after the other."""
    source: int = _ROOT
    """The only rank whose data this rank receives, unless it receives data of all ranks."""

    def __init__(self, case: Case) -> None:
        """Allocate the buffers."""
        self.case = case
        self.rank, self.size = case.rank, case.size
        self.count = self.count_of(case)
        self.share = self.count // case.size
        self.send, self.receive = self._buffers()

    @classmethod
    def has_parts(cls) -> bool:
        """Return whether the larger buffer has one part for each rank."""
        return _PARTS in (cls.sends, cls.receives)

    @classmethod
    def count_of(cls, case: Case) -> int:
        """Return the number of elements of the larger buffer."""
        count = max(1, case.nbytes // case.dtype.itemsize)
        return max(1, count // case.size) * case.size if cls.has_parts() else count

    @property
    def nbytes(self) -> int:
        """Size of the larger buffer in bytes."""
        return self.count * self.case.dtype.itemsize

    @property
    def load(self) -> float:
        """Ratio of bus bandwidth to algorithm bandwidth."""
        return (self.size - 1) / self.size if self.has_parts() else 1.0

    def prepare(self) -> None:
        """Write the inputs, and fill the receive buffer with a value that no result contains."""
        self.receive.fill_(known_inputs.POISON)
        self.write_inputs()

    def write_inputs(self) -> None:
        """Write the inputs of this rank."""
        if not self.from_root or self.rank == _ROOT:
            known_inputs.fill(self.send, self._sent)

    def wrong(self) -> int:
        """Return the number of wrong elements in this rank's result."""
        return known_inputs.wrong(self.receive, self._received()) if self.has_result else 0

    @property
    def has_result(self) -> bool:
        """Whether this rank has a result."""
        return not self.to_root or self.rank == _ROOT

    def by_torch(self, group: Any, *, starts: bool = False) -> Any:
        """Run the operation with torch.distributed; with `starts` return its handle without waiting."""
        return self._by_torch(group=group, async_op=starts)

    def by_mpi4py(self, comm: Any) -> Callable[[], Any]:
        """Return the call of mpi4py, with its arguments.

        Raises:
            NotImplementedError: If MPI has no such call, cannot reduce this dtype, or the tensors are not on the CPU.
        """
        if self.averages:
            raise NotImplementedError("MPI defines no averaging reduction")
        dtype = self.case.dtype
        datatype = dtypes.arithmetic(dtype) if self.reduces else dtypes.carrier(dtype)
        if datatype is None or self.case.device.type != "cpu":
            raise NotImplementedError

        def buffer(tensor: torch.Tensor) -> list[Any]:
            return [mpi.api().memory.fromaddress(tensor.data_ptr(), tensor.nbytes), datatype]

        sent = mpi.api().IN_PLACE if self.case.in_place else buffer(self.send)
        function, *arguments = self._by_mpi4py(comm, sent, buffer(self.receive))
        return functools.partial(function, *arguments)

    def _by_torch(self, **options: Any) -> Any:
        raise NotImplementedError

    def _by_mpi4py(self, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
        """Return the function and its arguments; `sent` is IN_PLACE in place."""
        raise NotImplementedError

    def _received(self) -> Rows:
        part = self.rank if self.sends == _PARTS else 0
        if self.reduces:
            return [known_inputs.summed(part, self.size).double() / (self.size if self.averages else 1)]
        sources = range(self.size) if self.receives == _PARTS else [self.source]
        return [self._of(source, part) for source in sources]

    @functools.cached_property
    def _sent(self) -> Rows:
        parts = range(self.size if self.sends == _PARTS else 1)
        return [self._of(self.rank, part).to(self.case.device, self.case.dtype) for part in parts]

    @property
    def _reduction(self) -> Any:
        return dist.ReduceOp.AVG if self.averages else dist.ReduceOp.SUM

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.case.in_place:
            whole = self._allocate(self.count)
            own = whole[self.rank * self.share :][: self.share]
            return own if self.sends == _PART else whole, own if self.receives == _PART else whole
        return (
            self._allocate(self.share if self.sends == _PART else self.count),
            self._allocate(self.share if self.receives == _PART else self.count),
        )

    def _allocate(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=self.case.dtype, device=self.case.device)

    def _of(self, rank: int, part: int) -> torch.Tensor:
        return known_inputs.pattern(rank, part, self.size)

    def _at_root(self, value: Any) -> Any:
        return value if self.rank == _ROOT else None


class _AllReduce(MeasuredOperation):
    name = "all_reduce"
    places = (True,)
    reduces = True

    @property
    def load(self) -> float:
        return 2 * (self.size - 1) / self.size

    def _by_torch(self, **options: Any) -> Any:
        return dist.all_reduce(self.receive, self._reduction, **options)

    def _by_mpi4py(self, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
        return comm.Allreduce, sent, received


class _AllReduceAverage(_AllReduce):
    name = "all_reduce_avg"
    averages = True


class _Reduce(MeasuredOperation):
    name = "reduce"
    places = (True,)
    reduces = True
    to_root = True

    def _by_torch(self, **options: Any) -> Any:
        return dist.reduce(self.receive, _ROOT, self._reduction, **options)

    def _by_mpi4py(self, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
        pair = (sent, received) if self.rank == _ROOT else (received, None)
        return comm.Reduce, *pair, mpi.api().SUM, _ROOT


class _ReduceAverage(_Reduce):
    name = "reduce_avg"
    averages = True


class _Broadcast(MeasuredOperation):
    name = "broadcast"
    places = (True,)
    from_root = True

    def _by_torch(self, **options: Any) -> Any:
        return dist.broadcast(self.receive, _ROOT, **options)

    def _by_mpi4py(self, comm: Any, _sent: Any, received: Any) -> Sequence[Any]:
        return comm.Bcast, received, _ROOT


class _AllGather(MeasuredOperation):
    name = "all_gather"
    places = (False, True)
    sends, receives = _PART, _PARTS

    def _by_torch(self, **options: Any) -> Any:
        return _all_gather(self.receive, self.send, **options)

    def _by_mpi4py(self, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
        return comm.Allgather, sent, received


class _ReduceScatter(MeasuredOperation):
    name = "reduce_scatter"
    places = (False, True)
    sends, receives = _PARTS, _PART
    reduces = True

    def _by_torch(self, **options: Any) -> Any:
        return _reduce_scatter(self.receive, self.send, self._reduction, **options)

    def _by_mpi4py(self, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
        if self.case.in_place:  # MPI writes the result to the start of the buffer, torch to the rank's own part
            raise NotImplementedError
        return comm.Reduce_scatter_block, sent, received


class _ReduceScatterAverage(_ReduceScatter):
    name = "reduce_scatter_avg"
    averages = True


class _AllToAll(MeasuredOperation):
    name = "all_to_all"
    sends = receives = _PARTS

    def _by_torch(self, **options: Any) -> Any:
        return dist.all_to_all_single(self.receive, self.send, **options)

    def _by_mpi4py(self, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
        return comm.Alltoall, sent, received


class _Gather(MeasuredOperation):
    name = "gather"
    sends, receives = _PART, _PARTS
    to_root = True

    @functools.cached_property
    def _outputs(self) -> Any:
        return self._at_root(list(self.receive.split(self.share)))

    def _by_torch(self, **options: Any) -> Any:
        return dist.gather(self.send, self._outputs, _ROOT, **options)

    def _by_mpi4py(self, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
        return comm.Gather, sent, self._at_root(received), _ROOT


class _Scatter(MeasuredOperation):
    name = "scatter"
    sends, receives = _PARTS, _PART
    from_root = True

    @functools.cached_property
    def _inputs(self) -> Any:
        return self._at_root(list(self.send.split(self.share)))

    def _by_torch(self, **options: Any) -> Any:
        return dist.scatter(self.receive, self._inputs, _ROOT, **options)

    def _by_mpi4py(self, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
        return comm.Scatter, self._at_root(sent), received, _ROOT


class _SendReceive(MeasuredOperation):
    """Each rank sends to the next rank of a ring and receives from the previous one."""

    name = "sendrecv"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._next, self.source = (case.rank + 1) % case.size, (case.rank - 1) % case.size

    def _by_torch(self, **options: Any) -> Any:
        # As a batch, since NCCL executes messages in the order of the calls, and all ranks would send first.
        pair = [
            dist.P2POp(dist.isend, self.send, self._next, options["group"]),
            dist.P2POp(dist.irecv, self.receive, self.source, options["group"]),
        ]
        both = _All(dist.batch_isend_irecv(pair))
        return both if options["async_op"] else both.wait()

    def _by_mpi4py(self, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
        return comm.Sendrecv, sent, self._next, 0, received, self.source, 0


class _PingPong(MeasuredOperation):
    """Each even rank sends to the next rank, which answers; the latency is half the round trip."""

    name = "pingpong"
    repeats = 2

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.source = case.rank ^ 1
        self._is_first = case.rank % 2 == 0

    @property
    def has_result(self) -> bool:
        return self.source < self.size  # the last of an odd number of ranks has no partner

    def _by_torch(self, **options: Any) -> Any:
        if not self.has_result:
            return _All([])
        group = options["group"]
        if options["async_op"]:
            send = functools.partial(dist.isend, self.send, self.source, group)
            receive = functools.partial(dist.irecv, self.receive, self.source, group)
            return _All([send(), receive()]) if self._is_first else _Answer(receive(), send)
        steps = [(dist.send, self.send), (dist.recv, self.receive)]
        for function, tensor in steps if self._is_first else reversed(steps):
            function(tensor, self.source, group)
        return None

    def _by_mpi4py(self, comm: Any, sent: Any, received: Any) -> Sequence[Any]:
        def exchange() -> None:
            comm.Send(sent, self.source)
            comm.Recv(received, self.source)

        def answer() -> None:
            comm.Recv(received, self.source)
            comm.Send(sent, self.source)

        if not self.has_result:
            return (lambda: None,)
        return (exchange if self._is_first else answer,)


class _Barrier(MeasuredOperation):
    """It has no data, and therefore no wrong elements."""

    name = "barrier"

    @classmethod
    def count_of(cls, case: Case) -> int:  # noqa: ARG003  the number of elements is the same in all cases
        return 0

    def _by_torch(self, **options: Any) -> Any:
        return dist.barrier(**options)

    def _by_mpi4py(self, comm: Any, _sent: Any, _received: Any) -> Sequence[Any]:
        return (comm.Barrier,)


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


_KINDS: tuple[type[MeasuredOperation], ...] = (
    _AllReduce,
    _AllReduceAverage,
    _Reduce,
    _ReduceAverage,
    _Broadcast,
    _AllGather,
    _ReduceScatter,
    _ReduceScatterAverage,
    _AllToAll,
    _Gather,
    _Scatter,
    _SendReceive,
    _PingPong,
    _Barrier,
)
OPERATIONS = {each.name: each for each in _KINDS}
