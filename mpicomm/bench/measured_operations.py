"""The measured operations: buffers, exact inputs and results, and the calls of torch.distributed and mpi4py.

Sizes and factors are those of nccl-tests (doc/PERFORMANCE.md there): the size is that of the larger of the two buffers
of a rank; the bus bandwidth is the bandwidth that the links between the ranks must carry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from mpicomm.bench import known_inputs

_ROOT = 0
# torch 2.13 renamed these, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Group = Any
Rows = Sequence[torch.Tensor]
"""Contents of a buffer: for each of its equal parts, the pattern that it repeats."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Parameters of one measurement."""

    nbytes: int
    """Size of the larger of a rank's two buffers, before rounding to a multiple of the number of ranks."""
    dtype: torch.dtype
    device: torch.device
    in_place: bool
    """Whether the operation runs in place: the send and the receive buffer share memory."""
    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class MPI4PyCalls:
    """Parameters of an mpi4py call."""

    comm: Any
    mpi: Any
    buffer: Callable[[torch.Tensor], Any]
    """Converts a tensor to an mpi4py buffer, once per tensor."""


class MeasuredOperation:
    """An operation on buffers of its own.

    Attributes:
        send: The send buffer of this rank.
        receive: The receive buffer; in place the same tensor, or a part of it.
    """

    name: ClassVar[str]
    is_shared_out: ClassVar[bool] = False
    """Whether the larger buffer has one part for each rank."""
    places: ClassVar[tuple[bool, ...]] = (False,)
    """Supported modes: out of place (False), in place (True), or both."""
    reduces: ClassVar[bool] = False

    def __init__(self, case: Case) -> None:
        """Allocate the buffers."""
        self.case = case
        self.rank, self.size = case.rank, case.size
        self.count = self.count_of(case)
        self.share = self.count // case.size
        self.send, self.receive = self._buffers()

    @classmethod
    def count_of(cls, case: Case) -> int:
        """Return the number of elements of the larger buffer."""
        count = max(1, case.nbytes // case.dtype.itemsize)
        return max(1, count // case.size) * case.size if cls.is_shared_out else count

    @property
    def nbytes(self) -> int:
        """Size of the larger buffer in bytes."""
        return self.count * self.case.dtype.itemsize

    @property
    def load(self) -> float:
        """Ratio of bus bandwidth to algorithm bandwidth."""
        return (self.size - 1) / self.size if self.is_shared_out else 1.0

    def prepare(self) -> None:
        """Write the inputs, and fill the receive buffer with a value that no result contains."""
        self.receive.fill_(known_inputs.POISON)
        known_inputs.fill(self.send, self._sent())

    def wrong(self) -> int:
        """Return the number of wrong elements in this rank's result."""
        rows = self._received()
        return 0 if rows is None else known_inputs.wrong(self.receive, rows)

    def by_torch(self, group: Group, *, starts: bool = False) -> Any:
        """Run the operation with torch.distributed; with `starts` return its handle without waiting."""
        raise NotImplementedError

    def by_mpi(self, calls: MPI4PyCalls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the mpi4py call and its arguments.

        Raises:
            NotImplementedError: If MPI has no such call.
        """
        raise NotImplementedError

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._allocate(self.count), self._allocate(self.count)

    def _sent(self) -> Rows:
        return [self._of(self.rank)]

    def _received(self) -> Rows | None:
        raise NotImplementedError

    def _allocate(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=self.case.dtype, device=self.case.device)

    def _own_part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.rank * self.share :][: self.share]

    def _of(self, rank: int, part: int = 0) -> torch.Tensor:
        return known_inputs.pattern(rank, part, self.size)

    def _at_root(self, value: Any) -> Any:
        return value if self.rank == _ROOT else None


class _InPlace(MeasuredOperation):
    places = (True,)

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = self._allocate(self.count)
        return tensor, tensor


class _SharedOut(MeasuredOperation):
    is_shared_out = True


class _AllReduce(_InPlace):
    name = "all_reduce"
    reduces = True

    @property
    def load(self) -> float:
        return 2 * (self.size - 1) / self.size

    def _received(self) -> Rows:
        return [known_inputs.summed(0, self.size)]

    def by_torch(self, group: Group, *, starts: bool = False) -> Any:
        return dist.all_reduce(self.receive, group=group, async_op=starts)

    def by_mpi(self, calls: MPI4PyCalls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return calls.comm.Allreduce, (calls.mpi.IN_PLACE, calls.buffer(self.receive))


class _Reduce(_InPlace):
    name = "reduce"
    reduces = True

    def _received(self) -> Rows | None:
        rows: Rows | None = self._at_root([known_inputs.summed(0, self.size)])
        return rows

    def by_torch(self, group: Group, *, starts: bool = False) -> Any:
        return dist.reduce(self.receive, _ROOT, group=group, async_op=starts)

    def by_mpi(self, calls: MPI4PyCalls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        mine = calls.buffer(self.send)
        pair = (calls.mpi.IN_PLACE, mine) if self.rank == _ROOT else (mine, None)
        return calls.comm.Reduce, (*pair, calls.mpi.SUM, _ROOT)


class _Broadcast(_InPlace):
    name = "broadcast"

    def _received(self) -> Rows:
        return [self._of(_ROOT)]

    def by_torch(self, group: Group, *, starts: bool = False) -> Any:
        return dist.broadcast(self.receive, _ROOT, group=group, async_op=starts)

    def by_mpi(self, calls: MPI4PyCalls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return calls.comm.Bcast, (calls.buffer(self.receive), _ROOT)


class _AllGather(_SharedOut):
    name = "all_gather"
    places = (False, True)

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        whole = self._allocate(self.count)
        return self._own_part(whole) if self.case.in_place else self._allocate(self.share), whole

    def _received(self) -> Rows:
        return [self._of(other) for other in range(self.size)]

    def by_torch(self, group: Group, *, starts: bool = False) -> Any:
        return _all_gather(self.receive, self.send, group=group, async_op=starts)

    def by_mpi(self, calls: MPI4PyCalls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        sent = calls.mpi.IN_PLACE if self.case.in_place else calls.buffer(self.send)
        return calls.comm.Allgather, (sent, calls.buffer(self.receive))


class _ReduceScatter(_SharedOut):
    name = "reduce_scatter"
    places = (False, True)
    reduces = True

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        whole = self._allocate(self.count)
        return whole, self._own_part(whole) if self.case.in_place else self._allocate(self.share)

    def _sent(self) -> Rows:
        return [self._of(self.rank, part) for part in range(self.size)]

    def _received(self) -> Rows:
        return [known_inputs.summed(self.rank, self.size)]

    def by_torch(self, group: Group, *, starts: bool = False) -> Any:
        return _reduce_scatter(self.receive, self.send, group=group, async_op=starts)

    def by_mpi(self, calls: MPI4PyCalls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self.case.in_place:  # MPI writes the result to the start of the buffer, torch to the rank's own part
            raise NotImplementedError
        return calls.comm.Reduce_scatter_block, (calls.buffer(self.send), calls.buffer(self.receive))


class _AllToAll(_SharedOut):
    name = "all_to_all"

    def _sent(self) -> Rows:
        return [self._of(self.rank, part) for part in range(self.size)]

    def _received(self) -> Rows:
        return [self._of(other, self.rank) for other in range(self.size)]

    def by_torch(self, group: Group, *, starts: bool = False) -> Any:
        return dist.all_to_all_single(self.receive, self.send, group=group, async_op=starts)

    def by_mpi(self, calls: MPI4PyCalls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return calls.comm.Alltoall, (calls.buffer(self.send), calls.buffer(self.receive))


class _Gather(_SharedOut):
    name = "gather"

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._allocate(self.share), self._allocate(self.count)

    def _received(self) -> Rows | None:
        rows: Rows | None = self._at_root([self._of(other) for other in range(self.size)])
        return rows

    def by_torch(self, group: Group, *, starts: bool = False) -> Any:
        parts = self._at_root(list(self.receive.split(self.share)))
        return dist.gather(self.send, parts, _ROOT, group=group, async_op=starts)

    def by_mpi(self, calls: MPI4PyCalls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return calls.comm.Gather, (calls.buffer(self.send), self._at_root(calls.buffer(self.receive)), _ROOT)


class _Scatter(_SharedOut):
    name = "scatter"

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._allocate(self.count), self._allocate(self.share)

    def _sent(self) -> Rows:
        return [self._of(self.rank, part) for part in range(self.size)]

    def _received(self) -> Rows:
        return [self._of(_ROOT, self.rank)]

    def by_torch(self, group: Group, *, starts: bool = False) -> Any:
        parts = self._at_root(list(self.send.split(self.share)))
        return dist.scatter(self.receive, parts, _ROOT, group=group, async_op=starts)

    def by_mpi(self, calls: MPI4PyCalls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return calls.comm.Scatter, (self._at_root(calls.buffer(self.send)), calls.buffer(self.receive), _ROOT)


class _SendReceive(MeasuredOperation):
    """Each rank sends to the next rank of a ring and receives from the previous one."""

    name = "sendrecv"

    @property
    def _before(self) -> int:
        return (self.rank - 1) % self.size

    @property
    def _next(self) -> int:
        return (self.rank + 1) % self.size

    def _received(self) -> Rows:
        return [self._of(self._before)]

    def by_torch(self, group: Group, *, starts: bool = False) -> Any:
        # As a batch, since NCCL executes messages in the order of the calls, and all ranks would send first.
        pair = [
            dist.P2POp(dist.isend, self.send, self._next, group),
            dist.P2POp(dist.irecv, self.receive, self._before, group),
        ]
        both = _All(dist.batch_isend_irecv(pair))
        return both if starts else both.wait()

    def by_mpi(self, calls: MPI4PyCalls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        sent, received = calls.buffer(self.send), calls.buffer(self.receive)
        return calls.comm.Sendrecv, (sent, self._next, 0, received, self._before, 0)


@dataclasses.dataclass(frozen=True)
class _All:
    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


_ALL = (
    _AllReduce,
    _Reduce,
    _Broadcast,
    _AllGather,
    _ReduceScatter,
    _AllToAll,
    _Gather,
    _Scatter,
    _SendReceive,
)
OPERATIONS: dict[str, type[MeasuredOperation]] = {each.name: each for each in _ALL}
