"""A process group that passes the tensors of one device type to an inner backend, and all others to MPI."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import torch_internals
from mpicomm.backend import dispatcher
from mpicomm.backend.execution.executor import Executor
from mpicomm.backend.operations import TABLE
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.recorder.stream_queue import StreamQueue

MakeInner = Callable[[Executor, str, dist.Store], Any]
"""Creates the inner backend of a group from its executor, its name and its own store."""


def vendor_maker(backend: str, backend_options: Any) -> MakeInner:
    """Return the function that creates the vendor's backend of a group, with the user's options or None."""

    def make_inner(executor: Executor, name: str, store: dist.Store) -> Any:
        timeout = datetime.timedelta(seconds=executor.record.timeout)
        ranks = executor.record.ranks
        return torch_internals.make_vendor_backend(
            backend, name, store, executor.comm.rank, ranks, timeout, backend_options
        )

    return make_inner


class CompositeProcessGroup(MPIProcessGroup):
    """A process group that passes the tensors of one device type to an inner backend, and all others to MPI.

    It calls the inner backend directly: a Python method that called the C++ base method of the same name would be
    dispatched to itself.
    """

    takes_gpu_tensors = False

    def __init__(
        self,
        executor: Executor,
        name: str,
        backend_name: str,
        store: dist.Store,
        device_type: str,
        make_inner: MakeInner,
    ) -> None:
        super().__init__(executor, name, backend_name, store)
        self._device_type = device_type
        self._make_inner = make_inner
        self._inner = make_inner(executor, name, store)
        self._stream = StreamQueue(executor.record)

    @property
    def _device_types(self) -> list[torch.device]:
        return list(dict.fromkeys([torch.device("cpu"), torch.device(self._device_type)]))

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner if torch.device(device).type == self._device_type else self

    def _make_part(self, executor: Executor, name: str, store: dist.Store) -> CompositeProcessGroup:
        return CompositeProcessGroup(executor, name, self._backend_name, store, self._device_type, self._make_inner)

    def barrier(self, opts: Any = None, timeout: datetime.timedelta | None = None) -> dist.Work:
        """Synchronise the current CUDA stream, then wait for every rank (collective)."""
        if self._device_type == "cuda":
            torch.cuda.current_stream().synchronize()
        return super().barrier(opts, timeout)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the timeout of all later operations; the inner backend gets a slightly longer one."""
        super().set_timeout(timeout)
        torch_internals.set_inner_timeout(self._inner, torch_internals.with_extra_timeout(timeout))

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Abort both backends without waiting for other ranks."""
        self._inner.abort()
        self._stream.close()
        super().abort()

    def shutdown(self) -> None:
        """Shut down the inner backend, then this one (collective, unless the group's world has ended)."""
        if self._executor.record.has_ended:
            self._inner.abort()
        else:
            self._inner.shutdown()
        self._stream.close()
        super().shutdown()

    def start_coalescing(self, device: torch.device) -> None:
        """Collect the works of the operations called from now on."""
        if torch.device(device).type == self._device_type and self._inner.supports_coalescing:
            self._inner._start_coalescing()
        else:
            super().start_coalescing(device)

    def end_coalescing(self, device: torch.device) -> dist.Work:
        """Return one work for all operations since `start_coalescing`."""
        if torch.device(device).type == self._device_type and self._inner.supports_coalescing:
            return self._inner._end_coalescing()
        return super().end_coalescing(device)

    def _run_inside(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method of the inner backend; emulate a missing coalesced method by one call per tensor."""
        if (call := getattr(self._inner, name, None)) is not None:
            return call(*args, **kwargs)
        if name not in _ONE_BY_ONE:
            raise NotImplementedError(
                f"the {self._inner.name()} backend does not support {name} for tensors on {self._device_type}.\n"
                f"Move the tensors to the CPU."
            )
        outputs, inputs, opts = args
        call = getattr(self._inner, _ONE_BY_ONE[name])
        device = inputs[0].device
        self.start_coalescing(device)
        for output, source in zip(outputs, inputs, strict=True):
            self._executor.batch.add(call(output, source, opts))
        return self.end_coalescing(device)


_MESSAGES = ("send", "recv", "recv_anysource")
_ONE_BY_ONE = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}


def _delegate(name: str, inner_name: str) -> None:
    """Add a method to `CompositeProcessGroup` that dispatches on the device of its tensors."""
    over_mpi = getattr(MPIProcessGroup, name)

    @functools.wraps(over_mpi)
    def method(self: CompositeProcessGroup, *args: Any, **kwargs: Any) -> dist.Work | None:
        tensor = dispatcher.first_tensor([*args, *kwargs.values()])
        if tensor is None or tensor.device.type != self._device_type:
            return over_mpi(self, *args, **kwargs)
        if dispatcher.is_needed(*args, *kwargs.values()):
            return over_mpi(self, *args, **kwargs)  # the kernel of torch's operator calls this method again
        operation = self._stream.note(name, tensor.dtype, tensor.numel(), name in _MESSAGES)
        work = self._run_inside(inner_name, args, kwargs)
        if work is None:  # part of a coalesced batch, whose work ends it
            operation.finish()
            return None
        # A captured operation runs later, and its work must not be queried during the capture.
        if not torch_internals.is_capturing(tensor):
            self._stream.started(operation, work)
        else:
            operation.finish()
        self._executor.batch.add(work)
        return work

    setattr(CompositeProcessGroup, name, method)


for _name in (*(operation.method for operation in TABLE), *_MESSAGES):
    for _alias in dict.fromkeys((_name, torch_internals.RENAMED.get(_name, _name))):
        _delegate(_alias, torch_internals.name_in_this_torch(_name))

torch_internals.hide_from_compiler(CompositeProcessGroup)
torch_internals.coalesce_batches_of(CompositeProcessGroup)
