"""Programs that are legal on Gloo give the same results on this backend."""

from __future__ import annotations

import concurrent.futures
import functools
import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.programs import drawn
from tests.programs.sets import GLOO, OURS, GroupSet, Program, make_set
from tests.programs.written import PROGRAMS
from tests.worlds import Group

pytestmark = pytest.mark.mpi(min_size=2)

SEED, DRAWN = 20, 8
OPERATIONS = 50  # on each thread


@pytest.fixture(scope="session")
def sets(groups: dict[str, Group]) -> list[GroupSet]:
    return [make_set(backend) for backend in (GLOO, OURS)]


def assert_equal_results(sets: list[GroupSet], program: Program) -> None:
    expected, found = (program(dist.get_rank(), dist.get_world_size(), groups) for groups in sets)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_same_as_on_gloo(sets: list[GroupSet], name: str) -> None:
    assert_equal_results(sets, PROGRAMS[name])


@pytest.mark.parametrize("number", range(DRAWN))
def test_a_drawn_program_gives_the_same_as_on_gloo(sets: list[GroupSet], number: int) -> None:
    assert_equal_results(sets, functools.partial(drawn.run, f"{SEED}-{number}"))


def test_four_threads_on_four_groups(sets: list[GroupSet]) -> None:
    """Each thread has its own group and, on each rank, its own delays; it has several operations in progress."""

    def load(kind: str, group: Group) -> None:
        same, own, pending = random.Random(kind), random.Random(f"{kind}-{group.rank}"), []
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        for number in range(OPERATIONS):
            time.sleep(0.002 * own.random() * (own.random() < 0.05))
            tensor = torch.full((same.choice((1, 100, 5000)),), float(number + group.rank))
            call, total = same.choice(("all_reduce", "maximum", "broadcast", "ring")), sum(range(group.size))
            if call == "all_reduce":
                works, expected = (
                    [dist.all_reduce(tensor, group=group.handle, async_op=True)],
                    total + group.size * number,
                )
            elif call == "maximum":
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group.handle)
                works, expected = [], number + group.size - 1
            elif call == "broadcast" or group.size == 1:
                works, expected = [dist.broadcast(tensor, group_src=0, group=group.handle, async_op=True)], number
            else:
                works = [dist.isend(tensor.clone(), group_dst=after, group=group.handle)]
                works.append(dist.irecv(tensor, group_src=before, group=group.handle))
                expected = number + before
            pending.append((works, tensor, expected))
            while len(pending) > (8 * own.random() if number < OPERATIONS - 1 else 0):
                works, tensor, expected = pending.pop(0)
                for work in works:
                    work.wait()
                assert torch.equal(tensor, torch.full_like(tensor, expected)), f"{call} #{number} on {kind}"

    loads = [(kind, group) for kind, group in sets[1].named.items() if kind != "parity"]
    with concurrent.futures.ThreadPoolExecutor(len(loads)) as pool:
        list(pool.map(load, *zip(*loads, strict=True)))
    dist.barrier()
