"""Collectives against formulas in rank and size, on every kind of group, dtype and layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mpicomm.backend import dtypes
from tests.worlds import Group

MOVED = [*dtypes._ARITHMETIC, *dtypes.NARROW_FLOATS, torch.float8_e8m0fnu]
REDUCED = [*dtypes._ARITHMETIC, torch.bfloat16, torch.float16]
WHEN = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def finish(work: dist.Work | None) -> None:
    if work is not None:
        assert work.wait()
        assert work.is_completed()


def of_rank(rank: int, dtype: torch.dtype, count: int = 5) -> torch.Tensor:
    """Return a tensor that tells its rank: 1 + rank in every element, exact in every dtype."""
    return torch.full((count,), 1 + rank, dtype=torch.float32).to(dtype)


def layouts(shape: tuple[int, ...], fill: float) -> list[torch.Tensor]:
    """Return tensors of one shape and content that lie differently in memory."""
    rows, columns = shape
    return [
        torch.full(shape, fill),
        torch.full((columns, rows), fill).t(),
        torch.full((rows, 3 * columns), fill)[:, ::3],
        torch.full((2, 1, rows, columns), fill).contiguous(memory_format=torch.channels_last)[1, 0],
    ]


@WHEN
@pytest.mark.parametrize("dtype", REDUCED, ids=dtypes.short)
def test_all_reduce_sum(group: Group, dtype: torch.dtype, is_async: bool) -> None:
    tensor = of_rank(group.rank, dtype)
    finish(dist.all_reduce(tensor, group=group.handle, async_op=is_async))
    expected = sum(range(1, group.size + 1)) if dtype != torch.bool else True
    assert torch.equal(tensor, torch.full((5,), expected).to(dtype))


def reference(op: str, values: torch.Tensor) -> torch.Tensor:
    """Reduce the rows of `values` in one process."""
    folds = {
        "SUM": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": lambda a, b: a & b,
        "BOR": lambda a, b: a | b,
        "BXOR": lambda a, b: a ^ b,
    }
    result = values[0]
    for row in values[1:]:
        result = folds[op](result, row)
    return result


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_all_reduce_ops_on_integers(group: Group, dtype: torch.dtype, op: str) -> None:
    values = torch.randint(0, 2 if dtype == torch.bool else 5, (group.size, 64), generator=torch.manual_seed(1))
    values = values.to(dtype)
    tensor = values[group.rank].clone()
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group.handle)
    assert torch.equal(tensor, reference(op, values))


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_reduce_ops_on_floats(group: Group, dtype: torch.dtype, op: str) -> None:
    values = torch.randint(-3, 4, (group.size, 64), generator=torch.manual_seed(2)).to(dtype)  # exact in any order
    tensor = values[group.rank].clone()
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group.handle)
    assert torch.equal(tensor, reference(op, values))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int32])
def test_average(group: Group, dtype: torch.dtype) -> None:
    tensor = of_rank(group.rank, dtype)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group.handle)
    mean = (group.size + 1) / 2
    assert torch.equal(tensor, torch.full((5,), int(mean) if dtype == torch.int32 else mean).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_premultiplied_sum(group: Group, dtype: torch.dtype) -> None:
    source = of_rank(group.rank, dtype)
    tensor, block = source.clone(), torch.empty(5, dtype=dtype)
    op = dist._make_nccl_premul_sum(0.5)
    dist.all_reduce(tensor, op, group=group.handle)
    expected = torch.full((5,), 0.5 * group.size * (group.size + 1) / 2).to(dtype)
    assert torch.equal(tensor, expected)
    stacked = source.repeat(group.size)
    dist.reduce_scatter_single(block, stacked, op, group=group.handle)
    assert torch.equal(block, expected)
    assert torch.equal(stacked, source.repeat(group.size))


def test_complex_product(group: Group) -> None:
    tensor = torch.full((3,), 1j, dtype=torch.complex64)
    group.handle.allreduce([tensor], _all_reduce_options(dist.ReduceOp.PRODUCT)).wait()
    assert torch.equal(tensor, torch.full((3,), 1j**group.size, dtype=torch.complex64))


def _all_reduce_options(op: dist.ReduceOp) -> object:
    from mpicomm.backend import c10d

    options = c10d.AllreduceOptions()
    options.reduceOp = op
    return options


@WHEN
def test_all_reduce_of_every_layout(group: Group, is_async: bool) -> None:
    for tensor in layouts((4, 6), fill=1.0 + group.rank):
        strides = tensor.stride()
        finish(dist.all_reduce(tensor, group=group.handle, async_op=is_async))
        assert torch.equal(tensor, torch.full((4, 6), group.size * (group.size + 1) / 2))
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
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float64], ids=dtypes.short)
def test_reduce_to_every_root(group: Group, dtype: torch.dtype, is_async: bool) -> None:
    for root in range(group.size):
        tensor = of_rank(group.rank, dtype)
        finish(dist.reduce(tensor, group_dst=root, group=group.handle, async_op=is_async))
        reached = group.size * (group.size + 1) // 2 if group.rank == root else 1 + group.rank
        assert torch.equal(tensor, torch.full((5,), reached).to(dtype))


@WHEN
@pytest.mark.parametrize("dtype", MOVED, ids=dtypes.short)
def test_broadcast_from_every_root(group: Group, dtype: torch.dtype, is_async: bool) -> None:
    for root in range(group.size):
        tensor = of_rank(group.rank, dtype)
        finish(dist.broadcast(tensor, group_src=root, group=group.handle, async_op=is_async))
        assert torch.equal(tensor.view(torch.uint8), of_rank(root, dtype).view(torch.uint8))


def test_broadcast_into_every_layout(group: Group) -> None:
    for tensor in layouts((4, 6), fill=1.0 + group.rank):
        dist.broadcast(tensor, group_src=0, group=group.handle)
        assert torch.equal(tensor, torch.ones(4, 6))


@WHEN
@pytest.mark.parametrize("dtype", MOVED, ids=dtypes.short)
def test_all_gather(group: Group, dtype: torch.dtype, is_async: bool) -> None:
    source = of_rank(group.rank, dtype)
    outputs = [torch.empty_like(source) for _ in range(group.size)]
    finish(dist.all_gather(outputs, source, group=group.handle, async_op=is_async))
    flat = torch.empty(group.size * 5, dtype=dtype)
    finish(dist.all_gather_single(flat, source, group=group.handle, async_op=is_async))
    for rank, output in enumerate(outputs):
        expected = of_rank(rank, dtype).view(torch.uint8)
        assert torch.equal(output.view(torch.uint8), expected)
        assert torch.equal(flat[5 * rank : 5 * rank + 5].view(torch.uint8), expected)
    assert torch.equal(source.view(torch.uint8), of_rank(group.rank, dtype).view(torch.uint8))


@WHEN
def test_all_gather_of_uneven_sizes(group: Group, is_async: bool) -> None:
    source = torch.full((group.rank, 2), float(group.rank))
    outputs = [torch.empty(rank, 2) for rank in range(group.size)]
    finish(dist.all_gather(outputs, source, group=group.handle, async_op=is_async))
    for rank, output in enumerate(outputs):
        assert torch.equal(output, torch.full((rank, 2), float(rank)))


@WHEN
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float32], ids=dtypes.short)
def test_reduce_scatter(group: Group, dtype: torch.dtype, is_async: bool) -> None:
    blocks = [of_rank(group.rank + rank, dtype) for rank in range(group.size)]
    source = torch.cat(blocks)
    mine, also_mine = torch.empty(5, dtype=dtype), torch.empty(5, dtype=dtype)
    finish(dist.reduce_scatter_single(mine, source, group=group.handle, async_op=is_async))
    finish(dist.reduce_scatter(also_mine, blocks, group=group.handle, async_op=is_async))
    expected = sum(1 + rank + group.rank for rank in range(group.size))
    assert torch.equal(mine, torch.full((5,), expected).to(dtype))
    assert torch.equal(also_mine, mine)
    assert torch.equal(source, torch.cat([of_rank(group.rank + rank, dtype) for rank in range(group.size)]))


@WHEN
def test_gather_and_scatter_with_every_root(group: Group, is_async: bool) -> None:
    for root in range(group.size):
        is_root = group.rank == root
        source = of_rank(group.rank, torch.float32)
        gathered = [torch.empty(5) for _ in range(group.size)] if is_root else None
        finish(dist.gather(source, gathered, group_dst=root, group=group.handle, async_op=is_async))
        for rank, each in enumerate(gathered or []):
            assert torch.equal(each, of_rank(rank, torch.float32))
        mine = torch.empty(5)
        finish(dist.scatter(mine, gathered, group_src=root, group=group.handle, async_op=is_async))
        assert torch.equal(mine, source)


@WHEN
def test_coalesced_all_reduce(group: Group, is_async: bool) -> None:
    tensors = [torch.full((3,), 1.0 + group.rank), torch.full((2, 2), 2 * group.rank)]
    with dist._coalescing_manager(group.handle, async_ops=is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group.handle)
    if is_async:
        manager.wait()
    total = sum(range(group.size))
    assert torch.equal(tensors[0], torch.full((3,), float(group.size + total)))
    assert torch.equal(tensors[1], torch.full((2, 2), 2 * total))


def test_the_input_may_be_a_part_of_the_output(group: Group) -> None:
    """FSDP gathers in place; MPI forbids it unless it is told so."""
    gathered = torch.zeros(3 * group.size)
    mine = gathered[3 * group.rank : 3 * group.rank + 3]
    mine.fill_(group.rank)
    dist.all_gather_single(gathered, mine, group=group.handle)
    assert torch.equal(gathered, torch.arange(group.size).repeat_interleave(3).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtypes.short)
def test_the_output_may_be_a_part_of_the_input(group: Group, dtype: torch.dtype) -> None:
    source = torch.arange(4 * group.size).to(dtype)
    block = source[4 * group.rank : 4 * group.rank + 4]
    dist.reduce_scatter_single(block, source, group=group.handle)
    assert torch.equal(block, (group.size * torch.arange(4 * group.rank, 4 * group.rank + 4)).to(dtype))


def test_the_default_device_is_the_users_affair(group: Group) -> None:
    """Calls from C++, as DDP's, run with it; the host memory that MPI wants must not follow it."""
    tensor = torch.ones(4, 2).t()
    torch.set_default_device("meta")
    try:
        group.handle.allreduce([tensor]).wait()
    finally:
        torch.set_default_device(None)
    assert torch.equal(tensor, torch.full((2, 4), float(group.size)))


def test_a_tensor_that_a_functional_collective_still_fills(group: Group) -> None:
    from torch.distributed._functional_collectives import all_reduce

    pending = all_reduce(torch.ones(3), "sum", group.handle)
    result = torch.empty(3)
    dist.reduce_scatter(result, [pending] * group.size, group=group.handle)
    assert torch.equal(result, torch.full((3,), float(group.size**2)))


def test_barrier_waits_for_the_last(group: Group, world: object) -> None:
    import time

    last = group.size - 1
    arrived = torch.zeros(1, dtype=torch.float64)
    if group.rank == last:
        time.sleep(0.2)
        arrived.fill_(time.monotonic())
    dist.barrier(group=group.handle)
    left = time.monotonic()
    dist.broadcast(arrived, group_src=last, group=group.handle)
    assert left >= arrived.item()  # the ranks share a host, and with it the clock


def test_objects(group: Group) -> None:
    mine = {"rank": group.rank, "list": list(range(group.rank)), "text": "x" * 1000 * group.rank}
    everyone: list[dict | None] = [None] * group.size
    dist.all_gather_object(everyone, mine, group=group.handle)
    assert [each and each["rank"] for each in everyone] == list(range(group.size))
    assert [each and len(each["text"]) for each in everyone] == [1000 * rank for rank in range(group.size)]
    for root in range(group.size):
        sent = [mine, root] if group.rank == root else [None, None]
        dist.broadcast_object_list(sent, group_src=root, group=group.handle)
        assert sent[0]["rank"] == sent[1] == root
        gathered = [None] * group.size if group.rank == root else None
        dist.gather_object(mine, gathered, group_dst=root, group=group.handle)
        received: list[object] = [None]
        dist.scatter_object_list(received, gathered, group_src=root, group=group.handle)
        assert received[0] == mine


def test_the_autograd_flags_of_parameters_are_left_alone(group: Group) -> None:
    parameter = torch.nn.Parameter(torch.full((4,), 1.0 + group.rank))
    transposed = torch.nn.Parameter(torch.full((2, 3), 1.0 + group.rank).t())
    for each in (parameter, transposed):
        dist.broadcast(each, group_src=0, group=group.handle)
        assert each.requires_grad
        assert each.is_leaf
        assert torch.equal(each.detach(), torch.ones_like(each))
