"""The options of horovodrun after `mpicomm run --horovod`, and the equivalent options; all functions are pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from mpicomm.cli import run_line


def _bytes(mebibytes: str) -> str:
    if not mebibytes.isdecimal():
        raise ValueError(f"--fusion-threshold-mb must be a number of MiB, got {mebibytes}.\nPass 0 or more.")
    return str(int(mebibytes) * 2**20)


_EQUIVALENTS: dict[str, str] = {
    **run_line.FOREIGN,
    "--num-proc": run_line.RANKS,
    "-hostfile": run_line.HOSTFILE,
    "--output-filename": "--log-dir",
}
"""Options with a value, and the options of `mpicomm run` with the same value."""

_VARIABLES: dict[str, tuple[str, Callable[[str], str]]] = {
    "--timeline-filename": ("HOROVOD_TIMELINE", str),
    "--fusion-threshold-mb": ("HOROVOD_FUSION_THRESHOLD", _bytes),
    "--cycle-time-ms": ("HOROVOD_CYCLE_TIME", str),
    "--cache-capacity": ("HOROVOD_CACHE_CAPACITY", str),
    "--stall-check-warning-time-seconds": ("HOROVOD_STALL_CHECK_TIME_SECONDS", str),
    "--stall-check-shutdown-time-seconds": ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str),
}
"""Options with a value, the variables of mpicomm.horovod, and how their values follow."""

_FLAGS = {
    "--timeline-mark-cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
    "--no-stall-check": "HOROVOD_STALL_CHECK_DISABLE",
}
"""Options without a value, and the variables that they set to 1."""

_WITHOUT_EFFECT = ("--mpi", "--gloo", "--verbose", "--disable-cache")
"""Options without a value that select or describe Horovod's own launcher."""


def translated(line: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace the options of horovodrun, if `--horovod` is among the options before the program.

    Args:
        line: The arguments of `mpicomm run`.

    Returns:
        The arguments for `mpicomm run`, and a message for each replaced option.

    Raises:
        ValueError: If the value of an option is not valid.
    """
    options, rest = run_line.leading(line, (*_EQUIVALENTS, *_VARIABLES))
    if [run_line.HOROVOD] not in options:
        return list(line), []
    found: list[str] = []
    notes = []
    for words in options:
        name, has_value, value = words[0].partition("=")
        ours = _equivalent(name, value if has_value else " ".join(words[1:]))
        if ours is None:
            found += words
            continue
        found += ours
        meaning = f"is {shlex.join(ours)}" if ours else "has no effect: the launcher is that of the MPI in use"
        notes.append(f"horovodrun's {shlex.join(words)} {meaning}")
    return [*found, *rest], notes


def _equivalent(name: str, value: str) -> list[str] | None:
    """Return the options of `mpicomm run` for one of horovodrun; None if it is not one of horovodrun."""
    if name in _EQUIVALENTS:
        return [_EQUIVALENTS[name], value]
    if name in _VARIABLES:
        variable, convert = _VARIABLES[name]
        return [run_line.VARIABLE, f"{variable}={convert(value)}"]
    if name in _FLAGS:
        return [run_line.VARIABLE, f"{_FLAGS[name]}=1"]
    return [] if name in _WITHOUT_EFFECT else None
