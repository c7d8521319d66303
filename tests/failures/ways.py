"""The fault cases: every way in which a rank can fail or exit while the others wait for it, and the expected outcome.

The code of a case runs on one rank while the others are in `all_reduce`. It is the same with mpicomm and with
mpi4py alone: the preambles define the same names.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm.recorder import rank_text
from tests.launching import Outcome, run_command
from tests.time_limits import scaled

SIZE = 4
TIMEOUT = 8
"""The timeout of operations, in seconds: longer than the watchdog waits for a rank that has exited."""

PLAIN_LIMIT = 15
"""Seconds after which a job without mpicomm counts as hanging."""

OPEN_MPI, MPICH = "Open MPI", "MPICH"

AT_ONCE, WAIT_LIMIT, DEADLINE, GOOD = (
    "at once",
    "after the wait limit of 5 s",
    "at the deadline",
    "never: the job ends well",
)

# The bounds, in seconds after the fault, between which the job must end. The upper bounds are scaled: they only
# distinguish an end from a hang. A job that ends at the deadline instead of at once prints another cause.
BOUNDS = {
    AT_ONCE: (0.0, TIMEOUT + 4.0),
    WAIT_LIMIT: (4.5, 30.0),
    DEADLINE: (TIMEOUT - 0.5, 30.0),
    GOOD: (0.0, 30.0),
}
_WITHOUT_RANK_0 = 4.0  # additional seconds if the others must detect that rank 0 does not respond
_LIMIT = 180.0

_ENV = {"MPICOMM_HANG_SECONDS": "3"}
_AT = "FAULTS_AT"

FAILING, OTHERS, ALL, NONE = "failing rank", "others", "all", "none"


@dataclasses.dataclass(frozen=True)
class Way:
    """One fault: a way to fail, to exit, or to keep the others waiting."""

    name: str
    code: str
    """The code that the failing rank runs while the others are in `all_reduce`."""

    when: str
    """When the job must end: AT_ONCE, WAIT_LIMIT, DEADLINE, or GOOD if the fault must not end it."""

    words: str
    """A regular expression for the lines that mpicomm must print."""

    named: str = FAILING
    """The ranks that mpicomm must name as the cause."""

    trace: str = ""
    """The last line of the single traceback; empty without a traceback."""

    open_mpi_status: int | None = None
    """The exit status of Open MPI's mpiexec; None for any status except 0."""

    is_sudden: bool = False
    """The rank prints nothing; some launchers kill the other ranks before they can report it."""

    others: str = "for _ in range(3):\n    all_reduce()"
    """The code that the other ranks run."""

    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def bounds(self, rank: int) -> tuple[float, float]:
        """Return the bounds, in seconds after the fault, between which the job must end."""
        low, high = BOUNDS[self.when]
        return low, high + (_WITHOUT_RANK_0 if rank == 0 else 0.0)


_HOLD = "threading.Thread(target=time.sleep, args=(600,)).start()\n"
_DIED = r"died: its process ended without reporting an error"
_SIGNAL, _LINE = "died: ", r' ended its process; last Python line: File "'
_LEFT = r"has exited, but other ranks wait for it; aborting the job[\s\S]*?\n  rank {rank} +exited \d+ s ago "
_STATE = r".*: process \d+ is "
_NO_ANSWER = rf"(rank {{rank}} +not responding for \d+ s|rank {{rank}} .*has not responded for \d+ s){_STATE}"
_FAILED = "failed; aborting the job:"
_IN_A_THREAD = """
def check():
    assert False, "in a thread"
threading.Thread(target=check).start()
time.sleep(600)
"""
_RECEIVE = "receive((rank - 1) % size)"
_BROADCAST = "broadcast((rank + 1) % size)\nall_reduce()"

WAYS = [
    Way("exception", 'raise ValueError("a bad batch")', AT_ONCE, _FAILED, trace="ValueError: a bad batch"),
    Way(
        "exception, while another thread runs",
        _HOLD + 'raise ValueError("a bad batch")',
        AT_ONCE,
        _FAILED,
        trace="ValueError: a bad batch",
    ),
    Way("sys.exit(0)", "sys.exit(0)", WAIT_LIMIT, _LEFT + "with status 0"),
    Way("sys.exit(3)", "sys.exit(3)", WAIT_LIMIT, _LEFT + "with status 3", open_mpi_status=3),
    Way(
        "sys.exit(3), while another thread runs",
        _HOLD + "sys.exit(3)",
        WAIT_LIMIT,
        _LEFT + "with status 3",
        open_mpi_status=3,
    ),
    Way("raise SystemExit(4)", "raise SystemExit(4)", WAIT_LIMIT, _LEFT),
    Way("os._exit(0)", "os._exit(0)", AT_ONCE, r"called os\._exit\(0\)"),
    Way("os._exit(3)", "os._exit(3)", AT_ONCE, r"called os\._exit\(3\)", open_mpi_status=3),
    Way("end of the program", "pass", WAIT_LIMIT, _LEFT + "at the end of its program"),
    Way(
        "failed assertion in a thread",
        _IN_A_THREAD,
        AT_ONCE,
        r"thread Thread-1.*, failed; aborting the job:",
        trace="AssertionError: in a thread",
    ),
    Way("MPI error", 'comm.Send(b"x", dest=99)', AT_ONCE, _FAILED, trace="mpi4py.MPI.Exception: "),
    Way("segmentation fault", "ctypes.string_at(0)", AT_ONCE, _SIGNAL + "SIGSEGV" + _LINE, is_sudden=True),
    Way("os.abort()", "os.abort()", AT_ONCE, _SIGNAL + "SIGABRT" + _LINE, is_sudden=True),
    Way("SIGKILL", "os.kill(os.getpid(), signal.SIGKILL)", AT_ONCE, _DIED, is_sudden=True),
    Way(
        "SIGTERM",
        "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(600)",
        AT_ONCE,
        "was terminated by SIGTERM",
        is_sudden=True,
    ),
    Way("SIGSTOP", "os.kill(os.getpid(), signal.SIGSTOP)", DEADLINE, _NO_ANSWER + r"stopped by a signal \(SIGSTOP\)"),
    Way(
        "C call that holds the GIL",
        "ctypes.PyDLL(None).sleep(600)",
        DEADLINE,
        _NO_ANSWER + "sleeping in code that holds the GIL",
    ),
    Way(
        "end of the program, with an unmatched all_reduce",
        "start_all_reduce()",
        WAIT_LIMIT,
        r"have exited, but other ranks wait for them[\s\S]*?\n  rank {rank} +in all_reduce #4, ",
        named=OTHERS,
        others="pass",
    ),
    Way(
        "deadlock of receives",
        _RECEIVE,
        DEADLINE,
        r"timed out after \d+ s in recv from rank \d[\s\S]*?\n  rank {rank} +in recv from rank \d, ",
        named=ALL,
        others=_RECEIVE,
    ),
    Way(
        "broadcast while the others call all_reduce",
        _BROADCAST,
        DEADLINE,
        r"timed out after \d+ s in [\s\S]*?\n  rank {rank} +in broadcast #4, root rank \d, ",
    ),
    Way(
        "broadcast while the others call all_reduce, MPICOMM_DEBUG=1",
        _BROADCAST,
        AT_ONCE,
        r"MismatchError: [\s\S]*?\n *rank {rank}: .*broadcast",
        env={"MPICOMM_DEBUG": "1"},
    ),
    Way("5 s of sleep, within the timeout", "time.sleep(5)\nfor _ in range(3):\n    all_reduce()", GOOD, "", NONE),
]

BY_NAME = {way.name: way for way in WAYS}

_COMMON = f"""
import ctypes, os, resource, signal, sys, threading, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def now():
    Path(os.environ["{_AT}"]).write_text(str(time.time()))
"""
_MPICOMM = f"""
import torch
import torch.distributed as dist
import mpicomm
world = mpicomm.bootstrap(timeout={TIMEOUT})
rank, size, comm = world.rank, world.size, world.comm
tensor = torch.ones(4)

def all_reduce():
    dist.all_reduce(tensor)
def start_all_reduce():
    return dist.all_reduce(tensor, async_op=True)
def broadcast(root):
    dist.broadcast(tensor, root)
def receive(source):
    dist.recv(tensor, source)
"""
_PLAIN = """
import array
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
numbers = array.array("f", [1] * 4)
requests = []

def all_reduce():
    comm.Allreduce(MPI.IN_PLACE, numbers)
def start_all_reduce():
    requests.append(comm.Iallreduce(MPI.IN_PLACE, numbers))
def broadcast(root):
    comm.Bcast(numbers, root)
def receive(source):
    comm.Recv(numbers, source)
"""
_BEFORE = "for _ in range(3):\n    all_reduce()"


def script(way: Way, rank: int, *, before: str = _BEFORE, is_plain: bool = False) -> str:
    """Return the program of a case.

    Args:
        before: The code that all ranks run first.
        is_plain: Use mpi4py alone, instead of mpicomm.
    """
    parts = [_COMMON, _PLAIN if is_plain else _MPICOMM, before, f"if rank == {rank}:", _indented("now()\n" + way.code)]
    return "\n".join([*parts, "else:", _indented(way.others)]) + "\n"


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.strip().splitlines())


@dataclasses.dataclass(frozen=True)
class Result:
    """How a job with a fault ended."""

    way: Way
    rank: int
    size: int
    mpi: str
    ended: bool
    """Whether the job ended before it was killed at its time limit."""

    seconds: float | None
    """Seconds from the fault to the end of the job; None if it did not end."""

    status: int | None
    left: list[str]
    """Leftover processes and files of the job. mpicomm creates no file in /dev/shm: it uses memfd_create."""

    stderr: str
    """The content of stderr; if the job did not end, a description of the failure."""

    @functools.cached_property
    def lines(self) -> list[str]:
        """The output of mpicomm: its `[mpicomm]` lines and the tables below them."""
        return _lines_of_ours(self.stderr)

    @property
    def causes(self) -> list[str]:
        """The lines that name the cause of the job's end."""
        return [line for line in self.lines if _CAUSE.match(line)]

    @property
    def named(self) -> list[int]:
        """The ranks that these lines name."""
        return _named(self.lines)

    @property
    def problems(self) -> list[str]:
        """The deviations from the specified outcome; empty if the job with mpicomm ended as specified."""
        if not self.ended:
            return [f"timed out after {_LIMIT:.0f} s", *self.left]
        checks = [self._wrong_status(), self._wrong_moment(), self._wrong_names(), self._wrong_trace(), *self.left]
        return [problem for problem in checks if problem]

    def _wrong_status(self) -> str:
        wanted = self.way.open_mpi_status if self.mpi == OPEN_MPI else None
        if self.way.when == GOOD:
            wanted = 0
        if self.status == 0 if wanted is None else self.status != wanted:
            return f"status {self.status}, expected {'any except 0' if wanted is None else wanted}"
        return ""

    def _wrong_moment(self) -> str:
        low, high = self.way.bounds(self.rank)
        if self.seconds is None:
            return "the fault did not happen"
        high = scaled(high)
        return "" if low <= self.seconds <= high else f"{self.seconds:.1f} s, expected {low:g} to {high:g} s"

    def _wrong_names(self) -> str:
        others = sorted(set(range(self.size)) - {self.rank})
        named = {FAILING: [self.rank], OTHERS: others, ALL: list(range(self.size)), NONE: []}[self.way.named]
        if self.is_silent_by_launcher or self.way.when == GOOD:
            return "" if not self.causes else f"a cause is reported: {self.causes}"
        if self.named != named:
            return f"names {self.named}, expected {named}"
        if len(self.causes) != 1:
            return f"{len(self.causes)} causes are reported: {self.causes}"
        words = self.way.words.replace("{rank}", str(self.rank))
        return "" if re.search(words, "\n".join(self.lines)) else f"does not print {words!r}"

    def _wrong_trace(self) -> str:
        is_timed_out = self.way.when == DEADLINE and any(line.startswith(_TIMED_OUT) for line in self.lines)
        times = 1 if self.way.trace or is_timed_out else 0
        for text in filter(None, ["Traceback (most recent call last)", self.way.trace]):
            if (count := self.stderr.count(text)) != times:
                return f"{text!r} occurs {count} times, expected {times}"
        return ""

    @property
    def is_silent_by_launcher(self) -> bool:
        """Whether MPICH's launcher killed the other ranks before they could report the dead rank."""
        return self.way.is_sudden and self.mpi == MPICH and not self.named

    def __str__(self) -> str:
        moment = "has not ended" if self.seconds is None else f"{self.seconds:.1f} s"
        return f"{self.mpi}, {self.way.name}, rank {self.rank} of {self.size}: {moment}, status {self.status}"


def run(
    way: Way,
    rank: int = 2,
    size: int = SIZE,
    *,
    before: str = _BEFORE,
    is_plain: bool = False,
    environment: Path | None = None,
    launcher: Sequence[str] = (),
) -> Result:
    """Run a case in a new temporary directory.

    Args:
        before: The code that all ranks run first.
        is_plain: Use mpi4py alone, instead of mpicomm.
        environment: The virtual environment with the MPI; by default this Python's.
        launcher: The command that starts the ranks; by default the MPI's own mpiexec.
    """
    programs = programs_of(environment)
    # The launcher has its own exit status for failed ranks, and rank 0 sees only the processes of its own host.
    if launcher:
        way = dataclasses.replace(way, open_mpi_status=None, words=way.words.partition(_STATE)[0])
    with tempfile.TemporaryDirectory() as folder:
        at, cwd = Path(folder, "at"), Path(folder, "cwd")
        cwd.mkdir()
        command = [*(launcher or [str(programs / "mpiexec"), "-n", str(size)]), str(programs / "python")]
        command += ["-c", script(way, rank, before=before, is_plain=is_plain)]
        try:
            outcome = run_command(
                ["env", "-C", str(cwd), *command],
                env={**_ENV, **way.env, _AT: str(at)},
                timeout=PLAIN_LIMIT / scaled(1) if is_plain else _LIMIT,
            )
        except AssertionError as error:  # the job was killed, or left processes
            return _of_failure(way, rank, size, mpi_of(programs), str(error))
        left = [f"file {path.name}" for path in sorted(cwd.iterdir())]
        seconds = outcome.ended - float(at.read_text()) if at.exists() else None
    return Result(way, rank, size, mpi_of(programs), True, seconds, outcome.status, left, outcome.stderr)


def programs_of(environment: Path | None) -> Path:
    """Return the directory with an environment's `mpiexec` and `python`; by default this Python's."""
    return Path(sys.executable).parent if environment is None else environment.absolute() / "bin"


@functools.cache
def mpi_of(programs: Path) -> str:
    """Return the name of the MPI library of an environment."""
    output = subprocess.run([programs / "mpiexec", "--version"], capture_output=True, text=True, timeout=30, check=True)
    return OPEN_MPI if "Open MPI" in output.stdout else MPICH


def is_killed_by_launcher(outcome: Outcome) -> bool:
    """Return whether MPICH's launcher, at the death of a rank, may have killed rank 0 before it named the dead rank.

    The launcher's own message, which has the pid, is removed from the standard output.
    """
    return mpi_of(programs_of(None)) == MPICH and outcome.status == signal.SIGKILL


def _of_failure(way: Way, rank: int, size: int, mpi: str, error: str) -> Result:
    is_hang = error.startswith("killed at its time limit")
    left = [] if is_hang else [error.splitlines()[0]]
    status = re.search(r"^status (-?\d+) after", error, re.MULTILINE)
    known = None if is_hang or not status else int(status[1])
    return Result(way, rank, size, mpi, not is_hang, None, known, left, error)


# -- output of mpicomm -------------------------------------------------------------------------------------------------

_CAUSE = re.compile(
    r"\[mpicomm\] (ranks? [\d, -]+) of \d+ on [\w.-]+(?:, (?!thread )[\w.-]+)*(?:, thread .*,)? "
    r"(failed; aborting|died:|called os|was terminated by|has exited|have exited|timed out after|has not responded)"
    r"|mpicomm\.MismatchError: "
)
_ROW = re.compile(r" +(ranks? [\d, -]+?)(?: +|: #\d+ )(not responding|died|exited|not in|(?:in )?[a-z_]+)")
_TIMED_OUT = "TimeoutError: barrier #"  # the error of a barrier that timed out; the other ranks end the job
_IS_ELSEWHERE = {"not responding", "died", "exited", "not in"}
_FORWARDED = ", which forwards its messages, does not respond"  # in the row of a rank behind a hub that is stopped


def _lines_of_ours(stderr: str) -> list[str]:
    """Return the lines that mpicomm printed and the indented lines below them."""
    lines: list[str] = []
    is_ours = False
    # Open MPI's own output may end in the middle of a line.
    for line in re.sub(r"[^\S\n]*(?=\[mpicomm\] )", "\n", stderr).splitlines():
        starts = line.startswith(("[mpicomm]", "mpicomm.", _TIMED_OUT))
        is_ours = starts or (is_ours and line.startswith("  "))
        if is_ours:
            lines.append(line)
    return lines


def _named(lines: Sequence[str]) -> list[int]:
    """Return the ranks that are reported as the cause: in the line itself, or in the table below it."""
    named: set[int] = set()
    for number, line in enumerate(lines):
        if (cause := _CAUSE.match(line)) is None:
            continue
        below = lines[number + 1 :]
        if below and below[0].startswith(_TIMED_OUT):
            named |= _odd_ones(below[1:])
        elif cause[2] == "timed out after" or cause[1] is None:
            named |= _odd_ones(below)
        else:
            named |= _ranks(cause[1])
    return sorted(named)


def _odd_ones(lines: Sequence[str]) -> set[int]:
    """Return the ranks outside the most frequent place in a table; all ranks if they are in the same operation."""
    places: dict[int, str] = {}
    for line in lines:
        if not line.startswith(" "):
            break
        if (row := _ROW.match(line)) and _FORWARDED not in line:
            places |= dict.fromkeys(_ranks(row[1]), row[2])
    elsewhere = {rank for rank, place in places.items() if place in _IS_ELSEWHERE}
    most = collections.Counter(places.values()).most_common(1)
    return elsewhere or {rank for rank, place in places.items() if place != most[0][0]} or set(places)


def _ranks(text: str) -> set[int]:
    return set(rank_text.parse_ranges(re.sub("ranks? ", "", text)))


def described_status(status: int | None) -> str:
    """Return a launcher's exit status, with the name of the signal that it may represent."""
    if status is None:
        return ""
    number = -status if status < 0 else status - 128
    return f"{status} ({signal.Signals(number).name})" if number in set(signal.Signals) else str(status)


def environments(other: str | None = os.environ.get("OTHER_MPI_ENV")) -> list[Path | None]:
    """Return the environments with an MPI: this one and, if configured, the other one."""
    return [None, Path(other)] if other else [None]
