"""all_to_all: each rank sends a different block to each rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.mpi.counts import limit
from tests.mpi.sweep import sweep
from tests.mpi.test_collectives import MOVED, WHEN, finish
from tests.worlds import MAIN_KINDS, Group, on_groups

WIDTH = 3


@pytest.fixture(params=["whole", "in parts", "some in parts"], autouse=True)
def counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, group: Group) -> None:
    """Run with MPI's own limit on counts, 2^31 or more, with a limit of two, or so that only some blocks exceed it."""
    if request.param == "in parts":
        limit(monkeypatch, group, 2)
    elif request.param == "some in parts":
        limit(monkeypatch, group, 2 * WIDTH * group.size)


def rows(src: int, dst: int) -> int:
    """Return the number of rows that `src` sends to `dst`, zero for some pairs of ranks."""
    return (src + 2 * dst) % 4


def block(src: int, dst: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the rows that `src` sends to `dst`: (count, WIDTH)."""
    return torch.full((count, WIDTH), 10 * src + dst + 1, dtype=torch.float32).to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@WHEN
@pytest.mark.parametrize("is_even", [True, False], ids=["even", "uneven"])
@sweep(MOVED, kinds=MAIN_KINDS)
def test_parts(group: Group, dtype: torch.dtype, is_even: bool, is_async: bool) -> None:
    sends = [2 if is_even else rows(group.rank, dst) for dst in range(group.size)]
    receives = [2 if is_even else rows(src, group.rank) for src in range(group.size)]
    source = torch.cat([block(group.rank, dst, count, dtype) for dst, count in enumerate(sends)])
    output = torch.empty(sum(receives), WIDTH, dtype=dtype)
    sizes = (None, None) if is_even else (receives, sends)
    finish(dist.all_to_all_single(output, source, *sizes, group=group.handle, async_op=is_async))
    expected = torch.cat([block(src, group.rank, count, dtype) for src, count in enumerate(receives)])
    assert torch.equal(raw(output), raw(expected))


@pytest.mark.parametrize("counts", ["whole"], indirect=True)
@on_groups("world", "mpi", "staged")
def test_uneven_parts_with_equal_sums(group: Group) -> None:
    """Every rank sends and receives the same number of rows, as with equal parts that are large enough for slots."""
    sends = [2**10 * ((group.rank + dst) % group.size) for dst in range(group.size)]
    source = torch.cat([block(group.rank, dst, count) for dst, count in enumerate(sends)])
    output = torch.empty_like(source)
    dist.all_to_all_single(output, source, sends, sends, group=group.handle)
    expected = torch.cat([block(src, group.rank, count) for src, count in enumerate(sends)])
    assert torch.equal(output, expected)


@WHEN
@on_groups(*MAIN_KINDS)
def test_uneven_parts_on_one_side(group: Group, is_async: bool) -> None:
    """The first rank passes only input sizes, the last rank only output sizes; the omitted sizes equal the defaults."""
    first, last = 0, group.size - 1
    counts = [[3 if (src, dst) == (first, last) else 1 for dst in range(group.size)] for src in range(group.size)]
    sends, receives = counts[group.rank], [row[group.rank] for row in counts]
    source = torch.cat([block(group.rank, dst, count) for dst, count in enumerate(sends)])
    output = torch.empty(sum(receives), WIDTH)
    output_sizes = receives if group.rank != first else None
    input_sizes = sends if group.rank != last else None
    finish(dist.all_to_all_single(output, source, output_sizes, input_sizes, group=group.handle, async_op=is_async))
    assert torch.equal(output, torch.cat([block(src, group.rank, count) for src, count in enumerate(receives)]))


@WHEN
@sweep([torch.float32, torch.float8_e5m2, torch.complex128], kinds=MAIN_KINDS)
def test_lists(group: Group, dtype: torch.dtype, is_async: bool) -> None:
    sources = [block(group.rank, dst, rows(group.rank, dst), dtype) for dst in range(group.size)]
    outputs = [torch.empty(rows(src, group.rank), WIDTH, dtype=dtype) for src in range(group.size)]
    finish(dist.all_to_all(outputs, sources, group=group.handle, async_op=is_async))
    for src, output in enumerate(outputs):
        assert torch.equal(raw(output), raw(block(src, group.rank, rows(src, group.rank), dtype)))


@WHEN
@pytest.mark.parametrize("length", [1, 50_000])  # MPI may copy a short input during the call
@on_groups(*MAIN_KINDS)
def test_the_output_may_be_the_input(group: Group, length: int, is_async: bool) -> None:
    tensor = (torch.arange(group.size).float() + 100 * group.rank).repeat_interleave(length)
    finish(dist.all_to_all_single(tensor, tensor, group=group.handle, async_op=is_async))
    assert torch.equal(tensor, (100.0 * torch.arange(group.size) + group.rank).repeat_interleave(length))
    chunks = list(tensor.chunk(group.size))
    finish(dist.all_to_all(chunks, chunks, group=group.handle, async_op=is_async))  # exchanges the chunks back
    assert torch.equal(tensor, (torch.arange(group.size).float() + 100 * group.rank).repeat_interleave(length))


@pytest.mark.parametrize("counts", ["whole"], indirect=True)
@pytest.mark.parametrize("shape", [(0,), (0, 3)], ids=str)
@on_groups("world", "alone", "staged")
def test_nothing(group: Group, shape: tuple[int, ...]) -> None:
    output = torch.empty(shape)
    dist.all_to_all_single(output, torch.empty(shape), group=group.handle)
    dist.all_to_all_single(output, torch.empty(shape), [0] * group.size, [0] * group.size, group=group.handle)
    dist.all_to_all([output] * group.size, [torch.empty(shape)] * group.size, group=group.handle)
