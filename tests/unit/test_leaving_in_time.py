"""Stop requests of a run: signals, and the remaining time that schedulers report."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest

from mpicomm.training import preemption
from mpicomm.training.preemption import StopRequest, seconds_of_flux, seconds_of_lsf, seconds_of_pbs, seconds_of_slurm
from tests.launching import run_alone
from tests.time_limits import wait_until


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45", 45),
        ("1:30\n", 90),
        ("2:00:05", 7205),
        ("3-04:05:06", 3 * 86400 + 4 * 3600 + 5 * 60 + 6),
        ("0:00", 0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_the_output_of_squeue(text: str, seconds: float | None) -> None:
    assert seconds_of_slurm(text) == seconds


def pbs(walltime: object, stime: str) -> str:
    return json.dumps({"Jobs": {"7.pbs1": {"Resource_List": {"walltime": walltime}, "stime": stime}}})


def test_the_output_of_qstat(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.mktime(time.strptime("2026-11-20 10:06:58", "%Y-%m-%d %H:%M:%S"))
    assert seconds_of_pbs(pbs("00:05:00", "Fri Nov 20 10:06:58 2026"), "7.pbs1", start + 2) == 298
    assert seconds_of_pbs(pbs("48:00:00", "Fri Nov 20 10:06:58 2026"), "8.pbs1", start) == 48 * 3600


@pytest.mark.parametrize(
    "text", ["", "{}", '{"Jobs": {}}', '{"Jobs": {"7.pbs1": {}}}', pbs(12, "Fri Nov 20 10:06:58 2026"), pbs("1", "now")]
)
def test_incomplete_output_of_qstat(text: str) -> None:
    assert seconds_of_pbs(text, "7.pbs1", 0.0) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("0:45 L\n", 2700), ("36:00 E\n", 129600), ("0:00 X", 0), ("1:30", 5400), ("-\n", None)]
)
def test_remaining_time_of_lsf(text: str, seconds: float | None) -> None:
    assert seconds_of_lsf(text) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("1800\n", 1800), ("0\n", 0), ("4294967295\n", None), ("", None), ("flux-job: ERROR", None)]
)
def test_remaining_time_of_flux(text: str, seconds: float | None) -> None:
    assert seconds_of_flux(text) == seconds


@pytest.mark.parametrize(
    ("environ", "command", "asked"),
    [
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "0"}, "bjobs", "-noheader -o time_left 7"),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "3"}, "bjobs", "-noheader -o time_left 7[3]"),
        ({"FLUX_JOB_ID": "f2e73NP", "SLURM_JOB_ID": "9"}, "flux", "job timeleft"),
    ],
)
def test_the_command_of_each_scheduler(
    environ: dict[str, str], command: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / command).write_text(
        f'#!/bin/sh\n[ "$*" = "{asked}" ] && echo {"0:02 L" if command == "bjobs" else 120}\n'
    )
    (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    remaining_seconds = preemption.remaining_time_query(environ)
    assert remaining_seconds() == 120


def test_the_signal_at_the_time_limit_of_flux_requests_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_request = StopRequest()
    with stop_request.handling_signals(None, polls_scheduler=False):
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL, "programs use SIGALRM themselves"
    monkeypatch.setenv("FLUX_JOB_ID", "f2e73NP")
    with stop_request.handling_signals(None, polls_scheduler=False):
        os.kill(os.getpid(), signal.SIGALRM)
        assert stop_request.why == "SIGALRM"
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a scheduler command that prints the contents of the returned file."""
    answer = tmp_path / "answer"
    command = tmp_path / "squeue"
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {answer}\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return answer


def test_the_scheduler_is_queried(squeue: Path) -> None:
    remaining_seconds = preemption.remaining_time_query(os.environ)
    squeue.write_text("2:00\n")
    assert remaining_seconds() == 120
    squeue.unlink()
    assert remaining_seconds() is None
    assert (squeue.parent / "asked").read_text().splitlines()[0] == "--noheader --jobs 17 --format %L"
    assert preemption.remaining_time_query({}) is None
    assert preemption.remaining_time_query({"SLURM_JOB_ID": "17", "PATH": ""}) is not None


def wait_until_queried_again(squeue: Path) -> None:
    def queries() -> int:
        asked = squeue.parent / "asked"
        return len(asked.read_text().splitlines()) if asked.exists() else 0

    former = queries()
    wait_until(lambda: queries() >= former + 2, "the scheduler has been queried, and the answer has been read")


def test_a_rank_requests_a_stop_before_the_end_of_the_allocation(squeue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_POLL_SECONDS", 0.05)
    squeue.write_text("5:00\n")
    stop_request = StopRequest()
    with stop_request.handling_signals(120.0, polls_scheduler=True):
        wait_until_queried_again(squeue)
        assert stop_request.why is None
        squeue.write_text("1:59\n")
        wait_until(lambda: stop_request.why, "a stop is requested")
        assert stop_request.why == "119 s remaining in the allocation"
    stop_request.reset()
    squeue.write_text("1:00\n")
    with stop_request.handling_signals(
        120.0, polls_scheduler=True
    ):  # limited to half of 60 s: each run of a short job progresses
        wait_until_queried_again(squeue)
        assert stop_request.why is None
        squeue.write_text("0:29\n")
        wait_until(lambda: stop_request.why, "a stop is requested")
        assert stop_request.why == "29 s remaining in the allocation"
    stop_request.reset()
    squeue.write_text("0:10\n")
    for stop_margin, asks in ((None, True), (120.0, False)):
        with stop_request.handling_signals(stop_margin, polls_scheduler=asks):
            time.sleep(0.2)
            assert stop_request.why is None
    wait_until(lambda: "mpicomm-time-left" not in [thread.name for thread in threading.enumerate()], "the thread ends")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_is_a_stop_request(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop_request = StopRequest()
    with stop_request.handling_signals(None, polls_scheduler=False):
        os.kill(os.getpid(), number)
        assert stop_request.why == number.name
        os.kill(os.getpid(), number)  # launchers repeat the signal
    # SIGUSR1 and SIGUSR2, for which no other handler is set, stay harmless; SIGTERM ends the process again.
    is_harmless = before is signal.SIG_DFL and number != signal.SIGTERM
    assert signal.getsignal(number) is (preemption._ignore if is_harmless else before)


def test_a_handler_is_restored() -> None:
    def mine(_number: int, _frame: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with StopRequest().handling_signals(None, polls_scheduler=False):
            assert signal.getsignal(signal.SIGUSR1) is not mine
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


LATE = """
import os, signal
from mpicomm.training import preemption
for _ in range(2):
    with preemption.StopRequest().handling_signals(None, polls_scheduler=False):
        pass
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
print("done", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_warning_after_the_run_ends_nothing() -> None:
    outcome = run_alone(LATE)
    assert (outcome.status, outcome.stdout) == (-signal.SIGTERM, "done\n"), outcome


TWICE = """
import os, signal, sys
from mpicomm.training import preemption
preemption._REPEAT_SECONDS = 0.0
request = preemption.StopRequest()
with request.handling_signals(None, polls_scheduler=False):
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
print("not reached")
"""


def test_a_second_signal_ends_the_process_at_once() -> None:
    outcome = run_alone(TWICE)
    assert (outcome.status, outcome.stdout) == (-signal.SIGUSR1, ""), outcome
