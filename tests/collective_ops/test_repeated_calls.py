"""all_reduce of plain tensors, whose later calls of a kind use what the first one has prepared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mpicomm
from mpicomm.collective_ops import repeated_calls
from mpicomm.collective_ops.group_argument import resolve
from mpicomm.errors import MismatchError, MpicommError

SIZE = 5


@pytest.fixture(params=["first", "later"])
def calls(request: pytest.FixtureRequest, world: mpicomm.World) -> dict[Any, Any]:
    """Return what is kept of the calls: nothing, or what the usual call has prepared."""
    kept = resolve(None, "test").kept
    kept.clear()
    if request.param == "later":
        mpicomm.all_reduce(usual(world))
    return kept


def usual(world: mpicomm.World, values: int = SIZE) -> torch.Tensor:
    return torch.full((values,), float(world.rank + 1))


def total(world: mpicomm.World) -> torch.Tensor:
    return torch.full((SIZE,), world.size * (world.size + 1) / 2)


def test_the_result_has_memory_of_its_own(world: mpicomm.World, calls: dict[Any, Any]) -> None:
    tensor = usual(world)
    first, second = mpicomm.all_reduce(tensor), mpicomm.all_reduce(tensor)
    assert torch.equal(tensor, usual(world))
    assert torch.equal(first, total(world))
    first.zero_()
    assert torch.equal(second, total(world))
    assert len(calls) == 1


def test_in_place(world: mpicomm.World, calls: dict[Any, Any]) -> None:
    tensor = usual(world)
    assert mpicomm.all_reduce(tensor, inplace=True) is tensor
    assert torch.equal(tensor, total(world))
    strided = torch.stack([usual(world), usual(world)], 1)[:, 0]
    assert mpicomm.all_reduce(strided, inplace=True) is strided
    assert torch.equal(strided, total(world))


def test_every_operation_is_kept_apart(world: mpicomm.World, calls: dict[Any, Any]) -> None:
    size = world.size
    values = {"sum": size * (size + 1) / 2, "mean": (size + 1) / 2, "max": size, "min": 1}
    for _ in range(2):
        assert {op: mpicomm.all_reduce(usual(world), op)[0].item() for op in values} == values


OTHERS: dict[str, Callable[[mpicomm.World], Any]] = {
    "shape": lambda world: mpicomm.all_reduce(usual(world, SIZE + 1)),
    "dimensions": lambda world: mpicomm.all_reduce(usual(world).view(1, SIZE)),
    "dtype": lambda world: mpicomm.all_reduce(usual(world).int()),
    "operation": lambda world: mpicomm.all_reduce(usual(world), "max"),
    "array": lambda world: mpicomm.all_reduce(np.ones(SIZE, dtype=np.float32)),
    "container": lambda world: mpicomm.all_reduce([usual(world)]),
    "gradient": lambda world: mpicomm.all_reduce(usual(world).requires_grad_()),
    "reduce": lambda world: mpicomm.reduce(usual(world)),
    "asynchronous": lambda world: mpicomm.all_reduce(usual(world, SIZE + 1), async_op=True).wait(),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", OTHERS)
def test_another_call_on_the_last_rank(world: mpicomm.World, calls: dict[Any, Any], other: str) -> None:
    last = world.size - 1
    with pytest.raises(MismatchError, match=rf"rank {last}: "):
        OTHERS[other](world) if world.rank == last else mpicomm.all_reduce(usual(world))
    assert torch.equal(mpicomm.all_reduce(usual(world)), total(world))


GENERAL: dict[str, Callable[[torch.Tensor], Any]] = {
    "strided": lambda tensor: mpicomm.all_reduce(torch.stack([tensor, tensor], 1)[:, 0]),
    "negative": lambda tensor: mpicomm.all_reduce(torch.complex(tensor, -tensor).conj().imag),
    "asynchronous": lambda tensor: mpicomm.all_reduce(tensor, async_op=True).wait(),
    "operation of torch": lambda tensor: mpicomm.all_reduce(tensor, torch.distributed.ReduceOp.SUM),
    "parameter": lambda tensor: mpicomm.all_reduce(torch.nn.Parameter(tensor, requires_grad=False)),
    "no gradient": lambda tensor: torch.no_grad()(mpicomm.all_reduce)(tensor.clone().requires_grad_()),
}


@pytest.mark.parametrize("way", GENERAL)
def test_one_rank_needs_the_general_way(world: mpicomm.World, calls: dict[Any, Any], way: str) -> None:
    call = GENERAL[way] if world.rank == 0 else mpicomm.all_reduce
    assert torch.equal(call(usual(world)), total(world))


def test_a_gradient_after_calls_without(world: mpicomm.World, calls: dict[Any, Any]) -> None:
    tensor = usual(world).requires_grad_()
    mpicomm.all_reduce(tensor).sum().backward()
    assert torch.equal(tensor.grad, torch.full((SIZE,), float(world.size)))


def test_an_operation_that_the_dtype_lacks(world: mpicomm.World, calls: dict[Any, Any]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="BOR is not defined for float32"):
            mpicomm.all_reduce(usual(world), "bor")


def test_the_result_of_a_transposed_matrix_is_contiguous(world: mpicomm.World, calls: dict[Any, Any]) -> None:
    matrix = torch.ones(2, 3)
    for _ in range(2):
        assert mpicomm.all_reduce(matrix.view(3, 2)).is_contiguous()
        assert mpicomm.all_reduce(matrix.t()).is_contiguous()
        assert mpicomm.all_reduce(matrix[:1, :1]).stride() == (1, 1)


def test_complex_numbers(world: mpicomm.World, calls: dict[Any, Any]) -> None:
    tensor = torch.complex(usual(world), -usual(world))
    for is_async in (False, True, world.rank == 0):
        reduced = mpicomm.all_reduce(tensor, async_op=is_async)
        reduced = reduced.wait() if is_async else reduced
        assert torch.equal(reduced, torch.complex(total(world), -total(world)))
        with pytest.raises(ValueError, match="PRODUCT on complex tensors"):
            mpicomm.all_reduce(tensor, "product")


def test_a_forward_gradient_is_not_that_of_this_rank(world: mpicomm.World, calls: dict[Any, Any]) -> None:
    forward = torch.autograd.forward_ad
    for inplace in (False, True):
        with forward.dual_level():
            dual = forward.make_dual(usual(world), torch.ones(SIZE))
            reduced = mpicomm.all_reduce(dual, inplace=inplace)
            assert torch.equal(forward.unpack_dual(reduced).primal, total(world))
            assert inplace or forward.unpack_dual(reduced).tangent is None


@pytest.mark.parametrize("mode", ["transform", "fake"])
def test_a_call_that_failed_in_a_mode_of_torch_leaves_no_trace(
    world: mpicomm.World, calls: dict[Any, Any], mode: str
) -> None:
    tensor = torch.ones(SIZE + 2 + world.size)  # the first call with this shape

    def reduce_times(factor: torch.Tensor) -> torch.Tensor:
        return (mpicomm.all_reduce(tensor) * factor).sum()

    within = FakeTensorMode(allow_non_fake_inputs=True) if mode == "fake" else contextlib.nullcontext()
    call = torch.func.grad(reduce_times) if mode == "transform" else reduce_times
    with within, contextlib.suppress(Exception):  # of torch, which differs between its versions
        call(torch.ones(1))
    assert torch.equal(mpicomm.all_reduce(tensor), world.size * tensor)


UNSUPPORTED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (torch.Tensor.to_sparse, "one of layout torch.sparse_coo"),
    "mkldnn": (torch.Tensor.to_mkldnn, "one of layout torch._mkldnn"),
    "nested": (lambda tensor: torch.nested.nested_tensor([tensor]), "a nested one"),
    "quantized": (lambda tensor: torch.quantize_per_tensor(tensor, 1.0, 0, torch.quint8), "one of layout"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # nested and quantized tensors
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_tensors_that_are_not_supported(world: mpicomm.World, calls: dict[Any, Any], kind: str) -> None:
    convert, named = UNSUPPORTED[kind]
    for _ in range(2):
        with pytest.raises(TypeError, match=named):
            mpicomm.all_reduce(convert(usual(world)))
    assert torch.equal(mpicomm.all_reduce(usual(world)), total(world))


WRONG: dict[str, Callable[[mpicomm.World], Any]] = {
    "kind": lambda world: mpicomm.all_reduce(torch.quantize_per_tensor(usual(world), 1.0, 0, torch.quint8)),
    "operation": lambda world: mpicomm.all_reduce(usual(world), "bor"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wrong", WRONG)
def test_the_last_rank_cannot_send(world: mpicomm.World, calls: dict[Any, Any], wrong: str) -> None:
    last = world.size - 1
    if world.rank == last:
        with pytest.raises((TypeError, ValueError)):
            WRONG[wrong](world)
    else:
        with pytest.raises(MpicommError, match=f"rank {last} could not send its data"):
            mpicomm.all_reduce(usual(world))


def test_calls_after_one_under_inference_mode(world: mpicomm.World, calls: dict[Any, Any]) -> None:
    with torch.inference_mode():
        assert torch.equal(mpicomm.all_reduce(usual(world), "sum"), total(world))
    with torch.profiler.profile():  # it takes part in torch's own steps around an operation
        assert torch.equal(mpicomm.all_reduce(usual(world), "sum"), total(world))


def test_few_kinds_are_kept(world: mpicomm.World, calls: dict[Any, Any]) -> None:
    for values in range(2 * repeated_calls._MOST_KEPT):
        assert mpicomm.all_reduce(usual(world, values)).sum() == values * total(world)[0]
    assert 0 < len(calls) <= repeated_calls._MOST_KEPT
