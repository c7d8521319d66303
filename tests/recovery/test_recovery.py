"""Jobs whose ranks die: the others continue, or the job ends with a report."""

from __future__ import annotations

import sys

import pytest

from mpicomm import mpi
from mpicomm.job.recovery import next_ranks
from tests import accelerator
from tests.launching import ROOT, Outcome, run_command, run_ranks

RUN = [sys.executable, "-m", "mpicomm", "run"]

# Every program begins with this.
START = """
import os, pickle, signal, sys, threading, time
import torch.distributed as dist
import mpicomm
from mpicomm import agreement
from mpicomm.job import recovery, session, session_setup
from mpicomm.watchdog import rank_failures

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def recovered(world):
    try:
        mpicomm.barrier()
    except mpicomm.RankFailedError:
        world = mpicomm.recover()
    return world

def continues(world):
    print(f"rank {world.rank} of {world.size} continues", flush=True)

"""

TOO_FEW = """
world = mpicomm.bootstrap(on_failure="recover", min_ranks=3)
if world.rank == 2:
    os._exit(0)  # the others cannot know that it means success
try:
    mpicomm.barrier()
except mpicomm.RankFailedError as error:
    assert error.reason == "it called os._exit(0)", error.reason
    mpicomm.recover()
print("continued")
"""

AT_THE_END = """
world = mpicomm.bootstrap(on_failure="recover")
mpicomm.barrier()
if world.rank == 0:  # the others wait for it at the end of their programs
    threading.Timer(1.0, die).start()
    threading.Event().wait()
print(f"rank {world.rank} has finished")
"""

AT_THE_START = """
failures = agreement.failures

def die_on_rank_1(*arguments):
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        die()
    return failures(*arguments)

agreement.failures = die_on_rank_1  # which the start of the watchdogs calls
world = mpicomm.bootstrap(on_failure="recover")
mpicomm.barrier()
print(f"rank {world.rank} of {world.size} has started, {world.recoveries} recovery")
"""

# Rank 1 dies while the vendor's backend of the others waits for it on the device, until the group is aborted.
VENDOR = f"""
sys.path.insert(0, {str(ROOT)!r})
import torch
from tests import accelerator
from tests.accelerator import recording
from mpicomm.training import resumable_run

os.environ["EMULATED_DEVICES"] = "3"
accelerator.register()
recording.register(accelerator.NAME)
world = mpicomm.bootstrap("cpu:mpi,emulated:recording", on_failure="recover")
part = dist.new_group()
tensor = torch.ones(4, device=world.device)
dist.all_reduce(tensor, group=part)
abort, reduce, is_aborted = recording.Recording.abort, recording.Recording._reduce, threading.Event()

def noted_abort(backend):
    is_aborted.set()
    abort(backend)

recording.Recording.abort = noted_abort
if world.rank == 1:
    threading.Timer(0.5, die).start()
    threading.Event().wait()
recording.Recording._reduce = lambda *_: is_aborted.wait()
dist.all_reduce(tensor, group=part)
tensor.cpu()
recording.Recording._reduce = reduce
peer, number = 2 - world.rank, len(recording.backends[-1].calls)
messages = [dist.P2POp(dist.isend, tensor, peer, part), dist.P2POp(dist.irecv, torch.empty_like(tensor), peer, part)]
for call in (lambda: dist.all_reduce(tensor, group=part), lambda: dist.batch_isend_irecv(messages)):
    try:
        call()
    except mpicomm.RankFailedError as error:
        print(error, flush=True)
    assert "allreduce" not in [call.method for call in recording.backends[-1].calls[number:]]
world = recovered(world)
calls = [{{call.method for call in backend.calls}} for backend in recording.backends]
assert [methods & {{"abort", "shutdown"}} for methods in calls] == [{{"abort"}}, {{"abort"}}, set()], calls
tensor = torch.ones(4, device=world.device)
dist.all_reduce(tensor)
print(tensor.tolist(), flush=True)

# The ranks vote for a step of the trainer when the device has reduced the gradients.
are_idle, vote = [], resumable_run.ResumableRun.start_vote

def noted_vote(run, **arguments):
    are_idle.append(torch.accelerator.current_stream().query())
    vote(run, **arguments)

resumable_run.ResumableRun.start_vote = noted_vote
recording.backends[-1].delay_seconds = 0.2
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = torch.nn.MSELoss()
trainer = mpicomm.Trainer(model, optimizer, loss, on_failure="recover", on_nonfinite="skip")
trainer.fit(torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), 1)
print(f"idle before each vote: {{set(are_idle)}}", flush=True)
"""

# Rank 2 dies at the end of a call of the trainer, which rank 0 notices and rank 1, whose call is complete, does not.
AT_THE_END_OF_A_CALL = """
import torch

def call():
    dist.barrier()
    if session.recoveries() == 0:
        if dist.get_rank() == 2:
            die()
        if dist.get_rank() == 0:
            dist.barrier()
    return session.recoveries()

mpicomm.bootstrap(on_failure="recover")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = mpicomm.Trainer(model, optimizer, torch.nn.MSELoss(), on_failure="recover")
print(f"the call returned in world {trainer._run_call(call)}", flush=True)
"""

INTERRUPTED = """
make_group = session_setup._make_group

def interrupted(opened):
    # in the first attempt to recover rank 2 dies, and of the others only rank 1 begins to create the default group
    session_setup._make_group = make_group
    if rank == 2:
        die()
    if rank == 0:
        opened.failures.has_any.wait()
        raise opened.failures.error()
    make_group(opened)

world = mpicomm.bootstrap(on_failure="recover")
rank = world.rank
session_setup._make_group = interrupted
if rank == 3:
    die()
world = recovered(world)
dist.barrier(dist.new_group([0, 1]))
continues(world)
"""

INCOMPLETE = """
order = recovery._order

def incomplete(*args, **options):
    # in the first attempt rank 1 gets an incomplete result, because rank 2 dies, or for another reason
    recovery._order = order
    if rank == 2 and DIES:
        die()
    if rank == 1:
        raise pickle.UnpicklingError("invalid load key")
    return order(*args, **options)

world = mpicomm.bootstrap(on_failure="recover")
rank = world.rank
recovery._order = incomplete
if rank == 3:
    die()
world = recovered(world)
mpicomm.barrier()
continues(world)
"""

BEFORE_FIT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

world = mpicomm.bootstrap(on_failure="recover")
rank = world.rank
torch.manual_seed(0)
model, data = nn.Linear(3, 1), torch.ones(12, 3)
before = model.weight.tolist()
trainer = mpicomm.Trainer(
    model, torch.optim.SGD(model.parameters(), 0.0), nn.functional.mse_loss, strategy="fsdp", on_failure="recover",
    replicate_shards=COPIES, batch_size=2, progress="none",
)
if rank == 1:
    die()
trainer.evaluate(TensorDataset(data, data[:, :1]))
trainer.fit(TensorDataset(data, data[:, :1]), 1)
after = trainer.wrapped.inner.weight.full_tensor().tolist()
print(f"rank {trainer.world.rank} of {trainer.world.size} has its parameters: {after == before}")
"""

SERVING = """
from mpicomm.integrations import serving

world = mpicomm.bootstrap(on_failure="recover")
if world.rank == KILLED:
    die()
try:
    with serving.until_rank_0_leaves(world):
        if world.rank == 0:  # its cluster may need no operation of mpicomm
            rank_failures.current().has_any.wait()
            time.sleep(3)
    if world.rank == 0:
        mpicomm.barrier()
except mpicomm.RankFailedError as error:
    assert error.ranks == (KILLED,), error
    world = mpicomm.recover()
continues(world)
"""

CANNOT_FORM = """
make_group = session_setup._make_group
left = TIMES

def failing(opened):
    global left
    if left and rank == 1:
        left -= 1
        print("an attempt fails", flush=True)
        raise OSError("no port is free")
    make_group(opened)

world = mpicomm.bootstrap(on_failure="recover")
rank = world.rank
session_setup._make_group = failing
if rank == 2:
    die()
world = recovered(world)
mpicomm.barrier()
continues(world)
"""

BARRIER_PENDING = """
world = mpicomm.bootstrap(on_failure="recover")
first = dist.group.WORLD
if world.rank == 2:
    time.sleep(3)
    die()
try:
    mpicomm.barrier(timeout=1)
except (TimeoutError, mpicomm.MpicommError):  # the second one on a rank that learns first that the other one timed out
    rank_failures.current().has_any.wait()
continues(mpicomm.recover())
"""

ONE_STOPS = """
world = mpicomm.bootstrap(on_failure="recover", timeout=10)
if world.rank:
    os.kill(os.getpid(), signal.SIGKILL if world.rank == 1 else signal.SIGSTOP)
continues(recovered(world))
"""

DIFFERENT = """
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])

def start(on_failure, min_ranks, spares):
    os.environ["MPICOMM_SPARES"] = spares
    try:
        mpicomm.bootstrap(on_failure=on_failure, min_ranks=min_ranks)
    except mpicomm.MpicommError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0])

start("abort" if rank == 2 else "recover", 1, "0")
start("recover", 1 + rank // 2, "0")
start("recover", 1, str(rank % 2))
start("recover", 3, "1")
"""
CONTINUE = [f"rank {rank} of 2 continues" for rank in range(2)]


def run(size: int, program: str, *, spares: int = 0) -> Outcome:
    """Run a program on ranks that can recover."""
    options = ["--spares", str(spares)] if spares else ["--fault-tolerant"]
    return run_command([*RUN, "-n", str(size), *options, sys.executable, "-c", START + program])


def check(outcome: Outcome, lines: list[str]) -> None:
    """Check that a job ended with status 0 and that its ranks printed these lines."""
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.splitlines()) == sorted(lines), outcome


def test_ranks_die_and_the_others_continue() -> None:
    outcome = run_command([*RUN, "-n", "5", "--spares", "1", "-m", "tests.recovery.program"])
    assert outcome.status == 0, outcome
    assert outcome.stdout.count("the last rank has finished") == 1
    for number in (1, 2, 3):
        assert f"(recovery {number})" in outcome.stderr, outcome


def test_a_rank_that_has_passed_the_end_of_a_call_recovers_with_the_others() -> None:
    check(run(4, AT_THE_END_OF_A_CALL, spares=1), ["the call returned in world 1"] * 3)


def test_the_job_ends_if_too_few_ranks_are_left() -> None:
    outcome = run(3, TOO_FEW)
    assert outcome.status == 1, outcome
    assert "it called os._exit(0); 2 ranks are left, fewer than min_ranks=3; aborting the job" in outcome.stderr
    assert "continued" not in outcome.stdout


def test_an_incomplete_result_after_a_failure_starts_the_search_for_the_remaining_ranks_again() -> None:
    check(run(4, "DIES = True" + INCOMPLETE), CONTINUE)


@pytest.mark.parametrize("copies", [True, False])
def test_a_sharded_model_whose_rank_fails_before_the_first_step(copies: bool) -> None:
    outcome = run(3, f"COPIES = {copies}{BEFORE_FIT}")
    if copies:
        check(outcome, [f"rank {rank} of 2 has its parameters: True" for rank in range(2)])
    else:
        assert outcome.status not in (0, None), outcome
        assert "Start the job again. Trainer continues from the newest checkpoint" in outcome.stderr, outcome


@pytest.mark.parametrize("killed", [0, 2])
def test_ranks_that_serve_rank_0_recover_with_the_others(killed: int) -> None:
    check(run(3, f"KILLED = {killed}{SERVING}"), CONTINUE)


def test_an_error_that_no_failure_explains_ends_the_job() -> None:
    outcome = run(4, "DIES = False" + INCOMPLETE)
    assert outcome.status not in (0, None), outcome
    assert outcome.stderr.count("UnpicklingError: invalid load key") == 1, outcome


def test_groups_have_equal_names_after_a_recovery_was_interrupted() -> None:
    check(run(4, INTERRUPTED), CONTINUE)


def test_a_rank_with_an_interrupted_barrier_of_the_last_world_reaches_its_end() -> None:
    check(run(3, BARRIER_PENDING), CONTINUE)


def test_an_attempt_to_form_the_new_world_that_fails_is_repeated() -> None:
    check(run(3, "TIMES = 1" + CANNOT_FORM), ["an attempt fails", *CONTINUE])


def test_the_job_ends_if_the_new_world_cannot_be_formed() -> None:
    outcome = run(3, "TIMES = 9" + CANNOT_FORM)
    assert outcome.status == 1, outcome
    assert outcome.stdout.splitlines() == ["an attempt fails"] * 2, outcome
    assert "recover: the new world cannot be formed: rank 1: no port is free" in outcome.stderr, outcome


def test_the_job_ends_if_a_stopped_rank_does_not_recover() -> None:
    outcome = run(3, ONE_STOPS)
    assert outcome.status == 1, outcome
    assert "recover() timed out after 10 s" in outcome.stderr
    assert "continues" not in outcome.stdout


def test_a_rank_that_dies_at_the_end_does_not_fail_the_job() -> None:
    outcome = run(3, AT_THE_END)
    assert outcome.status == 0, outcome
    assert sorted(outcome.stdout.split("\n"))[-2:] == ["rank 1 has finished", "rank 2 has finished"]


@pytest.mark.skipif(bool(accelerator.reason_to_skip()), reason=accelerator.reason_to_skip())
def test_a_vendors_communicators_are_aborted_and_made_anew() -> None:
    outcome = run(3, VENDOR)
    assert outcome.status == 0, outcome
    assert outcome.stdout.count("rank 1 of 3 on") == 4, outcome
    assert outcome.stdout.count("[2.0, 2.0, 2.0, 2.0]") == 2, outcome
    assert outcome.stdout.count("idle before each vote: {True}") == 2, outcome


def test_a_rank_that_dies_during_the_start_is_replaced_and_the_other_spare_waits() -> None:
    outcome = run(4, AT_THE_START, spares=2)
    assert outcome.status == 0, outcome
    started = [f"rank {rank} of 2 has started, 1 recovery" for rank in range(2)]
    assert sorted(outcome.stdout.split("\n"))[-2:] == started, outcome
    assert outcome.stdout.count("has started") == 2, outcome


def test_every_rank_raises_the_error_of_settings_with_which_the_job_cannot_recover() -> None:
    outcome = run(3, DIFFERENT)
    errors = [
        "MpicommError: rank 2: on_failure must be the same on every rank, got 'abort', but 'recover' on rank 0.",
        "MpicommError: rank 2: min_ranks must be the same on every rank, got 2, but 1 on rank 0.",
        "MpicommError: rank 1: MPICOMM_SPARES must be the same on every rank, got 1, but 0 on rank 0.",
        "LaunchError: bootstrap(min_ranks=3) needs 3 ranks and the spares (MPICOMM_SPARES=1), got 3 processes.",
    ]
    expected = [f"rank {rank}: {error}" for rank in range(3) for error in errors]
    assert sorted(outcome.stdout.splitlines()) == sorted(expected), outcome


@pytest.mark.each_mpi
def test_without_ulfm_the_start_fails_with_what_works_instead() -> None:
    outcome = run_ranks(2, 'import mpicomm\nmpicomm.bootstrap(on_failure="recover")')
    assert outcome.status != 0, outcome
    assert outcome.stderr.count('LaunchError: bootstrap(on_failure="recover") needs Open MPI 5') == 1, outcome
    assert "--max-restarts N" in outcome.stderr
    assert "mpicomm run --fault-tolerant" in outcome.stderr


@pytest.mark.each_mpi
def test_the_option_needs_an_mpi_that_tolerates_failures() -> None:
    outcome = run_command([*RUN, "-n", "2", "--fault-tolerant", "--dry-run", "true"])
    if mpi.api().get_vendor()[0] == "Open MPI":
        assert "--with-ft ulfm" in outcome.stdout
    else:
        assert outcome.status == 2, outcome
        assert "--fault-tolerant and --spares need Open MPI 5 with ULFM" in outcome.stderr


@pytest.mark.parametrize(
    ("ranks", "failed", "expected"),
    [
        ([0, 1, 3], [2], [0, 1, 2]),
        ([1, 2, 3, None], [0], [1, 2, 3, 0]),
        ([0, 3, None], [1, 2], [0, 2, 1]),
        ([0, 1, 3, None, None], [2], [0, 1, 3, 2, 4]),
        ([0, 1, None], [], [0, 1, 2]),
        ([None, 2, 0], [1], [1, 2, 0]),
    ],
)
def test_spares_take_the_places_of_failed_ranks(ranks, failed, expected) -> None:
    assert next_ranks(ranks, failed) == expected
