"""Random arguments of `bootstrap()` give a world or a clear error, never a hang or a crash."""

from __future__ import annotations

from tests.launching import run_alone, run_ranks

PROGRAM = """
import datetime, sys
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpicomm

NAMES = ["auto", "mpi", "gloo", "nccl", "cpu:mpi,cuda:nccl", "cpu:gloo,cuda:nccl", "mpicomm", "MPI", "", "cpu:mpi"]
BACKENDS = st.one_of(st.sampled_from(NAMES), st.none(), st.text(max_size=4), st.integers())
TIMEOUTS = st.one_of(
    st.none(), st.floats(), st.integers(), st.text(max_size=3), st.booleans(),
    st.timedeltas(datetime.timedelta(-5), datetime.timedelta(5)),
)
DEVICES = st.one_of(st.none(), st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:99", "meta", "gpu"]), st.integers(-2, 3),
                    st.text(max_size=3), st.floats())
COMMS = st.one_of(st.none(), st.integers(), st.text(max_size=3))
EXPECTED = (mpicomm.MpicommError, ValueError, TypeError, OverflowError, NotImplementedError)
outcomes = {"world": 0, "refused": 0}

def attempt(**arguments):
    try:
        world = mpicomm.bootstrap(abort_on_error=False, **arguments)
    except EXPECTED as error:
        assert str(error), "an error without a message"
        outcomes["refused"] += 1
    else:
        assert world.size == SIZE
        if dist.is_initialized():
            dist.barrier()
        mpicomm.shutdown()
        outcomes["world"] += 1
"""

DRAWN = """
SIZE = 1
quiet = list(HealthCheck)

@settings(max_examples=150, deadline=None, database=None, suppress_health_check=quiet)
@given(backend=BACKENDS, timeout=TIMEOUTS, device=DEVICES, comm=COMMS)
def draw(**arguments):
    attempt(**arguments)

@settings(max_examples=15, deadline=None, database=None, suppress_health_check=quiet)
@given(backend=st.sampled_from(["auto", "mpi", None]), timeout=st.sampled_from([None, 30, 5.5]))
def draw_good(**arguments):
    attempt(**arguments)

draw()
draw_good()
assert outcomes["world"] >= 9 and outcomes["refused"] > 15, outcomes
sys.stdout.write("done\\n")
"""

ALIKE = """
SIZE = 2
WRONG = [{"backend": "mpicom"}, {"backend": 7}, {"device": "cuda:99"}, {"device": "gpu"}, {"timeout": "soon"},
         {"timeout": -1}, {"timeout": float("nan")}, {"comm": 3}, {"backend": "nccl"}]
for arguments in WRONG:
    attempt(**arguments)
assert outcomes == {"world": 0, "refused": len(WRONG)}, outcomes
attempt()
sys.stdout.write("done\\n")
"""


def test_drawn_arguments_of_one_process() -> None:
    outcome = run_alone(PROGRAM + DRAWN)
    assert outcome.status == 0, outcome
    assert outcome.stdout == "done\n", outcome


def test_wrong_arguments_are_refused_on_every_rank() -> None:
    outcome = run_ranks(2, PROGRAM + ALIKE)
    assert outcome.status == 0, outcome
    assert outcome.stdout.count("done\n") == 2, outcome


TIMEOUT_TYPES = """
import datetime
import numpy
import torch.distributed as dist
import mpicomm

minute = datetime.timedelta(minutes=1)
for timeout in (60, 60.0, numpy.int64(60), minute):
    with mpicomm.bootstrap(timeout=timeout) as world:
        is_same = mpicomm.bootstrap(timeout=minute) is world
        print(type(timeout).__name__, dist.group.WORLD.timeout_seconds, is_same, flush=True)
for timeout in ("60", True):
    try:
        mpicomm.bootstrap(timeout=timeout, abort_on_error=False)
    except TypeError as error:
        print(error, flush=True)
"""


def test_a_timeout_is_a_number_of_seconds_or_a_timedelta() -> None:
    outcome = run_alone(TIMEOUT_TYPES)
    assert outcome.status == 0, outcome
    remedy = (
        "Pass seconds or a datetime.timedelta, or omit the timeout for 30 minutes (operations) and 10 minutes (waiting "
        "for ranks)."
    )
    assert outcome.stdout.splitlines() == [
        *[f"{name} 60.0 True" for name in ("int", "float", "int64", "timedelta")],
        "timeout must be seconds or a datetime.timedelta, got '60' (str).",
        remedy,
        "timeout must be seconds or a datetime.timedelta, got True (bool).",
        remedy,
    ], outcome
