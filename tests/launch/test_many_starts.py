"""Many jobs start concurrently, without port conflicts and without connections between jobs.

`python -m tests.launch.test_many_starts 100` starts a hundred jobs, four at a time.
"""

from __future__ import annotations

import collections
import concurrent.futures
import sys

from tests.launching import run_ranks

SIZE = 2
CODE = """
import sys
import torch
import torch.distributed as dist
import mpicomm
world = mpicomm.bootstrap()
tensor = torch.tensor([world.rank + 1])
dist.all_reduce(tensor)
sys.stdout.write(f"{world.rank} of {world.size}: {tensor.item()}\\n")
"""


def start(_: int = 0) -> str:
    """Run one job, and return "well" or a description of its failure."""
    try:
        outcome = run_ranks(SIZE, CODE)
    except AssertionError as error:
        return str(error)
    total = SIZE * (SIZE + 1) // 2
    expected = [f"{rank} of {SIZE}: {total}" for rank in range(SIZE)]
    is_well = outcome.status == 0 and sorted(outcome.stdout.split("\n")[:-1]) == expected and not outcome.stderr
    return "well" if is_well else str(outcome)


def start_many(starts: int, at_a_time: int) -> collections.Counter[str]:
    """Run jobs concurrently, and count their results."""
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
        return collections.Counter(pool.map(start, range(starts)))


def test_jobs_start_side_by_side() -> None:
    assert start_many(4, at_a_time=2) == {"well": 4}


if __name__ == "__main__":
    ends = start_many(int(sys.argv[1]), at_a_time=4)
    for end, times in ends.most_common():
        sys.stdout.write(f"{times} times: {end}\n")
    sys.exit(list(ends) != ["well"])
