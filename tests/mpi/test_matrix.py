"""Every dtype with every operation in every reduction, compared with an exact reduction in one process."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpicomm.backend.transfer import dtypes, reductions
from tests.mpi.counts import limit
from tests.mpi.sweep import FEW
from tests.torches import reduce_scatter_single
from tests.worlds import KINDS, Group, on_groups

COUNT = 33
INTEGERS = [
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip
NARROW = [torch.float16, torch.bfloat16]
FLOATS = [*NARROW, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
SUMS, PRODUCT, ORDERED, BITWISE = ["SUM", "AVG"], ["PRODUCT"], ["MIN", "MAX"], ["BAND", "BOR", "BXOR"]
MEANINGFUL = [
    *[(dtype, op) for dtype in [torch.bool] for op in ["SUM", *PRODUCT, *ORDERED, *BITWISE]],
    *[(dtype, op) for dtype in INTEGERS for op in [*SUMS, *PRODUCT, *ORDERED, *BITWISE]],
    *[(dtype, op) for dtype in FLOATS for op in [*SUMS, *PRODUCT, *ORDERED, "PREMUL_SUM"]],
    *[(dtype, op) for dtype in COMPLEX for op in [*SUMS, *PRODUCT, "PREMUL_SUM"]],
]
MEANINGLESS = [
    (torch.bool, "AVG"),
    *[(dtype, op) for dtype in [*FLOATS, *COMPLEX] for op in BITWISE],
    *[(dtype, op) for dtype in COMPLEX for op in ORDERED],
    *[(dtype, "PREMUL_SUM") for dtype in [torch.bool, *INTEGERS]],
]
SOME = [(dtype, op) for dtype, op in MEANINGFUL if dtype in FEW]
WHOLE, IN_PARTS = "whole", "in parts"
# Every dtype with every operation on the world; some of them on other groups and with small counts.
CASES = [
    *[("world", WHOLE, *pair) for pair in MEANINGFUL],
    *[(kind, WHOLE, *pair) for kind in KINDS if kind != "world" for pair in SOME],
    *[(kind, IN_PARTS, *pair) for kind in ("world", "parity", "staged") for pair in SOME],
]
FACTOR = 0.375
FOLDS: dict[str, Callable] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PREMUL_SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": min,
    "MAX": max,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


@pytest.fixture
def counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, group: Group) -> None:
    """Run with MPI's own limit on counts, 2^31 or more, or with a limit of seven and tensors widened in small pieces.

    Larger tensors use the same code.
    """
    if request.param == IN_PARTS:
        limit(monkeypatch, group, 7)
        monkeypatch.setattr(reductions, "_PIECE", 10)


def operation(op: str) -> object:
    return dist._make_nccl_premul_sum(FACTOR) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def inputs(group: Group, dtype: torch.dtype, op: str, blocks: int) -> torch.Tensor:
    """Return the inputs of all ranks, equal on all ranks: (size, blocks * COUNT). Integers use their full width."""
    generator = torch.manual_seed(17)
    shape = (group.size, blocks * COUNT)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        width = 8 * dtype.itemsize
        bits = torch.randint(-(2**62), 2**62, shape, generator=generator)
        if op == "AVG" and dtype == torch.uint64:  # the sum is between 2^63 and 2^64
            bits = bits.abs() // group.size + (2**63 - 1) // group.size + 1
        elif op == "AVG" and width == 64:
            bits = bits.abs() >> 8  # the sum of larger values wraps around
        signed = getattr(torch, f"int{width}")
        return bits.to(signed).view(dtype)
    if dtype in NARROW:
        return torch.randn(shape, generator=generator).to(dtype)
    values = torch.randint(-3, 4, shape, generator=generator).to(dtype)  # exact in any order
    return values * (1 - 2j) if dtype.is_complex else values


def exact(values: torch.Tensor, op: str) -> list:
    """Reduce the rows in Python's numbers: integers of arbitrary length, 64-bit floats."""
    columns = zip(*values.tolist(), strict=True)
    return [_finish(functools.reduce(FOLDS[op], column), op, values) for column in columns]


def _finish(result: complex, op: str, values: torch.Tensor) -> complex:
    if op == "PREMUL_SUM":
        return result * FACTOR
    if op != "AVG":
        return result
    if isinstance(result, int):
        quotient = abs(result) // len(values)  # rounds toward zero
        return -quotient if result < 0 else quotient
    return result / len(values)


def check(got: torch.Tensor, expected: list) -> None:
    dtype = got.dtype
    assert len(got) == len(expected)
    if dtype == torch.bool:
        assert got.tolist() == [bool(each) for each in expected]
    elif dtype in NARROW:
        for mine, right in zip(got.tolist(), expected, strict=True):
            assert abs(mine - right) <= _half_ulp(right, dtype)
    elif dtype.is_floating_point or dtype.is_complex:
        torch.testing.assert_close(got, torch.tensor(expected, dtype=dtype), rtol=0, atol=0)
    else:
        modulus = 2 ** (8 * dtype.itemsize)
        assert [each % modulus for each in got.tolist()] == [each % modulus for each in expected]


def _half_ulp(value: float, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return 2.0 ** math.floor(math.log2(max(abs(value), info.smallest_normal))) * info.eps / 2


def named(pair: object) -> str:
    return dtypes.short(pair) if isinstance(pair, torch.dtype) else str(pair)


each_case = pytest.mark.parametrize(("group", "counts", "dtype", "op"), CASES, indirect=["group", "counts"], ids=named)


@each_case
def test_all_reduce_and_reduce(group: Group, counts: None, dtype: torch.dtype, op: str) -> None:
    values = inputs(group, dtype, op, blocks=1)
    expected, redop, mine = exact(values, op), operation(op), values[group.rank]
    for is_async in (False, True):
        tensor, strided, at_root = mine.clone(), torch.stack([mine, mine], 1)[:, 0], mine.clone()
        for_all, for_root = _options("AllreduceOptions", redop, is_async), _options("ReduceOptions", redop, is_async)
        for_root.rootRank = root = group.size - 1 if is_async else 0
        works = [
            group.handle.allreduce([tensor], for_all),
            group.handle.allreduce([strided], for_all),
            group.handle.reduce([at_root], for_root),
        ]
        for work in works:
            work.wait()
        check(tensor, expected)
        check(strided, expected)
        check(at_root, expected if group.rank == root else mine.tolist())


@each_case
def test_reduce_scatter(group: Group, counts: None, dtype: torch.dtype, op: str) -> None:
    values = inputs(group, dtype, op, blocks=group.size)
    blocks = values.view(group.size, group.size, COUNT)
    expected, redop = exact(blocks[:, group.rank], op), operation(op)
    source = values[group.rank].clone()
    shares = [block[:rank] for rank, block in enumerate(blocks[group.rank])]  # different sizes, one of them empty
    for is_async in (False, True):
        options = _options("ReduceScatterOptions", redop, is_async)
        single, first, second, of_list = (torch.empty(COUNT, dtype=dtype) for _ in range(4))
        share = torch.empty(group.rank, dtype=dtype)
        works = [
            group.handle.reduce_scatter_single(single, source, options),
            group.handle.reduce_scatter_single_coalesced([first, second], [source, source], options),
            group.handle.reduce_scatter([of_list], [list(blocks[group.rank])], options),
            group.handle.reduce_scatter([share], [shares], options),
        ]
        for work in works:
            work.wait()
        for got in (single, first, second, of_list):
            check(got, expected)
        check(share, expected[: group.rank])
    assert torch.equal(source.view(torch.uint8), values[group.rank].clone().view(torch.uint8))


@pytest.mark.parametrize(
    ("counts", "dtype"),
    [*[(WHOLE, dtype) for dtype in [*FLOATS, torch.float8_e5m2]], (IN_PARTS, torch.float32)],
    indirect=["counts"],
    ids=named,
)
@pytest.mark.parametrize("op", ORDERED)
@pytest.mark.parametrize("group", ["world", "parity", "staged"], indirect=True)
def test_extremes_of_nan_infinity_and_signed_zeros(group: Group, counts: None, dtype: torch.dtype, op: str) -> None:
    special = torch.tensor([math.nan, math.inf, 0.0, 1.0, torch.finfo(dtype).smallest_normal / 2], dtype=torch.float64)
    choices = torch.randint(10, (group.size, group.size * COUNT), generator=torch.manual_seed(3))
    choices[:, :3] = 2 + 5 * (torch.arange(group.size).unsqueeze(1) == torch.arange(3)).to(torch.int64)  # one -0
    values = torch.cat([special, -special])[choices].to(dtype)
    expected = [_extreme(column, op) for column in zip(*values.tolist(), strict=True)]
    tensor, block, one = values[group.rank].clone(), torch.empty(COUNT, dtype=dtype), values[group.rank, 0].clone()
    dist.all_reduce(tensor, operation(op), group=group.handle)
    dist.all_reduce(one, operation(op), group=group.handle)
    reduce_scatter_single(block, values[group.rank], operation(op), group=group.handle)
    assert [str(each) for each in tensor.tolist()] == [str(each) for each in expected]  # which shows -0.0
    assert len({bytes(_bits(each).tolist()) for each in tensor if math.isnan(each)}) == 1  # the signs of NaNs differ
    assert torch.equal(_bits(one), _bits(tensor[0]))
    assert torch.equal(_bits(block), _bits(tensor[group.rank * COUNT :][:COUNT]))
    of_ranks = [torch.empty_like(_bits(tensor)) for _ in range(group.size)]
    dist.all_gather(of_ranks, _bits(tensor), group=group.handle)
    assert all(torch.equal(each, of_ranks[0]) for each in of_ranks)  # also the bits of NaN


def _extreme(column: tuple[float, ...], op: str) -> float:
    is_nan = any(math.isnan(each) for each in column)
    return math.nan if is_nan else FOLDS[op](column, key=lambda each: (each, math.copysign(1, each)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@on_groups("world")
@pytest.mark.parametrize(("dtype", "op"), MEANINGLESS, ids=named)
def test_undefined_reductions_are_refused(group: Group, dtype: torch.dtype, op: str) -> None:
    tensor = torch.ones(2).to(dtype)
    for call in (
        lambda: group.handle.allreduce([tensor], _options("AllreduceOptions", operation(op), False)),
        lambda: group.handle.allreduce_coalesced([tensor], _options("AllreduceCoalescedOptions", operation(op), False)),
        lambda: group.handle.reduce_scatter_single(
            tensor[:1], tensor[:1].repeat(group.size), _options("ReduceScatterOptions", operation(op), False)
        ),
    ):
        with pytest.raises(ValueError, match=f"{op} is not defined for {dtypes.short(dtype)}"):
            call()


@on_groups("world", "staged")
def test_the_average_of_narrow_integers_does_not_overflow(group: Group) -> None:
    tensor = torch.tensor([200, 255], dtype=torch.uint8)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group.handle)
    assert tensor.tolist() == [200, 255]
    below = torch.tensor([-3 if group.rank == 0 else 0], dtype=torch.int8)
    dist.all_reduce(below, dist.ReduceOp.AVG, group=group.handle)
    assert below.item() == -(3 // group.size)


def _options(kind: str, op: object, is_async: bool) -> Any:
    from mpicomm import torch_internals

    options = getattr(torch_internals, kind)()
    options.reduceOp = op
    options.asyncOp = is_async
    return options
