"""`mpicomm top` and running jobs: under mpirun and under `mpicomm run`, with a stopped and a killed rank."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpicomm import mpi
from mpicomm.cli import main
from mpicomm.watchdog import job_files
from mpicomm.watchdog.job_files import ListedJob
from tests.launching import Job, Outcome, background_job, on_ranks, python
from tests.time_limits import EVENT_SECONDS, scaled

SIZE, ELEMENTS = 4, 1 << 14
# The ranks exchange tensors until the last one finds the file `late`, or one has failed. Then the last one computes,
# while the others wait for it, until it finds the file `stop`.
PROGRAM = f"""
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import mpicomm

folder = Path(sys.argv[1])
world = mpicomm.bootstrap(on_failure=sys.argv[2])
(folder / f"pid-{{world.rank}}").write_text(str(os.getpid()))

def compute():
    while not (folder / "stop").exists():
        time.sleep(0.01)

def exchange(values):
    dist.all_reduce(values)

def run():
    values, ended = torch.zeros({ELEMENTS}), False
    is_last = world.rank == world.size - 1
    while not ended:
        is_late = torch.tensor(int(is_last and ((folder / "late").exists() or world.recoveries > 0)))
        dist.all_reduce(is_late)
        exchange(values)
        ended = bool(is_late)
    if is_last:
        compute()
    exchange(values)
    print("sum", float(values.sum()))

try:
    run()
except mpicomm.RankFailedError:
    world = mpicomm.recover()
    run()
"""
LINES = PROGRAM.splitlines()
EXCHANGE = f"program.py:{LINES.index('    dist.all_reduce(values)') + 1} (exchange)"
COMPUTE = f"program.py:{LINES.index('        time.sleep(0.01)') + 1} (compute)"


class RunningJob:
    """A job that runs in the background, and `mpicomm top` for it."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder = folder
        self._job = job

    def listed(self) -> ListedJob:
        return self.wait(lambda: next(iter(self.found()), None))

    def found(self) -> list[ListedJob]:
        return [each for each in job_files.listed() if str(self.folder) in each.job.program]

    def wait(self, condition: Callable[[], Any]) -> Any:
        return self._job.wait_until(condition, "mpicomm top shows the expected state")

    def signal(self, number: int, rank: int) -> None:
        os.kill(int((self.folder / f"pid-{rank}").read_text()), number)

    def make(self, name: str) -> None:
        (self.folder / name).touch()

    def end(self) -> Outcome:
        self.make("late")
        self.make("stop")
        return self._job.finish()


@contextlib.contextmanager
def running(folder: Path, launcher: list[str], on_failure: str = "abort") -> Iterator[RunningJob]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with background_job([*launcher, str(program), str(folder), on_failure]) as job:
        yield RunningJob(folder, job)


def top(job: RunningJob, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the ranks that `mpicomm top --json` shows."""
    assert main.main(["top", job.listed().job.name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["job"] == job.listed().job.name
    ranks: list[dict[str, Any]] = found["ranks"]
    return ranks


def test_a_job_under_mpirun_shows_what_each_rank_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, on_ranks(SIZE, [])) as job:
        # 1. the throughput while they exchange tensors
        job.wait(lambda: all(rank["bytes_per_second"] > 4 * ELEMENTS for rank in top(job, capsys)))
        ranks = top(job, capsys)
        assert [rank["rank"] for rank in ranks] == list(range(SIZE))
        assert all(rank["memory"] > 10 * 2**20 for rank in ranks)
        # 2. all wait for the last rank
        job.make("late")
        late = [COMPUTE if rank == SIZE - 1 else EXCHANGE for rank in range(SIZE)]
        job.wait(lambda: [rank["line"] for rank in top(job, capsys)] == late)
        before, after = top(job, capsys), top(job, capsys)
        for rank in range(SIZE - 1):
            assert before[rank]["operation"].startswith("all_reduce #")
            assert before[rank]["operation"].endswith(f", float32[{ELEMENTS}]")
            assert after[rank]["operation"] == before[rank]["operation"]
            assert after[rank]["seconds"] > before[rank]["seconds"]
        assert (after[-1]["state"], after[-1]["operation"], after[-1]["seconds"]) == ("computing", "", None)
        # 3. a stopped rank
        job.signal(signal.SIGSTOP, 2)
        stopped = f"not responding: process {(tmp_path / 'pid-2').read_text()} is stopped by a signal (SIGSTOP); "
        job.wait(lambda: top(job, capsys)[2]["operation"].startswith(stopped))
        states = ["in_operation", "in_operation", "not_responding", "computing"]
        assert [rank["state"] for rank in top(job, capsys)] == states
        job.signal(signal.SIGCONT, 2)
        job.wait(lambda: [rank["line"] for rank in top(job, capsys)] == late)
        # 4. the display on a terminal
        assert "mpicomm" not in show_on_a_terminal(job, keys=b"xq", expected=b"(exchange)")
        show_on_a_terminal(job, keys=b"\x03", expected=b"(exchange)")
        outcome = job.end()
        assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "sum 0.0\n" * SIZE, ""), outcome
        assert job.found() == []


def show_on_a_terminal(job: RunningJob, keys: bytes, expected: bytes) -> str:
    """Run `mpicomm top` on a terminal until it shows a text, press keys, and check that it ends and leaves no trace."""
    pid, ours = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm")
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 150, 0, 0))  # lines, columns
        os.execv(sys.executable, python(["-m", "mpicomm", "top", job.listed().job.name]))
    try:
        before = termios.tcgetattr(ours)
        shown = bytearray()
        deadline = time.monotonic() + scaled(EVENT_SECONDS)
        is_ready = has_ended = False
        while not has_ended and time.monotonic() < deadline:
            if not is_ready and expected in shown and not termios.tcgetattr(ours)[3] & termios.ICANON:
                is_ready = True
                os.write(ours, keys)
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    shown += os.read(ours, 1 << 16)
                except OSError:
                    has_ended = True
        assert is_ready, bytes(shown)
        assert has_ended, bytes(shown)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, bytes(shown)
        pid = 0
        assert termios.tcgetattr(ours)[3] == before[3]
        return shown.decode(errors="replace")
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(ours)


def states_if_it_answers(job: RunningJob, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the states of the ranks; none while the job recovers."""
    status = main.main(["top", *(each.job.name for each in job.found()), "--json"])
    printed = capsys.readouterr().out
    return [rank["state"] for rank in json.loads(printed).get("ranks", ())] if status == 0 else []


@pytest.mark.skipif(mpi.library().vendor != "Open MPI", reason="requires an MPI that continues after a failure (ULFM)")
@pytest.mark.parametrize("launcher", ["mpirun", "mpicomm run"])
def test_a_job_that_recovers_keeps_its_name(launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0, to which `mpicomm top` connects under mpirun, is killed."""
    ours = [sys.executable, "-m", "mpicomm", "run", "--fault-tolerant"]
    run = ours if launcher == "mpicomm run" else ["mpirun", "--with-ft", "ulfm"]
    with running(tmp_path, [*run, "-n", "3", *python([])], "recover") as job:
        name = job.listed().job.name
        job.wait(lambda: all(rank["bytes_per_second"] > 4 * ELEMENTS for rank in top(job, capsys)))
        ranks = {int((tmp_path / f"pid-{rank}").read_text()) for rank in range(3)}
        assert (job.listed().job.pid in ranks) == (launcher == "mpirun")
        job.signal(signal.SIGKILL, 0)
        job.wait(lambda: states_if_it_answers(job, capsys) == ["in_operation", "computing"])
        assert job.listed().job.name == name
        outcome = job.end()
        assert outcome.stdout == "sum 0.0\n" * 2, outcome
