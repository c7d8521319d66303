"""The `ProcessGroup` over MPI that torch calls, for the backends `mpicomm` and `mpicomm_nccl`.

Every method checks its arguments on the calling rank, before any communication, and passes them to the operations.
torch's old and new method names are both defined: `_allgather_base` became `all_gather_single`, and so on.
"""

from __future__ import annotations

import collections
import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.backend import checks, dispatcher, groups, reductions, torch_internals
from mpicomm.backend.buffers import Tensors
from mpicomm.backend.fast_path import FastPath
from mpicomm.backend.operations import Operations
from mpicomm.backend.torch_internals import active_modes

Timeout = datetime.timedelta | None


class MPIProcessGroup(dist.ProcessGroup):
    """A process group whose collective operations run over MPI.

    Every method follows torch's contract; see `torch.distributed` for the semantics of the operations.
    """

    takes_gpu_tensors = True
    """Whether MPI handles GPU tensors too."""

    def __init__(self, operations: Operations, name: str, backend_name: str, store: dist.Store) -> None:
        # The type stub has only one of the two constructors.
        super().__init__(operations.comm.rank, operations.comm.size)  # type: ignore[call-arg]
        self._store = store
        self._operations = operations
        self._fast_path = FastPath(operations)
        operations.executor.profiler.backend_name = backend_name
        self._rank = operations.comm.rank
        self._size = operations.comm.size
        self._name = name
        self._description = "undefined"
        self._parts: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._backend_name = backend_name
        self._registered = torch_internals.register_backend(self, dispatcher.run)

    # -- identity ------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  torch's name, as are those below
        """Return the name under which the backend is registered."""
        return self._backend_name

    def getRank(self) -> int:  # noqa: N802
        """Return the rank of this process in the group."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        """Return the number of ranks in the group."""
        return self._size

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch assigned to the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name that torch assigns to the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the user's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the user's description of the group."""
        self._description = description

    @property
    def timeout_seconds(self) -> float:
        """Timeout of an operation, in seconds."""
        return self._operations.record.timeout

    def get_group_store(self) -> dist.Store:
        """Return the store that torch assigned to the group."""
        return self._store

    # torch's Python code uses these names; its C++ code uses those above.
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
    """Options that torch copies to the groups that it splits off."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing on a rank outside the new group: only its members take part in the split."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: MPI is already connected."""

    supports_coalescing = False  # batched messages need none: MPI starts each one immediately
    supports_splitting = torch_internals.CAN_SPLIT
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002  torch's signature
        """Return False: FSDP2 must allocate the memory of its collectives itself."""
        return False

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has called on the group."""
        return self._operations.record.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: sequence numbers count from the creation of the group."""

    # -- timeouts ------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of all operations called from now on."""
        self._operations.record.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # -- subgroups -----------------------------------------------------------------------------------------------

    def splitGroup(  # noqa: N802
        self,
        ranks: Sequence[int],
        timeout: Timeout = None,
        opts: Any = None,  # noqa: ARG002  for other backends
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,  # noqa: ARG002  one backend serves all
    ) -> MPIProcessGroup | None:
        """Create a group of some ranks of this group (collective over these ranks only).

        Args:
            ranks: Ranks of this group, in their order in the new group.
            timeout: Timeout of the new group's operations; None for this group's.

        Returns:
            The new group; None on ranks that are not in `ranks`.
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
        """Return a name that is equal on all members: each has split off the same number of groups of these members."""
        self._parts[tuple(members)] += 1
        return f"{self._name}:split:{'-'.join(map(str, members))}:{self._parts[tuple(members)]}"

    def _make_part(self, operations: Operations, name: str, store: dist.Store) -> MPIProcessGroup:
        return MPIProcessGroup(operations, name, self._backend_name, store)

    # -- coalescing ----------------------------------------------------------------------------------------------

    def start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002  torch's signature
        """Collect the works of the operations called from now on."""
        self._operations.executor.batch.start()

    def end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        """Return one work for all operations called since `start_coalescing`."""
        return self._operations.executor.batch.end()

    # torch's Python code uses these names; its C++ code uses those above.
    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self.end_coalescing(device)

    # -- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Timeout = None, *, op: Any = None) -> dist.Work:
        """All-reduce a tensor in place; sparse tensors (COO) support sums only."""
        if timeout is None and op is None and not active_modes():
            work = self._fast_path.allreduce(tensors, opts)
            if work is not None:
                return work
        opts = torch_internals.options(torch_internals.AllreduceOptions, opts, timeout, reduceOp=op or opts)
        if dispatcher.is_needed(tensors):
            return dispatcher.call(self, "allreduce", [dispatcher.as_list(tensors)], opts)
        value = tensors if isinstance(tensors, torch.Tensor) else checks.only(tensors, "all_reduce")
        if getattr(value, "layout", None) == torch.sparse_coo:
            tensor = checks.on_known_device(value, "all_reduce")
            reduction = reductions.plan(opts.reduceOp, tensor.dtype, self._size, "all_reduce", is_sparse=True)
            return self._operations.all_reduce_sparse(tensor, reduction, opts)
        tensor = checks.written(value, "all_reduce")
        reduction = reductions.plan(opts.reduceOp, tensor.dtype, self._size, "all_reduce")
        return self._operations.all_reduce(tensor, reduction, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """All-reduce several tensors in place."""
        what, opts = "all_reduce_coalesced", torch_internals.options(torch_internals.AllreduceCoalescedOptions, opts)
        if dispatcher.is_needed(tensors):
            return dispatcher.call(self, "allreduce_coalesced", [tensors], opts)
        tensors = [checks.written(each, what) for each in checks.some(tensors, what)]
        checks.distinct(tensors, what, "tensors")
        return self._operations.all_reduce_coalesced(tensors, self._plans(opts.reduceOp, tensors, what), opts)

    def reduce(
        self, tensors: Tensors, opts: Any = None, op: Any = None, timeout: Timeout = None, *, root: int | None = None
    ) -> dist.Work:
        """Reduce a tensor in place on the root."""
        if timeout is None and not active_modes():
            work = self._fast_path.reduce(tensors, opts)
            if work is not None:
                return work
        given = opts if root is None else root
        opts = torch_internals.options(torch_internals.ReduceOptions, opts, timeout, rootRank=given, reduceOp=op)
        if dispatcher.is_needed(tensors):
            return dispatcher.call(self, "reduce", [dispatcher.as_list(tensors)], opts)
        tensor = checks.single_written(tensors, "reduce")
        root = checks.rank(opts.rootRank, self._size, "reduce", "dst")
        reduction = reductions.plan(opts.reduceOp, tensor.dtype, self._size, "reduce")
        return self._operations.reduce(tensor, root, reduction, opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, timeout: Timeout = None, *, op: Any = None
    ) -> dist.Work:
        """Reduce a list with one tensor for each rank; each rank receives its own. Sizes may differ between ranks."""
        what, opts = (
            "reduce_scatter",
            torch_internals.options(torch_internals.ReduceScatterOptions, opts, timeout, reduceOp=op or opts),
        )
        if dispatcher.is_needed(outputs, inputs):
            return dispatcher.call(
                self, "reduce_scatter", [dispatcher.as_list(outputs), dispatcher.as_lists(inputs)], opts
            )
        output = checks.single_written(outputs, what)
        sources = checks.one_per_rank(checks.only_list(inputs, what), self._size, what, "input_list")
        self._check_lists(sources, output, what, "input_list")
        reduction = reductions.plan(opts.reduceOp, output.dtype, self._size, what)
        return self._operations.reduce_scatter_list(output, sources, reduction, opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce a tensor of group size times the output; each rank receives its block."""
        if not active_modes() and (work := self._fast_path.reduce_scatter_single(output, source, opts)) is not None:
            return work
        if dispatcher.is_needed(output, source):
            opts = torch_internals.options(torch_internals.ReduceScatterOptions, opts)
            return dispatcher.call(self, "reduce_scatter_single", [output, source], opts)
        return self._reduce_scatter("reduce_scatter_tensor", [output], [source], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors, each of group size times its output; each rank receives its blocks."""
        if dispatcher.is_needed(outputs, inputs):
            opts = torch_internals.options(torch_internals.ReduceScatterOptions, opts)
            return dispatcher.call(self, "reduce_scatter_single_coalesced", [outputs, inputs], opts)
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

    # -- data movement -------------------------------------------------------------------------------------------

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: Timeout = None, *, root: int | None = None
    ) -> dist.Work:
        """Copy the root's tensor to all ranks."""
        if timeout is None and not active_modes():
            work = self._fast_path.broadcast(tensors, opts)
            if work is not None:
                return work
        given = opts if root is None else root
        opts = torch_internals.options(torch_internals.BroadcastOptions, opts, timeout, rootRank=given)
        if dispatcher.is_needed(tensors):
            return dispatcher.call(self, "broadcast", [dispatcher.as_list(tensors)], opts)
        tensor = checks.single_written(tensors, "broadcast")
        root = checks.rank(opts.rootRank, self._size, "broadcast", "src")
        return self._operations.broadcast(tensor, root, opts)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, timeout: Timeout = None
    ) -> dist.Work:
        """Gather every rank's tensor into a list on every rank; sizes may differ between ranks."""
        if timeout is None and not active_modes():
            work = self._fast_path.allgather(outputs, inputs, opts)
            if work is not None:
                return work
        what, opts = "all_gather", torch_internals.options(torch_internals.AllgatherOptions, opts, timeout)
        if dispatcher.is_needed(outputs, inputs):
            return dispatcher.call(self, "allgather", [dispatcher.as_lists(outputs), dispatcher.as_list(inputs)], opts)
        source = checks.single(inputs, what)
        lists = checks.only_list(outputs, what)
        targets = checks.one_per_rank(lists, self._size, what, "tensor_list", are_written=True)
        checks.distinct(targets, what, "tensor_list")
        self._check_lists(targets, source, what, "tensor_list")
        return self._operations.all_gather_list([targets], [source], opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather several tensors of every rank: `outputs[r]` receives those of rank r."""
        what, opts = "all_gather_coalesced", torch_internals.options(torch_internals.AllgatherOptions, opts)
        if dispatcher.is_needed(outputs, inputs):
            return dispatcher.call(self, "allgather_coalesced", [outputs, inputs], opts)
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
        """Gather every rank's tensor into one tensor on every rank."""
        if not active_modes() and (work := self._fast_path.all_gather_single(output, source, opts)) is not None:
            return work
        if dispatcher.is_needed(output, source):
            opts = torch_internals.options(torch_internals.AllgatherOptions, opts)
            return dispatcher.call(self, "all_gather_single", [output, source], opts)
        return self._all_gather("all_gather_into_tensor", [output], [source], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather several tensors of every rank, each into its own output tensor, on every rank."""
        if dispatcher.is_needed(outputs, inputs):
            opts = torch_internals.options(torch_internals.AllgatherOptions, opts)
            return dispatcher.call(self, "all_gather_single_coalesced", [outputs, inputs], opts)
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
        if timeout is None and not active_modes():
            work = self._fast_path.gather(outputs, inputs, opts)
            if work is not None:
                return work
        given = opts if root is None else root
        what, opts = "gather", torch_internals.options(torch_internals.GatherOptions, opts, timeout, rootRank=given)
        if dispatcher.is_needed(outputs, inputs):
            return dispatcher.call(self, "gather", [dispatcher.as_lists(outputs), dispatcher.as_list(inputs)], opts)
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
        """Gather every rank's tensor into one tensor on the root; `output` is ignored on other ranks."""
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
        """Send one tensor of the root's list to each rank; sizes may differ between ranks."""
        if timeout is None and not active_modes():
            work = self._fast_path.scatter(outputs, inputs, opts)
            if work is not None:
                return work
        given = opts if root is None else root
        what, opts = "scatter", torch_internals.options(torch_internals.ScatterOptions, opts, timeout, rootRank=given)
        if dispatcher.is_needed(outputs, inputs):
            return dispatcher.call(self, "scatter", [dispatcher.as_list(outputs), dispatcher.as_lists(inputs)], opts)
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
        """Send each rank its rows of a tensor and receive rows from all ranks into another.

        Either all ranks omit both lists of split sizes, for equal parts, or every rank passes at least one.
        """
        if timeout is None and not active_modes():
            work = self._fast_path.all_to_all_single(output, source, output_split_sizes, input_split_sizes, opts)
            if work is not None:
                return work
        what, opts = "all_to_all_single", torch_internals.options(torch_internals.AllToAllOptions, opts, timeout)
        if dispatcher.is_needed(output, source):
            return dispatcher.call(
                self, "all_to_all_single", [output, source], output_split_sizes, input_split_sizes, opts
            )
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
        """Send each rank its tensor of a list and receive one from each rank into another list; sizes may differ."""
        what, opts = "all_to_all", torch_internals.options(torch_internals.AllToAllOptions, opts)
        if dispatcher.is_needed(outputs, inputs):
            return dispatcher.call(self, "alltoall", [outputs, inputs], opts)
        targets = checks.one_per_rank(outputs, self._size, what, "output_tensor_list", are_written=True)
        sources = checks.one_per_rank(inputs, self._size, what, "input_tensor_list")
        for each in [*targets, *sources]:
            checks.same_dtype(each, sources[0], what, "a list")
        checks.same_share([each.numel() for each in targets], [each.numel() for each in sources], self._rank, what)
        checks.distinct(targets, what, "output_tensor_list")
        return self._operations.all_to_all_list(targets, sources, opts)

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> dist.Work:
        """Wait for all ranks.

        Raises:
            TimeoutError: If a rank does not arrive within the timeout in the options, or else the group's; the message
                lists the missing ranks.
        """
        opts = torch_internals.options(torch_internals.BarrierOptions, opts, timeout or opts)
        if dispatcher.is_needed():
            return dispatcher.call(self, "barrier", [], opts)
        return self._operations.barrier(opts)

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error on rank 0 lists the missing ranks.

        Args:
            timeout: The longest wait; None for the group's timeout.
            wait_all_ranks: Whether rank 0 waits for all ranks and lists every missing rank, not only the first.

        Raises:
            RuntimeError: If a rank does not arrive in time. The group stays usable.
        """
        seconds = self._operations.record.timeout if timeout is None else timeout.total_seconds()
        self._operations.monitored_barrier(seconds, names_all=wait_all_ranks)

    def _check_lists(self, tensors: Tensors, mine: torch.Tensor, what: str, argument: str) -> None:
        """Check a list with one tensor per rank: equal dtypes, and this rank's entry as large as its own tensor."""
        for each in tensors:
            checks.same_dtype(each, mine, what, argument)
        checks.same_size(tensors[self._rank], mine, what, f"{argument}[{self._rank}]")

    def _check_blocks(
        self, outputs: Tensors, sources: Tensors, what: str
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Check and return the outputs and inputs of an operation on pairs of these."""
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

    # -- point-to-point ------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Start sending a tensor to `dst`."""
        if dispatcher.is_needed(tensors):
            return dispatcher.call(self, "send", [dispatcher.as_list(tensors)], dst, tag)
        tensor = checks.single(tensors, "send")
        return self._operations.send(tensor, checks.rank(dst, self._size, "send", "dst"), checks.tag(tag, "send"))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from `src`."""
        if dispatcher.is_needed(tensors):
            return dispatcher.call(self, "recv", [dispatcher.as_list(tensors)], src, tag)
        tensor = checks.single_written(tensors, "recv")
        return self._operations.recv(tensor, checks.rank(src, self._size, "recv", "src"), checks.tag(tag, "recv"))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from the first rank that sends one with this tag."""
        if dispatcher.is_needed(tensors):
            return dispatcher.call(self, "recv_anysource", [dispatcher.as_list(tensors)], tag)
        return self._operations.recv(checks.single_written(tensors, "recv"), None, checks.tag(tag, "recv"))

    # -- shutdown ------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Complete the queued operations and free the communicator (collective)."""
        if mpi.is_usable():
            self._operations.executor.close()

    def abort(self) -> None:
        """Abandon the group immediately, with all pending operations; it becomes unusable on the other ranks too."""
        self._operations.executor.abort()


torch_internals.hide_from_compiler(MPIProcessGroup)
torch_internals.set_timeouts_of(MPIProcessGroup)


def barrier_within(group: Any, seconds: float | None) -> None:
    """Wait for all ranks of a group of any backend (collective).

    Args:
        seconds: The longest wait; None for the group's own timeout.

    Raises:
        TimeoutError: If a rank does not arrive in time and the group uses this backend.
        RuntimeError: If a rank does not arrive in time and the group uses another backend.
    """
    if seconds is not None and not isinstance(group, MPIProcessGroup) and dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group, datetime.timedelta(seconds=seconds), wait_all_ranks=True)
        return
    options = torch_internals.BarrierOptions()
    options.asyncOp = False
    if seconds is not None:
        options.timeout = datetime.timedelta(seconds=seconds)
    group.barrier(options).wait()
