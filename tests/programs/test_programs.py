"""Programs that are legal on Gloo give the same results on this backend."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.programs import threads
from tests.programs.both import Both
from tests.programs.drawn import DrawnProgram
from tests.programs.written import PROGRAMS
from tests.time_limits import scaled
from tests.worlds import Group

SECONDS = 60.0  # limit of one program, scaled
SEED, DRAWN = 20, 8
OPERATIONS = 50  # on each thread


@pytest.fixture(scope="session")
def both(groups: dict[str, Group]) -> Both:
    return Both(scaled(SECONDS))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_same_as_on_gloo(both: Both, name: str) -> None:
    assert both.differences(name, PROGRAMS[name]) == []


@pytest.mark.parametrize("number", range(DRAWN))
def test_a_drawn_program_gives_the_same_as_on_gloo(both: Both, number: int) -> None:
    assert both.differences(f"program {number} of seed {SEED}", DrawnProgram(SEED, number)) == []


def test_four_threads_on_four_groups(both: Both) -> None:
    loads = threads.run_on(both.ours, OPERATIONS, SEED, both.limit)
    dist.barrier()
    assert [load.error for load in loads if load.error] == []
