"""The C library adds with the same bits as torch's kernels."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from mpicomm.backend.transfer import slots
from mpicomm.backend.transfer.slots import NativeSlots
from mpicomm.native import c_library, extension
from tests.ordered_sum import ordered_sum

pytestmark = pytest.mark.skipif(c_library.load() is None, reason="the C library was not built")

BLOCK = 1024  # elements that the library adds at a time
COUNTS = [1, 7, 8, 9, 31, 33, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17]
SPECIAL = {
    torch.float32: [0.0, -0.0, 1e-40, -1e-45, 1.0, -1.5, 3e38, -3e38, math.inf, -math.inf, math.nan],
    torch.float64: [0.0, -0.0, 5e-324, -1e-310, 1.0, -1.5, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan],
}
DTYPES = list(c_library.KINDS)
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex]


def by_library(terms: list[torch.Tensor], out: torch.Tensor, divisor: int) -> torch.Tensor:
    kind, numbers = c_library.KINDS[terms[0].dtype]
    addresses = (ctypes.c_void_p * len(terms))(*[term.data_ptr() for term in terms])
    is_wide = out.dtype != terms[0].dtype
    library = c_library.load()
    library.mpicomm_sum(kind, addresses, len(terms), out.data_ptr(), is_wide, numbers * terms[0].numel(), divisor)
    return out


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bits, except those of numbers that are not a number in both."""
    got, expected = (torch.view_as_real(each) if each.is_complex() else each for each in (got, expected))
    is_nan = expected.isnan()
    assert torch.equal(got.isnan(), is_nan)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    assert torch.equal(got.view(integer)[~is_nan], expected.view(integer)[~is_nan])


def compare(terms: list[torch.Tensor], divisor: int) -> None:
    expected = ordered_sum(terms, divisor)
    assert_same_bits(by_library(terms, torch.empty_like(terms[0]), divisor), expected)


def random_bits(dtype: torch.dtype, number: int, count: int) -> list[torch.Tensor]:
    """Return tensors of random bits, which include special values in dtypes of few bits."""
    generator = torch.manual_seed(count)
    shape = (number, count * dtype.itemsize)
    return list(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [2, 3, 4, 7])
def test_the_same_bits(dtype: torch.dtype, number: int) -> None:
    for count, divisor in itertools.product(COUNTS, (1, number) if dtype in FLOATS else (1,)):
        terms = random_bits(dtype, number, count)
        compare(terms, divisor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("divisor", [1, 3])
def test_ordinary_numbers(dtype: torch.dtype, divisor: int) -> None:
    """Random bits hardly contain numbers of similar magnitude, whose sums have to be rounded."""
    values = torch.randn(3, 5 * BLOCK + 3, generator=torch.manual_seed(1)).to(dtype)
    compare(list(values), divisor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_numbers(dtype: torch.dtype) -> None:
    base = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    special = torch.tensor(SPECIAL[base], dtype=base)
    first, second = torch.cartesian_prod(special, special).t().contiguous()
    terms = [torch.view_as_complex(torch.stack([each, each.flip(0)], 1)) if dtype.is_complex else each.to(dtype)
             for each in (first, second)]  # fmt: skip
    for divisor in (1, 2):
        compare(terms, divisor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_narrow_number_and_every_tie(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    for other in (0.0, 2.0**-9, 2.0**-12, 2.0**-25, 1.0, 60000.0, 65504.0, 16.0):
        terms = [every, torch.full_like(every, other)]
        for divisor in (1, 2, 3):
            compare(terms, divisor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_wide_output(dtype: torch.dtype) -> None:
    terms = list(torch.randn(3, BLOCK + 5, generator=torch.manual_seed(1)).to(dtype))
    out = torch.empty(BLOCK + 5)
    assert_same_bits(by_library(terms, out, 1), ordered_sum(terms, dtype=torch.float32))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_output_may_be_a_term(place: int) -> None:
    terms = list(torch.randn(3, 2 * BLOCK + 3, generator=torch.manual_seed(1)))
    expected = ordered_sum(terms)
    assert_same_bits(by_library(terms, terms[place], 1), expected)


def test_flushing_denormals_does_not_change_narrow_numbers() -> None:
    every = torch.arange(0, 2**10, dtype=torch.int16).view(torch.float16)
    assert torch.set_flush_denormal(True)
    try:
        out = by_library([every, torch.zeros_like(every)], torch.empty_like(every), 1)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(out, every)


# -- slots of ranks in one process ------------------------------------------------------------------------------------


class Ranks:
    """The slots of many ranks; this process runs their operations in turns."""

    def __init__(self, size: int) -> None:
        self._memory = torch.zeros(slots.memory_bytes(size), dtype=torch.uint8)
        self._library = c_library.load()
        self._of_ranks = [NativeSlots(self._comm(rank, size), self._memory, self._fail) for rank in range(size)]
        self._addresses = [ctypes.addressof(each._state) for each in self._of_ranks]
        for each in self._of_ranks:
            each._state.pause_ns = each._state.spins = 0

    @staticmethod
    def _comm(rank: int, size: int) -> Any:
        return types.SimpleNamespace(rank=rank, size=size, allgather=lambda cores: [cores])

    @staticmethod
    def _fail() -> None:
        raise AssertionError("the library returns to the test, not to NativeSlots")

    def run(self, call: int, sources: list[torch.Tensor], outs: list[torch.Tensor], count: int) -> None:
        """Run an operation on all ranks."""
        waiting = []
        for address, source, out in zip(self._addresses, sources, outs, strict=True):
            if (
                self._library.mpicomm_start(address, call, source.data_ptr(), out.data_ptr(), count)
                == c_library.WAITING
            ):
                waiting.append(address)
        while waiting:
            statuses = {address: self._library.mpicomm_continue(address) for address in waiting}
            assert set(statuses.values()) <= {c_library.WAITING, c_library.DONE}
            waiting = [address for address, status in statuses.items() if status == c_library.WAITING]


def test_more_than_256_ranks() -> None:
    size, count = 300, 201  # blocks of several steps
    ranks, whole = Ranks(size), torch.arange(size * count).remainder_(13).to(torch.int32)
    tensors = [whole + rank for rank in range(size)]
    total = whole * size + sum(range(size))
    blocks = [torch.empty(count, dtype=torch.int32) for _ in range(size)]
    ranks.run(c_library.reducing(c_library.REDUCE_SCATTER, torch.int32), tensors, blocks, count)
    assert torch.equal(torch.cat(blocks), total)
    ranks.run(c_library.reducing(c_library.ALL_REDUCE, torch.int32), tensors, tensors, whole.numel())
    assert all(torch.equal(tensor, total) for tensor in tensors)


@pytest.mark.parametrize("size", [2, 64, 256, 257, 1000, 5000])
def test_a_slot_has_room_for_every_rank(size: int) -> None:
    region_bytes = slots._slot_bytes(size) // size
    assert region_bytes >= c_library.HEADER + 64
    assert slots.memory_bytes(size) <= 2**26 + 2**17 or size > 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 100_001])
def test_reduce_scatter_with_wide_sums(dtype: torch.dtype, count: int) -> None:
    size = 3
    ranks = Ranks(size)
    tensors = list(torch.randn(size, size * count, generator=torch.manual_seed(1)).to(dtype))
    outs = [torch.empty(count) for _ in range(size)]
    ranks.run(c_library.reducing(c_library.REDUCE_SCATTER, dtype) | c_library.IS_WIDE, tensors, outs, count)
    assert torch.equal(torch.cat(outs), functools.reduce(torch.add, [tensor.float() for tensor in tensors]))


# -- the library -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "is_used"), [(None, True), ("slots.c", False), ("slots.h", False), ("all", True)], ids=str
)
def test_a_library_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str | None, is_used: bool
) -> None:
    for path in extension.LIBRARY.parent.glob("*.[ch]"):
        (tmp_path / path.name).write_bytes(path.read_bytes() + b"\n" * (path.name == changed))
        if changed == "all":  # installed from a wheel
            (tmp_path / path.name).unlink()
    monkeypatch.setattr(extension, "_FOLDER", tmp_path)
    assert (extension.library.__wrapped__() is not None) is is_used
