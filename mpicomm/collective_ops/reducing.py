"""all_reduce, reduce and reduce_scatter of containers: packs leaves of the same dtype and device into one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import arguments, torch_internals
from mpicomm.backend.transfer import buffers, reductions
from mpicomm.collective_ops import autograd, call_check, data_movement, handles, packing, pytree
from mpicomm.collective_ops.group_argument import GroupArgument
from mpicomm.collective_ops.handles import IN_THE_CALL, Mode, Steps
from mpicomm.collective_ops.pytree import FACTOR, NUMBER, TERM, Data

_OPS = {
    "sum": "SUM",
    "mean": "AVG",
    "avg": "AVG",
    "product": "PRODUCT",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}
_OP = dataclasses.replace(arguments.one_of(*_OPS), kind="a str or a torch.distributed.ReduceOp")
_ARITHMETIC = ("SUM", "AVG", "PRODUCT")
_LINEAR = ("SUM", "AVG")


@dataclasses.dataclass(frozen=True)
class Op:
    """A reduction operation."""

    name: str
    """torch's name of it, such as SUM."""

    handle: Any
    """The `torch.distributed.ReduceOp`."""

    @classmethod
    def of(cls, op: Any, operation: str) -> Op:
        """Return the operation for the caller's argument, a name or a `torch.distributed.ReduceOp`.

        Raises:
            TypeError: If the argument is neither a str nor a ReduceOp.
            ValueError: If the name is unknown.
        """
        if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return cls(torch_internals.reduce_op_name(op), op)
        _OP.check(op, "op", operation)
        return cls(_OPS[op], getattr(dist.ReduceOp, _OPS[op]))

    @property
    def in_all_reduce(self) -> str:
        """The operation all_reduce with it, as the ranks compare it."""
        return f"all_reduce {self.name}"

    def check(self, data: Data, size: int, operation: str) -> None:
        """Check that the operation is defined for all leaves, before anything is sent.

        Raises:
            ValueError: If the operation is not defined for a leaf's dtype.
        """
        for dtype in dict.fromkeys(data.description.dtypes):
            reductions.reduction_for(self.handle, dtype, size, operation)

    def on(self, members: GroupArgument) -> Any:
        """Return the operation to call on a group: only this package's backend implements AVG for every dtype."""
        return dist.ReduceOp.SUM if self.name == "AVG" and not members.is_ours else self.handle


def widen_numbers(data: Data, op: Op, members: GroupArgument) -> Data:
    """Return the data with Python numbers as in Python's arithmetic: the mean of 1 and 2 is 1.5, integers are exact."""
    kinds = data.description.kinds
    if NUMBER not in kinds or op.name not in _ARITHMETIC:
        return data
    pairs = [
        _widened(tensor, op, members) if kind == NUMBER else (kind, tensor)
        for kind, tensor in zip(kinds, data.tensors, strict=True)
    ]
    return Data.of(data.description.structure, tuple([kind for kind, _ in pairs]), [tensor for _, tensor in pairs])


def _widened(number: torch.Tensor, op: Op, members: GroupArgument) -> tuple[str, torch.Tensor]:
    if number.dtype in (torch.float64, torch.complex128):
        return NUMBER, number
    if op.name == "AVG":
        return NUMBER, number.to(torch.float64)
    value = int(number)
    if op.name == "SUM":
        return TERM, pytree.term(value)
    return FACTOR, pytree.factor(value, members.rank, members.size)


def reduce_on_all_ranks(members: GroupArgument, data: Data | Exception, op: Op, inplace: bool, mode: Mode) -> Steps:
    """Run all_reduce, and return the reduced data."""
    data = yield from call_check.compare_calls(members, op.in_all_reduce, data, mode)
    bundles = _bundles(data, inplace=inplace)
    reduce_op = op.on(members)
    yield [dist.all_reduce(bundle.flat, reduce_op, members.handle, async_op=mode.last) for bundle in bundles]
    results = _unbundled(bundles, data.description.shapes, members, op)
    if inplace:
        return _written_back(data, results)

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        gradients = pytree.take(grads, "all_reduce, backward")
        return handles.run(reduce_on_all_ranks(members, gradients, op, False, IN_THE_CALL))

    return data.description.rebuilt(_attached(data, op, results, backward))


def reduce_to_one(members: GroupArgument, data: Data | Exception, op: Op, dst: int, mode: Mode) -> Steps:
    """Run reduce, and return the reduced data on `dst`, None elsewhere."""
    data = yield from call_check.compare_calls(members, f"reduce {op.name} to rank {dst}", data, mode)
    bundles = _bundles(data, inplace=False)
    target, reduce_op = members.ranks[dst], op.on(members)
    yield [dist.reduce(bundle.flat, target, reduce_op, members.handle, async_op=mode.last) for bundle in bundles]
    if members.rank != dst:
        return None
    return data.description.rebuilt(_unbundled(bundles, data.description.shapes, members, op))


def reduce_and_scatter(members: GroupArgument, data: Data | Exception, op: Op, mode: Mode) -> Steps:
    """Run reduce_scatter: each leaf is split along its first dimension, and each rank gets its part of the result."""
    data = yield from call_check.compare_calls(members, f"reduce_scatter {op.name}", data, mode)
    parts = [tensor.detach().tensor_split(members.size) for tensor in data.tensors]
    bundles, works = [], []
    for indices in packing.by_dtype(data):
        sources = [packing.packed([parts[index][rank] for index in indices]) for rank in range(members.size)]
        output = torch.empty_like(sources[members.rank])
        bundles.append(_Bundle(indices, output))
        works.append(dist.reduce_scatter(output, sources, op.on(members), members.handle, async_op=mode.last))
    yield works
    results = _unbundled(bundles, [parts_of_leaf[members.rank].shape for parts_of_leaf in parts], members, op)

    def backward(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        gradients = pytree.take(grads, "reduce_scatter, backward")
        gathered = handles.run(data_movement.gather(members, gradients, None, "reduce_scatter, backward", IN_THE_CALL))
        whole = [torch.cat(parts_of_leaf) for parts_of_leaf in zip(*gathered, strict=True)]
        return [gradient / members.size for gradient in whole] if op.name == "AVG" else whole

    return data.description.rebuilt(_attached(data, op, results, backward))


def _attached(data: Data, op: Op, results: list[torch.Tensor], backward: autograd.Backward) -> list[torch.Tensor]:
    is_needed = op.name in _LINEAR and data.description.has_gradient
    return autograd.attach(results, data.tensors, backward, is_needed=is_needed)


# -- bundles -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Bundle:
    """Leaves of one dtype and device, as one tensor."""

    indices: Sequence[int]
    flat: torch.Tensor


def _bundles(data: Data, *, inplace: bool) -> list[_Bundle]:
    return [
        _Bundle(indices, bundled([data.tensors[index] for index in indices], inplace))
        for indices in packing.by_dtype(data)
    ]


def bundled(tensors: Sequence[torch.Tensor], inplace: bool) -> torch.Tensor:
    """Return tensors of one dtype as one contiguous tensor: a copy, or with `inplace` a single dense tensor itself."""
    if len(tensors) > 1:
        return packing.packed(tensors)
    tensor = tensors[0].detach()
    if inplace and buffers.is_dense(tensor):
        return tensor
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _unbundled(
    bundles: Sequence[_Bundle], shapes: Sequence[Sequence[int]], members: GroupArgument, op: Op
) -> list[torch.Tensor]:
    """Return the result for each leaf, given the shapes of the results."""
    for bundle in bundles:
        _divide(bundle.flat, members, op)
    if len(bundles) == 1:
        return packing.unpacked(bundles[0].flat, shapes)
    results: dict[int, torch.Tensor] = {}
    for bundle in bundles:
        parts = packing.unpacked(bundle.flat, [shapes[index] for index in bundle.indices])
        results.update(zip(bundle.indices, parts, strict=True))
    return [results[index] for index in range(len(shapes))]


def _written_back(data: Data, results: Sequence[torch.Tensor]) -> Any:
    for tensor, result in zip(data.tensors, results, strict=True):
        if tensor.data_ptr() != result.data_ptr():
            tensor.detach().copy_(result)
    return data.description.rebuilt(data.tensors)


def _divide(flat: torch.Tensor, members: GroupArgument, op: Op) -> None:
    """Divide a sum by the group size, where the backend does not implement AVG."""
    if op.name == "AVG" and not members.is_ours:
        is_inexact = flat.dtype.is_floating_point or flat.dtype.is_complex
        flat.div_(members.size, rounding_mode=None if is_inexact else "trunc")
