"""A Ray cluster on our ranks' nodes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integrations.digits import accuracy
from tests.launching import Outcome, run_ranks

PACKAGES = ("ray",)
COMMANDS = [
    "mpirun -n 2 python -m mpicomm.examples.integrations.ray_train",
    "torchrun --nproc-per-node 2 examples/integrations/ray_train.py",
]

# The World of two nodes with two ranks each, on one machine: rank 2 starts a second raylet.
TWO_NODES = """
import dataclasses, os, ray, mpicomm
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from mpicomm.integrations.ray import cluster
world = mpicomm.bootstrap()
nodes = dict(local_rank=world.rank % 2, local_size=2, node_rank=world.rank // 2, num_nodes=2, nodes=(0, 0, 1, 1))
with cluster(dataclasses.replace(world, **nodes), options=["--object-store-memory=100000000"]) as address:
    if world.rank == 0:
        @ray.remote
        def facts():
            return ray.get_runtime_context().get_node_id(), os.environ.get("RANK"), os.environ["RAY_ADDRESS"]

        alive = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        assert len(alive) == 2
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in alive]
        found = ray.get([facts.options(scheduling_strategy=place).remote() for place in places])
        assert [node for node, _, _ in found] == alive
        assert {rank for _, rank, _ in found} == {None}  # tasks do not get the variables of our ranks
        assert {each for _, _, each in found} == {address}
assert mpicomm.all_reduce(1) == world.size
if world.rank == 0:
    print("passed")
"""

# Rank 1 dies while the cluster runs.
KILLED = """
import os, ray, signal, time, mpicomm
from mpicomm.integrations.ray import cluster
world = mpicomm.bootstrap()
with cluster(world):
    if world.rank == 0:
        ray.get([ray.remote(lambda: 0).remote() for _ in range(2)])  # there are workers
    mpicomm.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""

RAISES = """
import ray, mpicomm
from mpicomm.integrations.ray import cluster
world = mpicomm.bootstrap()
with cluster(world):
    if world.rank == 0:
        ray.get(ray.remote(lambda: 0).remote())
        raise KeyError("left")
"""

# Each is an error on every rank, and the job continues.
ERRORS = """
import ray, mpicomm
from mpicomm.integrations.ray import cluster
world = mpicomm.bootstrap()

def attempt(kind, **arguments):
    try:
        with cluster(**{"world": world, **arguments}):
            pass
        raise AssertionError
    except (mpicomm.MpicommError, TypeError) as error:
        assert type(error).__name__ == kind, error
        first, *_, last = str(error).splitlines()
        print(f"{world.rank}: {first} {last}\\n", end="", flush=True)
    mpicomm.barrier()

attempt("TypeError", world=None)
attempt("TypeError", options="--num-gpus=1")
attempt("TypeError", options=["--num-gpus", 1])
attempt("MpicommError", options=["--num-gpu=1"])
ray.is_initialized = lambda: world.rank == 1
attempt("MpicommError")
"""
PASS_LIST = 'Pass a list of options, such as ["--num-gpus=4"].'
RUN_IT = "Correct the options, or run `ray start --head --num-gpu=1` on that host to see the whole output."
SHUT_DOWN = "Remove the call of ray.init(), or call ray.shutdown() before cluster()."
EXPECTED_ERRORS = [
    "world must be a World, from bootstrap(), got None (NoneType). Pass world, from world = mpicomm.bootstrap().",
    f"options must be a sequence of str, got '--num-gpus=1' (str). {PASS_LIST}",
    f"options must be a sequence of str, got ['--num-gpus', 1] (list). {PASS_LIST}",
    f"rank 0 on HOST: `ray start` with options=['--num-gpu=1'] exited with status 2; its last lines: {RUN_IT}",
    f"rank 1 on HOST: Ray is connected to a cluster already, but cluster() starts one of its own. {SHUT_DOWN}",
]


@pytest.fixture(autouse=True)
def no_files_are_left() -> Iterator[None]:
    before = files()
    yield
    assert files() - before == set()


def files() -> set[Path]:
    return {path for path in Path(tempfile.gettempdir()).glob("ray-*") if path.is_dir()}


@pytest.mark.parametrize("command", COMMANDS)
def test_ray_train_learns_the_digits(run: Callable[..., Outcome], command: str) -> None:
    assert accuracy(run(command, finds=accuracy))["accuracy, %"] > 90


def test_each_node_has_a_raylet() -> None:
    outcome = run_ranks(4, TWO_NODES)
    assert outcome.status == 0, outcome
    assert "passed" in outcome.stdout.splitlines(), outcome


def test_ray_ends_with_a_killed_job() -> None:
    outcome = run_ranks(2, KILLED)  # fails if it leaves processes behind
    assert outcome.status != 0, outcome
    assert "Traceback" not in outcome.stderr, outcome
    assert "[mpicomm] rank 1 of 2" in outcome.stderr, outcome


def test_an_exception_on_rank_0_ends_the_job() -> None:
    outcome = run_ranks(2, RAISES)
    assert outcome.status != 0, outcome
    assert outcome.stderr.count("\nKeyError: 'left'") == 1, outcome
    assert outcome.stderr.count("Traceback (most recent call last)") == 1, outcome
    assert "TCPStore" not in outcome.stderr, outcome


def test_errors_on_every_rank() -> None:
    outcome = run_ranks(2, ERRORS)
    assert outcome.status == 0, outcome
    lines = [re.sub(r"(rank \d+ on) [^:]+:", r"\1 HOST:", line) for line in outcome.stdout.splitlines()]
    for rank in range(2):
        assert [line[3:] for line in lines if line.startswith(f"{rank}: ")] == EXPECTED_ERRORS, outcome
