"""Input and result of a launch: `Request`, `Machine` and `Node` are the input, `Start` is the result."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from mpicomm.errors import LaunchError
from mpicomm.launch.allocation import Allocation, Host, HostAllocation
from mpicomm.launch.binding import Processors
from mpicomm.launch.containers import CARRIER, OF_IMAGE, PYTHON, Container
from mpicomm.settings import PARENT_VARIABLE

_PYTHON_OPTIONS_WITH_VALUE = ("-W", "-X")
VARIABLE_OPTIONS = ("--env", "-x")
"""The options with a variable for the ranks, of `mpicomm run` and `mpicomm job`, and of mpirun."""

_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_LAUNCHERS_OF_RANKS = {
    "accelerate launch": "mpicomm run -n N",
    "accelerate.commands.launch": "mpicomm run -n N",
    "deepspeed": "mpicomm run -n N",
    "deepspeed.launcher.runner": "mpicomm run -n N",
    "horovodrun": "mpicomm run --horovod -n N",
}
"""Commands that start ranks, and the command that starts the ranks of their programs."""


@dataclasses.dataclass(frozen=True)
class Node:
    """This node in a launch without MPI, with one command on each node."""

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
    launcher: str | None = None
    """The user's launcher, one of `selection.LAUNCHERS`."""
    node: Node | None = None
    slurm_nodes: tuple[str, ...] = ()
    """The nodes of a Slurm allocation to use; empty for all."""
    ranks_per_node: int | None = None
    """The number of ranks on each of them; None if srun distributes the ranks."""
    log_dir: str | None = None
    appends_logs: bool = False
    """Whether the logs keep the output of an earlier attempt."""
    tag_output: bool = False
    is_fault_tolerant: bool = False
    """Whether the other ranks continue if a rank fails."""
    forwards_all: bool = False
    """Whether ranks on other hosts get all variables of this process, because the hosts are containers of one image."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables for the ranks on all hosts."""
    container: Container | None = None
    """The container in which each rank runs."""
    launcher_arguments: tuple[str, ...] = ()
    """Arguments that the launcher gets unchanged, after the options of `mpicomm run` and before the program."""
    excluded: tuple[str, ...] = ()
    """Names and patterns of variables of this process that no rank gets, as if they were not set."""
    sets_variables: bool = False
    """Whether the ranks get the variables of torchrun's ranks, for programs that do not call `bootstrap()`."""
    replaced_backend: str | None = None
    """The backend of `bootstrap()` that replaces that of the program's init_process_group()."""
    bind: str | None = None
    """One of `binding.MODES`; None for the binding of the launcher."""
    stage_directory: str | None = None
    """The directory of every node to which the Python environment is copied; None to use it in its place."""
    python: str | None = None
    """The Python of the copy, which also runs the wrappers of the program; None for that of this command."""

    @property
    def launcher_variables(self) -> dict[str, str]:
        """The variables of the launcher for those of the ranks; a container gets each of them by another name."""
        if self.container is None:
            return dict(self.variables)
        carried = {f"{CARRIER}{name}": value for name, value in self.variables.items()}
        return {**outside_container(self.variables), **carried}

    def rank_command(self, python: str, *, binds_in: int | None = None, by_srun: bool = False) -> tuple[str, ...]:
        """Return the command of one rank, which writes its own log if `log_dir` is set.

        Args:
            binds_in: The number of ranks of its host, among which a rank that binds itself divides the cores; None if
                the launcher binds it.
            by_srun: Whether srun starts the rank.

        Raises:
            LaunchError: If the launcher cannot start the container.
        """
        if self.container is None:
            return self._wrapped_program(self.python or python, binds_in)
        program = self._wrapped_program(PYTHON, binds_in)
        return self.container.rank_command(program, by_srun=by_srun, variables=tuple(self.variables))

    def _wrapped_program(self, python: str, binds_in: int | None) -> tuple[str, ...]:
        command = self.program
        if self.sets_variables:
            replaced = () if self.replaced_backend is None else ("--backend", self.replaced_backend)
            command = (python, "-m", "mpicomm.rank_variables", *replaced, *command)
        if self.bind is not None and binds_in is not None:
            command = (python, "-m", "mpicomm.rank_binding", self.bind, str(binds_in), *command)
        if self.log_dir is None:
            return command
        shown = "all" if self.tag_output else "0"
        appends = ("--append",) if self.appends_logs else ()
        return (python, "-m", "mpicomm.rank_log", self.log_dir, shown, *appends, *command)


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
    processors: Processors | None = None
    """The cores of the hosts of the job, if this machine is one of them and the ranks are to be bound."""

    @property
    def capacity(self) -> int:
        """Default number of ranks: one per GPU, or one per core without GPUs."""
        return self.gpus or self.cores

    def is_exclusive_to(self, job: HostAllocation) -> bool:
        """Return whether no other job uses the cores and GPUs."""
        return self.is_whole and job.cpus >= self.cores

    def with_default_ranks(self, job: Allocation | None) -> Allocation | None:
        """Return an allocation with the number of ranks to start if the user requests none.

        PBS reports only cores. On hosts that the job does not share, every GPU is its own.
        """
        if isinstance(job, HostAllocation) and self.is_exclusive_to(job):
            return job.with_rank_per_gpu(self.gpus)
        return job


@dataclasses.dataclass(frozen=True)
class Start:
    """A launch command and the environment in which to run it."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    is_local: bool = False
    """Whether all ranks are on this host."""
    parent_options: tuple[str, ...] = ()
    """Options of the launcher that forward the variable of `with_parent` to other hosts."""

    ranks: int | None = None
    """The number of ranks; None if only the scheduler or the launcher knows it."""

    has_input: bool = True
    """Whether the launcher gets the standard input of `mpicomm run`."""

    has_store: bool = False
    """Whether ranks may connect by `init_process_group("env://")`."""

    hidden: frozenset[str] = frozenset()
    """The variables of the user, whose values may be secrets and are not shown."""

    def with_parent(self, parent: str) -> Start:
        """Return the launch with the address at which rank 0 reaches `mpicomm run`."""
        command = (self.command[0], *self.parent_options, *self.command[1:])
        return dataclasses.replace(self, command=command, environ={**self.environ, PARENT_VARIABLE: parent})

    def shown(self, before: Mapping[str, str]) -> str:
        """Return the equivalent command line for a shell with the environment `before`; hidden values are `***`."""
        removed = [word for name in sorted(before.keys() - self.environ.keys()) for word in ("-u", name)]
        added = sorted(name for name, value in self.environ.items() if before.get(name) != value)
        shown = [f"{name}=" + ("***" if name in self.hidden else shlex.quote(self.environ[name])) for name in added]
        return " ".join([*(["env", shlex.join(removed)] if removed else []), *shown, shlex.join(self.command)])


def program(words: Sequence[str], module: Sequence[str], python: str) -> tuple[str, ...]:
    """Return the command of a program: Python runs *.py and *.pyz files and modules, other commands run directly.

    Args:
        words: A script or a command, and its arguments.
        module: A module and its arguments; empty for a script or a command.

    Raises:
        LaunchError: If there is nothing to run, or if it is torchrun, which starts ranks itself.
    """
    command = _command(words, module, python)
    if (parts := torchrun_parts(command)) is not None:
        arguments = shlex.join(parts[1])
        raise LaunchError(
            "torchrun starts ranks itself: each rank of `mpicomm run` would start a torchrun with a world of its own.\n"
            "Use one of the two: `mpicomm run train.py`, or without mpicomm run:\n"
            f"  torchrun {arguments}"
        )
    if (name := _other_launcher(command)) is not None:
        raise LaunchError(
            f"{name} starts ranks itself: each rank of `mpicomm run` would start another job.\n"
            f"Pass the program in its place: {_LAUNCHERS_OF_RANKS[name]} train.py [ARGUMENT ...]"
        )
    return command


def with_horovod(command: Sequence[str], python: str) -> tuple[str, ...]:
    """Return the command of a Python program that imports Horovod, for which mpicomm.horovod takes its place.

    Raises:
        LaunchError: If the command is not a Python script or module.
    """
    options, rest = [], list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        options.append(rest.pop(0))
        if options[-1] in _PYTHON_OPTIONS_WITH_VALUE:
            options += rest[:1]
            del rest[:1]
    if command[0] != python or not rest or rest[0] == "-c":
        raise LaunchError(
            f"--horovod requires a Python script or a module, got {shlex.join(command)}.\n"
            f"If that command starts Python, remove --horovod, and insert this before the script:\n"
            f"  python -m mpicomm.horovod"
        )
    return (python, *options, "-m", "mpicomm.horovod", *rest)


def variables(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `--env NAME=VALUE`, and of `--env NAME` with the value in the environment.

    Raises:
        LaunchError: If a word has another form, or a variable is not set.
    """
    values = {}
    for word in words:
        name, has_value, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LaunchError(f"--env {without_value(word)}: expected NAME=VALUE, or NAME of a variable that is set.")
        if not has_value and name not in environ:
            raise LaunchError(f"--env {name}: {name} is not set in this environment.\nUse --env {name}=VALUE.")
        values[name] = value if has_value else environ[name]
    return values


def outside_container(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ranks in containers that the launcher gets, too."""
    return {name: value for name, value in variables.items() if name not in OF_IMAGE}


def without_value(word: str) -> str:
    """Return NAME=VALUE with `***` in place of the value, which may be a secret."""
    name, has_value, _ = word.partition("=")
    return f"{name}=***" if has_value else word


def command_line(words: Sequence[str]) -> str:
    """Return words as one line for a shell; `***` stands for the values of variables for the ranks."""
    shown = []
    for previous, word in zip(["", *words], words, strict=False):
        option, _, value = word.partition("=")
        if previous in VARIABLE_OPTIONS:
            shown.append(without_value(word))
        elif option in VARIABLE_OPTIONS and value:
            shown.append(f"{option}={without_value(value)}")
        else:
            shown.append(word)
    return " ".join(word if word.endswith("=***") else shlex.quote(word) for word in shown)


def this_program() -> str:
    """Return the command line of this process without the interpreter, in one line."""
    first, *others = sys.orig_argv[1:] or sys.argv
    return " ".join(command_line([first if first.startswith("-") else PurePath(first).name, *others]).split())


def torchrun_parts(command: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the words that start torchrun, and its arguments; None if the command is another program."""
    if PurePath(command[0]).name == "torchrun":
        return tuple(command[:1]), tuple(command[1:])
    if tuple(command[1:2]) == ("-m",) and len(command) > 2 and command[2] in _TORCHRUN_MODULES:
        return tuple(command[:3]), tuple(command[3:])
    return None


def _other_launcher(command: Sequence[str]) -> str | None:
    """Return the command that starts ranks itself, one of `_LAUNCHERS_OF_RANKS`; None if it is another program."""
    first = PurePath(command[0]).name
    names = command[2:3] if tuple(command[1:2]) == ("-m",) else (first, " ".join([first, *command[1:2]]))
    return next((name for name in _LAUNCHERS_OF_RANKS if name in names), None)


def _command(words: Sequence[str], module: Sequence[str], python: str) -> tuple[str, ...]:
    if words and words[0] == "--":
        words = words[1:]
    if bool(words) == bool(module):
        raise LaunchError("nothing to run.\nPass a script, `-m MODULE`, or a command after `--`.")
    if module:
        return (python, "-m", *module)
    if words[0].endswith((".py", ".pyz")):
        return (python, *words)
    if words[0] in ("python", "python3"):  # the interpreter that has mpi4py, independent of PATH
        return (python, *words[1:])
    return tuple(words)
