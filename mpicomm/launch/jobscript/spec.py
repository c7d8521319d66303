"""`JobSpec`: the description of a job, a frozen value that is validated when it is created."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

from mpicomm.launch.jobscript import option_values

Scheduler = Literal["slurm", "pbs"]
Mpi = Literal["openmpi", "mpich"]

SCHEDULERS: tuple[Scheduler, ...] = ("slurm", "pbs")
MPIS: tuple[Mpi, ...] = ("openmpi", "mpich")
MAIL_TYPES: dict[str, tuple[str, ...]] = {
    "slurm": ("NONE", "BEGIN", "END", "FAIL", "ALL", "REQUEUE", "ARRAY_TASKS", "TIME_LIMIT", "TIME_LIMIT_80"),
    "pbs": ("NONE", "BEGIN", "END", "FAIL", "ALL"),
}

# What replaces the option in the other scheduler.
_FOR_SLURM = {
    "qos": "in PBS use --queue",
    "constraint": "in PBS use --queue",
    "signal": "PBS sends no signal before the time limit; mpicomm.Trainer asks PBS for the remaining time",
}
_FOR_PBS = {"project": "in Slurm use --account", "no_ssh": "srun needs no ssh"}

_STARTERS = ("srun", "mpirun", "mpiexec", "mpiexec.hydra", "prterun", "sbatch", "salloc", "qsub", "aprun", "jsrun")
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_TORCHRUN_ADDED = re.compile(r"--?(nnodes|nproc.per.node|node.rank|rdzv.*|master.*|standalone)(=.*)?")
_WARNING = "USR1@180"
_EARLY = 60  # seconds by which Slurm may send the signal early, see --signal in sbatch(1)


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A job: nodes, ranks, resources and the program. The fields are named like the options of `mpicomm job`.

    Raises:
        ValueError: If a value is invalid, or if two values contradict each other.
    """

    scheduler: Scheduler
    command: tuple[str, ...]
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    mem: str | None = None
    """Memory of each node, as all schedulers count it; `mem_per_cpu` and `mem_per_gpu` are alternatives."""
    mem_per_cpu: str | None = None
    mem_per_gpu: str | None = None
    exclusive: bool = False
    time: str = "1:00:00"

    name: str | None = None
    partition: str | None = None
    """Slurm partition or PBS queue."""
    account: str | None = None
    project: str | None = None
    qos: str | None = None
    constraint: str | None = None
    array: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    output: str | None = None
    error: str | None = None
    chdir: str | None = None

    module: tuple[str, ...] = ()
    venv: str | None = None
    env: tuple[str, ...] = ()
    mpi: Mpi | None = None
    no_ssh: bool = False

    signal: str | None = None
    requeue: bool = False
    max_restarts: int = 10

    file: str | None = None
    """File name of the script, for its header."""
    made_by: str = ""
    """The command that generates the script, for its header."""

    def __post_init__(self) -> None:
        for check in (_check_numbers, _check_texts, _check_choices, _check_command, _check_together, _check_scheduler):
            check(self)

    @property
    def seconds(self) -> int:
        """Time limit in seconds."""
        return option_values.seconds_of(self.time, has_days=self.scheduler == "slurm")

    @property
    def title(self) -> str:
        """Job name; the name of the program by default."""
        return self.name or _name_of(self.command if self.torchrun is None else ("torchrun", *self.torchrun))

    @property
    def flavour(self) -> Mpi:
        """The MPI that mpi4py loads."""
        return self.mpi or "openmpi"

    @property
    def torchrun(self) -> tuple[str, ...] | None:
        """Arguments of torchrun if the program is torchrun, else None."""
        if PurePath(self.command[0]).name == "torchrun":
            return self.command[1:]
        if self.command[1:2] == ("-m",) and self.command[2:3] and self.command[2] in _TORCHRUN_MODULES:
            return self.command[3:]
        return None

    @property
    def processes_per_node(self) -> int:
        """Number of processes that the scheduler or mpirun starts on each node; torchrun starts the ranks itself."""
        return self.ranks_per_node if self.torchrun is None else 1

    @property
    def cpus_per_node(self) -> int:
        """Number of cores for all ranks of a node."""
        return self.ranks_per_node * self.cpus_per_rank

    @property
    def variables(self) -> list[tuple[str, str]]:
        """Names and values in `env`."""
        return [(name, value) for name, _, value in (each.partition("=") for each in self.env)]

    @property
    def warning(self) -> str | None:
        """The signal before the time limit, as SIGNAL@SECONDS."""
        return self.signal or (_WARNING if self.requeue and self.scheduler == "slurm" else None)

    @property
    def mail_types(self) -> list[str]:
        """Events that send a mail."""
        return (self.mail_type or ("END,FAIL" if self.mail_user else "")).upper().split(",")


def flag(field: str) -> str:
    """Return the command-line option of a field."""
    return "--" + field.replace("_", "-")


def _check_numbers(spec: JobSpec) -> None:
    for field, least in (("nodes", 1), ("ranks_per_node", 1), ("cpus_per_rank", 1), ("max_restarts", 1)):
        if getattr(spec, field) < least:
            raise ValueError(f"{flag(field)} {getattr(spec, field)}: expected {least} or more")
    ranks, gpus = spec.ranks_per_node, spec.gpus_per_node
    if gpus < 0:
        raise ValueError(f"--gpus-per-node {gpus}: expected 0 or more")
    if gpus and gpus % ranks and ranks % gpus:
        raise ValueError(
            f"--gpus-per-node {gpus} cannot be shared evenly by --ranks-per-node {ranks}; "
            f"for one GPU per rank use --ranks-per-node {gpus} or --gpus-per-node {ranks}"
        )


def _check_texts(spec: JobSpec) -> None:
    for field, form in option_values.FORMS.items():
        for text in _texts(getattr(spec, field)):
            if not (field == "mem" and text == "0" and spec.scheduler == "slurm"):  # all memory of the node
                form.check(flag(field), text)
    if spec.array is not None:
        option_values.check_array(spec.array)
    if spec.seconds and spec.warning and int(spec.warning.partition("@")[2]) + _EARLY >= spec.seconds:
        later = (spec.seconds - _EARLY) // 2
        or_later = f", or a later signal, --signal USR1@{later}" if later > 0 else ""
        raise ValueError(
            f"--time {spec.time} is too short for {spec.warning}, which Slurm may send 60 s early: the ranks would "
            f"receive it as they start; expected a longer --time{or_later}"
        )


def _texts(value: str | tuple[str, ...] | None) -> Iterator[str]:
    yield from (value,) if isinstance(value, str) else value or ()


def _check_choices(spec: JobSpec) -> None:
    for option, got, valid in (
        ("scheduler", [spec.scheduler], SCHEDULERS),
        ("--mpi", [spec.flavour], MPIS),
        ("--mail-type", [each for each in spec.mail_types if each], MAIL_TYPES.get(spec.scheduler, ())),
    ):
        for each in got:
            if each not in valid:
                raise ValueError(f"{option} {each!r}: expected one of {', '.join(valid)}")


def _check_command(spec: JobSpec) -> None:
    if not spec.command or not spec.command[0]:
        raise ValueError("missing program; append it after two dashes: -- python train.py")
    first = PurePath(spec.command[0]).name
    if first in _STARTERS or spec.command[:2] == ("mpicomm", "run"):
        raise ValueError(f"the script starts the ranks itself: remove {first} and its options from the command")
    if re.match(r"\w+=", spec.command[0]):
        raise ValueError(f"expected a program, got {spec.command[0]}; set a variable with --env {spec.command[0]}")
    if ":" in spec.command:
        raise ValueError("the argument : would start another program, with srun and with mpirun; remove it")
    if any("\0" in word for word in spec.command):
        raise ValueError("an argument of the program cannot contain a null character; remove it")
    if spec.torchrun is not None:
        _check_torchrun(spec, spec.torchrun)


def _check_torchrun(spec: JobSpec, words: tuple[str, ...]) -> None:
    if not words:
        raise ValueError("torchrun needs a program: -- torchrun train.py")
    for word in words:
        if word in ("-m", "--module") or word.endswith(".py"):
            break
        if _TORCHRUN_ADDED.fullmatch(word):
            raise ValueError(f"the script passes {word} to torchrun, from --nodes and --ranks-per-node; remove it")
    for field in ("requeue", "signal", "mpi"):
        if getattr(spec, field):
            raise ValueError(
                f"{flag(field)} does not work with torchrun, which runs without MPI and turns status 85 into 1; "
                f"use -- python train.py"
            )


def _check_together(spec: JobSpec) -> None:
    given = [flag(field) for field in ("mem", "mem_per_cpu", "mem_per_gpu") if getattr(spec, field) is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} contradict each other: give one of --mem, --mem-per-cpu, --mem-per-gpu"
        )
    if spec.mem_per_gpu and not spec.gpus_per_node:
        raise ValueError("--mem-per-gpu needs --gpus-per-node; without GPUs use --mem or --mem-per-cpu")
    if spec.array and spec.scheduler == "slurm":
        for field in ("output", "error"):
            name = getattr(spec, field)
            if name and not re.search(r"%[0-9]*[ajJ]", name):
                raise ValueError(
                    f"{flag(field)} {name}: all jobs of the array would write to this file; add %A_%a to the name"
                )


def _check_scheduler(spec: JobSpec) -> None:
    owner, reasons = ("Slurm", _FOR_SLURM) if spec.scheduler == "pbs" else ("PBS", _FOR_PBS)
    for field, reason in reasons.items():
        if getattr(spec, field):
            raise ValueError(f"{flag(field)} is valid only for {owner}: {reason}")
    if spec.scheduler == "pbs":
        _check_pbs(spec)


def _check_pbs(spec: JobSpec) -> None:
    if spec.array and not re.fullmatch(r"([0-9]+)-(?!\1[:%]|\1$)[0-9]+(:[0-9]+)?(%[0-9]+)?", spec.array):
        raise ValueError(
            f"--array {spec.array}: PBS accepts one range of two jobs or more; expected 0-9, 0-30:10 or 0-9%2"
        )
    if spec.array and spec.requeue:
        raise ValueError("--array and --requeue: PBS cannot resubmit one job of an array; remove one of the two")
    for field in ("output", "error"):
        name = getattr(spec, field)
        if spec.requeue and name and not name.endswith("/"):
            raise ValueError(
                f"{flag(field)} {name}: a resubmitted job would overwrite this file; "
                f"use a directory, {name}/, in which PBS creates one file per job"
            )


def _name_of(command: tuple[str, ...]) -> str:
    """Return the name of a program: `train` for `python train.py`, `ddp` for `python -m mpicomm.examples.ddp`."""
    first, second = (*command, "", "")[1:3]
    if first == "-m" and re.match("python|torchrun", PurePath(command[0]).name):
        name = second.rpartition(".")[2]
    else:
        name = next((PurePath(word).stem for word in command if word.endswith(".py")), PurePath(command[0]).name)
    return re.sub(r"[^\w.+-]|^[.+-]", "_", name, flags=re.ASCII)[:64] or "job"
