"""The face that torch sees: a `ProcessGroup` over MPI, under the names `mpicomm` and `mpicomm_nccl`.

Every method checks its arguments, on the rank that erred and before anything is sent, and hands them to the operations.
Both generations of torch's method names are there: `_allgather_base` became `all_gather_single`, and so on.
"""

from __future__ import annotations

import collections
import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import checks, groups, reductions, torch_internals
from mpicomm.backend.buffers import Tensors
from mpicomm.backend.fast_path import FastPath
from mpicomm.backend.operations import Operations
from mpicomm.backend.work import JointWork

Timeout = datetime.timedelta | None


class MPIProcessGroup(dist.ProcessGroup):
    """A group of ranks whose collectives are MPI's.

    Every method is torch's own contract; see `torch.distributed` for what the operations mean.
    """

    takes_gpu_tensors = True
    """Whether tensors on GPUs are for MPI too."""

    def __init__(self, operations: Operations, name: str, backend_name: str, store: dist.Store) -> None:
        super().__init__(operations.comm.rank, operations.comm.size)  # type: ignore[call-arg]  # the stub knows one of two
        self._store = store
        self._operations = operations
        self._at_once = FastPath(operations)
        operations.executor.title = backend_name
        self._rank = operations.comm.rank
        self._size = operations.comm.size
        self._name = name
        self._description = "undefined"
        self._parts: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._backend_name = backend_name
        self._registered = torch_internals.register_backend(self)

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

    @property
    def timeout_seconds(self) -> float:
        """How long an operation may take."""
        return self._operations.record.timeout

    def get_group_store(self) -> dist.Store:
        """Return the store that torch gave the group."""
        return self._store

    # torch's Python code asks by these names; its C++ code asks by those above.
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    name = getBackendName
    rank = getRank
    size = getSize
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002  torch's signature
        is_bound = self.bound_device_id is not None
        return self._registered if is_bound and self._registered is not None else self

    options = None
    """What torch copies for the groups that it splits off."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing, on a rank that is not in a group that others split off: they make it among themselves."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: MPI is connected."""

    supports_coalescing = False  # messages of a batch need none: MPI starts each at once
    supports_splitting = torch_internals.CAN_SPLIT
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002  torch's signature
        """Tell FSDP2 that it must allocate the memory of its collectives itself."""
        return False

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has called on the group."""
        return self._operations.record.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the numbers are counted from the start."""

    # -- how long an operation may take --------------------------------------------------------------------------

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Give every operation that is called from now on so much time."""
        self._operations.record.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # -- groups of this group ------------------------------------------------------------------------------------

    def splitGroup(  # noqa: N802
        self,
        ranks: Sequence[int],
        timeout: Timeout = None,
        opts: Any = None,  # noqa: ARG002  other back ends have some
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,  # noqa: ARG002  there is one back end for all
    ) -> MPIProcessGroup | None:
        """Make a group of some of this group's ranks (collective over these alone); None on the others.

        Args:
            ranks: Ranks of this group, in the order that they have in the new one.
        """
        members = [checks.rank(rank, self._size, "split_group", "ranks") for rank in dict.fromkeys(ranks)]
        if self._rank not in members:
            return None
        seconds = self._operations.record.timeout if timeout is None else timeout.total_seconds()
        of_job = [self._operations.record.ranks[rank] for rank in members]
        name = group_name or self._name_of_part(members)
        store = dist.PrefixStore(f"{name}/", self._store)
        group = self._make_part(
            groups.make(name, of_job, seconds, takes_gpu_tensors=self.takes_gpu_tensors), name, store
        )
        group.setGroupDesc(group_desc or f"{self._description}:split")
        return group

    split_group = splitGroup

    def _name_of_part(self, members: list[int]) -> str:
        """Return a name on which the members agree, who have split off as many groups of just them as each other."""
        self._parts[tuple(members)] += 1
        return f"{self._name}:split:{'-'.join(map(str, members))}:{self._parts[tuple(members)]}"

    def _make_part(self, operations: Operations, name: str, store: dist.Store) -> MPIProcessGroup:
        return MPIProcessGroup(operations, name, self._backend_name, store)

    # -- several calls as one ------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002  torch's signature
        """Remember what is called from now on."""
        self._operations.executor.start_batch()

    def _end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        """Return the work of all that was called since."""
        return JointWork(self._operations.executor.end_batch())

    # -- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Timeout = None, *, op: Any = None) -> dist.Work:
        """Reduce a tensor in place on all ranks; a sparse one (COO) is added up."""
        if timeout is None and op is None and (work := self._at_once.all_reduce(tensors, opts)) is not None:
            return work
        opts = torch_internals.options(torch_internals.AllreduceOptions, opts, timeout, reduceOp=op or opts)
        value = tensors if isinstance(tensors, torch.Tensor) else checks.only(tensors, "all_reduce")
        if getattr(value, "layout", None) == torch.sparse_coo:
            tensor = checks.on_known_device(value, "all_reduce")
            reduction = reductions.plan(opts.reduceOp, tensor.dtype, self._size, "all_reduce", is_sparse=True)
            return self._operations.all_reduce_sparse(tensor, reduction, opts)
        tensor = checks.written(value, "all_reduce")
        reduction = reductions.plan(opts.reduceOp, tensor.dtype, self._size, "all_reduce")
        return self._operations.all_reduce(tensor, reduction, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors in place on all ranks."""
        what, opts = "all_reduce_coalesced", torch_internals.options(torch_internals.AllreduceCoalescedOptions, opts)
        tensors = [checks.written(each, what) for each in checks.some(tensors, what)]
        checks.distinct(tensors, what, "tensors")
        return self._operations.all_reduce_coalesced(tensors, self._plans(opts.reduceOp, tensors, what), opts)

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: Timeout = None, *, root: int | None = None
    ) -> dist.Work:
        """Reduce a tensor in place on the root."""
        given = opts if root is None else root
        opts = torch_internals.options(torch_internals.ReduceOptions, opts, timeout, rootRank=given, reduceOp=op)
        tensor = checks.single_written(tensors, "reduce")
        root = checks.rank(opts.rootRank, self._size, "reduce", "dst")
        reduction = reductions.plan(opts.reduceOp, tensor.dtype, self._size, "reduce")
        return self._operations.reduce(tensor, root, reduction, opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, timeout: Timeout = None, *, op: Any = None
    ) -> dist.Work:
        """Reduce a list of tensors, one for each rank, and leave each rank its own; sizes may differ between ranks."""
        what, opts = (
            "reduce_scatter",
            torch_internals.options(torch_internals.ReduceScatterOptions, opts, timeout, reduceOp=op or opts),
        )
        output = checks.single_written(outputs, what)
        sources = checks.one_per_rank(checks.only_list(inputs, what), self._size, what, "input_list")
        self._check_lists(sources, output, what, "input_list")
        reduction = reductions.plan(opts.reduceOp, output.dtype, self._size, what)
        return self._operations.reduce_scatter_list(output, sources, reduction, opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce a tensor of size times the output and leave each rank its block."""
        return self._reduce_scatter("reduce_scatter_tensor", [output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors, each of size times its output, and leave each rank its blocks."""
        return self._reduce_scatter("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, what: str, outputs: Tensors, sources: Tensors, opts: Any) -> dist.Work:
        opts = torch_internals.options(torch_internals.ReduceScatterOptions, opts)
        outputs, sources = self._check_blocks(outputs, sources, what)
        for output, source in zip(outputs, sources, strict=True):
            checks.multiple(source, output, self._size, what, "input", "output")
        return self._operations.reduce_scatter(outputs, sources, self._plans(opts.reduceOp, outputs, what), opts)

    def _plans(self, op: Any, tensors: Tensors, what: str) -> list[reductions.Reduction]:
        return [reductions.plan(op, each.dtype, self._size, what) for each in tensors]

    # -- movement ------------------------------------------------------------------------------------------------

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: Timeout = None, *, root: int | None = None
    ) -> dist.Work:
        """Copy the root's tensor into everybody's."""
        given = opts if root is None else root
        opts = torch_internals.options(torch_internals.BroadcastOptions, opts, timeout, rootRank=given)
        tensor = checks.single_written(tensors, "broadcast")
        root = checks.rank(opts.rootRank, self._size, "broadcast", "src")
        return self._operations.broadcast(tensor, root, opts)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, timeout: Timeout = None
    ) -> dist.Work:
        """Gather every rank's tensor into a list on every rank; sizes may differ between ranks."""
        what, opts = "all_gather", torch_internals.options(torch_internals.AllgatherOptions, opts, timeout)
        source = checks.single(inputs, what)
        lists = checks.only_list(outputs, what)
        targets = checks.one_per_rank(lists, self._size, what, "tensor_list", are_written=True)
        checks.distinct(targets, what, "tensor_list")
        self._check_lists(targets, source, what, "tensor_list")
        return self._operations.all_gather_list([targets], [source], opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather several tensors of every rank: `outputs[r]` are those of rank r."""
        what, opts = "all_gather_coalesced", torch_internals.options(torch_internals.AllgatherOptions, opts)
        sources = [checks.tensor(each, what) for each in checks.some(inputs, what)]
        checks.lists_per_rank(outputs, self._size, len(sources), what, "output_tensor_lists")
        targets = [[checks.written(of_rank[i], what) for of_rank in outputs] for i in range(len(sources))]
        flat = [each for of_source in targets for each in of_source]
        checks.distinct(flat, what, "outputs")
        checks.unread(flat, sources, what)
        for index, (each, source) in enumerate(zip(targets, sources, strict=True)):
            self._check_lists(each, source, what, f"output_tensor_lists[...][{index}]")
        return self._operations.all_gather_list(targets, sources, opts)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor into one, on every rank."""
        return self._all_gather("all_gather_into_tensor", [output], [source], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather several tensors of every rank, each kind into one, on every rank."""
        return self._all_gather("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, what: str, outputs: Tensors, sources: Tensors, opts: Any) -> dist.Work:
        opts = torch_internals.options(torch_internals.AllgatherOptions, opts)
        outputs, sources = self._check_blocks(outputs, sources, what)
        for output, source in zip(outputs, sources, strict=True):
            checks.multiple(output, source, self._size, what, "output", "input")
        return self._operations.all_gather(outputs, sources, opts)

    def gather(
        self,
        outputs: Sequence[Tensors],
        inputs: Tensors,
        opts: Any = None,
        timeout: Timeout = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Gather every rank's tensor into a list on the root; sizes may differ between ranks."""
        given = opts if root is None else root
        what, opts = "gather", torch_internals.options(torch_internals.GatherOptions, opts, timeout, rootRank=given)
        source = checks.single(inputs, what)
        root = checks.rank(opts.rootRank, self._size, what, "dst")
        targets: Tensors = []
        if self._rank == root:
            lists = checks.only_list(outputs, what)
            targets = checks.one_per_rank(lists, self._size, what, "gather_list", are_written=True)
            checks.distinct(targets, what, "gather_list")
            self._check_lists(targets, source, what, "gather_list")
        return self._operations.gather(targets, source, root, opts)

    def gather_single(self, output: torch.Tensor | None, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor into one, on the root; `output` is looked at there alone."""
        what, opts = "gather_into_tensor", torch_internals.options(torch_internals.GatherOptions, opts)
        source = checks.tensor(source, what)
        root = checks.rank(opts.rootRank, self._size, what, "dst")
        targets: Tensors = []
        if self._rank == root:
            output = checks.written(output, what)
            checks.multiple(output, source, self._size, what, "output", "input")
            targets = [output]
        return self._operations.gather_single(targets, source, root, opts)

    def scatter(
        self,
        outputs: Tensors,
        inputs: Sequence[Tensors],
        opts: Any = None,
        timeout: Timeout = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Send each rank its tensor of the root's list; sizes may differ between ranks."""
        given = opts if root is None else root
        what, opts = "scatter", torch_internals.options(torch_internals.ScatterOptions, opts, timeout, rootRank=given)
        output = checks.single_written(outputs, what)
        root = checks.rank(opts.rootRank, self._size, what, "src")
        sources: Tensors = []
        if self._rank == root:
            sources = checks.one_per_rank(checks.only_list(inputs, what), self._size, what, "scatter_list")
            self._check_lists(sources, output, what, "scatter_list")
        return self._operations.scatter(output, sources, root, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Timeout = None,
    ) -> dist.Work:
        """Send each rank its rows of a tensor, and receive everybody's into another.

        Either all ranks give no sizes at all, for equal parts, or all give some.
        """
        what, opts = "all_to_all_single", torch_internals.options(torch_internals.AllToAllOptions, opts, timeout)
        output, source = checks.written(output, what), checks.tensor(source, what)
        checks.same_dtype(output, source, what, "output")
        counts = checks.splits(output_split_sizes, output, self._size, what, "output_split_sizes")
        source_counts = checks.splits(input_split_sizes, source, self._size, what, "input_split_sizes")
        if output_split_sizes or input_split_sizes:
            checks.same_share(counts, source_counts, self._rank, what)
            return self._operations.all_to_all(output, counts, source, source_counts, opts)
        checks.same_size(output, source, what, "output")
        return self._operations.all_to_all(output, None, source, None, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Send each rank its tensor of a list, and receive everybody's into another; sizes may differ."""
        what, opts = "all_to_all", torch_internals.options(torch_internals.AllToAllOptions, opts)
        targets = checks.one_per_rank(outputs, self._size, what, "output_tensor_list", are_written=True)
        sources = checks.one_per_rank(inputs, self._size, what, "input_tensor_list")
        for each in [*targets, *sources]:
            checks.same_dtype(each, sources[0], what, "a list")
        checks.same_share([each.numel() for each in targets], [each.numel() for each in sources], self._rank, what)
        checks.distinct(targets, what, "output_tensor_list")
        return self._operations.all_to_all_list(targets, sources, opts)

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> dist.Work:
        """Wait for every rank.

        Raises:
            TimeoutError: If a rank has not come after the options' timeout, or else the group's; it names who has not.
        """
        return self._operations.barrier(torch_internals.options(torch_internals.BarrierOptions, opts, timeout or opts))

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; rank 0 names those that do not come.

        Args:
            timeout: How long to wait; the group's timeout if left out.
            wait_all_ranks: Rank 0 waits for all ranks and names all that did not come, not only the first.

        Raises:
            RuntimeError: If a rank has not come in time. The group can be used on.
        """
        seconds = self._operations.record.timeout if timeout is None else timeout.total_seconds()
        self._operations.monitored_barrier(seconds, names_all=wait_all_ranks)

    def _check_lists(self, tensors: Tensors, mine: torch.Tensor, what: str, argument: str) -> None:
        """Check a list with one tensor per rank: one dtype, and this rank's entry as large as its own tensor."""
        for each in tensors:
            checks.same_dtype(each, mine, what, argument)
        checks.same_size(tensors[self._rank], mine, what, f"{argument}[{self._rank}]")

    def _check_blocks(
        self, outputs: Tensors, sources: Tensors, what: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs and inputs of an operation on pairs of them."""
        if len(outputs) != len(checks.some(sources, what)):
            raise ValueError(
                f"{what}: got {len(outputs)} outputs for {len(sources)} inputs.\nPass one output for each input."
            )
        outputs = [checks.written(each, what) for each in outputs]
        sources = [checks.tensor(each, what) for each in sources]
        if len(outputs) > 1:
            checks.distinct(outputs, what, "output")
            checks.unread(outputs, sources, what)
        return outputs, sources

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Start sending a tensor."""
        tensor = checks.single(tensors, "send")
        return self._operations.send(tensor, checks.rank(dst, self._size, "send", "dst"), checks.tag(tag, "send"))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        """Start receiving a tensor."""
        tensor = checks.single_written(tensors, "recv")
        return self._operations.recv(tensor, checks.rank(src, self._size, "recv", "src"), checks.tag(tag, "recv"))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from whichever rank sends first."""
        return self._operations.recv(checks.single_written(tensors, "recv"), None, checks.tag(tag, "recv"))

    # -- the end -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what is queued and free the communicator (collective)."""
        if mpi.is_usable():
            self._operations.executor.close()

    def abort(self) -> None:
        """Give the group up at once, whatever is on its way; the other ranks are told, and cannot use it either."""
        self._operations.executor.abort()


torch_internals.hide_from_compiler(MPIProcessGroup)
torch_internals.set_timeouts_of(MPIProcessGroup)


def barrier_within(group: Any, seconds: float | None) -> None:
    """Wait for every rank of any group, for at most `seconds`, or the group's own timeout (collective).

    Raises:
        TimeoutError: If the group is this back end's, and a rank has not come in time.
        RuntimeError: If it is another's.
    """
    if seconds is not None and not isinstance(group, MPIProcessGroup) and dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group, datetime.timedelta(seconds=seconds), wait_all_ranks=True)
        return
    options = torch_internals.BarrierOptions()
    options.asyncOp = False
    if seconds is not None:
        options.timeout = datetime.timedelta(seconds=seconds)
    group.barrier(options).wait()
