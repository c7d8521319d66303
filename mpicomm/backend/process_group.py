"""The `ProcessGroup` over MPI that torch calls, for the backends `mpicomm` and `mpicomm_nccl`.

The collective methods follow from the table in operations.py. Every method checks its arguments on the calling rank,
before any communication. torch's old and new method names are both defined: `_allgather_base` became
`all_gather_single`, and so on.
"""

from __future__ import annotations

import collections
import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import mpi, torch_internals
from mpicomm.backend import checks, dispatcher, groups, operations, plain_calls
from mpicomm.backend.execution.executor import Executor
from mpicomm.backend.operations import TABLE, CollectiveOperation
from mpicomm.backend.transfer.buffers import Tensors
from mpicomm.errors import MpicommError


class MPIProcessGroup(dist.ProcessGroup):
    """A process group whose collective operations run over MPI.

    Every method follows torch's contract; see `torch.distributed` for the semantics of the operations.
    """

    takes_gpu_tensors = True
    """Whether MPI handles GPU tensors too."""

    def __init__(self, executor: Executor, name: str, backend_name: str, store: dist.Store) -> None:
        # The type stub has only one of the two constructors.
        super().__init__(executor.comm.rank, executor.comm.size)  # type: ignore[call-arg]
        self._store = store
        self._executor = executor
        self._plain = plain_calls.create(executor)
        self._plain_messages = plain_calls.create_messages(executor)
        executor.backend_name = executor.messages.backend_name = backend_name
        self._rank = executor.comm.rank
        self._size = executor.comm.size
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
        return self._executor.record.timeout

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
        return self._executor.record.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: sequence numbers count from the creation of the group."""

    # -- timeouts ------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of all operations called from now on."""
        self._executor.record.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # -- subgroups -----------------------------------------------------------------------------------------------

    def splitGroup(  # noqa: N802
        self,
        ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,  # noqa: ARG002  one backend serves all
    ) -> MPIProcessGroup | None:
        """Create a group of some ranks of this group (collective over these ranks; with NCCL, over all ranks).

        Args:
            ranks: Ranks of this group, in their order in the new group.
            timeout: Timeout of the new group's operations; None for this group's.
            opts: Options of the vendor's backend, if this group has one.

        Returns:
            The new group; None on ranks that are not in `ranks`.
        """
        members = [checks.require_rank(rank, self._size, "split_group", "ranks") for rank in dict.fromkeys(ranks)]
        seconds = self._executor.record.timeout if timeout is None else timeout.total_seconds()
        name = group_name or self._name_of_part(members)
        inner = self._split_inner(members, name, seconds, opts)
        if self._rank not in members:
            return None
        of_job = [self._executor.record.ranks[rank] for rank in members]
        store = dist.PrefixStore(f"{name}/", self._store)
        executor = groups.make(name, of_job, seconds, takes_gpu_tensors=self.takes_gpu_tensors)
        group = self._make_part(executor, name, store, inner)
        group.setGroupDesc(group_desc or f"{self._description}:split")
        return group

    split_group = splitGroup

    def _name_of_part(self, members: list[int]) -> str:
        """Return a name that is equal on all members: each has split off the same number of groups of these members."""
        self._parts[tuple(members)] += 1
        return f"{self._name}:split:{'-'.join(map(str, members))}:{self._parts[tuple(members)]}"

    def _split_inner(self, members: list[int], name: str, seconds: float, opts: Any) -> dist.ProcessGroup | None:
        """Split the group that this one contains, if any (collective over all ranks of this group)."""

    def _make_part(
        self,
        executor: Executor,
        name: str,
        store: dist.Store,
        inner: dist.ProcessGroup | None,  # noqa: ARG002  of subclasses
    ) -> MPIProcessGroup:
        return MPIProcessGroup(executor, name, self._backend_name, store)

    # -- coalescing ----------------------------------------------------------------------------------------------

    def start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002  torch's signature
        """Collect the works of the operations called from now on."""
        self._executor.batch.start()

    def end_coalescing(self, device: torch.device) -> dist.Work:  # noqa: ARG002
        """Return one work for all operations called since `start_coalescing`."""
        return self._executor.batch.end()

    # torch's Python code uses these names; its C++ code uses those above.
    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self.end_coalescing(device)

    # -- operations ----------------------------------------------------------------------------------------------

    def _call(self, operation: CollectiveOperation, args: Sequence[Any], keywords: dict[str, Any]) -> dist.Work:
        """Run a call that does not take the fast path."""
        arguments, opts = operation.bind(args, keywords)
        values = list(arguments.values())
        if operation.operator_forms and dispatcher.is_needed(*values):
            count = len(operation.operator_forms)
            tensors = [form(value) for form, value in zip(operation.operator_forms, values, strict=False)]
            return dispatcher.call(self, operation.method, tensors, *values[count:], opts)
        return self._executor.submit(operation.describe(self._executor.dense, opts, arguments), opts)

    def barrier(self, opts: Any = None, timeout: datetime.timedelta | None = None) -> dist.Work:
        """Wait for all ranks.

        Raises:
            TimeoutError: If a rank does not arrive within the timeout in the options, or else the group's; the message
                lists the missing ranks.
        """
        opts = operations.options_of("barrier", torch_internals.BarrierOptions, opts, {"timeout": timeout})
        if self._plain is not None and (work := self._plain.barrier(opts)) is not None:
            return work
        if dispatcher.is_needed():
            return dispatcher.call(self, "barrier", [], opts)
        return self._executor.barrier(opts)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error on rank 0 lists the missing ranks.

        Args:
            timeout: The longest wait; None for the group's timeout.
            wait_all_ranks: Whether rank 0 waits for all ranks and lists every missing rank, not only the first.

        Raises:
            RuntimeError: If a rank does not arrive in time. The group stays usable; as the ranks' calls are matched in
                their order, the missing rank must still make this call before its next monitored barrier.
        """
        seconds = self._executor.record.timeout if timeout is None else timeout.total_seconds()
        self._executor.monitored_barrier(seconds, names_all=wait_all_ranks)

    # -- point-to-point ------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        """Start sending a tensor to `dst`."""
        if self._plain_messages is not None and (work := self._plain_messages.send(tensors, dst, tag)) is not None:
            return work
        if dispatcher.is_needed(tensors):
            return dispatcher.call(self, "send", [dispatcher.as_list(tensors)], dst, tag)
        tensor = checks.require_single_tensor(tensors, "send")
        dst, tag = checks.require_rank(dst, self._size, "send", "dst"), checks.require_tag(tag, "send")
        return self._executor.messages.send(tensor, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from `src`."""
        if self._plain_messages is not None and (work := self._plain_messages.recv(tensors, src, tag)) is not None:
            return work
        if dispatcher.is_needed(tensors):
            return dispatcher.call(self, "recv", [dispatcher.as_list(tensors)], src, tag)
        tensor = checks.require_single_output(tensors, "recv")
        src, tag = checks.require_rank(src, self._size, "recv", "src"), checks.require_tag(tag, "recv")
        return self._executor.messages.receive(tensor, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from the first rank that sends one with this tag."""
        if dispatcher.is_needed(tensors):
            return dispatcher.call(self, "recv_anysource", [dispatcher.as_list(tensors)], tag)
        tensor = checks.require_single_output(tensors, "recv")
        return self._executor.messages.receive(tensor, None, checks.require_tag(tag, "recv"))

    # -- shutdown ------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Check that the group can be used.

        Raises:
            MpicommError: If it is broken or was destroyed.
        """
        self._executor.check_open()

    def finish(self) -> bool:
        """Wait until the operations that this rank has queued have run; return whether no message is in flight."""
        return self._executor.finish()

    def end(self, error: MpicommError) -> None:
        """End the group on this rank without communication; the other ranks may do the same, or keep it.

        Args:
            error: The error of operations that have not completed.
        """
        self._executor.end(error, revokes=False)

    def shutdown(self) -> None:
        """Complete the queued operations and free the communicator (collective)."""
        if mpi.is_usable():
            self._executor.close()

    def abort(self) -> None:
        """Abandon the group immediately, with all pending operations; it becomes unusable on the other ranks too."""
        self._executor.abort()


def _add_method(operation: CollectiveOperation) -> None:
    """Add the method of an operation to `MPIProcessGroup`, with torch's new and old names.

    torch's C++ code looks for its methods on the class.
    """
    name = operation.method
    run_plain = getattr(plain_calls.PlainCalls, name, None)

    def method(self: MPIProcessGroup, *args: Any, **keywords: Any) -> dist.Work:
        if run_plain is not None and self._plain is not None and not keywords:
            work = run_plain(self._plain, *args)
            if work is not None:
                return work
        return self._call(operation, args, keywords)

    method.__name__, method.__qualname__ = name, f"{MPIProcessGroup.__name__}.{name}"
    method.__doc__, method.__signature__ = operation.documentation, operation.signature  # type: ignore[attr-defined]
    for alias in {name, torch_internals.RENAMED.get(name, name)}:
        setattr(MPIProcessGroup, alias, method)


for _operation in TABLE:
    _add_method(_operation)
_MESSAGES_AND_BARRIER = ("send", "recv", "recv_anysource", "barrier")
torch_internals.forward_from_cpp(
    [*(operation.method for operation in TABLE if operation.operator_forms), *_MESSAGES_AND_BARRIER]
)
torch_internals.hide_from_compiler(MPIProcessGroup)
torch_internals.set_timeouts_of(MPIProcessGroup)
