"""A Dask cluster of our ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.launching import Outcome, run_ranks

PACKAGES = ("distributed",)
EXAMPLES = [
    ("mpirun -n 4 python -m mpicomm.examples.integrations.dask_tasks", "1, 2, 3"),
    ("torchrun --nproc-per-node 2 examples/integrations/dask_tasks.py", "1"),
]

# Two clusters in sequence. A failed task raises on rank 0; afterwards the ranks continue together.
TWICE = """
import os, mpicomm
from mpicomm.integrations.dask import cluster
world = mpicomm.bootstrap()
for threads in (1, 2):
    with cluster(world, threads=threads) as client:
        assert (client is None) == (world.rank != 0)
        if client is not None:
            assert client.nthreads() and set(client.nthreads().values()) == {threads}
            ranks = client.run(os.getenv, "RANK")
            assert sorted(map(int, ranks.values())) == list(range(1, world.size)) or world.size == 1
            assert client.submit(pow, world.size, 2).result() == world.size**2
            assert isinstance(client.submit(divmod, 1, 0).exception(), ZeroDivisionError)
    assert mpicomm.all_reduce(world.rank + 1) == world.size * (world.size + 1) // 2
if world.rank == 0:
    print("passed")
"""

RAISES = """
import mpicomm
from mpicomm.integrations.dask import cluster
world = mpicomm.bootstrap()
with cluster(world) as client:
    if client is not None:
        client.submit(divmod, 1, 0).result()
"""


@pytest.mark.parametrize(("command", "workers"), EXAMPLES)
def test_the_example_computes_pi_on_the_other_ranks(run: Callable[..., Outcome], command: str, workers: str) -> None:
    outcome = run(command, finds=lambda outcome: {"pi": float(re.search(r"about ([\d.]+)", outcome.stdout)[1])})
    assert outcome.stdout.splitlines()[0] == f"workers: ranks {workers}", outcome
    assert re.search(r"pi is about 3\.14\d, from 64 tasks", outcome.stdout), outcome
    assert "distributed" not in outcome.stderr, outcome  # neither log messages nor errors of the library


@pytest.mark.parametrize("ranks", [1, 3])
def test_clusters_in_sequence(ranks: int) -> None:
    outcome = run_ranks(ranks, TWICE)
    assert outcome.status == 0, outcome
    assert outcome.stdout == "passed\n", outcome


def test_an_exception_on_rank_0_ends_the_job() -> None:
    outcome = run_ranks(2, RAISES)
    assert outcome.status != 0, outcome
    assert "ZeroDivisionError" in outcome.stderr, outcome
