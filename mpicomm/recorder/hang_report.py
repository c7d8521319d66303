"""The report on a job that hangs or ends: the table of the ranks' positions, and why ranks have died."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

from mpicomm.recorder import rank_text
from mpicomm.recorder.status import Crash, ExitedRank, NotResponding, Status

_ROWS = 32  # the most rows of a table

DEATH_REMEDY = (
    "Check the output of that rank, and the kernel's log of its host (dmesg): it names processes that were killed for "
    "lack of memory."
)
"""The next step after the death of a rank."""

HOST_REMEDY = (
    "mpirun does not continue without a host. With mpicomm run --max-restarts N, the job starts again on the other "
    "hosts, and continues from its newest checkpoint."
)
"""The next step after the loss of a host."""

_UNREPORTED = (
    "its process ended without reporting an error or a signal (killed, for example for lack of memory, os._exit or "
    "MPI_Abort)"
)
_UNREACHABLE = {os.strerror(number) for number in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)}


def remedy_after_death(crash: Crash | None, synchronous_kernels: str) -> str:
    """Return the next step after the death of a rank.

    Args:
        crash: The signal that has ended its process, such as SIGSEGV; None if it has not crashed.
        synchronous_kernels: The setting with which calls wait for their kernels on GPUs; empty without one.
    """
    if crash is None:
        return DEATH_REMEDY
    return (
        "Native code crashed: see the stacks in the output of that rank. To find the call in it, run the job under gdb"
        + (f"; with GPUs, set {synchronous_kernels}, too." if synchronous_kernels else ".")
    )


def table(rows: Mapping[int, Status], hosts: Sequence[str]) -> str:
    """Return one line for all ranks with the same position; lines of more ranks first."""
    ranks: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}  # the most of a line's ranks
    for rank, row in sorted(rows.items()):
        text, of_rank = _position(row, hosts[rank])
        ranks.setdefault(text, []).append(rank)
        seconds[text] = max(seconds.get(text, 0.0), of_rank)
    ordered = sorted(ranks, key=lambda text: -len(ranks[text]))
    names = [rank_text.name_ranks(ranks[text]) for text in ordered]
    width = max(map(len, names), default=0)
    lines = [
        f"  {name:{width}}  {text.replace(_SECONDS, f'{seconds[text]:.0f} s')}"
        for name, text in zip(names[:_ROWS], ordered, strict=False)
    ]
    if len(ordered) > _ROWS:
        lines.append(f"  ... and {len(ordered) - _ROWS} more rows; see the ranks' dump files")
    return "\n".join(lines)


_SECONDS = "\0"  # placeholder for the seconds: ranks with the same position share a line whatever their seconds


def _position(row: Status, host: str) -> tuple[str, float]:
    """Return the position of a rank, and the seconds for `_SECONDS`."""
    if isinstance(row, NotResponding):
        state = f": {row.state}" if row.state else ""
        return f"not responding for {_SECONDS} on {host}{state}", row.seconds
    if isinstance(row, ExitedRank):
        return f"exited {_SECONDS} ago {row.manner}", row.seconds
    if (longest := row.longest) is not None:
        more = len(row.running) - 1
        beside = f" (and {more} more operation{'s' if more > 1 else ''})" if more else ""
        operation = rank_text.describe_operation(longest)
        return f"in {operation}, at {longest.where}, for {_SECONDS}{beside}", longest.seconds or 0.0
    at = f"at {row.main}" if row.main else "its main thread has ended, other threads are running"
    if row.last is None:
        return f"not in an operation, none called yet; {at}", 0.0
    last = f"last called {_SECONDS} ago: {rank_text.describe_operation(row.last)}, at {row.last.where}"
    return f"not in an operation; {at}; {last}", row.last.called


def is_unreachable(lost: str) -> bool:
    """Return whether a connection was lost because the other host does not answer."""
    return lost in _UNREACHABLE


def cause_of_loss(lost: str, crash: Crash | None = None) -> str:
    """Return why a rank died, from the reason why its connection was lost, and its own last message."""
    if crash is not None:
        return f"{crash.signal} ended its process" + (f"; last Python line: {crash.line}" if crash.line else "")
    if is_unreachable(lost):
        return f"its host is unreachable ({lost})"
    return _UNREPORTED
