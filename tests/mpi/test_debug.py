"""`MPICOMM_DEBUG=1`: mismatched calls raise an error on every rank, before any data is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import mpicomm

pytestmark = pytest.mark.mpi(min_size=2)

Calls = dict[str, tuple[Callable[[dist.ProcessGroup], object], Callable[[dist.ProcessGroup], object], str, str]]

# The call of rank 0, the call of the other ranks, and the description of each in the error message.
CALLS: Calls = {
    "operation": (
        lambda group: dist.all_reduce(torch.ones(4), group=group),
        lambda group: dist.broadcast(torch.ones(4), 0, group=group),
        r"all_reduce SUM float32\[4\]",
        r"broadcast float32\[4\] \(root: rank 0 of the group\)",
    ),
    "dtype": (
        lambda group: dist.all_reduce(torch.ones(4), group=group),
        lambda group: dist.all_reduce(torch.ones(4, dtype=torch.int64), group=group),
        r"all_reduce SUM float32\[4\]",
        r"all_reduce SUM int64\[4\]",
    ),
    "shape": (
        lambda group: dist.all_reduce(torch.ones(2, 3), group=group),
        lambda group: dist.all_reduce(torch.ones(6), group=group),
        r"all_reduce SUM float32\[2, 3\]",
        r"all_reduce SUM float32\[6\]",
    ),
    "reduction": (
        lambda group: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX, group=group),
        lambda group: dist.all_reduce(torch.ones(4), group=group),
        r"all_reduce MAX",
        r"all_reduce SUM",
    ),
    "root": (
        lambda group: dist.broadcast(torch.ones(4), 0, group=group),
        lambda group: dist.broadcast(torch.ones(4), 1, group=group),
        r"root: rank 0",
        r"root: rank 1",
    ),
    "barrier": (
        lambda group: dist.barrier(group=group),
        lambda group: dist.all_reduce(torch.ones(4), group=group),
        r"barrier",
        r"all_reduce",
    ),
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
    start = _asynchronously if is_async else _synchronously
    with pytest.raises(mpicomm.MismatchError) as caught:
        start(call, group)
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


def _synchronously(call: Callable[[dist.ProcessGroup], object], group: dist.ProcessGroup) -> None:
    call(group)


def _asynchronously(call: Callable[[dist.ProcessGroup], object], group: dist.ProcessGroup) -> None:
    """Make a call whose operation runs on the worker of the group, after another operation."""
    work = dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
    try:
        call(group)
    finally:
        work.wait()
