"""The messages that launchers print about a failed rank, which `mpicomm run` holds back if it reports the failure."""

from __future__ import annotations

import dataclasses
import re

_MOST_BYTES = 2000  # of a message; the longest known one has 600, with the names of a host and of a communicator
_LINE = b"-" * 74 + b"\n"
_DOUBLE_LINE = b"=" * 83 + b"\n"
_NAMES = (b"prterun", b"mpirun", b"mpiexec")  # of Open MPI's launcher: Open MPI 4 prints that of the command


@dataclasses.dataclass(frozen=True)
class FailureMessage:
    """One message of a launcher, which is printed at most once in a job."""

    start: bytes
    """The bytes with which it starts, up to the first that differ between launches."""

    pattern: re.Pattern[bytes]
    """The whole message."""


@dataclasses.dataclass(frozen=True)
class FailureMessages:
    """The messages of a launcher."""

    stream: int
    """The launcher's file descriptor of the messages: 1 or 2."""

    known: tuple[FailureMessage, ...]


def _message(start: bytes, *rest: bytes) -> FailureMessage:
    """Describe a message by its first bytes, and patterns of the rest."""
    return FailureMessage(start, re.compile(re.escape(start) + b"".join(rest)))


# The texts of Open MPI 4 and 5: help-mpi-api.txt, help-prun.txt and help-orterun.txt. PRRTE 3 writes a NUL byte after
# some of them, in a write of its own.
OPEN_MPI = FailureMessages(
    2,
    (
        _message(
            _LINE + b"MPI_ABORT was invoked on rank ",
            rb"\d+ in communicator [^\n]*\n(?:  Proc: [^\n]*\n  Errorcode: -?\d+\n|with errorcode -?\d+\.\n)\n",
            rb"NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes\.\n",
            rb"You may or may not see output from other processes, depending on\n",
            rb"exactly when Open MPI kills them\.\n",
            _LINE,
        ),
        *[
            _message(
                _LINE + name + b" has exited due to process rank ",
                rb"\d+ with PID \d+ on node \S+ calling\n",
                rb'"abort"\. This may have caused other processes in the application to be\n',
                rb"terminated by signals sent by \S+ \(as reported here\)\.\n",
                _LINE,
            )
            for name in _NAMES
        ],
        *[
            _message(
                _LINE + name + b" detected that one or more processes exited with non-zero status,\n",
                rb"thus causing the job to be terminated\. The first process to do so was:\n\n",
                rb"   Process name: [^\n]*\n   Exit code:    -?\d+\n",
                _LINE,
            )
            for name in _NAMES
        ],
        *[
            _message(
                _LINE + name + b" noticed that process rank ",
                rb"\d+ with PID \d+ on node \S+ exited on\s+signal \d+(?: \([^\n]*\))?\.\n",
                _LINE,
            )
            for name in _NAMES
        ],
    ),
)

# MPICH's Hydra, pmiserv_cb.c and mpiexec.c.
MPICH = FailureMessages(
    1,
    (
        _message(
            b"\n" + _DOUBLE_LINE + b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n",
            rb"=   PID \d+ RUNNING AT [^\n]*\n=   EXIT CODE: \d+\n",
            rb"=   CLEANING UP REMAINING PROCESSES\n=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES\n",
            _DOUBLE_LINE,
        ),
        _message(
            b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: ",
            rb"[^\n]*\nThis typically refers to a problem with your application\.\n",
            rb"Please see the FAQ page for debugging suggestions\n",
        ),
    ),
)


class FailureMessageFilter:
    """Holds back the messages of a launcher in a stream of bytes; every other byte is passed on unchanged."""

    def __init__(self, messages: FailureMessages) -> None:
        self._known = messages.known
        self._undecided = b""  # may be the start of a message
        self._held: dict[bytes, bytes] = {}  # by their start
        self._follows_message = False  # whether the next byte is the first after a message

    @property
    def is_undecided(self) -> bool:
        """Whether bytes wait for those that follow, to decide whether they belong to a message."""
        return bool(self._undecided)

    @property
    def held(self) -> bytes:
        """The messages that are held back."""
        return b"".join(self._held.values())

    def add(self, data: bytes) -> bytes:
        """Return the bytes to print, after more bytes have arrived.

        A message that was held back is printed when another one of its kind arrives: a program in a rank may print
        those of a launcher of its own.
        """
        if self._follows_message:
            data = data.removeprefix(b"\0")
            self._follows_message = False
        self._undecided += data
        printed = []
        while (found := self._first_start()) is not None:
            position, message = found
            match = message.pattern.match(self._undecided, position)
            if match is not None:
                printed += [self._undecided[:position], self._held.pop(message.start, b"")]
                self._held[message.start] = match[0]
                self._undecided = self._undecided[match.end() :].removeprefix(b"\0")
                self._follows_message = match.end() == match.endpos
            elif len(self._undecided) - position > _MOST_BYTES:
                end = position + len(message.start)
                printed.append(self._undecided[:end])
                self._undecided = self._undecided[end:]
            else:
                printed.append(self._undecided[:position])
                self._undecided = self._undecided[position:]
                return b"".join(printed)
        kept = max(_overlap(self._undecided, message.start) for message in self._known)
        end = len(self._undecided) - kept
        printed.append(self._undecided[:end])
        self._undecided = self._undecided[end:]
        return b"".join(printed)

    def release(self, *, also_held: bool) -> bytes:
        """Return the undecided bytes, which no others have followed, and the messages that are held back on request."""
        printed, self._undecided = self._undecided, b""
        if also_held:
            printed = self.held + printed
            self._held.clear()
        return printed

    def _first_start(self) -> tuple[int, FailureMessage] | None:
        positions = [(self._undecided.find(message.start), message) for message in self._known]
        return min((found for found in positions if found[0] >= 0), key=lambda found: found[0], default=None)


def _overlap(data: bytes, start: bytes) -> int:
    """Return the length of the longest end of the data that is a beginning of `start`."""
    lengths = range(min(len(data), len(start) - 1), 0, -1)
    return next((length for length in lengths if data.endswith(start[:length])), 0)
