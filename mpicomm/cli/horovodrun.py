"""The options of horovodrun after `mpicomm run --horovod`, and the equivalent options; all functions are pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from mpicomm.cli import run_line
from mpicomm.launch.request import VARIABLE_OPTIONS, command_line


def _same_as(ours: str) -> Callable[[str], list[str]]:
    return lambda value: [ours, value]


def _variable(name: str) -> Callable[[str], list[str]]:
    return lambda value: [run_line.VARIABLE, f"{name}={value}"]


def _fusion_threshold(mebibytes: str) -> list[str]:
    if not mebibytes.isdecimal():
        raise ValueError(
            f"--fusion-threshold-mb must be a number of MiB, got {mebibytes}.\nPass a whole number of at least 0."
        )
    return _variable("HOROVOD_FUSION_THRESHOLD")(str(int(mebibytes) * 2**20))


def _minimum(ranks: str) -> list[str]:
    return ["--fault-tolerant", *_variable("HOROVOD_ELASTIC_MIN_NP")(ranks)]


_WITH_VALUE: dict[str, Callable[[str], list[str]]] = {
    **{option: _same_as(ours) for option, ours in run_line.FOREIGN.items()},
    "--num-proc": _same_as(run_line.RANKS),
    "--output-filename": _same_as("--log-dir"),
    "--min-np": _minimum,
    "--min-num-proc": _minimum,
    "--timeline-filename": _variable("HOROVOD_TIMELINE"),
    "--fusion-threshold-mb": _fusion_threshold,
    "--cycle-time-ms": _variable("HOROVOD_CYCLE_TIME"),
    "--cache-capacity": _variable("HOROVOD_CACHE_CAPACITY"),
    "--stall-check-warning-time-seconds": _variable("HOROVOD_STALL_CHECK_TIME_SECONDS"),
    "--stall-check-shutdown-time-seconds": _variable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
}
"""The options with a value, and the options of `mpicomm run` that follow from it."""

_FLAGS: dict[str, list[str]] = {
    "--timeline-mark-cycles": _variable("HOROVOD_TIMELINE_MARK_CYCLES")("1"),
    "--no-stall-check": _variable("HOROVOD_STALL_CHECK_DISABLE")("1"),
    **{option: [] for option in ("--mpi", "--gloo", "--verbose", "--disable-cache")},
}
"""The options without a value. Those with no equivalent select or describe Horovod's own launcher."""


def translated(line: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace the options of horovodrun, if `--horovod` is among the options before the program.

    Args:
        line: The arguments of `mpicomm run`.

    Returns:
        The arguments for `mpicomm run`, and a message for each replaced option.

    Raises:
        ValueError: If the value of an option is not valid.
    """
    options, rest = run_line.leading(line, tuple(_WITH_VALUE))
    if [run_line.HOROVOD] not in options:
        return list(line), []
    found: list[str] = []
    notes = []
    for words in options:
        ours = _equivalent(words)
        if ours is None:
            found += words
            continue
        found += ours
        # The variables of horovodrun's own options are not secret.
        shown = command_line if words[0].partition("=")[0] in VARIABLE_OPTIONS else shlex.join
        meaning = f"is {shown(ours)}" if ours else "has no effect: the launcher is that of the MPI in use"
        notes.append(f"horovodrun's {shown(words)} {meaning}")
    return [*found, *rest], notes


def _equivalent(words: Sequence[str]) -> list[str] | None:
    """Return the options of `mpicomm run` for one of horovodrun with its value; None for another option."""
    option, has_value, value = words[0].partition("=")
    values = [value] if has_value else words[1:]
    if option in _WITH_VALUE and values:
        return _WITH_VALUE[option](values[0])
    return _FLAGS.get(option)
