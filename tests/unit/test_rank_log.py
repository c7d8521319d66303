"""The process that writes the log of a rank, without an MPI job."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.launching import run_command, run_within
from tests.time_limits import EVENT_SECONDS, scaled


def test_a_leftover_process_of_a_rank_keeps_no_log_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "mpicomm.rank_log", "logs", "0", "sh", "-c", "sleep 3600 & echo done; exit 3"]
    outcome = run_within(scaled(EVENT_SECONDS), command)
    assert (outcome.status, outcome.stdout) == (3, "done\n"), outcome
    assert ["sleep 3600" in each for each in outcome.left] == [True], f"the command waited for the process\n{outcome}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_logged_rank_ends_by_its_programs_signal(number: int, tmp_path: Path) -> None:
    program = ["sh", "-c", f"ulimit -c 0; echo last words; kill -{number} $$"]
    outcome = run_command([sys.executable, "-m", "mpicomm.rank_log", str(tmp_path), "0", *program])
    assert (outcome.status, outcome.stdout) == (-number, "last words\n"), outcome
    assert (tmp_path / "rank_000.log").read_text() == "last words\n"


def test_a_logged_rank_whose_first_process_is_killed_has_no_leftover_processes(tmp_path: Path) -> None:
    """Some launchers kill a process, but not its process group; `run_command` checks for leftover processes."""
    program = ["sh", "-c", "kill -KILL $PPID; exec sleep 3600"]
    outcome = run_command([sys.executable, "-m", "mpicomm.rank_log", str(tmp_path), "0", *program])
    assert outcome.status == -signal.SIGKILL, outcome
