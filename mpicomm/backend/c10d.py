"""The one place that knows PyTorch's private names."""

from __future__ import annotations

import ctypes
import datetime
import functools
import sys
import threading
import time
import types
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch._C._dynamo import eval_frame

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "arrived",
    "completed_future",
    "current_gpu",
    "end_event",
    "enter_thread",
    "future_of",
    "hide_from_compiler",
    "inner_method",
    "is_alive",
    "is_capturing",
    "is_profiling",
    "let_gloo_finish",
    "make_group",
    "make_nccl",
    "next_node",
    "options",
    "premul_factor",
    "prepare_thread_for_events",
    "put_node",
    "reduce_op_name",
    "start_event",
    "tag_of",
    "takes_host_tensors",
    "with_leash",
]

_SMALLEST_TAG_UB = 32767  # MPI-4.1, section 9.1.2
# NCCL's own watchdog aborts the process without saying who is where; ours speaks first.
_LEASH = datetime.timedelta(seconds=30)
_GLOO_THREAD = "pt_gloo_runloop"
_GLOO_SECONDS, _GLOO_PAUSE = 2.0, 0.005  # the most that its threads are waited for, and between two looks


_OPS = dist.ReduceOp.RedOpType.__members__
_OP_NAMES = sorted(_OPS, key=lambda name: _OPS[name].value)


is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled
"""Tell whether somebody profiles."""


def reduce_op_name(op: Any) -> str:
    """Return the name of a `ReduceOp`, which may be the enumeration's member or an object around it."""
    return _OP_NAMES[getattr(op, "op", op)]  # pybind looks an enumeration's name up by going through all


def premul_factor(op: Any) -> Any:
    """Return the factor of a PREMUL_SUM, which torch shows only to pickle."""
    return op.__getstate__()[1]


def options(kind: type, opts: Any, timeout: datetime.timedelta | None = None, **given: Any) -> Any:
    """Return the options of a call: `opts`, if it is that, or made of what is given.

    torch's groups take options or, in their older form, what is in them.
    """
    if type(opts) is kind:
        return opts
    made = kind()
    for name, value in given.items():
        if value is not None:
            setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout
    return made


def start_event(title: str, inputs: Sequence[torch.Tensor]) -> Any:
    """Start a span of torch's profiler; None while nobody profiles."""
    if not is_profiling():
        return None
    return threading.get_ident(), torch._C._autograd._record_function_with_args_enter(title, *inputs)


def end_event(event: Any) -> None:
    """End a span of the profiler.

    Spans of communication are asynchronous ones, and the profiler takes one for that if it ends on another thread than
    it started on.
    """
    if event is None:
        return
    thread, span = event
    end = functools.partial(torch._C._autograd._record_function_with_args_exit, span)
    if thread != threading.get_ident():
        end()
        return
    other = threading.Thread(target=end, name="mpicomm-profiler")
    other.start()
    other.join()


def future_of(tensors: Sequence[torch.Tensor]) -> torch.futures.Future[Any]:
    """Return a future that may hold these tensors: torch wants to know on which GPUs they are."""
    on_gpus = [each.device for each in tensors if each.is_cuda]
    return torch.futures.Future(devices=list(dict.fromkeys(on_gpus))) if on_gpus else torch.futures.Future()


def completed_future(tensors: Sequence[torch.Tensor]) -> torch.futures.Future[Any]:
    """Return a future that is done."""
    future = future_of(tensors)
    future.set_result(tensors)
    return future


def next_node() -> int:
    """Reserve the next place among autograd's nodes of this thread."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).view(()).grad_fn
    return node._sequence_nr()  # type: ignore[union-attr]


def put_node(outputs: Sequence[torch.Tensor], number: int) -> None:
    """Give the node that made some tensors a place among autograd's."""
    for each in outputs:
        if each.grad_fn is not None:
            each.grad_fn._set_sequence_nr(number)  # type: ignore[attr-defined]
            return


def make_group(ranks: Sequence[int], name: str, timeout: datetime.timedelta | None) -> dist.ProcessGroup:
    """Make a group of some ranks under a name (collective over them).

    The name that torch would give it depends on how many groups a rank is in, which may differ between its members.
    """
    module = dist.distributed_c10d
    given = module._process_group_name
    module._process_group_name = lambda *_args, **_kwargs: name  # type: ignore[assignment]
    try:
        return dist.new_group(list(ranks), timeout, use_local_synchronization=True)
    finally:
        module._process_group_name = given


def is_alive(group: dist.ProcessGroup) -> bool:
    """Tell whether torch knows a group, which has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def takes_host_tensors(group: dist.ProcessGroup) -> bool:
    """Tell whether a group has a back end for tensors on the host."""
    return any(torch.device(device).type == "cpu" for device in group._device_types)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor behind one that a functional collective may still be filling."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor):
        return tensor.wait()
    return tensor


def tag_of(group_name: str) -> int:
    """Return the tag under which the members of a group make its communicator: equal on all, mostly its own."""
    return zlib.crc32(group_name.encode()) % _SMALLEST_TAG_UB


def inner_method(names: tuple[str, str]) -> str:
    """Return the first of a method's names, new and old, that this torch's own back ends have."""
    return names[0] if hasattr(Backend, names[0]) else names[1]


def is_capturing(tensor: torch.Tensor) -> bool:
    """Tell whether the current stream records a CUDA graph instead of running what it is given."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def hide_from_compiler(kind: type) -> None:
    """Keep torch.compile out of a class's methods, which C++ calls in the middle of what it compiles.

    torch's own decorator for that would import the whole compiler.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for method in vars(kind).values():
        if isinstance(method, types.FunctionType):
            eval_frame.set_code_exec_strategy(method.__code__, skip)


def prepare_thread_for_events(device: torch.device) -> None:
    """Let the calling thread ask for CUDA events on a device, also while another thread records a graph.

    Such a question would make the recording invalid, were it not for the thread's own mode (CUDA Driver API,
    cuThreadExchangeStreamCaptureMode).
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)  # or asking would open a context on the first GPU
    if torch.version.hip:
        return
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def current_gpu() -> torch.device | None:
    """Return the GPU that the calling thread works on, if it works on any."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None


def enter_thread(device: torch.device | None) -> None:
    """Let the calling thread, which runs operations, work on a GPU in a stream of its own.

    The stream that threads begin with is the same for all, so that waiting for it would be waiting for the main thread.
    """
    if device is not None:
        prepare_thread_for_events(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
        torch.cuda.current_stream(device).synchronize()  # or the thread has no context yet


def with_leash(timeout: datetime.timedelta) -> datetime.timedelta:
    """Return the timeout that an inner back end is given for one of ours."""
    return timeout + _LEASH


def make_nccl(
    name: str, store: dist.Store, rank: int, ranks: Sequence[int], timeout: datetime.timedelta, nccl_options: Any
) -> Any:
    """Make the NCCL back end of a group.

    Args:
        rank: This rank in the group.
        ranks: The members' ranks in the job.
        timeout: How long an operation may take.
        nccl_options: A `ProcessGroupNCCL.Options` of the user's, or None.
    """
    if not dist.is_nccl_available():
        raise RuntimeError("this torch was built without NCCL.\nUse backend='mpi', or install a CUDA build of torch.")
    nccl = nccl_options or dist.ProcessGroupNCCL.Options()
    nccl._timeout = with_leash(timeout)
    nccl.global_ranks_in_group = list(ranks)
    nccl.group_name = name
    return dist.ProcessGroupNCCL(store, rank, len(ranks), nccl)


def let_gloo_finish() -> None:
    """Wait until the threads of Gloo's groups have nothing left to do.

    After an operation has completed, its thread still lets go of the tensors, for which it needs the GIL. If Python is
    finalizing by then, the process aborts ("terminate called without an active exception"): torch 2.13, one exit in
    twelve on a loaded machine.
    """
    deadline = time.monotonic() + _GLOO_SECONDS
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(_GLOO_PAUSE)  # without the GIL
        quiet = quiet + 1 if all(state == "S" for state in _states_of_gloo_threads()) else 0


def _states_of_gloo_threads() -> list[str]:
    """Return the scheduler's state of each of them: R for running or waiting for a core, S for asleep."""
    states = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name, rest = (task / "stat").read_text().split("(", 1)[1].rsplit(") ", 1)
        except OSError:  # it has ended meanwhile
            continue
        if name == _GLOO_THREAD:
            states.append(rest[0])
    return states
