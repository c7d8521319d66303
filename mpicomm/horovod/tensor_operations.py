"""The operations on tensors: each is declared once, and its public functions are derived from the declaration.

The name of a public function states its form, as in Horovod: `grouped_` takes a list of tensors as one operation,
`_async` returns a handle, a last `_` works in place. The others wait for a new tensor and are differentiable.
"""

from __future__ import annotations

import inspect
import math
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from mpicomm import arguments
from mpicomm.horovod import submission
from mpicomm.horovod.process_sets import ProcessSet, engine_of, global_process_set, index_of_root
from mpicomm.horovod.submission import (
    ANY_ROWS,
    OP_NAMES,
    Adasum,
    Average,
    HorovodInternalError,
    Layout,
    Signature,
    Submission,
    Sum,
)

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Tensors = Sequence[Tensor]

_ADASUM_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# -- handles -----------------------------------------------------------------------------------------------------------


def poll(handle: Submission) -> bool:
    """Return whether an operation has completed, so that `synchronize` does not wait. Does not communicate.

    Args:
        handle: The handle that the asynchronous function returned.
    """
    return handle.is_done


def synchronize(handle: Submission | Callable[[], Any]) -> Any:
    """Wait for an operation and return its result; every rank of the process set must have started the operation.

    Args:
        handle: The handle that the asynchronous function returned.

    Returns:
        The output tensor; a list of a grouped operation; the output and the received splits of `alltoall_async`.

    Raises:
        HorovodInternalError: If the arguments differ between ranks, or the ranks can no longer communicate.
    """
    if not isinstance(handle, Submission):
        return handle()  # of a sparse tensor
    handle.engine.wait(handle)
    if handle.events:
        handle.wait_for_events(handle.result)
    if handle.is_grouped:
        return list(handle.result)
    if handle.splits is not None:
        return tuple(handle.result)
    return handle.result[0] if handle.result else None


# -- public functions --------------------------------------------------------------------------------------------------


class FunctionCall(NamedTuple):
    """A call of a public function, which takes the place of its tensor in the declaration of an operation."""

    function: str
    """The name of the function, for messages."""

    tensors: Tensors
    is_grouped: bool
    is_in_place: bool
    is_async: bool


class OnTensor(Protocol[P, R_co]):
    """A public function of a tensor."""

    def __call__(self, tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run or start the operation."""


class OnTensors(Protocol[P, R_co]):
    """A public function of a list of tensors."""

    def __call__(self, tensors: Tensors, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run or start the operation."""


def _single(function: str, declaration: Callable[Concatenate[FunctionCall, P], Any], result: type[R]) -> OnTensor[P, R]:
    return _public(function, declaration, result)


def _grouped(
    function: str, declaration: Callable[Concatenate[FunctionCall, P], Any], result: type[R]
) -> OnTensors[P, R]:
    return _public(function, declaration, result)


def _public(function: str, declaration: Any, result: Any) -> Any:
    """Return the public function of an operation in the form that its name states.

    Args:
        function: The name.
        declaration: Runs a `FunctionCall`, with the further arguments of the function.
        result: The type that the function returns.
    """
    is_grouped = function.startswith("grouped_")
    is_in_place, is_async = function.endswith("_"), "_async" in function
    # A copy under the name of the public function, which errors about the number and the names of arguments contain.
    run = types.FunctionType(declaration.__code__, declaration.__globals__, None, declaration.__defaults__)

    def on_tensor(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return run(FunctionCall(function, [tensor], False, is_in_place, is_async), *args, **kwargs)

    def on_tensors(tensors: Tensors, *args: Any, **kwargs: Any) -> Any:
        return run(FunctionCall(function, list(tensors), True, is_in_place, is_async), *args, **kwargs)

    public: Any = on_tensors if is_grouped else on_tensor
    run.__name__ = run.__qualname__ = public.__name__ = public.__qualname__ = function
    first, *_ = inspect.signature(public).parameters.values()
    _, *others = inspect.signature(declaration).parameters.values()
    public.__signature__ = inspect.Signature([first, *others], return_annotation=result)
    public.__annotations__ = {parameter.name: parameter.annotation for parameter in (first, *others)}
    public.__annotations__["return"] = result
    if declaration.__doc__ is not None:  # python -OO removes docstrings
        public.__doc__ = _documented(declaration.__doc__, is_grouped, is_in_place, is_async)
    return public


def _documented(text: str, is_grouped: bool, is_in_place: bool, is_async: bool) -> str:
    """Return the docstring of a public function: that of the declaration, with the parts that depend on the form."""
    form = "The tensor receives the result." if is_in_place else "The tensor itself does not change."
    compression, result = "", "A list, for each tensor: " if is_grouped else "The result: "
    errors = "the arguments differ between ranks, or the ranks can no longer communicate"
    if is_async:
        form += " The function returns without waiting for the other ranks."
        result = "A handle for `hvd.poll` and `hvd.synchronize`; its result is "
        errors = "Horovod has been shut down"
    elif not is_in_place:
        form += " The function is differentiable."
        compression = "compression: hvd.Compression.none or hvd.Compression.fp16.\n        "
    tensor = "tensors: The tensors, which are one operation; of each, the" if is_grouped else "tensor: The tensor; its"
    return text.format(form=form, tensor=tensor, compression=compression, result=result) + (
        f"\n    Raises:\n"
        f"        ValueError: If an argument is invalid, or an operation of the same name is pending.\n"
        f"        HorovodInternalError: If the operation is not supported, or {errors}.\n    "
    )


# -- running a call ----------------------------------------------------------------------------------------------------


def _run(
    call: FunctionCall,
    process_set: ProcessSet,
    name: str | None,
    signature: Signature,
    gradient: Callable[[Any, Tensors], Tensors],
    splits: Tensor | None = None,
) -> Any:
    """Submit a call; return its handle or, after waiting, its result.

    Args:
        gradient: Returns the gradients of the tensors, from the context of `_Differentiable` and the gradients of the
            results.
        splits: The numbers of rows for each rank, of an alltoall.
    """
    engine = engine_of(process_set, call.function)
    kind = signature.kind
    outputs: Tensors = ()  # allocated when the numbers of rows of the other ranks are known
    if call.is_in_place:
        outputs = call.tensors
    elif kind in (submission.ALLREDUCE, submission.BROADCAST):
        outputs = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in call.tensors]
    handle = Submission(
        engine.next_name(kind) if name is None else f"{kind}.{name}",
        signature,
        call.tensors,
        outputs,
        splits,
        is_grouped=call.is_grouped,
        is_cacheable=name is not None,
    )
    inputs = call.tensors if splits is None else [*call.tensors, splits]
    if not all(tensor.is_cpu for tensor in inputs):
        handle.record_events(inputs)
    if call.is_async:
        return engine.submit(handle)
    if call.is_in_place:
        return synchronize(engine.submit(handle))
    results = _Differentiable.apply(engine, handle, process_set, gradient, *call.tensors)
    return results if call.is_grouped or splits is not None else results[0]


class _Differentiable(torch.autograd.Function):
    """An operation, whose backward pass calls the operation's own gradient.

    The context must not refer to the handle: its results refer to the context, and the cycle would keep their memory.
    """

    @staticmethod
    def forward(
        ctx: Any, engine: Any, handle: Submission, process_set: ProcessSet, gradient: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        synchronize(engine.submit(handle))
        ctx.gradient, ctx.process_set, ctx.signature = gradient, process_set, handle.signature
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.received = None if handle.splits is None else handle.result[1]
        return tuple(handle.result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *ctx.gradient(ctx, gradients)


def _layouts(call: FunctionCall, *, any_rows: bool = False, needs_rows: bool = False) -> tuple[Layout, ...]:
    """Return the layouts of the tensors after checking them.

    Args:
        any_rows: Whether the number of rows may differ between ranks.
        needs_rows: Whether the tensors must have rows.
    """
    layouts = []
    for tensor in call.tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise ValueError(
                f"{call.function}: expected dense tensors, got {arguments.shown(tensor)}.\n"
                f"Pass tensors; for sparse ones, use hvd.sparse_allreduce_async()."
            )
        shape = tensor.shape
        if needs_rows and not shape:
            raise ValueError(
                f"{call.function}: the tensor must have at least one dimension, got a scalar.\nPass tensor.reshape(1)."
            )
        layouts.append(Layout(tensor.dtype, (ANY_ROWS, *shape[1:]) if any_rows else shape, tensor.device.type))
    return tuple(layouts)


# -- compression -------------------------------------------------------------------------------------------------------


class Compressor:
    """The interface of a compression; its methods are called on the class."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the compressed tensor, and the argument `ctx` of `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004  the interface
        """Return the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16 if it is a floating-point tensor, and its dtype."""
        return tensor.half() if tensor.dtype.is_floating_point else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor.to(ctx)


class Compression:
    """The available compressions: pass `Compression.none` or `Compression.fp16` as `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor


def _compressed(call: FunctionCall, compression: type[Compressor], run: Callable[..., Tensors], *args: Any) -> Any:
    """Run a call with compressed tensors, and decompress the results."""
    pairs = [compression.compress(tensor) for tensor in call.tensors]
    compressed = [tensor for tensor, _ in pairs]
    # Grouped also for a single tensor, since the results below are a list. Only synchronous functions compress.
    reduced = run(FunctionCall(call.function, compressed, is_grouped=True, is_in_place=False, is_async=False), *args)
    results = [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]
    return results if call.is_grouped else results[0]


# -- allreduce ---------------------------------------------------------------------------------------------------------


def _allreduce(
    call: FunctionCall,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over all ranks (collective).

    {form}

    Args:
        {tensor} shape, dtype and device type must be equal on all ranks.
        average: Deprecated; use `op`.
        name: The name by which the ranks match their tensors, in any order; by default, the position among the calls
            without a name.
        {compression}op: hvd.Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        {result}the reduced tensor, of the same shape.
    """
    op = _effective_op(call, op, average)
    if op == Adasum:
        _check_adasum(process_set, call.tensors)
    factors = _factors(call, prescale_factor, postscale_factor)
    signature = Signature(submission.ALLREDUCE, _layouts(call), op, 0, *factors)
    return _run(call, process_set, name, signature, _allreduce_gradient)


def _compressed_allreduce(
    call: FunctionCall,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    op = _effective_op(call, op, average)
    return _compressed(call, compression, _allreduce, None, name, op, prescale_factor, postscale_factor, process_set)


_compressed_allreduce.__doc__ = _allreduce.__doc__


def _effective_op(call: FunctionCall, op: int | None, average: bool | None) -> int:
    """Return the operation that `op` and the deprecated `average` select."""
    if average is not None:
        if op is not None:
            raise ValueError(f"{call.function}: got both op and average.\nPass op only.")
        message = f"{call.function}: average is deprecated; pass op=hvd.Average or op=hvd.Sum"
        warnings.warn(message, DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    return checked_op(op, call.function)


def checked_op(op: int | None, function: str) -> int:
    """Return a reduction operation, by default Average.

    Args:
        op: The argument of a public function.
        function: The name of this function, for the message.

    Raises:
        ValueError: If it is not a reduction operation.
    """
    if op is None:
        return Average
    if op not in range(len(OP_NAMES)):
        raise ValueError(
            f"{function}: op must be hvd.{', hvd.'.join(OP_NAMES)}, got {op!r}.\nPass one of these constants."
        )
    return int(op)


def _factors(call: FunctionCall, prescale_factor: Any, postscale_factor: Any) -> tuple[float, float]:
    """Return the factors as floats: JSON, in which the ranks compare them, has no scalars of NumPy and no tensors."""
    factors = []
    for name, value in (("prescale_factor", prescale_factor), ("postscale_factor", postscale_factor)):
        try:
            factor = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
            factor = math.nan
        if math.isnan(factor):  # a NaN is different from that of the other ranks
            raise ValueError(f"{call.function}: {name} must be a number, got {arguments.shown(value)}.\nPass a number.")
        factors.append(factor)
    return factors[0], factors[1]


def _check_adasum(process_set: ProcessSet, tensors: Tensors) -> None:
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum supports the global process set only.\nUse another op, or omit process_set.")
    size = process_set.size() or 1
    if size & (size - 1):
        raise NotImplementedError(f"Adasum needs a power of two of ranks, got {size}.\nUse another op.")
    for tensor in tensors:
        if tensor.dtype not in _ADASUM_DTYPES:
            raise ValueError(
                f"Adasum reduces floating-point tensors, got {tensor.dtype}.\nUse another op, or convert it."
            )


def _allreduce_gradient(ctx: Any, gradients: Tensors) -> Tensors:
    """The gradient of a reduction is the reduction of the gradients."""
    signature = ctx.signature
    return grouped_allreduce(
        gradients,
        op=signature.op,
        prescale_factor=signature.prescale,
        postscale_factor=signature.postscale,
        process_set=ctx.process_set,
    )


allreduce = _single("allreduce", _compressed_allreduce, Tensor)
allreduce_ = _single("allreduce_", _allreduce, Tensor)
allreduce_async = _single("allreduce_async", _allreduce, Submission)
allreduce_async_ = _single("allreduce_async_", _allreduce, Submission)
grouped_allreduce = _grouped("grouped_allreduce", _compressed_allreduce, list[Tensor])
grouped_allreduce_ = _grouped("grouped_allreduce_", _allreduce, list[Tensor])
grouped_allreduce_async = _grouped("grouped_allreduce_async", _allreduce, Submission)
grouped_allreduce_async_ = _grouped("grouped_allreduce_async_", _allreduce, Submission)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start to sum or average a sparse tensor (COO) over all ranks, whose entries may differ (collective).

    Args:
        tensor: The sparse tensor; its shape and dtype must be equal on all ranks.
        name: The name by which the ranks match their tensors.
        op: hvd.Average or hvd.Sum.
        process_set: The ranks that take part.

    Returns:
        A function without arguments, which waits for the operation and returns the tensor; entries with equal indices
        add up.

    Raises:
        ValueError: If the operation is neither Average nor Sum, or one of the same name is pending.
    """
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async: op must be hvd.Average or hvd.Sum, got {op!r}.\nPass one of these.")
    entries = tensor.detach().coalesce()

    def gather(part: Tensor, label: str) -> Submission:
        call = FunctionCall("sparse_allreduce_async", [part], is_grouped=False, is_in_place=False, is_async=True)
        return _allgather(call, f"{name}.{label}", process_set)

    indices, values = gather(entries.indices().t().contiguous(), "indices"), gather(entries.values(), "values")

    def result() -> Tensor:
        gathered = synchronize(values)
        if op == Average:
            gathered = gathered / process_set.size()
        return torch.sparse_coo_tensor(synchronize(indices).t(), gathered, tensor.shape, check_invariants=False)

    return result


# -- allgather ---------------------------------------------------------------------------------------------------------


def _allgather(call: FunctionCall, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the tensors of all ranks along the first dimension (collective).

    {form}

    Args:
        {tensor} first dimension may differ between ranks.
        name: The name by which the ranks match their tensors; see `allreduce`.
        process_set: The ranks that take part.

    Returns:
        {result}the rows of all tensors, in the order of the ranks.
    """
    layouts = _layouts(call, any_rows=True, needs_rows=True)
    return _run(call, process_set, name, Signature(submission.ALLGATHER, layouts), _allgather_gradient)


def _allgather_gradient(ctx: Any, gradients: Tensors) -> Tensors:
    """The gradient is this rank's part of the average of the gradients, as in Horovod."""
    reduced = grouped_allreduce(gradients, op=Average, process_set=ctx.process_set)
    own_rows = [shape[0] for shape in ctx.shapes]
    rows = allgather(torch.tensor([own_rows]), process_set=ctx.process_set)
    starts = rows[: ctx.process_set.rank()].sum(0).tolist()
    return [tensor.narrow(0, start, length) for tensor, start, length in zip(reduced, starts, own_rows, strict=True)]


allgather = _single("allgather", _allgather, Tensor)
allgather_async = _single("allgather_async", _allgather, Submission)
grouped_allgather = _grouped("grouped_allgather", _allgather, tuple[Tensor, ...])
grouped_allgather_async = _grouped("grouped_allgather_async", _allgather, Submission)


# -- broadcast ---------------------------------------------------------------------------------------------------------


def _broadcast(
    call: FunctionCall, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send the root's tensor to all ranks (collective).

    {form}

    Args:
        {tensor} shape, dtype and device type must be equal on all ranks.
        root_rank: The rank in the job that sends.
        name: The name by which the ranks match their tensors; see `allreduce`.
        process_set: The ranks that take part.

    Returns:
        {result}the root's tensor.
    """
    root = index_of_root(root_rank, process_set, call.function)
    signature = Signature(submission.BROADCAST, _layouts(call), root=root)
    return _run(call, process_set, name, signature, _broadcast_gradient)


def _broadcast_gradient(ctx: Any, gradients: Tensors) -> Tensors:
    """The gradient is the average of the gradients on the root, and zero on the other ranks, as in Horovod."""
    reduced = allreduce(gradients[0], op=Average, process_set=ctx.process_set)
    return [reduced if ctx.process_set.rank() == ctx.signature.root else torch.zeros_like(reduced)]


broadcast = _single("broadcast", _broadcast, Tensor)
broadcast_ = _single("broadcast_", _broadcast, Tensor)
broadcast_async = _single("broadcast_async", _broadcast, Submission)
broadcast_async_ = _single("broadcast_async_", _broadcast, Submission)


# -- alltoall ----------------------------------------------------------------------------------------------------------


def _alltoall(
    call: FunctionCall,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send parts of a tensor to all ranks, and receive their parts (collective).

    {form}

    Args:
        {tensor} rows, along the first dimension, are divided among the ranks.
        splits: The number of rows for each rank, as a list or a tensor of int32; equal parts by default.
        name: The name by which the ranks match their tensors; see `allreduce`.
        process_set: The ranks that take part.

    Returns:
        {result}the received rows; of an asynchronous call and with `splits`, also their numbers from each rank.
    """
    layouts = _layouts(call, any_rows=True, needs_rows=True)
    size, rows = len(engine_of(process_set, call.function).ranks), call.tensors[0].shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                f"{call.function}: without splits, the first dimension must be a multiple of {size}, the number of "
                f"ranks, got {rows}.\nPass splits."
            )
        counts = torch.full((size,), rows // size, dtype=torch.int32)
    else:
        # A copy, because the rows are sent later: the program may use its tensor again after an asynchronous call.
        counts = splits.clone() if isinstance(splits, torch.Tensor) else torch.tensor(splits, dtype=torch.int32)
    if counts.dtype != torch.int32 or counts.shape != (size,):
        raise ValueError(
            f"{call.function}: splits must be {size} numbers of int32, one for each rank, got shape "
            f"{tuple(counts.shape)} of {counts.dtype}.\nPass the number of rows for each rank."
        )
    if int(counts.sum()) > rows or int(counts.min()) < 0:
        raise ValueError(
            f"{call.function}: splits must be at least 0, and their sum at most {rows}, the first dimension, got "
            f"{counts.tolist()}.\nPass the number of rows for each rank."
        )
    result = _run(call, process_set, name, Signature(submission.ALLTOALL, layouts), _alltoall_gradient, counts)
    return result if call.is_async or splits is not None else result[0]


def _alltoall_gradient(ctx: Any, gradients: Tensors) -> Tensors:
    """The gradient of a row returns to the rank that sent it."""
    returned, _ = alltoall(gradients[0], ctx.received, process_set=ctx.process_set)
    num_unsent = ctx.shapes[0][0] - returned.shape[0]  # rows that were sent to no rank
    if num_unsent:
        returned = torch.cat([returned, returned.new_zeros(num_unsent, *returned.shape[1:])])
    return [returned]


alltoall = _single("alltoall", _alltoall, cast("type[Tensor | tuple[Tensor, Tensor]]", Tensor | tuple[Tensor, Tensor]))
alltoall_async = _single("alltoall_async", _alltoall, Submission)


# -- reducescatter -----------------------------------------------------------------------------------------------------


def _reducescatter(
    call: FunctionCall,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks, each of which receives its part of the rows (collective).

    If the number of ranks does not divide the first dimension, the first ranks receive one row more. {form}

    Args:
        {tensor} shape, dtype and device type must be equal on all ranks.
        name: The name by which the ranks match their tensors; see `allreduce`.
        {compression}op: hvd.Average or hvd.Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        {result}this rank's rows of the reduced tensor.
    """
    if op not in (Average, Sum):
        raise HorovodInternalError(
            f"{call.function}: op must be hvd.Average or hvd.Sum, got {op!r}.\nPass one of these."
        )
    layouts = _layouts(call, needs_rows=True)
    factors = _factors(call, prescale_factor, postscale_factor)
    signature = Signature(submission.REDUCESCATTER, layouts, int(op), 0, *factors)
    return _run(call, process_set, name, signature, _reducescatter_gradient)


def _compressed_reducescatter(
    call: FunctionCall,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    return _compressed(call, compression, _reducescatter, name, op, process_set, prescale_factor, postscale_factor)


_compressed_reducescatter.__doc__ = _reducescatter.__doc__


def _reducescatter_gradient(ctx: Any, gradients: Tensors) -> Tensors:
    """The gradient gathers the parts; of a sum it is multiplied by the number of ranks, as in Horovod."""
    factor = ctx.signature.prescale * ctx.signature.postscale
    if ctx.signature.op == Sum:
        factor *= ctx.process_set.size()
    return grouped_allgather([gradient * factor for gradient in gradients], process_set=ctx.process_set)


reducescatter = _single("reducescatter", _compressed_reducescatter, Tensor)
reducescatter_async = _single("reducescatter_async", _reducescatter, Submission)
grouped_reducescatter = _grouped("grouped_reducescatter", _compressed_reducescatter, list[Tensor])
grouped_reducescatter_async = _grouped("grouped_reducescatter_async", _reducescatter, Submission)


# -- operations without tensors ----------------------------------------------------------------------------------------


def join(device: int = -1) -> int:
    """Contribute zeros to the allreduces of the other ranks until all ranks have joined (collective).

    Args:
        device: Ignored: the zeros are allocated on the device type of the other ranks' tensors.

    Returns:
        The last rank that joined.

    Raises:
        ValueError: If Horovod is not initialized.
        HorovodInternalError: If the ranks can no longer communicate.
    """
    del device
    engine = engine_of(global_process_set, submission.JOIN)
    handle = engine.submit(Submission(submission.JOIN, Signature(submission.JOIN), is_cacheable=False))
    return synchronize(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks of a process set (collective).

    Raises:
        ValueError: If Horovod is not initialized, or this rank is not in the process set.
        HorovodInternalError: If the ranks can no longer communicate.
    """
    engine = engine_of(process_set, submission.BARRIER)
    # One name for all calls: from the second one on, the ranks know it and exchange no description of it.
    engine.wait(engine.submit(Submission("barrier.barrier", Signature(submission.BARRIER))))
