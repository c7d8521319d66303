"""Prints which ranks of this host have not called `bootstrap()`: a script that `notice.py` runs while a rank waits.

It runs in an interpreter of its own, because the rank itself cannot run Python code: MPI_Init holds the GIL. It uses
only the standard library, and takes one argument, a JSON object with the fields of `Waiting`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MARKER = "mpicomm-start-"
"""Followed by the pid: the name of the abstract Unix socket that a process keeps open while it waits."""

_ALWAYS_PRINT = 16  # ranks below this may print; above, only powers of two, so that large jobs print few lines
_SHOWN = 8  # how many ranks or hosts are listed one by one
_COMMAND = 120  # characters of a command line


@dataclasses.dataclass(frozen=True)
class Waiting:
    """The information that a waiting rank passes to this script."""

    pid: int
    rank: int
    size: int | None
    """The number of ranks; None if the launcher does not set it."""

    local_size: int | None
    """The number of ranks on this host; None if the launcher does not set it."""

    variable: str
    """The environment variable in which the launcher passes the rank."""

    host: str
    phase: str
    seconds: float
    limit: float
    """Seconds after which the job is aborted."""

    script: str
    """The program: sys.argv[0]."""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of a rank."""

    pid: int
    rank: int
    command: str
    is_waiting: bool


def report(waiting: Waiting, processes: Sequence[Process], hosts: str) -> str | None:
    """Return the text to print; None if another rank of this host prints it, or this rank no longer waits.

    Args:
        processes: The processes of this host's ranks; a rank may have several.
        hosts: The hosts of the job as the launcher lists them; empty without such a list.
    """
    waiting_ranks = {each.rank for each in processes if each.is_waiting}
    if waiting.rank != min(filter(_may_print, waiting_ranks), default=None):
        return None
    of = "" if waiting.size is None else f" of {waiting.size}"
    name = f"rank {waiting.rank}{of} on {waiting.host}"
    lines = [
        f"[mpicomm] {name} has waited {waiting.seconds:g} s in bootstrap() ({waiting.phase}) for other ranks.",
        *(f"  {line}" for line in _ranks_of_host(waiting, processes, waiting_ranks)),
        *([f"  hosts of the job: {hosts}"] if hosts else []),
        *_remedy(waiting, waiting_ranks),
    ]
    return "\n".join(lines) + "\n"


def _may_print(rank: int) -> bool:
    return rank < _ALWAYS_PRINT or rank & (rank - 1) == 0


def _ranks_of_host(waiting: Waiting, processes: Sequence[Process], waiting_ranks: set[int]) -> list[str]:
    lines = [f"waiting on {waiting.host}: {_listed(waiting_ranks)}"]
    others: dict[int, Process] = {}
    for each in processes:
        if each.rank not in waiting_ranks:
            others.setdefault(each.rank, each)
    lines += [
        f"rank {rank} on {waiting.host} has not called bootstrap(): process {each.pid}, {each.command}"
        for rank, each in sorted(others.items())[:_SHOWN]
    ]
    if len(others) > _SHOWN:
        lines.append(f"and {len(others) - _SHOWN} more ranks on {waiting.host} have not")
    seen = waiting_ranks | others.keys()
    if waiting.local_size is None or len(seen) > waiting.local_size:
        return lines
    missing = waiting.local_size - len(seen)
    if missing and waiting.local_size == waiting.size:
        absent = _listed(set(range(waiting.size)) - seen)
        lines.append(f"{absent}: no process on {waiting.host}, exited before bootstrap()")
    elif missing:
        lines.append(
            f"{missing} of the {waiting.local_size} ranks on {waiting.host}: no process, exited before bootstrap()"
        )
    elif not others and waiting.local_size == waiting.size:
        lines.append("every rank has called bootstrap(): MPI itself is slow or blocked")
    elif not others:
        lines.append(
            f"all {waiting.local_size} ranks on {waiting.host} are waiting: the absent ranks are on other hosts"
        )
    return lines


def _remedy(waiting: Waiting, waiting_ranks: set[int]) -> list[str]:
    limit = f"The job is aborted after {waiting.limit:g} s; bootstrap(timeout=...) changes this limit."
    if waiting.script in ("", "-") and waiting_ranks == {0}:  # Python reads its program from standard input
        return [
            limit,
            "This program comes from standard input, which mpirun passes to rank 0 only. Save it to a file and start",
            f"  mpirun -n {waiting.size or 'N'} python FILE",
        ]
    if len(waiting_ranks) == waiting.size:
        return [
            limit,
            "Check that MPI works without mpicomm, with the same launcher and hosts:",
            f"  mpirun -n {waiting.size} python -m mpi4py.bench helloworld",
        ]
    return [
        limit,
        "Check that every rank runs this program, and that no rank exits or blocks before mpicomm.bootstrap().",
    ]


def _listed(ranks: set[int]) -> str:
    first = ", ".join(map(str, sorted(ranks)[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {first}{more}"


# -- information from /proc and the scheduler --------------------------------------------------------------------------


def processes_of_job(pid: int, variable: str) -> list[Process]:
    """Return the processes of the ranks that the launcher's daemon started on this host, parents first.

    The daemon is the nearest ancestor of `pid` whose environment lacks the launcher's variable.
    """
    parents = _parents()
    daemon = pid
    while (parent := parents.get(daemon)) and _rank_of(daemon, variable) is not None:
        daemon = parent
    children = collections.defaultdict(list)
    for child, parent in sorted(parents.items()):
        children[parent].append(child)
    markers = _markers()
    found, next_ones = [], list(children[daemon])
    while next_ones:
        each = next_ones.pop(0)
        rank = _rank_of(each, variable)
        if rank is not None:
            found.append(Process(each, rank, _command_of(each), f"@{MARKER}{each}" in markers))
            next_ones += children[each]
    return found


def hosts_of_job(environ: Mapping[str, str]) -> str:
    """Return the hosts of the job as its scheduler lists them; empty without such a list."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "LSB_HOSTS"):
        if environ.get(name):
            return f"{environ[name]} ({name})"
    names = list(dict.fromkeys(_read(environ.get("PBS_NODEFILE", "")).split()))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more} (PBS_NODEFILE)" if names else ""


def _parents() -> dict[int, int]:
    """Return the parent pid of every process, by pid."""
    stats = {int(path.name): _read(path / "stat") for path in Path("/proc").iterdir() if path.name.isdigit()}
    return {pid: int(stat.rpartition(") ")[2].split()[1]) for pid, stat in stats.items() if stat}


def _rank_of(pid: int, variable: str) -> int | None:
    """Return the rank in the environment of a process; None if it is not set, or another user owns the process."""
    for entry in _read(f"/proc/{pid}/environ").split("\0"):
        name, _, value = entry.partition("=")
        if name == variable and value.isdecimal():
            return int(value)
    return None


def _command_of(pid: int) -> str:
    command = " ".join(_read(f"/proc/{pid}/cmdline").replace("\0", " ").split()) or "ended"
    return command if len(command) <= _COMMAND else f"{command[:_COMMAND]} ..."


def _markers() -> set[str]:
    return {line.rpartition(" ")[2] for line in _read("/proc/net/unix").splitlines()}


def _read(path: str | Path) -> str:
    """Return the text of a file; empty if it cannot be read, such as that of a process that has ended."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    state = Waiting(**json.loads(sys.argv[1]))
    if text := report(state, processes_of_job(state.pid, state.variable), hosts_of_job(os.environ)):
        os.write(2, text.encode())
