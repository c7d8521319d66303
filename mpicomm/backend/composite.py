"""A process group over MPI that contains torch's own process group of a vendor's backend, such as NCCL.

torch's group receives the tensors of one device type. torch creates it, calls the vendor's backend, coalesces, splits,
dispatches and checks as in a program without mpicomm. This module only selects the group by the device of the tensors,
and records the operations for reports of hangs.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import torch_compatibility, torch_internals
from mpicomm.backend import dispatcher
from mpicomm.backend.execution.executor import Executor
from mpicomm.backend.gpu.thread_device import prepare_thread_for_events
from mpicomm.backend.operations import TABLE
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.devices import accelerator, vendors
from mpicomm.errors import MpicommError
from mpicomm.recorder.flight_recorder import Operation
from mpicomm.recorder.stream_queue import StreamQueue
from mpicomm.watchdog import rank_failures


class CompositeProcessGroup(MPIProcessGroup):
    """A process group over MPI that passes the tensors of one device type to a process group of torch."""

    takes_gpu_tensors = False

    def __init__(
        self,
        executor: Executor,
        name: str,
        backend_name: str,
        store: dist.Store,
        device_type: str,
        inner: dist.ProcessGroup,
    ) -> None:
        super().__init__(executor, name, backend_name, store)
        self._device_type = device_type
        self._inner = inner
        self._stream = StreamQueue(executor.record, prepare_thread_for_events)
        self._batched: list[Operation] | None = None  # in an open batch of the vendor's backend
        self._is_connected = False  # whether the vendor's backend has certainly created its communicator
        # C++ code, such as that of symmetric memory, takes the vendor's backend from the group that the user has.
        torch_internals.share_backend(inner, self, torch.device(device_type))
        rank_failures.abort_on_failure(inner)

    @classmethod
    def create(
        cls, executor: Executor, request: Any, backend_name: str, device_type: str, vendor_backend: str, options: Any
    ) -> CompositeProcessGroup:
        """Create a group that torch requests (collective over its ranks).

        Args:
            request: torch's description of the group.
            backend_name: The name under which this backend is registered.
            vendor_backend: The name under which the vendor's backend is registered.
            options: The user's options of the vendor's backend, or None.
        """
        timeout = torch_internals.with_extra_timeout(request.timeout)
        comm = executor.comm
        inner = rank_failures.call(
            torch_internals.make_inner_group, vendor_backend, request, comm.rank, comm.size, timeout, options
        )
        return cls(executor, request.group_id, backend_name, request.store, device_type, inner)

    @property
    def _device_types(self) -> list[torch.device]:
        return list(dict.fromkeys([torch.device("cpu"), torch.device(self._device_type)]))

    def _is_inner(self, device: torch.device) -> bool:
        return torch.device(device).type == self._device_type

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner._get_backend(device) if self._is_inner(device) else super()._get_backend(device)

    def splitGroup(self, ranks: Sequence[int], *args: Any, **kwargs: Any) -> MPIProcessGroup | None:  # noqa: N802
        """Create a group of some ranks of this group (collective over all ranks); the arguments are torch's."""
        if torch_compatibility.torch_version() < (2, 14):  # torch sorts them, but not on all ranks before this call
            ranks = sorted(ranks)
        return super().splitGroup(ranks, *args, **kwargs)

    split_group = splitGroup

    def _split_inner(self, members: list[int], name: str, seconds: float, opts: Any) -> dist.ProcessGroup | None:
        if not torch_internals.CAN_SPLIT:
            raise NotImplementedError(
                "split_group: this torch cannot split a group with GPUs; expected torch 2.9 or newer.\n"
                "Create the group with torch.distributed.new_group()."
            )
        self._connect()
        timeout = torch_internals.with_extra_timeout(datetime.timedelta(seconds=seconds))
        parent = self._inner._get_backend(torch.device(self._device_type))
        options = torch_internals.copy_of_options(opts or getattr(parent, "options", None), timeout)
        split = self._inner.split_group
        return rank_failures.call(split, members, timeout=timeout, opts=options, group_name=name)

    def _connect(self) -> None:
        """Let the vendor's backend create its communicator, by a small operation before the first split (collective).

        NCCL does so in its first collective. A split before it crashes the ranks outside of the new group, and the
        others guess their GPU from their rank. `eager_connect_single_device` would create a second communicator if
        there is one, and from then on messages would wait for all other operations of the group.
        """
        if not self._is_connected:
            self.allreduce([torch.zeros(1, device=self._stream.device or self._device_type)]).wait()
            self._is_connected = True

    def _make_part(
        self, executor: Executor, name: str, store: dist.Store, inner: dist.ProcessGroup | None
    ) -> CompositeProcessGroup:
        assert inner is not None  # this rank is a member
        return CompositeProcessGroup(executor, name, self._backend_name, store, self._device_type, inner)

    def barrier(self, opts: Any = None, timeout: datetime.timedelta | None = None) -> dist.Work:
        """Synchronise the current stream of the GPU, then wait for every rank (collective)."""
        if self._device_type != "cpu":
            accelerator.wait_for_work()
        return super().barrier(opts, timeout)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of all later operations; the vendor's backend gets a slightly longer one."""
        super().set_timeout(timeout)
        backend = self._inner._get_backend(torch.device(self._device_type))
        torch_internals.set_inner_timeout(backend, torch_internals.with_extra_timeout(timeout))

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort both groups without waiting for other ranks."""
        self._inner.abort()
        self._end_records()
        super().abort()

    def end(self, error: MpicommError) -> None:
        """Abort torch's group, and end this one, without communication."""
        self._inner.abort()
        self._end_records()
        super().end(error)

    def shutdown(self) -> None:
        """Shut down torch's group, then this one (collective)."""
        self._inner.shutdown()
        self._end_records()
        super().shutdown()

    def _end_records(self) -> None:
        rank_failures.keep_on_failure(self._inner)
        self._stream.close()
        torch_internals.detach_recorder(self._inner)

    def start_coalescing(self, device: torch.device) -> None:
        """Collect the works of the operations called from now on."""
        super().start_coalescing(device)
        if self._is_inner(device) and self._inner._get_backend(device).supports_coalescing:
            self._inner._start_coalescing(device)
            self._batched = []

    def end_coalescing(self, device: torch.device) -> dist.Work:
        """Return one work for all operations since `start_coalescing`, of both groups."""
        if self._batched is not None:
            operations, self._batched = self._batched, None
            try:
                work = rank_failures.call(self._inner._end_coalescing, device)
                rank_failures.raise_if_failed(None)
            except BaseException:
                super().end_coalescing(device)  # the next batch must not contain these works
                for operation in operations:
                    operation.finish()
                raise
            self._add_to_batch(work)
            self._record_until_run(operations, work)
        return super().end_coalescing(device)

    def _run_inside(self, name: str, tensor: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method of torch's group, and record the operation."""
        # An error within a batch would leave it open in torch, for which later calls are then no operations.
        if self._batched is None:
            rank_failures.raise_if_failed(None)  # a new connection to a failed rank would wait for it
        operation = self._stream.note(name, tensor.dtype, tensor.numel(), name in _MESSAGES)
        self._stream.device = tensor.device
        try:
            method = getattr(self._inner, torch_internals.name_in_this_torch(name))
            work = rank_failures.call(method, *args, **kwargs)
        except BaseException:
            operation.finish()
            raise
        if self._batched is None:
            self._add_to_batch(work)
            self._record_until_run([operation], work)
        else:  # a work, if any, is complete at once: that of the batch ends the operation
            self._batched.append(operation)
        return work

    def _add_to_batch(self, work: dist.Work | None) -> None:
        if work is not None:
            self._executor.batch.add(work)

    def _record_until_run(self, operations: Sequence[Operation], work: dist.Work | None) -> None:
        """Record operations until the device has run them."""
        if not operations:
            return
        has_ended = self._poll_of(work)
        for operation in operations:
            if has_ended is None:
                operation.finish()
            else:
                self._stream.started(operation, has_ended)

    def _poll_of(self, work: dist.Work | None) -> Callable[[], bool] | None:
        """Return the poll of the last operation on the device; None without one.

        Args:
            work: The work of the operation. NCCL and XCCL return none if the operation is synchronous: then it runs in
                the order of the current stream, so that the next event in the stream ends it.
        """
        device = self._stream.device
        if vendors.is_capturing(device):
            return None  # it runs later, and a query of its work or an event would end the capture
        if work is not None:
            return work.is_completed
        if device.type == "cpu":
            return None
        return accelerator.end_of_work(device).query


_MESSAGES = ("send", "recv", "recv_anysource")


def _select_by_device(name: str) -> None:
    """Add a method to `CompositeProcessGroup` that calls one of both groups, by the device of its tensors."""
    over_mpi = getattr(MPIProcessGroup, name)

    @functools.wraps(over_mpi)
    def method(self: CompositeProcessGroup, *args: Any, **kwargs: Any) -> dist.Work | None:
        tensor = dispatcher.first_tensor((*args, *kwargs.values()) if kwargs else args)
        if tensor is None or tensor.device.type != self._device_type:
            return over_mpi(self, *args, **kwargs)
        return self._run_inside(name, tensor, args, kwargs)

    setattr(CompositeProcessGroup, name, method)


for _name in (*(operation.method for operation in TABLE), *_MESSAGES):
    for _alias in dict.fromkeys((_name, torch_internals.RENAMED.get(_name, _name))):
        _select_by_device(_alias)

torch_internals.hide_from_compiler(CompositeProcessGroup)
torch_internals.coalesce_batches_of(CompositeProcessGroup)
