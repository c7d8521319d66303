"""Collectives compared with formulas in rank and size, for every kind of group, dtype and layout."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from mpicomm.backend.transfer import dtypes
from tests import nodes
from tests.mpi.sweep import sweep
from tests.torches import all_gather_single, reduce_scatter_single
from tests.worlds import MAIN_KINDS, Group, on_groups

pytestmark = pytest.mark.each_torch("collectives")

MOVED = [*dtypes._ARITHMETIC, *dtypes.NARROW_FLOATS, torch.float8_e8m0fnu]
WHEN = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def finish(work: dist.Work | None) -> None:
    if work is not None:
        assert work.wait()
        assert work.is_completed()


def of_rank(rank: int, dtype: torch.dtype, count: int = 5) -> torch.Tensor:
    """Return a tensor that identifies its rank: 1 + rank in every element, exact in every dtype; True on even ranks."""
    if dtype == torch.bool:
        return torch.full((count,), rank % 2 == 0)
    return torch.full((count,), 1 + rank, dtype=torch.float32).to(dtype)


def layouts(content: torch.Tensor) -> list[torch.Tensor]:
    """Return matrices with the same content and different memory layouts."""
    rows, columns = content.shape
    return [
        content.clone(),
        content.t().contiguous().t(),
        content.repeat_interleave(3, dim=1)[:, ::3],
        content.expand(2, 1, rows, columns).contiguous(memory_format=torch.channels_last)[1, 0],
    ]


@WHEN
def test_all_reduce_and_broadcast_of_every_layout(group: Group, is_async: bool) -> None:
    content = torch.arange(24.0).view(4, 6)
    for tensor in layouts(content + group.rank):
        strides = tensor.stride()
        finish(dist.all_reduce(tensor, group=group.handle, async_op=is_async))
        assert torch.equal(tensor, group.size * content + sum(range(group.size)))
        finish(dist.broadcast(tensor.copy_(content + group.rank), group_src=0, group=group.handle, async_op=is_async))
        assert torch.equal(tensor, content)
        assert tensor.stride() == strides


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)], ids=str)
def test_shapes_without_much_in_them(group: Group, shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 1.0 + group.rank)
    dist.all_reduce(tensor, group=group.handle)
    dist.broadcast(tensor, group_src=group.size - 1, group=group.handle)
    assert torch.equal(tensor, torch.full(shape, group.size * (group.size + 1) / 2))
    gathered = [torch.empty(shape) for _ in range(group.size)]
    dist.all_gather(gathered, tensor, group=group.handle)
    assert all(torch.equal(each, tensor) for each in gathered)


def test_megabytes(group: Group) -> None:
    count = 3_000_001
    tensor = torch.arange(count, dtype=torch.float32) % 1000 + group.rank
    dist.all_reduce(tensor, group=group.handle)
    expected = group.size * (torch.arange(count) % 1000) + sum(range(group.size))
    assert torch.equal(tensor, expected.to(torch.float32))


@WHEN
@sweep(MOVED)
def test_broadcast_from_every_root(group: Group, dtype: torch.dtype, is_async: bool) -> None:
    for root in range(group.size):
        tensor = of_rank(group.rank, dtype)
        finish(dist.broadcast(tensor, group_src=root, group=group.handle, async_op=is_async))
        assert torch.equal(tensor.view(torch.uint8), of_rank(root, dtype).view(torch.uint8))


@WHEN
@sweep(MOVED)
def test_all_gather(group: Group, dtype: torch.dtype, is_async: bool) -> None:
    source = of_rank(group.rank, dtype)
    outputs = [torch.empty_like(source) for _ in range(group.size)]
    finish(dist.all_gather(outputs, source, group=group.handle, async_op=is_async))
    flat = torch.empty(group.size * 5, dtype=dtype)
    finish(all_gather_single(flat, source, group=group.handle, async_op=is_async))
    for rank, output in enumerate(outputs):
        expected = of_rank(rank, dtype).view(torch.uint8)
        assert torch.equal(output.view(torch.uint8), expected)
        assert torch.equal(flat[5 * rank : 5 * rank + 5].view(torch.uint8), expected)
    assert torch.equal(source.view(torch.uint8), of_rank(group.rank, dtype).view(torch.uint8))


@WHEN
@on_groups(*MAIN_KINDS)
@pytest.mark.parametrize("rows", [1, 2**17])  # 8 bytes or 1 MiB times the rank
def test_all_gather_of_uneven_sizes(group: Group, is_async: bool, rows: int) -> None:
    source = torch.full((rows * group.rank, 2), float(group.rank))
    outputs = [torch.empty(rows * rank, 2) for rank in range(group.size)]
    finish(dist.all_gather(outputs, source, group=group.handle, async_op=is_async))
    for rank, output in enumerate(outputs):
        assert torch.equal(output, torch.full((rows * rank, 2), float(rank)))


def test_the_input_may_be_a_part_of_the_output(group: Group) -> None:
    """FSDP gathers in place; MPI forbids overlapping buffers unless the call passes MPI_IN_PLACE."""
    gathered = torch.zeros(3 * group.size)
    mine = gathered[3 * group.rank : 3 * group.rank + 3]
    mine.fill_(group.rank)
    all_gather_single(gathered, mine, group=group.handle)
    assert torch.equal(gathered, torch.arange(group.size).repeat_interleave(3).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtypes.short)
def test_the_output_may_be_a_part_of_the_input(group: Group, dtype: torch.dtype) -> None:
    source = torch.arange(4 * group.size).to(dtype)
    block = source[4 * group.rank : 4 * group.rank + 4]
    reduce_scatter_single(block, source, group=group.handle)
    assert torch.equal(block, (group.size * torch.arange(4 * group.rank, 4 * group.rank + 4)).to(dtype))


@on_groups("world", "copy")
@pytest.mark.parametrize("count", [3, 2**15])
def test_the_input_of_all_gather_may_overlap_its_block_of_the_output(group: Group, count: int) -> None:
    memory = torch.zeros(group.size * count + 1)
    output, start = memory[:-1], group.rank * count + 1  # one element after the rank's block
    memory[start : start + count] = torch.arange(count) + 100.0 * group.rank
    all_gather_single(output, memory[start : start + count], group=group.handle)
    expected = torch.cat([torch.arange(count) + 100.0 * rank for rank in range(group.size)])
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtypes.short)
@on_groups("world", "mpi", "staged", *nodes.KINDS)
def test_the_output_may_overlap_two_blocks_of_the_input(group: Group, dtype: torch.dtype) -> None:
    """The output starts in the middle of the rank's own block; on the last rank it ends after the input.

    A block consists of several chunks of the shared memory of a node.
    """
    count = 2**18
    memory = (torch.arange((group.size + 1) * count) % 61).to(dtype)  # with exact sums
    source = memory[: group.size * count]
    expected = group.size * source.view(group.size, count)[group.rank]
    output = memory[group.rank * count + count // 2 :][:count]
    reduce_scatter_single(output, source, group=group.handle)
    assert torch.equal(output, expected)


@on_groups("world", "staged", *nodes.KINDS)
def test_the_default_device_is_the_users_affair(group: Group) -> None:
    """Calls from C++, such as those of DDP, run with this setting; host memory for MPI must not follow it."""
    tensor = torch.ones(4, 2).t()
    torch.set_default_device("meta")
    try:
        group.handle.allreduce([tensor]).wait()
    finally:
        torch.set_default_device(None)
    assert torch.equal(tensor, torch.full((2, 4), float(group.size)))


LAZY = {
    "conjugated": lambda numbers: numbers.conj(),
    "negated": lambda numbers: numbers.conj().imag,
}


@pytest.mark.parametrize("view", LAZY)
@on_groups("world", "staged", *nodes.KINDS)
def test_views_that_torch_conjugates_or_negates_when_they_are_read(group: Group, view: str) -> None:
    """The values in their memory differ from the values of the tensors."""

    def of(rank: int) -> torch.Tensor:
        return LAZY[view](torch.tensor([1 + 2j, 3 - 4j]) * (1 + rank))

    last = group.size - 1
    mine = of(group.rank)
    assert mine.is_conj() or mine.is_neg()
    gathered = [torch.zeros(2, dtype=mine.dtype) for _ in range(group.size)]
    group.handle.allgather([gathered], [mine]).wait()  # functions of torch.distributed reject such complex tensors
    for rank, each in enumerate(gathered):
        assert torch.equal(each, of(rank))
    group.handle.broadcast([mine], last).wait()
    assert torch.equal(mine, of(last))
    if group.rank == last:
        work = group.handle.send([of(last)], 0)
    if group.rank == 0:
        received = of(0)
        group.handle.recv([received], last).wait()
        assert torch.equal(received, of(last))
    if group.rank == last:
        work.wait()


def test_a_tensor_that_a_functional_collective_still_fills(group: Group, groups: dict[str, Group]) -> None:
    """The same group fills it, or another one, in which rank 0 is late."""
    from torch.distributed._functional_collectives import all_reduce

    for filling in (group, groups["copy"]):
        if filling.rank == 0:
            time.sleep(0.1)
        pending = all_reduce(torch.ones(3), "sum", filling.handle)
        result = torch.empty(3)
        dist.reduce_scatter(result, [pending] * group.size, group=group.handle)
        assert torch.equal(result, torch.full((3,), float(filling.size * group.size)))


@on_groups("world", "parity", "debug")
def test_barrier_waits_for_the_last(group: Group, world: object) -> None:
    last = group.size - 1
    arrived = torch.zeros(1, dtype=torch.float64)
    if group.rank == last:
        time.sleep(0.2)
        arrived.fill_(time.monotonic())
    dist.barrier(group=group.handle)
    left = time.monotonic()
    dist.broadcast(arrived, group_src=last, group=group.handle)
    assert left >= arrived.item()  # the ranks share a host, and therefore its clock


def test_the_autograd_flags_of_parameters_are_left_alone(group: Group) -> None:
    parameter = torch.nn.Parameter(torch.full((4,), 1.0 + group.rank))
    transposed = torch.nn.Parameter(torch.full((2, 3), 1.0 + group.rank).t())
    for each in (parameter, transposed):
        dist.broadcast(each, group_src=0, group=group.handle)
        assert each.requires_grad
        assert each.is_leaf
        assert torch.equal(each.detach(), torch.ones_like(each))
