"""What goes into a start, and what comes out."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from mpicomm.errors import LaunchError
from mpicomm.launch.hosts import Host


@dataclasses.dataclass(frozen=True)
class Node:
    """This node among those that are started by hand, one command on each."""

    rank: int
    nodes: int
    master_addr: str
    master_port: int


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asks for."""

    program: tuple[str, ...]
    ranks: int | None = None
    """None for as many as there is room for."""
    hosts: tuple[Host, ...] = ()
    node: Node | None = None
    log_dir: str | None = None
    tag_output: bool = False

    def of_rank(self, python: str) -> tuple[str, ...]:
        """Return the command of one rank, which keeps its own log if one is asked for."""
        if self.log_dir is None:
            return self.program
        shown = "all" if self.tag_output else "0"
        return (python, "-m", "mpicomm.cli.rank_log", self.log_dir, shown, *self.program)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine on which the command is given."""

    cores: int
    """How many cores this process may use, each counted once however many threads it has."""
    is_whole: bool
    """Whether these are all that it has."""
    is_root: bool
    python: str
    gpus: int = 0

    @property
    def capacity(self) -> int:
        """The number of ranks that fit: one for each GPU, or for each core."""
        return self.gpus or self.cores


@dataclasses.dataclass(frozen=True)
class Start:
    """A command, and the environment in which it is to run."""

    command: tuple[str, ...]
    environ: Mapping[str, str]

    def shown(self, before: Mapping[str, str]) -> str:
        """Return the line that does the same in a shell with the environment `before`."""
        gone = [word for name in sorted(before.keys() - self.environ.keys()) for word in ("-u", name)]
        new = [f"{name}={value}" for name, value in sorted(self.environ.items()) if before.get(name) != value]
        return shlex.join([*(["env", *gone] if gone else []), *new, *self.command])


def program(words: Sequence[str], module: Sequence[str], python: str) -> tuple[str, ...]:
    """Return the command of a program: Python runs what is named *.py or given as a module, the rest runs itself.

    Args:
        words: A script or a command, and its arguments.
        module: A module and its arguments, if that is what was given.
    """
    if words and words[0] == "--":
        words = words[1:]
    if bool(words) == bool(module):
        raise LaunchError("nothing to run is given.\nName a script, `-m MODULE`, or a command after `--`.")
    if module:
        return (python, "-m", *module)
    if words[0].endswith(".py"):
        return (python, *words)
    if words[0] in ("python", "python3"):  # the one that has mpi4py, whatever is first in PATH
        return (python, *words[1:])
    return tuple(words)
