"""Options of other launchers after `mpicomm run`, horovodrun's too, and the equivalent ones; all functions are pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from mpicomm.launch.request import VARIABLE_OPTIONS, command_line

RANKS, HOSTS, HOSTFILE, VARIABLE = "-n", "--hosts", "--hostfile", "--env"
LAUNCHER_ARGUMENT = "--launcher-arg"
PER_NODE = ("--nproc-per-node", "--nproc_per_node")
FOREIGN = {
    **dict.fromkeys(("-np", "--np", "--ntasks"), RANKS),
    **dict.fromkeys(("-H", "-host", "--host", "-hosts"), HOSTS),
    **dict.fromkeys(("-hostfile", "-machinefile", "--machinefile"), HOSTFILE),
    "-x": VARIABLE,
}
"""Options of mpirun, srun and torchrun by their names there, and the option of `mpicomm run` for each."""

_OURS = ("--no-env", "--launcher", LAUNCHER_ARGUMENT, "--log-dir", "--max-restarts", "--grace-period", "--spares")
_CONTAINER = ("--container", "--container-runtime", "--container-bind")
_WITH_VALUE = (RANKS, *PER_NODE, HOSTS, HOSTFILE, VARIABLE, *_OURS, *_CONTAINER)
BIND = "--bind"
_OF_PROGRAMS_TOO = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--backend", BIND)
"""Options with a value that programs may have, too: behind a program they are its own."""

HOROVOD = "--horovod"
_FLAGS = ("--tag-output", "--dry-run", "--fault-tolerant", HOROVOD)


Equivalents = Mapping[str, Callable[[str], list[str]]]
"""Options of another launcher, and the options of `mpicomm run` that follow from the value of each."""


def _same_as(ours: str) -> Callable[[str], list[str]]:
    return lambda value: [ours, value]


_FOREIGN: Equivalents = {option: _same_as(ours) for option, ours in FOREIGN.items()}


def corrected(line: Sequence[str]) -> list[str]:
    """Return the arguments with the foreign options before the program replaced by those of `mpicomm run`."""
    options, rest = leading(line, tuple(FOREIGN))
    return [*(word for words in options for word in _equivalent(words, _FOREIGN) or words), *rest]


def leading(line: Sequence[str], with_value: Sequence[str] = ()) -> tuple[list[list[str]], list[str]]:
    """Split the arguments into the options before the program, each with its value, and the other arguments.

    Args:
        line: The arguments of `mpicomm run`.
        with_value: Options with a value in addition to those of `mpicomm run`.
    """
    options: list[list[str]] = []
    left = list(line)
    while left and left[0].startswith("-") and left[0] not in ("-m", "--"):
        words = [left.pop(0)]
        if words[0] in (*_WITH_VALUE, *_OF_PROGRAMS_TOO, *with_value):
            words += left[:1]
            del left[:1]
        options.append(words)
    return options, left


def _equivalent(words: Sequence[str], with_value: Equivalents) -> list[str] | None:
    """Return the options of `mpicomm run` for an option of another launcher with its value; None for one of its own."""
    option, has_value, value = words[0].partition("=")
    values = [value] if has_value else words[1:]
    return with_value[option](values[0]) if option in with_value and values else None


def note(line: Sequence[str]) -> str | None:
    """Suggest a command if options of `mpicomm run` follow the program; return None if none do.

    Args:
        line: The arguments of `mpicomm run`. If an option or `--` comes first, words after the program belong to it.
    """
    if not line or (line[0].startswith("-") and line[0] != "-m"):
        return None
    name = line[1] if line[0] == "-m" and len(line) > 1 else line[0]
    options, program = _separated(line)
    if not options:
        return None
    to_program = ["--", *(["python", *line] if line[0] == "-m" else line)]
    return (
        f"{command_line(options)} follows {name}, and is passed to it. If it is meant for mpicomm run:\n"
        f"  mpicomm run {command_line(corrected([*options, *program]))}\n"
        f"To pass it to {name} without this note: mpicomm run {command_line(to_program)}"
    )


def _separated(line: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the line into the options of `mpicomm run`, wherever they are, and the other words."""
    options: list[str] = []
    rest: list[str] = []
    left = list(line)
    while left:
        word = left.pop(0)
        option, has_value, value = word.partition("=")
        ours = RANKS if FOREIGN.get(option) == RANKS else option  # programs may have their own --host
        follows = value if has_value else next(iter(left), "")
        if word in _FLAGS:
            options.append(word)
        elif ours in _WITH_VALUE and follows and (ours not in (RANKS, *PER_NODE) or follows.isdecimal()):
            options += [word] if has_value else [word, left.pop(0)]
        else:
            rest.append(word)
    return options, rest


# -- horovodrun --------------------------------------------------------------------------------------------------------


def _variable(name: str) -> Callable[[str], list[str]]:
    return lambda value: [VARIABLE, f"{name}={value}"]


def _fusion_threshold(mebibytes: str) -> list[str]:
    if not mebibytes.isdecimal():
        raise ValueError(
            f"--fusion-threshold-mb must be a number of MiB, got {mebibytes}.\nPass a whole number of at least 0."
        )
    return _variable("HOROVOD_FUSION_THRESHOLD")(str(int(mebibytes) * 2**20))


def _minimum(ranks: str) -> list[str]:
    return ["--fault-tolerant", *_variable("HOROVOD_ELASTIC_MIN_NP")(ranks)]


_HOROVODRUN: Equivalents = {
    **_FOREIGN,
    "--num-proc": _same_as(RANKS),
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
_HOROVODRUN_FLAGS: Mapping[str, list[str]] = {
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
    options, rest = leading(line, tuple(_HOROVODRUN))
    if [HOROVOD] not in options:
        return list(line), []
    replaced: list[str] = []
    notes = []
    for words in options:
        ours = _equivalent(words, _HOROVODRUN)
        if ours is None:
            ours = _HOROVODRUN_FLAGS.get(words[0].partition("=")[0])
        if ours is None:
            replaced += words
            continue
        replaced += ours
        # The variables of horovodrun's own options are not secret.
        shown = command_line if words[0].partition("=")[0] in VARIABLE_OPTIONS else shlex.join
        meaning = f"is {shown(ours)}" if ours else "has no effect: the launcher is that of the MPI in use"
        notes.append(f"horovodrun's {shown(words)} {meaning}")
    return [*replaced, *rest], notes
