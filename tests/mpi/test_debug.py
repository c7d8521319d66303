"""`MPICOMM_DEBUG=1`: mismatched calls raise an error on every rank, before any data is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import mpicomm

pytestmark = pytest.mark.mpi(min_size=2)

Call = Callable[[dist.ProcessGroup], object]


def reducing(*shape: int, dtype: torch.dtype = torch.float32, op: object = dist.ReduceOp.SUM) -> Call:
    return lambda group: dist.all_reduce(torch.ones(shape, dtype=dtype), op, group=group)


def broadcasting(src: int) -> Call:
    return lambda group: dist.broadcast(torch.ones(4), src, group=group)


# The call of rank 0, the call of the other ranks, and the description of each in the error message.
CALLS: dict[str, tuple[Call, Call, str, str]] = {
    "operation": (
        reducing(4),
        broadcasting(0),
        r"all_reduce SUM float32\[4\]",
        r"broadcast float32\[4\] \(root: rank 0 ",
    ),
    "dtype": (reducing(4), reducing(4, dtype=torch.int64), r"float32\[4\]", r"int64\[4\]"),
    "shape": (reducing(2, 3), reducing(6), r"float32\[2, 3\]", r"float32\[6\]"),
    "reduction": (reducing(4, op=dist.ReduceOp.MAX), reducing(4), "all_reduce MAX", "all_reduce SUM"),
    "root": (broadcasting(0), broadcasting(1), "root: rank 0 of the group", "root: rank 1 of the group"),
    "barrier": (lambda group: dist.barrier(group=group), reducing(4), "barrier", "all_reduce"),
}


@pytest.fixture
def group(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    monkeypatch.setenv("MPICOMM_DEBUG", "1")
    group = dist.new_group(list(range(world.size)))
    yield group
    dist.destroy_process_group(group)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("what", list(CALLS))
def test_calls_that_do_not_match(world: mpicomm.World, group: dist.ProcessGroup, what: str, is_async: bool) -> None:
    first, others, shown_first, shown_others = CALLS[what]
    call = first if world.rank == 0 else others
    work = dist.all_reduce(torch.ones(100_000), group=group, async_op=True) if is_async else None  # runs before it
    with pytest.raises(mpicomm.MismatchError) as caught:
        call(group)
    if work is not None:
        work.wait()
    assert caught.value.is_on_all_ranks
    caught.match(rf"rank 0: #\d+ .*{shown_first}.*, at test_debug\.py:\d+")
    caught.match(rf"rank.* 1.*: #\d+ .*{shown_others}.*, at test_debug\.py:\d+")
    total = torch.tensor(1.0)
    dist.all_reduce(total, group=group)
    assert total.item() == world.size, "nothing was sent, so the group goes on"


def test_a_call_too_many_on_one_rank(world: mpicomm.World, group: dist.ProcessGroup) -> None:
    """The call numbers reveal the mismatch, even if the calls are otherwise equal."""
    record = group._executor.record  # type: ignore[attr-defined]
    record.sequence += world.rank == 0
    with pytest.raises(mpicomm.MismatchError) as caught:
        dist.all_reduce(torch.ones(4), group=group)
    caught.match(rf"rank 0: #{record.sequence if world.rank == 0 else record.sequence + 1} all_reduce")
    caught.match(rf"rank.* 1.*: #{record.sequence - 1 if world.rank == 0 else record.sequence} all_reduce")


def test_a_call_that_is_refused_has_no_number(world: mpicomm.World, group: dist.ProcessGroup) -> None:
    if world.rank == 0:
        with pytest.raises(ValueError, match="is not defined for float32"):
            dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND, group=group)
    dist.all_reduce(torch.ones(4), group=group)


@pytest.mark.mpi(min_size=3)
def test_a_mismatch_names_the_ranks_of_the_job(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOMM_DEBUG", "1")
    last = [world.size - 2, world.size - 1]
    part = dist.new_group(last)
    if world.rank in last:
        with pytest.raises(mpicomm.MismatchError) as caught:
            dist.all_reduce(torch.ones(1 + world.rank), group=part)
        for rank in last:
            caught.match(rf"rank {rank}: .*float32\[{1 + rank}\]")
        dist.destroy_process_group(part)
