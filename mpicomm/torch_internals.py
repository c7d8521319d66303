"""The only module that uses PyTorch's private names."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from mpicomm import host_info, torch_compatibility
from mpicomm.devices import accelerator, vendor_backends

__all__ = [  # of torch
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
]

# Checked before use: a torch without one of these raises an error that names it, also in a group's constructor.
torch_compatibility.require(
    "_C._distributed_c10d.Backend.Options",
    *(f"_C._distributed_c10d.{name}" for name in __all__),
    "_C._autograd._record_function_with_args_enter",
    "_C._autograd._record_function_with_args_exit",
    "_C._dynamo.eval_frame._FrameAction.SKIP",
    "_C._dynamo.eval_frame._FrameExecStrategy",
    "_C._dynamo.eval_frame.set_code_exec_strategy",
    "_C._current_graph_task_id",
    "_C._dispatch_tls_is_dispatch_key_excluded",
    "_C._len_torch_dispatch_stack",
    "_foreach_copy_",
    "autograd._profiler_enabled",
    "autograd._engine_run_backward",
    "autograd.graph._engine_run_backward",
    "futures.Future._set_unwrap_func",
    "distributed.ReduceOp.RedOpType",
    "_C._distributed_c10d._unregister_process_group",
    "distributed.distributed_c10d._abort_process_group",
    "distributed.distributed_c10d._check_p2p_op_list",
    "distributed.distributed_c10d._coalescing_manager",
    "distributed.distributed_c10d._check_valid_timeout",
    "distributed.distributed_c10d._new_process_group_helper",
    "distributed.distributed_c10d._process_group_name",
    "distributed.distributed_c10d._set_pg_timeout",
    "distributed.distributed_c10d._world.group_count",
    "distributed.distributed_c10d._world.pg_backend_config",
    "distributed.distributed_c10d._world.pg_map",
    "distributed.distributed_c10d._world.pg_names",
    "distributed.distributed_c10d._world.pg_to_tag",
    "distributed.distributed_c10d._world.tags_to_pg",
    "distributed.ProcessGroup.boxed",
    "distributed.ProcessGroup.unbox",
    "distributed.Work.boxed",
    "distributed.Work.unbox",
    "distributed.ProcessGroup._register_backend",
    "distributed.ProcessGroup._set_default_backend",
)
from torch._C._distributed_c10d import (  # noqa: E402  checked above
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
from torch._C._dynamo import eval_frame  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

# Added to the timeout of a vendor's backend: the watchdog of NCCL, for example, aborts the process without a report of
# each rank's position, so that of mpicomm must report first.
_VENDOR_EXTRA_TIMEOUT = datetime.timedelta(seconds=30)
_GLOO_THREAD = "pt_gloo_runloop"
_GLOO_SECONDS, _GLOO_PAUSE = 2.0, 0.005  # seconds: the longest wait for Gloo's threads, and the polling interval


_OPS = dist.ReduceOp.RedOpType.__members__
_OP_NAMES = sorted(_OPS, key=lambda name: _OPS[name].value)


RENAMED = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""The methods of groups and backends that torch 2.13 renamed, with their old names."""

# Functions that torch 2.13 renamed; it warns about the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled
"""Return whether a profiler is active."""


def reduce_op_name(op: Any) -> str:
    """Return the name of a `ReduceOp`, which may be a member of the enumeration or an object that wraps one."""
    return _OP_NAMES[getattr(op, "op", op)]  # pybind finds a member's name by a linear search


def premul_factor(op: Any) -> Any:
    """Return the factor of a PREMUL_SUM, which torch exposes only to pickle."""
    return op.__getstate__()[1]


def start_event(title: str, inputs: Sequence[torch.Tensor]) -> Any:
    """Start a span of torch's profiler, which is active (`is_profiling`)."""
    return threading.get_ident(), torch._C._autograd._record_function_with_args_enter(title, *inputs)


def end_event(event: Any) -> None:
    """End a span of the profiler; None, for no span, has no effect.

    Spans of communication are asynchronous, and the profiler treats a span as such if it ends on another thread than
    the one that started it. Before torch 2.12 the profiler loses such spans: it shows only those of operations that run
    on the caller's thread.
    """
    if event is None:
        return
    thread, span = event
    end = functools.partial(torch._C._autograd._record_function_with_args_exit, span)
    if thread != threading.get_ident() or torch_compatibility.torch_version() < (2, 12):
        end()
        return
    other = threading.Thread(target=end, name="mpicomm-profiler")
    other.start()
    other.join()


def future_of(tensors: Sequence[torch.Tensor]) -> torch.futures.Future[Any]:
    """Return a future that may hold these tensors; torch requires the list of their GPUs."""
    return torch.futures.Future(devices=[*accelerator.devices_of(tensors)])


def set_error(future: torch.futures.Future[Any], error: Exception, tensors: Sequence[torch.Tensor]) -> None:
    """Complete a future with an error: Python code that asks for the value gets the error, C++ code gets the tensors.

    With `Future.set_exception` C++ code gets the exception as the value. DDP expects a tensor in it, and crashes.
    `check_backward` then reports the error.
    """

    def value(_: object) -> None:
        raise error

    future._set_unwrap_func(value)
    future.set_result(list(tensors))


def is_in_backward() -> bool:
    """Return whether this thread computes gradients in a backward pass."""
    return torch._C._current_graph_task_id() != -1


@functools.cache  # there is one autograd engine
def check_backward(checked: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Run every backward pass in a context, which may raise another error than that of the pass.

    In a backward pass, DDP's C++ code waits for operations; their errors are lost there, or lose their type.

    Args:
        checked: Returns the context. The thread that calls the pass enters it.
    """
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def run_and_check(*args: Any, **kwargs: Any) -> Any:
        if is_in_backward():  # of a reentrant checkpoint, for example: the outer pass is checked
            return run(*args, **kwargs)
        with checked():
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_and_check
    torch.autograd.graph._engine_run_backward = run_and_check


def reserve_sequence_number() -> int:
    """Reserve the next sequence number of this thread's autograd nodes."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).view(()).grad_fn
    return node._sequence_nr()  # type: ignore[union-attr]


def set_sequence_number(outputs: Sequence[torch.Tensor], number: int) -> None:
    """Set the sequence number of the autograd node that computed the outputs."""
    for output in outputs:
        if output.grad_fn is not None:
            output.grad_fn._set_sequence_nr(number)  # type: ignore[attr-defined]
            return


def make_group(ranks: Sequence[int], name: str, timeout: datetime.timedelta | None) -> dist.ProcessGroup:
    """Create a group of some ranks with a given name (collective over these ranks).

    The name that torch would assign depends on the number of groups of a rank, which may differ between the members.
    """
    module = dist.distributed_c10d
    given = module._process_group_name
    module._process_group_name = lambda *_args, **_kwargs: name  # type: ignore[assignment]
    try:
        return dist.new_group(list(ranks), timeout, use_local_synchronization=True)
    finally:
        module._process_group_name = given


copy_all = torch._foreach_copy_
"""Copies each tensor of the second list to the one of the first list, in one call."""

CAN_SPLIT = hasattr(dist.ProcessGroup, "split_group")
"""Whether `torch.distributed.split_group` calls the process group; that of torch 2.8 supports NCCL only."""


_KEYS = torch._C.DispatchKey

KERNELS_CALL_BACKENDS = torch_compatibility.torch_version() >= (2, 14)
"""Whether Python can create a `Backend`: torch's `c10d` operators then call that of the group."""

_Run = Callable[..., dist.Work | None]
"""Runs a method, given by name, of a group, with arguments from torch's C++ code."""


class _RegisteredBackend(Backend):
    """The `Backend` that torch finds in a process group of this package.

    torch.distributed calls the methods of the process group itself. torch's C++ code calls this object: the kernels of
    the `c10d` operators, and `torch.ops._c10d_functional.batch_p2p_ops`. If a group is bound to a device, torch's
    Python code splits other groups off this object.
    """

    options: Any = None
    supports_splitting = True
    supports_coalescing = True
    # torch 2.15 reads the properties of a Python backend that does not define them in an infinite recursion.
    supports_reconfigure = supports_shrinking = supports_window = _supports_time_estimate = False

    def __init__(self, group: dist.ProcessGroup, run: _Run) -> None:
        super().__init__(group.rank(), group.size())
        self._name = group.name()
        self._group = weakref.ref(group)  # C++ owns this object through the group
        self._run = run

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """Return the name under which the backend is registered."""
        return self._name

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing on a rank outside the new group: only its members take part in the split."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: MPI is already connected."""


def forward_from_cpp(methods: Iterable[str]) -> None:
    """Let torch's C++ code call these methods of a process group of this package."""
    for name in methods:
        setattr(_RegisteredBackend, name, _forwarding(name))
    hide_from_compiler(_RegisteredBackend)


def _forwarding(name: str) -> Callable[..., dist.Work | None]:
    def method(self: _RegisteredBackend, *args: Any) -> dist.Work | None:
        return self._run(self._group(), name, *args)

    return method


def register_backend(group: dist.ProcessGroup, run: _Run) -> Backend | None:
    """Register a `Backend` with a process group implemented in Python, if this torch lets Python create one.

    From torch 2.15 on, `init_process_group` and `new_group` attach torch's flight recorder to every group, which needs
    a registered default backend. Before torch 2.14 a `Backend` has no constructor for Python.

    Args:
        run: Runs the operations that torch's C++ code calls.

    Returns:
        The `Backend`, which this torch requires to split groups; None if it splits them off the process group itself.
    """
    if not KERNELS_CALL_BACKENDS:
        return None
    # Not CUSTOM, the type of every backend that is not torch's own: a group has one backend of a type, and would call
    # this one for the tensors of such a vendor's backend.
    kind = dist.ProcessGroup.BackendType.MPI
    backend = _RegisteredBackend(group, run)
    for device in filter(None, ("cpu", vendor_backends.device_type())):
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
    return backend


@contextlib.contextmanager
def outside_workers() -> Iterator[None]:
    """Make `torch.utils.data.get_worker_info()` return None in a block, as in the process of the program."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def end_workers(loaded: Iterator[Any]) -> None:
    """Terminate the worker processes of an iterator of a DataLoader, also if they ignore SIGTERM."""
    if hasattr(loaded, "_shutdown_workers"):  # of an iterator with workers
        loaded._shutdown_workers()
        for process in loaded._workers:  # type: ignore[attr-defined]
            if process.is_alive():
                process.kill()


def copy_of_loader(loader: DataLoader[Any], collate_fn: Callable[[list[Any]], Any]) -> DataLoader[Any]:
    """Return a copy of a DataLoader with another collate_fn, and the same sampler and dataset."""
    same = copy.copy(loader)
    same.collate_fn = collate_fn
    same._iterator = None  # its persistent workers, if any, use the original collate_fn
    return same


def set_batch_sampler(loader: DataLoader[Any], batch_sampler: Any) -> None:
    """Replace the batch sampler of a DataLoader, which refuses it as an attribute."""
    loader.__dict__["batch_sampler"] = batch_sampler


active_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of dispatch modes that are active on this thread, such as `FakeTensorMode` or `CommDebugMode`."""


def is_dispatch_disabled() -> bool:
    """Return whether dispatch modes and tensor subclasses are disabled on this thread."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_KEYS.Python)


_NO_OVERRIDE = torch.Tensor.__torch_dispatch__


def overrides_dispatch(value: Any) -> bool:
    """Return whether a value is a tensor whose class defines what torch's operators do with it."""
    kind = type(value)
    if kind is torch.Tensor or getattr(kind, "__torch_dispatch__", _NO_OVERRIDE) is _NO_OVERRIDE:
        return False
    return not _is_pending(
        value
    )  # `wait_if_pending` unwraps it, also in lists of lists, where torch's dispatcher does not


def wait_if_pending(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of a functional collective's result, after waiting for the collective."""
    return tensor.wait() if _is_pending(tensor) else tensor  # type: ignore[attr-defined]


def _is_pending(value: Any) -> bool:
    functional = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(functional, "AsyncCollectiveTensor", None)  # missing while another thread imports the module
    return kind is not None and isinstance(value, kind)


def operator_call(name: str, args: Sequence[Any], group: dist.ProcessGroup) -> tuple[torch._ops.OpOverload, list[Any]]:
    """Return the operator that torch's own `ProcessGroup` calls in a method, and its arguments for `group`.

    The operators take a reduction as an object that only C++ can create.
    """
    try:
        with _Capture():
            getattr(_plain_group(), name_in_this_torch(name))(*args)
    except _Captured as call:
        operator, arguments = call.args
    arguments[_group_index(operator)] = group.boxed()
    return operator, arguments


class _Captured(Exception):  # noqa: N818  not an error
    """Ends a captured call."""


class _Capture(TorchDispatchMode):
    """Ends the call of a `c10d` operator with its arguments before torch's kernel and the other modes receive it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise _Captured(func, list(args))
        return func(*args, **(kwargs or {}))


@functools.cache
def _plain_group() -> dist.ProcessGroup:
    # The type stub has only one of the two constructors.
    return dist.ProcessGroup(0, 1)  # type: ignore[call-arg]


@functools.cache
def _group_index(operator: torch._ops.OpOverload) -> int:
    return [argument.name for argument in operator._schema.arguments].index("process_group")


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("c10d", "IMPL")


@functools.cache
def add_kernel(
    operator: torch._ops.OpOverload, run: Callable[[dist.ProcessGroup, Sequence[Any]], dist.Work | None]
) -> None:
    """Make an operator call `run` for groups of this package; for all other groups it calls torch's kernel.

    Before torch 2.14, torch's kernel finds no backend in a group that Python implements. The operator receives this
    kernel under a dispatch key for which torch has none: after all modes and subclasses, and before the kernels of
    devices.

    Args:
        run: Receives the group and the operator's tensors; returns NotImplemented for groups of other packages.
    """
    index = _group_index(operator)
    returns_tensors = len(operator._schema.returns) > 1

    def kernel(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        is_fake = keys.has(_KEYS.Meta)
        work = NotImplemented if is_fake else run(dist.ProcessGroup.unbox(args[index]), args[:index])
        if work is NotImplemented:
            return operator.redispatch(keys.remove(_KEYS.BackendSelect), *args)
        box = (work or dist.Work()).boxed()
        return (args[0], box) if returns_tensors else box

    _library().impl(operator, kernel, "BackendSelect", with_keyset=True)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether torch knows the group, that is, whether it has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def all_groups() -> list[dist.ProcessGroup]:
    """Return the groups of this rank."""
    return list(dist.distributed_c10d._world.pg_map)


def takes_host_tensors(group: dist.ProcessGroup) -> bool:
    """Return whether a group has a backend for CPU tensors."""
    return any(torch.device(device).type == "cpu" for device in group._device_types)


def name_in_this_torch(name: str) -> str:
    """Return the name that this torch's own groups have for a method that torch 2.13 renamed."""
    return name if hasattr(dist.ProcessGroup, name) else RENAMED.get(name, name)


def wait_for(work: dist.Work | None) -> None:
    """Wait for an operation; NCCL and XCCL return no work for a synchronous one, for which the stream waits."""
    if work is not None:
        work.wait()


def hide_from_compiler(kind: type) -> None:
    """Exclude a class's methods from torch.compile; C++ calls them within the code that it compiles.

    torch's own decorator for this imports the whole compiler.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for method in vars(kind).values():
        if isinstance(method, types.FunctionType):
            eval_frame.set_code_exec_strategy(method.__code__, skip)


def coalesce_batches_of(kind: type[dist.ProcessGroup]) -> None:
    """Make `batch_isend_irecv` coalesce the messages of groups of a class if the vendor's backend supports it.

    Before torch 2.15 it does so only for groups whose type is `ProcessGroup` itself. For other groups, NCCL receives
    the messages one by one, and two ranks that send large messages to each other deadlock. A program that imports the
    function by its name before the first use of this backend keeps torch's function.
    """
    if torch_compatibility.torch_version() >= (2, 15):
        return
    torchs = dist.batch_isend_irecv

    @functools.wraps(torchs)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group: Any = (getattr(p2p_op_list[0], "group", None) if p2p_op_list else None) or dist.group.WORLD
        if not isinstance(group, kind):
            return torchs(p2p_op_list)
        dist.distributed_c10d._check_p2p_op_list(p2p_op_list)
        device = next((message.tensor.device for message in p2p_op_list if _is_coalesced(group, message)), None)
        if device is None:
            return torchs(p2p_op_list)
        with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as joint:
            for message in p2p_op_list:
                peer = {"group_dst" if message.op is dist.isend else "group_src": message.group_peer}
                message.op(message.tensor, group=message.group, tag=message.tag, **peer)
        return joint.works

    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batch_isend_irecv


def _is_coalesced(group: dist.ProcessGroup, message: dist.P2POp) -> bool:
    return getattr(group._get_backend(message.tensor.device), "supports_coalescing", False)


def set_timeouts_of(kind: type[dist.ProcessGroup]) -> None:
    """Make `_set_pg_timeout` set the timeout of groups of a class; frameworks call it after the first training steps.

    torch's own function sets the timeout of NCCL and Gloo backends only; for other groups it only warns.
    """
    torchs = dist.distributed_c10d._set_pg_timeout

    @functools.wraps(torchs)
    def set_pg_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup | None = None) -> None:
        chosen: Any = dist.group.WORLD if group is None else group
        if isinstance(chosen, kind):
            dist.distributed_c10d._check_valid_timeout(timeout)
            chosen.set_timeout(timeout)
        else:
            torchs(timeout, group)

    dist.distributed_c10d._set_pg_timeout = set_pg_timeout


def set_shrink_of(kind: type[dist.ProcessGroup], shrink: Callable[[Any, list[int], bool], dist.ProcessGroup]) -> None:
    """Make `shrink_group` call a function for groups of a class, after torch's checks of its arguments.

    torch's own function requires a backend that C++ can call, which Python cannot create before torch 2.14, and returns
    a group without the methods of the class. A program that imports the function by its name before the first use of
    this backend keeps torch's function. torch 2.9 and older have none.

    Args:
        kind: The class.
        shrink: Receives the group, its ranks to exclude, and whether to abort its operations; returns the new group.
    """
    module: Any = dist.distributed_c10d
    if not hasattr(dist, "shrink_group"):
        return
    torchs = dist.shrink_group

    @functools.wraps(torchs)
    def shrink_group(
        ranks_to_exclude: list[int],
        group: dist.ProcessGroup | None = None,
        shrink_flags: int = module.SHRINK_DEFAULT,
        pg_options: Any = None,
    ) -> dist.ProcessGroup:
        chosen: Any = dist.group.WORLD if group is None else group
        if not isinstance(chosen, kind):
            return torchs(ranks_to_exclude, group, shrink_flags, pg_options)
        module._validate_shrink_inputs(ranks_to_exclude, shrink_flags)
        described = module._prepare_shrink_target_group(group)
        excluded = sorted(module._validate_and_process_excluded_ranks(ranks_to_exclude, described))
        if pg_options is not None:
            raise ValueError(
                f"shrink_group: pg_options are not supported by {chosen.name()}, got {pg_options}.\nOmit the argument."
            )
        return shrink(chosen, excluded, shrink_flags == module.SHRINK_ABORT)

    dist.shrink_group = module.shrink_group = shrink_group


def set_inner_timeout(backend: Any, timeout: datetime.timedelta) -> None:
    """Set the timeout of all operations that an inner backend starts from now on."""
    # torch 2.8 and earlier have only `_set_default_timeout`.
    (backend.set_timeout if hasattr(backend, "set_timeout") else backend._set_default_timeout)(timeout)


def with_extra_timeout(timeout: datetime.timedelta) -> datetime.timedelta:
    """Return the timeout of an inner backend for a timeout of this package, whose watchdog must report first."""
    return timeout + _VENDOR_EXTRA_TIMEOUT


def copy_of_options(options: Any, timeout: datetime.timedelta) -> Any:
    """Return a copy of a backend's options with another timeout, for a new group.

    torch and NCCL write the timeout, the name, the ranks and the parent of a group into the object that they receive:
    it must not be that of the user or, before torch 2.15, of the group that is split. Objects that are not options of
    torch are returned as they are, and so are options that torch cannot copy, such as those of Gloo.
    """
    if not isinstance(options, Backend.Options):
        return options
    try:
        copied = copy.deepcopy(options)
    except TypeError:
        return options
    copied._timeout = timeout
    return copied


def make_inner_group(
    backend: str, request: Any, rank: int, size: int, timeout: datetime.timedelta, backend_options: Any
) -> dist.ProcessGroup:
    """Create torch's own process group of a vendor's backend, by the function with which torch creates all groups.

    torch does not list it among its groups: it would shut it down itself, before the group that contains it.

    Args:
        backend: The name under which torch knows the vendor's backend, such as `nccl`.
        request: torch's description of the group that contains it, and has the same name.
        rank: The rank of this process in the group.
        size: The number of ranks in the group.
        timeout: Timeout of an operation.
        backend_options: The user's options of the vendor's backend, or None.

    Raises:
        RuntimeError: If this torch does not have the backend.
    """
    if not dist.is_backend_available(backend):
        title = backend.upper()
        raise RuntimeError(
            f"this torch was built without {title}.\nUse backend='mpi', or install a build of torch with {title}."
        )
    module, name, ranks = dist.distributed_c10d, request.group_id, list(request.global_ranks_in_group)
    options = copy_of_options(backend_options, timeout)
    group, _ = module._new_process_group_helper(
        size, rank, ranks, backend, request.store, name, backend_options=options, timeout=timeout
    )
    world = module._world
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        del table[group]
    for groups in world.tags_to_pg.values():
        groups[:] = [listed for listed in groups if listed is not group]
    torch._C._distributed_c10d._unregister_process_group(name)
    return group


def detach_recorder(group: dist.ProcessGroup) -> None:
    """Detach torch's flight recorder, which torch attaches to every group from 2.15 on."""
    getattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks", {}).pop(group, None)


def share_backend(source: dist.ProcessGroup, target: dist.ProcessGroup, device: torch.device) -> None:
    """Register a group's backend for a device with another group, too."""
    backend = source._get_backend(device)
    kind = dist.Backend.backend_type_map.get(backend.name(), dist.ProcessGroup.BackendType.CUSTOM)
    target._register_backend(device, kind, backend)


abort_groups: Callable[[], None] = dist.distributed_c10d._abort_process_group
"""Abort and forget all groups without waiting for other ranks; aborts of several NCCL communicators are one call."""


def restart_group_names() -> None:
    """Number groups from 0 again, before the default group is created.

    torch names a group by its number, which must be the same on all ranks. `destroy_process_group` restarts the
    numbers, but an `init_process_group` that fails, perhaps on some ranks only, has used one.
    """
    dist.distributed_c10d._world.group_count = 0


def let_gloo_finish() -> None:
    """Wait until the threads of Gloo's groups are idle, for at most 2 s.

    After an operation has completed, its thread still releases the tensors, for which it needs the GIL. If Python is
    already finalizing, the process aborts ("terminate called without an active exception"): with torch 2.13, in one
    exit of twelve on a loaded machine.
    """
    deadline = time.monotonic() + _GLOO_SECONDS
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(_GLOO_PAUSE)  # releases the GIL
        quiet = quiet + 1 if all(state == "S" for state in _states_of_gloo_threads()) else 0


def _states_of_gloo_threads() -> list[str]:
    """Return the scheduler state of each Gloo thread: R for running or waiting for a core, S for sleeping."""
    states = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name, (state, *_) = host_info.process_stat(task)
        except OSError:  # the thread has ended meanwhile
            continue
        if name == _GLOO_THREAD:
            states.append(state)
    return states
