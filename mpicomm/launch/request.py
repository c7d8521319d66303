"""Input and result of a launch: `Request`, `Machine` and `Node` are the input, `Start` is the result."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence

from mpicomm.errors import LaunchError
from mpicomm.launch.allocation import Host


@dataclasses.dataclass(frozen=True)
class Node:
    """This node in a launch by hand, with one command on each node."""

    rank: int
    nodes: int
    master_addr: str
    master_port: int


@dataclasses.dataclass(frozen=True)
class Request:
    """The launch that the user requests."""

    program: tuple[str, ...]
    ranks: int | None = None
    """None for the capacity of the allocation, the hosts or the machine."""
    hosts: tuple[Host, ...] = ()
    node: Node | None = None
    log_dir: str | None = None
    tag_output: bool = False

    def rank_command(self, python: str) -> tuple[str, ...]:
        """Return the command of one rank, which writes its own log if `log_dir` is set."""
        if self.log_dir is None:
            return self.program
        shown = "all" if self.tag_output else "0"
        return (python, "-m", "mpicomm.rank_log", self.log_dir, shown, *self.program)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine on which the command runs."""

    cores: int
    """Number of cores that this process may use; the hardware threads of a core count once."""
    is_whole: bool
    """Whether these are all cores of the machine."""
    is_root: bool
    python: str
    gpus: int = 0

    @property
    def capacity(self) -> int:
        """Default number of ranks: one per GPU, or one per core without GPUs."""
        return self.gpus or self.cores


@dataclasses.dataclass(frozen=True)
class Start:
    """A launch command and the environment in which to run it."""

    command: tuple[str, ...]
    environ: Mapping[str, str]

    def shown(self, before: Mapping[str, str]) -> str:
        """Return the equivalent command line for a shell with the environment `before`."""
        removed = [word for name in sorted(before.keys() - self.environ.keys()) for word in ("-u", name)]
        added = [f"{name}={value}" for name, value in sorted(self.environ.items()) if before.get(name) != value]
        return shlex.join([*(["env", *removed] if removed else []), *added, *self.command])


def program(words: Sequence[str], module: Sequence[str], python: str) -> tuple[str, ...]:
    """Return the command of a program: Python runs *.py files and modules, other commands run directly.

    Args:
        words: A script or a command, and its arguments.
        module: A module and its arguments; empty for a script or a command.

    Raises:
        LaunchError: If there is nothing to run.
    """
    if words and words[0] == "--":
        words = words[1:]
    if bool(words) == bool(module):
        raise LaunchError("nothing to run.\nPass a script, `-m MODULE`, or a command after `--`.")
    if module:
        return (python, "-m", *module)
    if words[0].endswith(".py"):
        return (python, *words)
    if words[0] in ("python", "python3"):  # the interpreter that has mpi4py, independent of PATH
        return (python, *words[1:])
    return tuple(words)
