"""Starts real jobs from tests: in a new session, with a hard time limit and a minimal environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from mpicomm import mpi

ROOT = Path(__file__).resolve().parent.parent
OTHER_MPI_ENV = os.environ.get("OTHER_MPI_ENV")
"""The virtual environment with the other MPI library, if configured."""

LIMIT = 180.0
"""Seconds after which a job is killed: many times the usual duration, so that a busy machine does not fail a test."""

PROGRAMS = {
    "mpirun": [str(Path(sys.executable).parent / "mpiexec")],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "python": [sys.executable],
    "mpicomm": [sys.executable, "-m", "mpicomm"],
}
"""The words that start a program of this environment, by its name in a shell."""

_KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "MPI4PY_LIBMPI", "MPI4PY_MPIABI", "SLURM_CONF")
_MARK = "TESTS_JOB"  # every process of a job inherits this variable, which identifies it
_TERM_SECONDS = 3.0  # after SIGTERM, for the launcher to end its ranks
_GONE_SECONDS = 3.0  # the time for which processes of a job may outlive the launcher
# Hydra may print this on standard output when a rank is killed, depending on which process ends first. MPICH's Hydra
# prints it once, with the last lines; Intel MPI's Hydra prints it for each killed rank.
_BANNER = re.compile(
    r"^\n=+\n=   BAD TERMINATION [^\n]*\n(?:=   [^\n]*\n)*=+\n"
    r"(?:YOUR APPLICATION .*?^Please see the FAQ page [^\n]*\n)?",
    re.DOTALL | re.MULTILINE,
)

# By default Open MPI refuses root, and more ranks than cores. Other MPIs ignore these variables.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # the name in Open MPI 4
}

# Dump files of failed jobs are written only in tests that enable them.
_MPICOMM = {"MPICOMM_DUMP_DIR": "none"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    status: int | None
    """None if it was killed at its time limit."""

    stdout: str
    """The output without Hydra's banner."""

    stderr: str
    seconds: float
    ended: float
    """The time at which the command ended, as of `time.time()`."""

    left: tuple[str, ...] = ()
    """Leftover processes, which were killed."""

    def __str__(self) -> str:
        return f"status {self.status} after {self.seconds:.1f} s\n-- stdout\n{self.stdout}\n-- stderr\n{self.stderr}"


def run_ranks(
    n: int,
    code_or_args: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = LIMIT,
    mpiexec: str | None = None,
) -> Outcome:
    """Run Python on `n` ranks, like a user from a shell.

    Args:
        code_or_args: Code for `python -c`, or the arguments of Python.
        env: Variables to add.
        timeout: Seconds after which the job is killed; the test then fails with the output of the job.
        mpiexec: The launcher; by default that of the MPI library that this Python loads.
    """
    return run_command([mpiexec or _own_mpiexec(), "-n", str(n), *python(code_or_args)], env=env, timeout=timeout)


def run_alone(
    code_or_args: str | Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = LIMIT
) -> Outcome:
    """Run Python in one process, without a launcher; arguments as for `run_ranks`."""
    return run_command(python(code_or_args), env=env, timeout=timeout)


def run_command(args: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = LIMIT) -> Outcome:
    """Run a command; fail if it exceeds its time limit, or leaves processes behind."""
    outcome = run_within(timeout, args, env=env)
    assert outcome.status is not None, f"killed after {timeout:.0f} s: {' '.join(args)}\n{outcome}"
    assert not outcome.left, f"the job left processes behind: {outcome.left}\n{outcome}"
    return outcome


def run_within(
    seconds: float, args: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Outcome:
    """Run a command, and kill all its processes after `seconds`."""
    mark = uuid.uuid4().hex
    # If a process of another job starts this job, the new job has the marks of both.
    marks = f"{os.environ.get(_MARK, '')},{mark}"
    environ = almost_empty_environment() | dict(env or {}) | {_MARK: marks}
    with (
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
        tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as sessions,
    ):
        # mpirun of Open MPI cannot start if one with the same pid, which has been killed, left its session directory.
        environ.setdefault("PRTE_MCA_prte_local_tmpdir_base", sessions)
        start = time.monotonic()
        process = subprocess.Popen(
            args, env=environ, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            in_time = _wait(process, seconds)
            took, ended = time.monotonic() - start, time.time()
            left = _survivors(mark) if in_time else []
        finally:
            _kill_job(process, mark)
        status = process.wait()
        shown = _BANNER.sub("", _text(stdout))
        return Outcome(status if in_time else None, shown, _text(stderr), took, ended, tuple(left))


def python(code_or_args: str | Sequence[str]) -> list[str]:
    """Return the command that runs Python with code or arguments."""
    arguments = ["-c", code_or_args] if isinstance(code_or_args, str) else list(code_or_args)
    return [sys.executable, *arguments]


def command_line(command: str) -> list[str]:
    """Return the words of a shell's command, with the programs of this environment and the files of this checkout."""
    words = [word for each in shlex.split(command) for word in PROGRAMS.get(each, [each])]
    return [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]


def almost_empty_environment() -> dict[str, str]:
    """Return only the variables that a process needs to find its programs and this checkout."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, **_OPEN_MPI, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **_MPICOMM}


def _own_mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"  # installed by a wheel
    return str(beside) if beside.exists() else mpi.library().mpiexec


def _wait(process: subprocess.Popen[bytes], timeout: float) -> bool:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True


def _survivors(mark: str) -> list[str]:
    """Return the command lines of the processes that are still running after `_GONE_SECONDS`."""
    deadline = time.monotonic() + _GONE_SECONDS
    while (pids := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"{pid}: {_read(pid, 'cmdline')}" for pid in pids]


def _kill_job(process: subprocess.Popen[bytes], mark: str) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        _wait(process, _TERM_SECONDS)
    # Launchers start ranks in new process groups and sessions, which survive a launcher that is killed.
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """Return the running processes that have the mark in their environment; the environment of a zombie is empty."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if mark in _read(pid, "environ")]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # the process has ended, or belongs to another user
        return ""


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
