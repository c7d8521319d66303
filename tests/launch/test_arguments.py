"""Wrong arguments of `bootstrap()` are errors on every rank, after which a world can be formed."""

from __future__ import annotations

from tests.launching import run_alone, run_ranks

ALIKE = """
import sys
import torch.distributed as dist
import mpicomm

WRONG = [{"backend": "mpicom"}, {"backend": 7}, {"device": "cuda:99"}, {"device": "gpu"}, {"timeout": "soon"},
         {"timeout": -1}, {"timeout": float("nan")}, {"comm": 3}, {"backend": "nccl"}]
for arguments in WRONG:
    try:
        mpicomm.bootstrap(abort_on_error=False, **arguments)
    except (mpicomm.MpicommError, ValueError, TypeError) as error:
        assert str(error), "an error without a message"
    else:
        raise AssertionError(f"{arguments} are accepted")
with mpicomm.bootstrap() as world:
    assert world.size == 2
    dist.barrier()
sys.stdout.write("done\\n")
"""


def test_wrong_arguments_are_refused_on_every_rank() -> None:
    outcome = run_ranks(2, ALIKE)
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
