"""A Dask cluster of our ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.launching import Outcome, run_ranks

PACKAGES = ("distributed", "cryptography")
EXAMPLES = [
    ("mpirun -n 4 python -m mpicomm.examples.integrations.dask_tasks", "1, 2, 3"),
    ("torchrun --nproc-per-node 2 examples/integrations/dask_tasks.py", "1"),
]

# Clusters in sequence, without and with encryption, for which rank 0 may have the certificate. A failed task raises on
# rank 0; afterwards the ranks continue together.
SEQUENCE = """
import os, distributed, mpicomm
from mpicomm.integrations.dask import cluster
world = mpicomm.bootstrap()
certificate = distributed.Security.temporary() if world.rank == 0 else None
for threads, security in ((1, None), (2, True), (1, certificate)):
    with cluster(world, threads=threads, security=security) as client:
        assert (client is None) == (world.rank != 0)
        if client is not None:
            assert client.nthreads() and set(client.nthreads().values()) == {threads}
            addresses = [client.scheduler.address, *client.nthreads()]
            assert all(each.startswith("tls://" if security else "tcp://") for each in addresses), addresses
            assert client.security.require_encryption == bool(security)
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

# Each is an error on every rank, or on rank 0 alone, and the job continues.
ERRORS = """
import distributed, mpicomm
from mpicomm.integrations.dask import cluster
from distributed.comm.tcp import TCPConnector
world = mpicomm.bootstrap(timeout=10)

async def unreachable(*args, **kwargs):
    raise OSError("unreachable")

def attempt(kind, **arguments):
    try:
        with cluster(**{"world": world, **arguments}):
            pass
        raise AssertionError
    except (mpicomm.MpicommError, TypeError, ValueError) as error:
        assert type(error).__name__ == kind, error
        print(f"{world.rank}: {str(error).splitlines()[0]}\\n", end="", flush=True)
    mpicomm.barrier()

attempt("TypeError", world=None)
attempt("TypeError", thread=2)
attempt("TypeError", name="worker")
attempt("ValueError", threads=0)
attempt("TypeError", security="tls")
attempt("MpicommError", memory_limit="many")
connect = TCPConnector.connect
if world.rank == 1:
    TCPConnector.connect = unreachable
attempt("MpicommError")
TCPConnector.connect = connect
distributed.Security.temporary = None
attempt("MpicommError", security=True)
"""
UNKNOWN = "expected threads, security or an argument of distributed.Worker."
START = "rank {} on HOST: cannot start the cluster:"
EXPECTED_ERRORS = [
    "world must be a World, from bootstrap(), got None (NoneType).",
    f"cluster() got an unknown argument 'thread', {UNKNOWN}",
    f"cluster() got an unknown argument 'name', {UNKNOWN}",
    "threads must be a positive integer, got 0.",
    "security must be True, a distributed.Security or None, got 'tls' (str).",
    f"{START.format(1)} ValueError: Could not interpret 'many' as a byte unit; caused by KeyError: 'many'",
    f"{START.format(1)} TimeoutError: Worker start timed out after 8s.",
    f"{START.format(0)} TypeError: 'NoneType' object is not callable",
]

# By default, a Worker of Dask waits 30 s for the task.
LEAVES = """
import time, mpicomm
from mpicomm.integrations.dask import cluster
world = mpicomm.bootstrap()
with cluster(world) as client:
    if client is not None:
        started = client.submit(time.sleep, 600, pure=False)
        while not any(client.processing().values()):
            time.sleep(0.1)
    leaves = time.monotonic()
assert time.monotonic() - leaves < 25
if world.rank == 0:
    print("passed")
"""


@pytest.mark.parametrize(("command", "workers"), EXAMPLES)
def test_the_example_computes_pi_on_the_other_ranks(run: Callable[..., Outcome], command: str, workers: str) -> None:
    outcome = run(command, finds=lambda outcome: {"pi": float(re.search(r"about ([\d.]+)", outcome.stdout)[1])})
    assert outcome.stdout.splitlines()[0] == f"workers: ranks {workers}", outcome
    assert re.search(r"pi is about 3\.14\d, from 64 tasks", outcome.stdout), outcome
    assert "distributed" not in outcome.stderr, outcome  # neither log messages nor errors of the library


@pytest.mark.parametrize(
    ("ranks", "program"), [(1, SEQUENCE), (3, SEQUENCE), (2, LEAVES)], ids=["one rank", "in sequence", "running task"]
)
def test_clusters(ranks: int, program: str) -> None:
    outcome = run_ranks(ranks, program)
    assert outcome.status == 0, outcome
    assert outcome.stdout == "passed\n", outcome


def test_an_exception_on_rank_0_ends_the_job() -> None:
    outcome = run_ranks(3, RAISES)
    assert outcome.status != 0, outcome
    assert outcome.stderr.count("\nZeroDivisionError: ") == 1, outcome
    assert outcome.stderr.count("Traceback (most recent call last)") == 1, outcome
    assert "TCPStore" not in outcome.stderr, outcome


def test_errors_on_every_rank() -> None:
    outcome = run_ranks(3, ERRORS)
    assert outcome.status == 0, outcome
    lines = [re.sub(r"(rank \d+ on) [^:]+:", r"\1 HOST:", line) for line in outcome.stdout.splitlines()]
    for rank in range(3):
        assert [line[3:] for line in lines if line.startswith(f"{rank}: ")] == EXPECTED_ERRORS, outcome
