"""The face that torch sees: a `ProcessGroup` over MPI, under the names `mpicomm` and `mpicomm_nccl`.

Every method checks its arguments, on the rank that erred and before anything is sent, and hands them to the engine.
Both generations of torch's method names are there: `_allgather_base` became `all_gather_single`, and so on.
"""

from __future__ import annotations

import datetime
import functools
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import c10d, checks, reductions
from mpicomm.backend.engine import Engine
from mpicomm.errors import MpicommError
from mpicomm.faults import recorder
from mpicomm.settings import Settings

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # made and looked at on the main thread

NAME = "mpicomm"
NAME_WITH_NCCL = "mpicomm_nccl"

Tensors = Sequence[torch.Tensor]


class MPIProcessGroup(dist.ProcessGroup):
    """A group of ranks whose collectives are MPI's.

    Every method is torch's own contract; see `torch.distributed` for what the operations mean.
    """

    def __init__(self, engine: Engine, name: str, backend_name: str = NAME) -> None:
        super().__init__(engine.comm.rank, engine.comm.size)  # type: ignore[call-arg]  # the stub knows one of two
        self._engine = engine
        self._rank = engine.comm.rank
        self._size = engine.comm.size
        self._name = name
        self._description = "undefined"
        self._backend_name = backend_name

    # -- who this is ---------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  torch's name, as are those below
        """Return the name under which the back end is registered."""
        return self._backend_name

    def getRank(self) -> int:  # noqa: N802
        """Return this rank in the group."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        """Return the number of ranks in the group."""
        return self._size

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch gave the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch gives the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the user's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take the user's description of the group."""
        self._description = description

    # torch's Python code asks by these names; its C++ code asks by those above.
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    name = getBackendName
    rank = getRank
    size = getSize
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc  # type: ignore[assignment]  # the stub names its argument otherwise

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002  torch's signature
        return self

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    # -- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce a tensor in place on all ranks."""
        opts = opts or c10d.AllreduceOptions()
        tensor = checks.single_written(tensors, "all_reduce")
        reduction = reductions.plan(opts.reduceOp, tensor.dtype, self._size, "all_reduce")
        return self._engine.all_reduce([tensor], [reduction], opts.asyncOp)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors in place on all ranks."""
        what, opts = "all_reduce_coalesced", opts or c10d.AllreduceCoalescedOptions()
        tensors = [checks.written(each, what) for each in tensors]
        plans = [reductions.plan(opts.reduceOp, each.dtype, self._size, what) for each in tensors]
        return self._engine.all_reduce(tensors, plans, opts.asyncOp)

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce a tensor in place on the root."""
        opts = opts or c10d.ReduceOptions()
        tensor = checks.single_written(tensors, "reduce")
        root = checks.rank(opts.rootRank, self._size, "reduce", "dst")
        reduction = reductions.plan(opts.reduceOp, tensor.dtype, self._size, "reduce")
        return self._engine.reduce(tensor, root, reduction, opts.asyncOp)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """Reduce a list of tensors, one for each rank, and leave each rank its own."""
        what, opts = "reduce_scatter", opts or c10d.ReduceScatterOptions()
        output = checks.single_written(outputs, what)
        sources = checks.one_per_rank(checks.only(inputs, what), self._size, what, "input_list")
        checks.alike(sources, output, what, "input_list")
        source = torch.cat([each.detach().reshape(-1) for each in sources])  # (size * output.numel(),)
        return self._reduce_scatter(what, output, source, opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce a tensor of size times the output and leave each rank its block."""
        what = "reduce_scatter_tensor"
        return self._reduce_scatter(what, output, source, opts or c10d.ReduceScatterOptions())

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # the stub has no default

    def _reduce_scatter(self, what: str, output: torch.Tensor, source: torch.Tensor, opts: Any) -> dist.Work:
        output, source = checks.written(output, what), checks.tensor(source, what)
        checks.multiple(source, output, self._size, what, "input", "output")
        reduction = reductions.plan(opts.reduceOp, output.dtype, self._size, what)
        return self._engine.reduce_scatter(output, source, reduction, opts.asyncOp)

    # -- movement ------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Copy the root's tensor into everybody's."""
        opts = opts or c10d.BroadcastOptions()
        tensor = checks.single_written(tensors, "broadcast")
        root = checks.rank(opts.rootRank, self._size, "broadcast", "src")
        return self._engine.broadcast(tensor, root, opts.asyncOp)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor into a list on every rank; sizes may differ between ranks."""
        what, opts = "all_gather", opts or c10d.AllgatherOptions()
        source = checks.single(inputs, what)
        targets = checks.one_per_rank(checks.only(outputs, what), self._size, what, "tensor_list", are_written=True)
        self._check_targets(targets, source, what, "tensor_list")
        return self._engine.all_gather_list(targets, source, opts.asyncOp)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor into one, on every rank."""
        what, opts = "all_gather_into_tensor", opts or c10d.AllgatherOptions()
        output, source = checks.written(output, what), checks.tensor(source, what)
        checks.multiple(output, source, self._size, what, "output", "input")
        return self._engine.all_gather(output, source, opts.asyncOp)

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor into a list on the root."""
        what, opts = "gather", opts or c10d.GatherOptions()
        source = checks.single(inputs, what)
        root = checks.rank(opts.rootRank, self._size, what, "dst")
        targets: Tensors = []
        if self._rank == root:
            targets = checks.one_per_rank(checks.only(outputs, what), self._size, what, "gather_list", are_written=True)
            self._check_targets(targets, source, what, "gather_list")
        return self._engine.gather(targets, source, root, opts.asyncOp)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """Send each rank its tensor of the root's list."""
        what, opts = "scatter", opts or c10d.ScatterOptions()
        output = checks.single_written(outputs, what)
        root = checks.rank(opts.rootRank, self._size, what, "src")
        sources: Tensors = []
        if self._rank == root:
            sources = checks.one_per_rank(checks.only(inputs, what), self._size, what, "scatter_list")
            self._check_targets(sources, output, what, "scatter_list")
        return self._engine.scatter(output, sources, root, opts.asyncOp)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for every rank.

        Raises:
            TimeoutError: If a rank has not come after the options' timeout, or else the group's; it names who has not.
        """
        opts = opts or c10d.BarrierOptions()
        seconds = opts.timeout.total_seconds()  # torch says "none" by a negative one
        return self._engine.barrier(opts.asyncOp, seconds if seconds > 0 else None)

    def _missing(self, *_arguments: Any, **_options: Any) -> dist.Work:
        raise NotImplementedError(
            "all_to_all and what is coalesced beside all_reduce are not part of this back end yet.\n"
            "Use all_gather or send and recv, or bootstrap(backend='gloo')."
        )

    alltoall = alltoall_base = all_to_all_single = _missing
    allgather_coalesced = all_gather_single_coalesced = allgather_into_tensor_coalesced = _missing
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _missing

    def _check_targets(self, tensors: Tensors, mine: torch.Tensor, what: str, argument: str) -> None:
        """Check a list with one tensor per rank: one dtype, and this rank's entry as large as its own tensor."""
        for each in tensors:
            checks.same_dtype(each, mine, what, argument)
        checks.same_size(tensors[self._rank], mine, what, f"{argument}[{self._rank}]")

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Start sending a tensor."""
        tensor = checks.single(tensors, "send")
        return self._engine.send(tensor, checks.rank(dst, self._size, "send", "dst"), checks.tag(tag, "send"))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        """Start receiving a tensor."""
        tensor = checks.single_written(tensors, "recv")
        return self._engine.recv(tensor, checks.rank(src, self._size, "recv", "src"), checks.tag(tag, "recv"))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from whichever rank sends first."""
        return self._engine.recv(checks.single_written(tensors, "recv"), None, checks.tag(tag, "recv"))

    # -- the end -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what is queued and free the communicator (collective)."""
        if mpi.is_usable():
            self._engine.close()


class RoutedProcessGroup(MPIProcessGroup):
    """A group that hands the tensors of some devices to an inner back end, and the rest to MPI.

    The inner back end is called directly: a Python method that calls its own C++ base by the same name would be
    dispatched to itself.
    """

    def __init__(self, engine: Engine, name: str, backend_name: str, device_type: str, inner: Any) -> None:
        super().__init__(engine, name, backend_name)
        self._device_type = device_type
        self._inner = inner
        self._stream = recorder.Stream(engine.record)

    @property
    def _device_types(self) -> list[torch.device]:
        return list(dict.fromkeys([torch.device("cpu"), torch.device(self._device_type)]))

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner if torch.device(device).type == self._device_type else self

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for every rank, and before that for what this rank has queued on its GPU."""
        if self._device_type == "cuda":
            torch.cuda.current_stream().synchronize()
        return super().barrier(opts)

    def shutdown(self) -> None:
        """End the inner back end, then this one (collective)."""
        self._inner.shutdown()
        self._stream.close()
        super().shutdown()


_MESSAGES = ("send", "recv", "recv_anysource")


def _route(name: str, inner_name: str) -> None:
    """Give `RoutedProcessGroup` a method that looks where its tensors are."""
    over_mpi = getattr(MPIProcessGroup, name)

    @functools.wraps(over_mpi)
    def method(self: RoutedProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        tensor = checks.first_tensor([*args, *kwargs.values()])
        if tensor is None or tensor.device.type != self._device_type:
            return over_mpi(self, *args, **kwargs)
        operation = self._stream.note(name, tensor.dtype, tensor.numel(), name in _MESSAGES)
        work = getattr(self._inner, inner_name)(*args, **kwargs)
        if not c10d.is_capturing(tensor):  # what a CUDA graph holds runs later, and must not be looked at now
            self._stream.started(operation, work)
        return work

    setattr(RoutedProcessGroup, name, method)


for _name in (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "allgather",
    "gather",
    "scatter",
    "send",
    "recv",
    "recv_anysource",
):
    _route(_name, _name)
for _names in (("reduce_scatter_single", "_reduce_scatter_base"), ("all_gather_single", "_allgather_base")):
    for _name in _names:
        _route(_name, c10d.inner_method(_names))


def barrier_within(group: Any, seconds: float | None) -> None:
    """Wait for every rank of any group, for at most `seconds`, or the group's own timeout (collective).

    Raises:
        TimeoutError: If the group is this back end's, and a rank has not come in time.
        RuntimeError: If it is another's.
    """
    if seconds is not None and not isinstance(group, MPIProcessGroup) and dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group, datetime.timedelta(seconds=seconds), wait_all_ranks=True)
        return
    options = c10d.BarrierOptions()
    options.asyncOp = False
    if seconds is not None:
        options.timeout = datetime.timedelta(seconds=seconds)
    group.barrier(options).wait()


def drain() -> None:
    """Wait until what this rank has queued on any group has run."""
    for engine in list(_engines):
        engine.drain()


def is_stuck() -> bool:
    """Tell whether an operation of this rank did not end in time, and may never."""
    return any(engine.is_stuck() for engine in list(_engines))


def advance() -> None:
    """Let messages that are on their way make progress."""
    for engine in list(_engines):
        engine.advance()


def register() -> None:
    """Register the back end with torch under its names; calling it again does nothing.

    From torch 2.14 on the name `mpi` is registered too, where torch itself was built without MPI.
    """
    if c10d.is_registered(NAME):
        return
    devices = ["cpu", "cuda"]
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
    dist.Backend.register_backend(NAME_WITH_NCCL, _create_with_nccl, extended_api=True, devices=devices)
    if c10d.leaves_mpi_open():
        dist.Backend.register_backend("mpi", _create, extended_api=True, devices=devices)


def _create(options: Any, _backend_options: Any) -> MPIProcessGroup:
    engine = _make_engine(options)
    return MPIProcessGroup(engine, options.group_id)


def _create_with_nccl(options: Any, backend_options: Any) -> MPIProcessGroup:
    engine = _make_engine(options)
    inner = c10d.make_nccl(options, backend_options, engine.comm.rank, engine.comm.size)
    return RoutedProcessGroup(engine, options.group_id, NAME_WITH_NCCL, "cuda", inner)


def _make_engine(options: Any) -> Engine:
    """Make the group's own communicator (collective over the group's ranks) and the engine on it."""
    ranks = list(options.global_ranks_in_group)
    record = recorder.Group(
        options.group_id,
        ranks or range(mpi.job_comm().size),
        options.timeout.total_seconds(),
        is_world=not ranks,
    )
    record.sequence = -1  # a group's own making is its number 0: a rank may never come to that
    operation = recorder.note(record, "new_group", None, 0, None, is_message=False, is_running=True, depth=2)
    try:
        comm = _make_comm(options)
    finally:
        operation.finish()
    engine = Engine(comm, record, Settings.from_environ(os.environ))
    _engines.add(engine)
    return engine


def _make_comm(options: Any) -> Intracomm:
    world = mpi.job_comm()
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        _check_world(options, world)
        return world.Dup()
    members = world.group.Incl(ranks)
    try:
        return world.Create_group(members, tag=c10d.tag_of(options.group_id))
    finally:
        members.Free()


def _check_world(options: Any, world: Any) -> None:
    said = (options.group_rank, options.group_size)
    if said not in ((world.rank, world.size), (-1, -1)):
        raise MpicommError(
            f"torch.distributed was told rank {said[0]} of {said[1]}, but MPI says {world.rank} of {world.size}.\n"
            f"Call mpicomm.bootstrap() and leave rank and world_size to it."
        )
