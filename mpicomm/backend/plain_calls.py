"""The extension module's short way for operations on plain tensors: dense, on the CPU, and of a common dtype.

`PlainCalls` and `PlainMessages` have a method for each of them, in C: the checks, the record, the run and the Work. A
call that does not qualify returns None without side effects, and takes the general path. Without the extension module,
all calls do. benchmarks/README.md breaks down the time of a call in microseconds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import mpi, torch_internals
from mpicomm.backend.execution import future_callbacks
from mpicomm.backend.execution.executor import MAX_KEPT_ELEMENTS, Executor
from mpicomm.backend.execution.message_work import MessageWork
from mpicomm.backend.execution.pending_messages import BUFFERED_BYTES, REAP_ABOVE
from mpicomm.backend.execution.work import CompletedWork, EarlyWork
from mpicomm.backend.gpu.transport import DIRECT
from mpicomm.backend.operations import TABLE
from mpicomm.backend.transfer import dtypes, mpi_calls, reductions
from mpicomm.backend.transfer.algorithms import only_mpi
from mpicomm.backend.transfer.dense_collectives import DenseCollectives
from mpicomm.backend.transfer.slots import note_writes
from mpicomm.native import c_library, extension
from mpicomm.recorder import flight_recorder

_DTYPES = (
    torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.int32,
    torch.uint8, torch.bool, torch.int8, torch.int16,
)  # fmt: skip
_NATIVE, _CONVERTED, _IMPOSSIBLE = range(3)  # how MPI computes a reduction, as in plain_calls.c
_ROWS = {operation.method: operation for operation in TABLE}

PlainCalls: Any = getattr(extension.module(), "PlainCalls", None)
PlainMessages: Any = getattr(extension.module(), "PlainMessages", None)
"""The extension module's classes; None without the extension module."""


def create(executor: Executor) -> Any:
    """Return the plain calls of a group; None if all its calls need the general path."""
    if PlainCalls is None or not executor.takes_plain_calls or not _is_configured():
        return None
    comm = executor.comm
    objects = executor.parts_of_plain_calls()
    by_mpi = functools.cache(lambda: DenseCollectives(comm, only_mpi))  # its buffer is seldom needed
    objects["run_by_mpi"] = lambda method, args: _run_on(by_mpi(), method, args)
    objects["run_general"] = functools.partial(_run_on, executor.dense)
    whole_bytes = min(executor.transport.whole_bytes, sys.maxsize)
    plain = PlainCalls(
        objects,
        comm.rank,
        comm.size,
        int(whole_bytes),
        MAX_KEPT_ELEMENTS,
        _handle(comm),
        mpi_calls.reduces_in_place(),
        mpi.has_thread_multiple(),
    )
    executor.algorithms.publish_to(plain)
    return plain


def create_messages(executor: Executor) -> Any:
    """Return the plain messages of a group; None if all its messages need the general path."""
    if PlainMessages is None or not executor.takes_plain_calls or not _is_configured():
        return None
    return PlainMessages(
        executor.messages.parts_of_plain_messages(),
        executor.comm.size,
        mpi_calls.largest_tag(),
        BUFFERED_BYTES,
        REAP_ABOVE,
        _handle(executor.comm),
        mpi.has_thread_multiple(),
    )


def _run_on(dense: DenseCollectives, method: str, args: Sequence[Any]) -> None:
    """Run a call in Python, for example by MPI if another rank's tensor is not on the host."""
    row = _ROWS[method]
    arguments, opts = row.bind(args, {})
    collective = row.describe(dense, opts, arguments)
    with torch.inference_mode(collective.results[0].is_inference() if collective.results else False):
        collective.prepared(DIRECT)()


@functools.cache
def _is_configured() -> bool:
    """Pass the objects of torch and MPI to the extension module; return whether it can find MPI's functions."""
    api = mpi.api()
    objects = {
        "tensor": torch.Tensor,
        "parameter": torch.nn.Parameter,
        "strided": torch.strided,
        "sum": dist.ReduceOp.SUM,
        "average": dist.ReduceOp.AVG,
        "least": dist.ReduceOp.MIN,
        "most": dist.ReduceOp.MAX,
        "is_contiguous": torch.Tensor.is_contiguous,
        "is_neg": torch.Tensor.is_neg,
        "data_ptr": torch.Tensor.data_ptr,
        "numel": torch.Tensor.numel,
        "is_profiling": torch_internals.is_profiling,
        "active_modes": torch_internals.active_modes,
        "callbacks": future_callbacks.pending,
        "message_threads": future_callbacks.message_threads,
        "completed_work": CompletedWork,
        "early_work": EarlyWork,
        "message_work": MessageWork,
        "note_writes": note_writes,
        "refuse_children": flight_recorder.refuse_children,
    }
    options = {name: _ROWS[name].options for name in _ROWS if hasattr(PlainCalls, name)}
    options["barrier"] = torch_internals.BarrierOptions
    rows = [_describe(dtype) for dtype in _DTYPES]
    try:
        extension.module().configure(
            objects, rows, options, api.__file__, api.Exception, _handle(api.SUM), int(api.IN_PLACE)
        )
    except OSError:
        return False
    return True


def _describe(dtype: torch.dtype) -> tuple[object, ...]:
    """Return the description of a dtype for the extension module."""
    kind = c_library.KINDS.get(dtype, (c_library.BYTES, 1))[0]
    arithmetic = dtypes.arithmetic(dtype)
    return (
        dtype,
        kind,
        c_library.kind_to_compare(dtype) if _row("MIN", dtype) != _IMPOSSIBLE else -1,
        dtype.itemsize,
        c_library.dtype_code(dtype),
        _row("SUM", dtype),
        _row("AVG", dtype),
        0 if arithmetic is None else _handle(arithmetic),
        _handle(dtypes.carrier(dtype)),
    )


def _row(name: str, dtype: torch.dtype) -> int:
    """Return how MPI computes a reduction in a group of several ranks, if slots can compute it."""
    try:
        reduction = reductions.reduction_for(getattr(dist.ReduceOp, name), dtype, 2, "all_reduce")
    except ValueError:
        return _IMPOSSIBLE
    if not reduction.uses_slots:
        return _IMPOSSIBLE
    return _NATIVE if reduction.is_native else _CONVERTED


def _handle(value: Any) -> int:
    """Return a handle of MPI as C passes it: a pointer, or an int of 32 bits with its sign."""
    api = mpi.api()
    handle = api._handleof(value)
    if api._sizeof(value) > 4:
        return handle
    handle &= 0xFFFFFFFF  # mpi4py may extend the sign of an int
    return handle - (1 << 32) if handle >= 1 << 31 else handle
