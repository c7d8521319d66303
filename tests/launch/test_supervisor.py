"""`mpicomm run` and its launcher on one host: signals and kills during training, completion, restarts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpicomm.watchdog import job_files, local_processes
from tests import time_limits
from tests.failures import ways
from tests.killed_run import KILLS, WARNINGS, send_signal
from tests.launching import Job, Outcome, background_job, python, run_command
from tests.time_limits import EVENT_SECONDS, JOB_SECONDS

RUN = [sys.executable, "-m", "mpicomm", "run"]
SLOW = "tests.slow_run"
# Seconds for which the ranks may outlive `mpicomm run`: they notice its death within their timeout.
GONE_SECONDS = 40.0


@pytest.fixture(autouse=True)
def _in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_killed(folder: Path, name: str) -> Outcome:
    """Run a training that one signal ends."""
    folder.mkdir()
    with background_job([*RUN, "-n", "2", "-m", SLOW, str(folder)]) as job:
        job.wait_until((folder / "begun").exists, "the training has begun")
        (folder / "pid").write_text(str(job.pid))
        send_signal(folder, name)
        return job.finish(gone=GONE_SECONDS)


@pytest.fixture(name="ends", scope="module")
def _ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """The ends of all jobs, which run at the same time, since they mostly wait."""
    folders = {name: tmp_path_factory.mktemp("kill") / name.replace(" ", "-") for name in KILLS}
    with concurrent.futures.ThreadPoolExecutor(len(KILLS)) as pool:
        jobs = {name: pool.submit(run_killed, folder, name) for name, folder in folders.items()}
        return {name: (folders[name], job.result()) for name, job in jobs.items()}


def has_checkpoint(folder: Path) -> bool:
    return bool(list(folder.glob("checkpoints/step-*/COMPLETE")))


@pytest.mark.each_mpi
@pytest.mark.parametrize("name", KILLS)
def test_a_run_is_signalled_or_killed(ends: dict[str, tuple[Path, Outcome]], name: str) -> None:
    """`run_killed` fails if a process is left."""
    folder, outcome = ends[name]
    assert outcome.status != 0, outcome
    assert "came through" not in outcome.stdout, outcome
    if name in WARNINGS:
        assert outcome.status == 85, outcome
        assert has_checkpoint(folder), outcome
    elif name == "KILL of a rank":
        unknown = ways.is_killed_by_launcher(outcome) and "mpicomm run: ranks 0, 1 of 2 on " in outcome.stderr
        assert unknown or "mpicomm run: rank 1 of 2 on " in outcome.stderr, outcome
    elif name == "KILL of the launcher":
        assert outcome.status == 128 + signal.SIGKILL, outcome
        assert "was killed by SIGKILL" in outcome.stderr, outcome


# -- a program that does not exit, and one without bootstrap() ---------------------------------------------------------

STUBBORN = """
import signal, time
import mpicomm
world = mpicomm.bootstrap()
signal.signal(signal.SIGTERM, lambda number, frame: print("handled", flush=True))
open(f"up{world.rank}", "w").close()
while True:
    time.sleep(0.1)
"""
PLAIN = """
import time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
open(f"up{MPI.COMM_WORLD.rank}", "w").close()
time.sleep(3600)
"""


@contextlib.contextmanager
def running(program: str, *options: str) -> Iterator[Job]:
    """Run a program on two ranks, which create the files up0 and up1 in the working directory."""
    path = Path("program.py")
    path.write_text(program)
    with background_job([*RUN, "-n", "2", *options, str(path)]) as job:
        job.wait_until(lambda: all(Path(f"up{rank}").exists() for rank in range(2)), "both ranks are up")
        if "bootstrap" in program:  # rank 0 connects to `mpicomm run` in the background
            job.wait_until(lambda: job.pid in {each.job.pid for each in job_files.listed()}, "rank 0 is connected")
        yield job


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    ("program", "options", "signals", "text"),
    [
        (STUBBORN, ["--grace-period", "3"], [signal.SIGTERM], "the grace period has passed"),
        (STUBBORN, [], [signal.SIGINT, signal.SIGINT], "second Ctrl-C"),
        (PLAIN, [], [signal.SIGTERM], ""),
        (PLAIN, [], [signal.SIGINT], ""),
    ],
    ids=["grace period", "second Ctrl-C", "TERM without bootstrap", "INT without bootstrap"],
)
def test_a_signal_ends_a_program_that_does_not_exit(
    program: str, options: list[str], signals: list[int], text: str
) -> None:
    with running(program, *options) as job:
        os.kill(job.pid, signals[0])
        for number in signals[1:]:
            job.wait_until(lambda: "handled" in job.stdout(), "a rank has handled the first signal")
            os.kill(job.pid, number)
        outcome = job.finish(EVENT_SECONDS)
    assert outcome.status == 128 + signals[0], outcome
    assert text in outcome.stderr, outcome
    assert ("handled" in outcome.stdout) == (program is STUBBORN), outcome


def test_a_closed_stderr_does_not_prevent_the_checkpoint() -> None:
    """Ctrl-C also ends the reader in `mpicomm run ... 2>&1 | tee log`."""
    line = f"""
        mkfifo errors; cat errors > /dev/null & reader=$!
        {shlex.join(RUN)} -n 2 -m {SLOW} . 2> errors & pid=$!
        while ! [ -e begun ]; do kill -0 $pid || exit 99; sleep 0.05; done
        kill $reader; wait $reader; kill -TERM $pid; wait $pid
    """
    outcome = run_command(["bash", "-c", line])
    assert outcome.status == 85, outcome
    assert has_checkpoint(Path()), outcome


PIDS = """
import os, time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
with open(f"pid{MPI.COMM_WORLD.rank}", "w") as file:
    file.write(str(os.getpid()))
MPI.COMM_WORLD.Barrier()
open(f"up{MPI.COMM_WORLD.rank}", "w").close()
time.sleep(3600)
"""


@pytest.mark.each_mpi
def test_ctrl_z_stops_the_ranks_until_they_are_continued() -> None:
    with running(PIDS) as job:
        pids = [job.pid, *(int(Path(f"pid{rank}").read_text()) for rank in range(2))]
        for number, is_stopped in ((signal.SIGTSTP, True), (signal.SIGCONT, False)):
            os.kill(job.pid, number)
            job.wait_until(
                lambda expected=is_stopped: all(local_processes.is_stopped(pid) == expected for pid in pids),
                f"the processes are stopped: {is_stopped}",
            )
        os.kill(job.pid, signal.SIGTERM)
        assert job.finish().status == 128 + signal.SIGTERM


LEAVING = """
import os, subprocess, sys
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    code = f"import time; time.sleep(3600)  # leftover in {{os.getcwd()}}"
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen([sys.executable, "-c", code], **streams, start_new_session=True)
MPI.COMM_WORLD.Barrier()
MPI.Finalize()
sys.exit({status})
"""


@pytest.mark.parametrize("status", [0, 3])
def test_leftover_processes_of_a_failed_program_are_killed(status: int, tmp_path: Path) -> None:
    Path("leaving.py").write_text(LEAVING.format(status=status))
    with background_job([*RUN, "-n", "2", "leaving.py"]) as job:
        outcome = job.outcome(time_limits.scaled(JOB_SECONDS))
    assert outcome.status == status, outcome
    assert any(f"# leftover in {tmp_path}" in process for process in outcome.left) == (status == 0), outcome


SUPERVISED = """
import os, signal, subprocess
from mpicomm.cli.supervisor import Supervisor
from mpicomm.launch.request import Start
"""


def test_a_signal_after_the_end_of_the_launcher_counts() -> None:
    code = """
Supervisor._read_last_messages = lambda self: os.kill(os.getpid(), signal.SIGTERM)
print(Supervisor("run", Start(("false",), os.environ, True), 1.0).run())
"""
    outcome = run_command([sys.executable, "-c", SUPERVISED + code])
    assert f"stopped_by={int(signal.SIGTERM)}," in outcome.stdout, outcome


def test_an_error_of_mpicomm_run_ends_the_launcher() -> None:
    code = """
def fail(self):
    raise OSError("the error")
Supervisor._check = fail
supervisor = Supervisor("run", Start(("sleep", "3600"), os.environ, True), 1.0)
try:
    supervisor.run()
finally:
    print(f"ended by {supervisor._process.returncode}")
"""
    outcome = run_command([sys.executable, "-c", SUPERVISED + code])
    assert outcome.stdout == f"ended by {-signal.SIGTERM}\n", outcome
    assert "OSError: the error" in outcome.stderr, outcome


# -- completion and restarts -------------------------------------------------------------------------------------------

# Rank 1 is killed in the first attempt, and fails in the second one; both in the second job of the program, which is
# connected to `mpicomm run`, too.
FAILING = """
import os, signal
import mpicomm
mpicomm.bootstrap()
mpicomm.shutdown()
world = mpicomm.bootstrap()
number = len([name for name in os.listdir() if name.startswith("attempt-")])
mpicomm.barrier()
print(f"attempt {number}, rank {world.rank} of {world.size}", flush=True)
if world.rank == 1:
    open(f"attempt-{number}", "w").close()
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 1:
        raise ValueError("the second attempt")
mpicomm.barrier()
"""


@pytest.mark.each_mpi
def test_a_launcher_that_hides_the_death_of_a_rank() -> None:
    """Open MPI's mpirun exits with status 0 if a host dies."""
    Path("failing.py").write_text(FAILING)
    hides = """
import os, sys
from mpicomm.cli import launching
from mpicomm.launch.request import Request
start = launching.build(Request((sys.executable, "failing.py"), 2), os.environ)
hiding = start.__class__(("sh", "-c", '"$@"; exit 0', "sh", *start.command), start.environ, start.is_local)
sys.exit(launching.execute(hiding, "run").status)
"""
    outcome = run_command([sys.executable, "-c", hides])
    assert outcome.status == 1, outcome
    last = [line for line in outcome.stderr.splitlines() if line.startswith("mpicomm run: ")][-1]
    # MPICH's mpiexec ends rank 0 at once, often before rank 0 has reported the death of rank 1.
    reported = r"rank 1 of 2 on \S+ died: .*|ranks 0, 1 of 2 on \S+ did not reach the end of the program "
    assert re.search(rf"({reported})\(sh exited with status 0\)", last), outcome


@pytest.mark.each_mpi
def test_failed_ranks_are_restarted_and_their_logs_are_kept() -> None:
    Path("failing.py").write_text(FAILING)
    outcome = run_command([*RUN, "-n", "2", "--max-restarts", "2", "--log-dir", "logs", "failing.py"])
    assert outcome.status == 0, outcome
    lines = outcome.stderr.splitlines()
    assert [line for line in lines if "restart " in line] == [f"mpicomm run: restart {n} of 2" for n in (1, 2)], outcome
    log = Path("logs/rank_001.log").read_text().splitlines()
    assert [line for line in log if line.startswith("attempt")] == [f"attempt {n}, rank 1 of 2" for n in range(3)]


@pytest.mark.each_mpi
@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("import mpicomm, sys; mpicomm.bootstrap(); sys.exit(85)", 85, ""),
        ("import sys; sys.exit(3)", 3, "not restarted: the ranks did not complete mpicomm.bootstrap()"),
    ],
    ids=["stopped with a checkpoint", "without bootstrap"],
)
def test_no_restart(code: str, status: int, reason: str) -> None:
    Path("program.py").write_text(code)
    outcome = run_command([*RUN, "-n", "2", "--max-restarts", "2", "program.py"])
    assert outcome.status == status, outcome
    assert "restart 1" not in outcome.stderr, outcome
    assert reason in outcome.stderr, outcome


STAND_IN = """#!/usr/bin/env python3
import os, pathlib, signal, time
received = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
pathlib.Path("ready").touch()
while len(received) < EXPECTED:
    time.sleep(0.01)
pathlib.Path("received").write_text(" ".join(received))
raise SystemExit(1)
"""


@pytest.mark.parametrize(
    ("name", "sent", "received"),
    [
        ("srun", signal.SIGINT, ["SIGTERM"]),
        ("srun", signal.SIGTERM, ["SIGTERM"]),
        ("flux", signal.SIGINT, ["SIGINT", "SIGINT"]),
        ("flux", signal.SIGTERM, ["SIGINT", "SIGINT"]),
        ("mpirun", signal.SIGINT, ["SIGINT"]),
    ],
)
def test_the_launcher_receives_the_signals_that_end_its_tasks(
    name: str, sent: int, received: list[str], tmp_path: Path
) -> None:
    launcher = tmp_path / name
    launcher.write_text(STAND_IN.replace("EXPECTED", str(len(received))))
    launcher.chmod(0o755)
    code = f"""
import os, signal, sys
from mpicomm.cli import launching
from mpicomm.launch.request import Start
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets commands in the background ignore it
sys.exit(launching.execute(Start(({str(launcher)!r},), dict(os.environ), True), "run").status)
"""
    with background_job(python(code), cwd=tmp_path) as job:
        job.wait_until((tmp_path / "ready").exists, "the launcher has started")
        os.kill(job.pid, sent)
        assert job.finish().status == 128 + sent
    assert (tmp_path / "received").read_text().split() == received
