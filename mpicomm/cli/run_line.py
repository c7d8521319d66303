"""Options of other launchers after `mpicomm run`, and the equivalent command line; all functions are pure."""

from __future__ import annotations

from collections.abc import Sequence

from mpicomm.launch.request import command_line

RANKS, HOSTS, HOSTFILE, VARIABLE = "-n", "--hosts", "--hostfile", "--env"
PER_NODE = ("--nproc-per-node", "--nproc_per_node")
FOREIGN = {
    **dict.fromkeys(("-np", "--np", "--ntasks"), RANKS),
    **dict.fromkeys(("-H", "-host", "--host", "-hosts"), HOSTS),
    **dict.fromkeys(("-hostfile", "-machinefile", "--machinefile"), HOSTFILE),
    "-x": VARIABLE,
}
"""Options of mpirun, srun and torchrun by their names there, and the option of `mpicomm run` for each."""

_WITH_VALUE = (RANKS, *PER_NODE, HOSTS, HOSTFILE, VARIABLE, "--log-dir", "--max-restarts", "--grace-period", "--spares")
_BY_HAND = ("--nnodes", "--node-rank", "--master-addr", "--master-port")  # programs may have these options too
HOROVOD = "--horovod"
_FLAGS = ("--tag-output", "--dry-run", "--fault-tolerant", HOROVOD)


def corrected(line: Sequence[str]) -> list[str]:
    """Return the arguments with the foreign options before the program replaced by those of `mpicomm run`."""
    found, rest = leading(line, tuple(FOREIGN))
    corrected_options: list[str] = []
    for words in found:
        option, has_value, value = words[0].partition("=")
        ours = FOREIGN.get(option)
        corrected_options += words if ours is None else [ours, value if has_value else words[1]]
    return [*corrected_options, *rest]


def leading(line: Sequence[str], with_value: Sequence[str] = ()) -> tuple[list[list[str]], list[str]]:
    """Split the arguments into the options before the program, each with its value, and the other arguments.

    Args:
        line: The arguments of `mpicomm run`.
        with_value: Options with a value in addition to those of `mpicomm run`.
    """
    found: list[list[str]] = []
    left = list(line)
    while left and left[0].startswith("-") and left[0] not in ("-m", "--"):
        words = [left.pop(0)]
        if words[0] in (*_WITH_VALUE, *_BY_HAND, *with_value):
            words += left[:1]
            del left[:1]
        found.append(words)
    return found, left


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
