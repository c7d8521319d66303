"""The examples of parallel programs: other numbers of ranks, and claims of their docstrings beyond the output."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import types

import pytest
import torch
import torch.distributed as dist

from mpicomm.examples import head_worker, model_parallel, overlap, spawn
from tests.launching import Outcome, run_alone, run_ranks

# One job runs all of them in sequence, because starting a job takes longer than these examples.
MODULES = (
    "p2p",
    "collectives",
    "ring_all_reduce",
    "overlap",
    "head_worker",
    "model_parallel",
    "pipeline",
    "parameter_server",
)
MAINS = "\n".join(f"from mpicomm.examples import {name}\n{name}.main()" for name in MODULES)

# One job of three ranks checks these claims in sequence; a traceback names the function that fails.
CLAIMS = """
import math, sys, torch, mpicomm
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from mpicomm.examples import char_lm, fsdp, head_worker, ring_all_reduce
world = mpicomm.bootstrap()

def ring():
    for count in (0, 1, 2, 3, 4, 5, 1001):
        for dtype in (torch.float32, torch.int64):
            tensor = torch.arange(count).to(dtype) + world.rank
            expected = tensor.clone()
            dist.all_reduce(expected)
            ring_all_reduce.ring_all_reduce(world, tensor)
            assert torch.equal(tensor, expected), count
    matrix = torch.ones(3, 5)
    ring_all_reduce.ring_all_reduce(world, matrix)
    assert (matrix == world.size).all()

def gathering():
    torch.manual_seed(0)
    text = char_lm.Text("def f(x): return x")
    model = char_lm.Model(len(text.characters))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    fully_shard(model)
    here, whole = fsdp.bytes_held(model)
    assert whole == sum(each.nbytes for each in before.values())
    assert 0 < here < whole
    copy = fsdp.gathered(world, model, text)
    assert (copy is None) == (world.rank != 0)
    if copy is not None:
        after = dict(copy.named_parameters())
        assert all(torch.equal(each, after[name]) for name, each in before.items())

def tasks():
    for numbers in ([12, 0, 97, -5, 1], [], list(range(1, 200))):
        futures = head_worker.hand_out(world, numbers)
        for number, future in zip(numbers, futures):
            if number < 1:
                assert str(future.exception()) == f"{number} has no prime factors"
            else:
                assert math.prod(future.result().factors) == number
        total = torch.tensor(len(futures))
        dist.all_reduce(total)
        assert total == len(numbers)  # rank 0 alone has futures; the world is in order
    def exits(number):
        raise SystemExit(number)
    head_worker.prime_factors = exits
    for future in head_worker.hand_out(world, [7, 8]):
        assert isinstance(future.exception(), SystemExit)

for claim in (ring, gathering, tasks):
    claim()
    sys.stdout.write(f"rank {world.rank}: {claim.__name__} holds\\n")
    sys.stdout.flush()
"""

DYING = """
import os, mpicomm
from mpicomm.examples import head_worker
world = mpicomm.bootstrap()
head_worker.prime_factors = lambda number: os._exit(3) if world.rank == 2 else [number]
head_worker.main()
"""


@functools.cache
def run_all(size: int) -> Outcome:
    return run_ranks(size, ["-c", MAINS, "--tasks", "60"])


@pytest.fixture(scope="module")
def claims() -> Outcome:
    return run_ranks(3, CLAIMS)


def lines(outcome: Outcome, pattern: str) -> int:
    """Return the number of lines that match the pattern."""
    return len(re.findall(f"^{pattern}$", outcome.stdout, re.MULTILINE))


# -- on other numbers of ranks ---------------------------------------------------------------------------------------


@pytest.mark.each_mpi
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_end_with_status_0(size):
    outcome = run_all(size)
    assert outcome.status == 0, outcome
    assert not outcome.stderr, outcome


@pytest.mark.each_mpi
@pytest.mark.parametrize("size", [2, 3])
def test_messages_arrive(size):
    outcome = run_all(size)
    assert lines(outcome, "-- .*, (16 B|8 MiB)") == 7, outcome
    assert lines(outcome, r"rank \d: (had|sent|idle)\b.*") == 7 * size, outcome
    for rank in range(size):
        sender = (rank - 1) % size
        assert lines(outcome, f"rank {rank}: had {rank}, received {sender} from rank {sender}") >= 2, outcome
    sitting_out = 4 if size % 2 else 0
    assert lines(outcome, f"rank {size - 1}: idle, the number of ranks is odd") == sitting_out, outcome


@pytest.mark.each_mpi
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_are_right(size):
    outcome = run_all(size)
    total = size * (size + 1) // 2
    assert lines(outcome, rf"all_reduce +{' . '.join([str(total)] * size)}") == 1, outcome


@pytest.mark.parametrize("size", [2, 3])
def test_the_ring_adds_and_is_timed(size):
    outcome = run_all(size)
    assert lines(outcome, f"{size} ranks, {2 * (size - 1)} steps in the ring") == 1, outcome
    assert lines(outcome, r" *[\d,]+ elements: equal; ring +[\d.]+ ms, all_reduce +[\d.]+ ms") == 3, outcome


@pytest.mark.each_mpi
@pytest.mark.parametrize("size", [2, 3])
def test_overlap_is_measured(size):
    outcome = run_all(size)
    assert lines(outcome, r"(communication|computation|both) +[\d.]+ ms") == 3, outcome
    assert lines(outcome, r"hidden +[\d.]+%") == 1, outcome


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_task_that_fails_loses_no_other(size):
    outcome = run_all(size)
    assert lines(outcome, "task 30 failed: ValueError: 0 has no prime factors") == 1, outcome
    assert lines(outcome, "59 of 60 tasks done: [0-9]+ primes, the last is [0-9]+") == 1, outcome
    busy = re.findall(rf"^workers: {max(1, size - 1)}, busy ([\d.]+)% of the time$", outcome.stdout, re.MULTILINE)
    assert 0 < float(*busy) <= 100, outcome


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_network_in_parts_is_the_network_in_one_piece(size):
    outcome = run_all(size)
    assert lines(outcome, "parameters of all parts equal those of a network trained on one rank") == 1, outcome
    assert lines(outcome, "parameters of all stages equal those of a network trained on one rank") == 1, outcome
    assert lines(outcome, r"step +\d+: loss 0\.\d+") == 10, outcome


def test_the_losses_of_the_parts_do_not_depend_on_their_number():
    losses = [set(re.findall(r"step 50: loss ([\d.]+)", run_all(size).stdout)) for size in (1, 2, 3)]
    assert len(losses[0] & losses[1] & losses[2]) == 1, losses


@pytest.mark.parametrize("size", [2, 3])
def test_every_worker_pushes_and_the_loss_becomes_small(size):
    outcome = run_all(size)
    shares = re.findall(r"^rank (\d) pushed ([\d.]+)% of 600 gradients$", outcome.stdout, re.MULTILINE)
    assert [int(rank) for rank, _ in shares] == list(range(1, size)), outcome
    assert all(float(share) > 0 for _, share in shares), outcome
    assert math.isclose(sum(float(share) for _, share in shares), 100, abs_tol=0.1 * size), outcome
    assert lines(outcome, r"loss 0\.0[\d]+ at the end: good") == 1, outcome


def test_one_rank_reports_invalid_arguments():
    outcome = run_all(1)
    for beginning, name in (
        ("rank 0: ", "p2p"),
        ("", "ring_all_reduce"),
        ("", "overlap"),
        ("", "parameter_server"),
    ):
        expected = (
            f"{beginning}needs 2 ranks or more, got 1; start with `mpirun -n 4 python -m mpicomm.examples.{name}`"
        )
        assert lines(outcome, expected) == 1, outcome


@pytest.mark.parametrize("rank", [0, 6])
def test_too_many_ranks_for_the_layers_are_reported_once(rank, monkeypatch, capsys):
    monkeypatch.setattr("mpicomm.bootstrap", lambda: types.SimpleNamespace(rank=rank, size=7), raising=False)
    model_parallel.main()
    expected = "expected at most 6 ranks, got 7; start with `mpirun -n 6`\n"
    assert capsys.readouterr().out == ("" if rank else expected)


# -- claims of the docstrings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", ["ring", "gathering", "tasks"])
def test_a_claim_holds(claim, claims):
    """The ring reduces tensors of all sizes; fsdp gathers its shards; the results are in the order of the tasks."""
    assert lines(claims, rf"rank \d: {claim} holds") == 3, claims


def test_the_ranks_continue_after_the_claims(claims):
    assert claims.status == 0, claims
    assert not claims.stderr, claims


@pytest.mark.parametrize(("together", "part"), [(10, 1), (12.5, 0.75), (20, 0), (25, 0)])
def test_the_overlapped_part_of_the_communication(together, part):
    assert overlap.hidden(communication=10, computation=10, together=together) == part


def test_the_computation_is_between_the_start_and_the_wait(monkeypatch):
    calls = []
    work = types.SimpleNamespace(wait=lambda: calls.append("wait"))
    monkeypatch.setattr(dist, "all_reduce", lambda _tensor, async_op: calls.append(f"start {async_op}") or work)
    monkeypatch.setattr(overlap, "compute", lambda _matrix, products: calls.append(f"compute {products}"))
    overlap.compute_while_communicating(torch.ones(1), torch.ones(1, 1), 3)
    assert calls == ["start True", "compute 3", "wait"]


@pytest.mark.parametrize(("number", "factors"), [(1, []), (2, [2]), (360, [2, 2, 2, 3, 3, 5]), (10**12 + 39, None)])
def test_prime_factors(number, factors):
    assert head_worker.prime_factors(number) == (factors or [number] * (number > 1))


def test_no_tasks_are_reported(capsys):
    head_worker.report([], [], workers=1, seconds=1.0)
    assert "0 of 0 tasks done: 0 primes, the last is None" in capsys.readouterr().out


def test_a_worker_that_dies_ends_the_job_and_is_named():
    outcome = run_ranks(3, DYING)
    assert outcome.status != 0, outcome
    assert re.search(r"rank 2 of 3 on .* called os\._exit\(3\)", outcome.stderr), outcome


# -- spawn -----------------------------------------------------------------------------------------------------------


def test_spawn_starts_the_requested_number_of_ranks():
    outcome = run_alone(["-m", "mpicomm.examples.spawn", "--processes", "2"])
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.splitlines()) == [f"rank {rank} of 2: cpu, gloo, sum 3" for rank in range(2)]


@pytest.mark.parametrize("variable", spawn.RANKS)
@pytest.mark.parametrize("rank", [0, 3])
def test_spawn_starts_none_under_any_launcher(variable, rank, monkeypatch):
    for name in spawn.RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(rank))
    monkeypatch.setattr("sys.argv", ["spawn"])
    refusal = pytest.raises(SystemExit, match=rf"\({variable} is set\)")
    with refusal if rank == 0 else contextlib.nullcontext():
        spawn.main()
