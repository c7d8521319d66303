"""Starts real jobs from tests: in a new session, with a hard time limit and a minimal environment."""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mpicomm import mpi
from tests import job_origin, time_limits
from tests.time_limits import EVENT_SECONDS, JOB_SECONDS, T

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parent.parent
OTHER_MPI_ENV = os.environ.get("OTHER_MPI_ENV")
"""The virtual environment with the other MPI library, if configured."""

PROGRAMS = {
    "mpirun": [str(Path(sys.executable).parent / "mpiexec")],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "python": [sys.executable],
    "mpicomm": [sys.executable, "-m", "mpicomm"],
}
"""The words that start a program of this environment, by its name in a shell."""

_KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "MPI4PY_LIBMPI", "MPI4PY_MPIABI", "SLURM_CONF")
_MARK = "TESTS_JOB"  # every process of a job inherits this variable, which identifies it
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)
_TERM_SECONDS = 3.0  # after SIGTERM, for the launcher to end its ranks; scaled
GONE_SECONDS = 3.0
"""The time for which processes of a job may outlive the launcher; scaled."""

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


class Job:
    """A command in the background; `background_job()` starts it."""

    def __init__(
        self, args: Sequence[str], environ: Mapping[str, str], cwd: Path | None, stdout: BinaryIO, stderr: BinaryIO
    ) -> None:
        self.args = args
        self._mark = uuid.uuid4().hex
        # If a process of another job starts this job, the new job has the marks of both.
        marks = f"{os.environ.get(_MARK, '')},{self._mark}"
        self._stdout, self._stderr = stdout, stderr
        self._start = time.monotonic()
        self._process = subprocess.Popen(
            args,
            env={**environ, _MARK: marks, job_origin.VARIABLE: job_origin.name()},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  a system call only
        )

    @property
    def pid(self) -> int:
        """The pid of the command, which is also its process group."""
        return self._process.pid

    def stdout(self) -> str:
        """Return the output until now."""
        return _text(self._stdout)

    def stderr(self) -> str:
        """Return the messages until now."""
        return _text(self._stderr)

    def wait_until(self, condition: Callable[[], T], what: str, seconds: float = EVENT_SECONDS) -> T:
        """Wait until a condition is true, as `time_limits.wait_until()`; fail with the output if the job ends first."""
        try:
            time_limits.wait_until(lambda: condition() or self._process.poll() is not None, what, seconds)
            value = condition()
            assert value, f"the job ended before {what}"
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{error}: {' '.join(self.args)}\n{self.outcome(0.0)}") from None
        return value

    def finish(self, timeout: float = JOB_SECONDS, *, gone: float = GONE_SECONDS) -> Outcome:
        """Wait for the end; fail if the command exceeds its time limit, or leaves processes behind.

        Args:
            timeout: The limit in seconds from now, before it is scaled.
            gone: The seconds for which processes may outlive the command, before they are scaled.
        """
        with contextlib.suppress(TimeoutError):
            time_limits.wait_until(lambda: self._process.poll() is not None, "the job ends", timeout)
        outcome = self.outcome(0.0, gone)
        assert outcome.status is not None, f"killed at its time limit: {' '.join(self.args)}\n{outcome}"
        assert not outcome.left, f"the job left processes behind: {outcome.left}\n{outcome}"
        return outcome

    def outcome(self, seconds: float, gone: float = GONE_SECONDS) -> Outcome:
        """Wait for the end for at most `seconds`, and return the result; kill all processes of the job."""
        try:
            in_time = _wait(self._process, seconds)
            took, ended = time.monotonic() - self._start, time.time()
            left = self._survivors(gone) if in_time else []
        finally:
            self.kill()
        status = self._process.wait() if in_time else None
        shown = _BANNER.sub("", _text(self._stdout))
        return Outcome(status, shown, _text(self._stderr), took, ended, tuple(left))

    def kill(self) -> None:
        """Kill all processes of the job: the command with SIGTERM first."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGTERM)
            _wait(self._process, time_limits.scaled(_TERM_SECONDS))
        # Launchers start ranks in new process groups and sessions, which survive a launcher that is killed.
        for pid in _marked(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _survivors(self, seconds: float) -> list[str]:
        """Return the command lines of the processes that are still running after `seconds`, which are scaled."""
        with contextlib.suppress(TimeoutError):
            time_limits.wait_until(lambda: not _marked(self._mark), "the processes of the job have ended", seconds)
        return [f"{pid}: {read_process(pid, 'cmdline')}" for pid in _marked(self._mark)]


@contextlib.contextmanager
def background_job(
    args: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[Job]:
    """Start a command, and kill all its processes at the end of the block."""
    environ = almost_empty_environment() | dict(env or {})
    with (
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
        tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True) as sessions,
    ):
        # mpirun of Open MPI cannot start if one with the same pid, which has been killed, left its session directory.
        environ.setdefault("PRTE_MCA_prte_local_tmpdir_base", sessions)
        job = Job(args, environ, cwd, stdout, stderr)
        try:
            yield job
        finally:
            job.kill()


def run_ranks(
    n: int,
    code_or_args: str | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = JOB_SECONDS,
    mpiexec: str | None = None,
) -> Outcome:
    """Run Python on `n` ranks, like a user from a shell.

    Args:
        code_or_args: Code for `python -c`, or the arguments of Python.
        env: Variables to add.
        timeout: Seconds, before they are scaled, after which the job is killed; the test then fails with its output.
        mpiexec: The launcher; by default that of the MPI library that this Python loads.
    """
    return run_command(on_ranks(n, code_or_args, mpiexec), env=env, timeout=timeout)


def run_alone(
    code_or_args: str | Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = JOB_SECONDS
) -> Outcome:
    """Run Python in one process, without a launcher; arguments as for `run_ranks`."""
    return run_command(python(code_or_args), env=env, timeout=timeout)


def run_command(args: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = JOB_SECONDS) -> Outcome:
    """Run a command; fail if it exceeds its time limit, or leaves processes behind."""
    with background_job(args, env=env) as job:
        return job.finish(timeout)


def run_within(
    seconds: float, args: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Outcome:
    """Run a command, and kill all its processes after `seconds`, which are not scaled."""
    with background_job(args, env=env, cwd=cwd) as job:
        return job.outcome(seconds)


def on_ranks(n: int, code_or_args: str | Sequence[str], mpiexec: str | None = None) -> list[str]:
    """Return the command that runs Python on `n` ranks."""
    return [mpiexec or _own_mpiexec(), "-n", str(n), *python(code_or_args)]


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
    return {**kept, **_OPEN_MPI, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **_MPICOMM, **time_limits.for_jobs()}


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM to the command when pytest is killed: launchers then end their ranks."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _own_mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"  # installed by a wheel
    return str(beside) if beside.exists() else mpi.library().mpiexec


def _wait(process: subprocess.Popen[bytes], timeout: float) -> bool:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True


def _marked(mark: str) -> list[int]:
    """Return the running processes that have the mark in their environment; the environment of a zombie is empty."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if mark in read_process(pid, "environ")]


def read_process(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # the process has ended, or belongs to another user
        return ""


def _text(file: BinaryIO) -> str:
    # The processes share the position of the file, so it must not move while they write.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


def refusal(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a wrong command of mpicomm in this process, and return what it prints on stderr."""
    from mpicomm.cli.main import main  # requires packages that `python -m tests.compat` does not have

    try:
        status = main(list(arguments))
    except SystemExit as error:
        status = error.code
    output = capsys.readouterr()
    assert (status, output.out) == (2, ""), output
    return output.err
