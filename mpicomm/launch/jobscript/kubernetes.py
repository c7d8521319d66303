"""Kubernetes jobs: an MPIJob of the MPI operator (v2beta1), or a TrainJob of Kubeflow Trainer v2 with its runtime.

Both have a launcher, which runs `mpicomm run`, and workers, which run sshd. The operator gives the launcher a host file
and all of them the keys for ssh.
"""

from __future__ import annotations

import dataclasses
import re

from mpicomm.launch import known_launchers
from mpicomm.launch.jobscript import options, quoting
from mpicomm.launch.jobscript.options import Form, flag, option, program_name

KINDS = ("mpijob", "trainjob")

_NAME = Form(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "at most 40 lowercase letters, digits and -, with a letter first")
_NAMESPACE = Form(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lowercase letters, digits and -")
_IMAGE = Form(r"[\w][\w./:@+-]*", "a container image, for example registry.example.org/train:1")
_CLAIM = Form(r"[a-z0-9][a-z0-9.-]*:/[^:\0]+", "the name of a PersistentVolumeClaim and a directory: data:/data")


@dataclasses.dataclass(frozen=True)
class KubernetesJob:
    """A job of an MPI operator. Every field with an `Option` is an option of `mpicomm job kubernetes`.

    Raises:
        ValueError: If a value is invalid, or if two values contradict each other.
    """

    command: tuple[str, ...]

    # 1. resources
    nodes: int = option("number of workers (default: %(default)s)", "N", default=1, least=1)
    ranks_per_node: int = option("ranks (default: one per GPU of the worker, or 1)", "N", default=1, least=1)
    gpus_per_node: int = option("GPUs, nvidia.com/gpu (default: %(default)s)", "N", default=0, least=0)
    cpus_per_rank: int = option("cores and threads (default: %(default)s)", "N", default=1, least=1)
    mem: str | None = option("memory per worker, /dev/shm included", "4G", options.MEMORY)
    time: str = option("limit, H:MM:SS, minutes or D-HH:MM:SS (default: %(default)s)", "1:00:00", default="1:00:00")

    # 2. job
    kind: str = option(
        "MPIJob of the MPI operator, or TrainJob of Kubeflow Trainer (default: %(default)s)",
        choices=KINDS,
        default="mpijob",
    )
    name: str | None = option("name of the job (default: that of the program)", form=_NAME)
    namespace: str = option("namespace (default: %(default)s)", "NS", _NAMESPACE, default="default")
    max_restarts: int = option("times to start again after a failure (default: %(default)s)", "N", default=0, least=0)

    # 3. container
    image: str | None = option("image with mpicomm, its MPI and sshd (required)", "IMAGE", _IMAGE)
    chdir: str | None = option("working directory (default: that of the image)", "DIR", options.DIRECTORY)
    claim: tuple[str, ...] = option("PersistentVolumeClaim to mount; repeat for more", "NAME:DIR", _CLAIM, default=())
    env: tuple[str, ...] = option("variable of the ranks; repeat for more", "NAME=VALUE", options.VARIABLE, default=())
    launcher_arg: tuple[str, ...] = option("argument for mpiexec; repeat for more", "ARG", options.ARGUMENT, default=())

    file: str | None = None
    """File name of the manifest, for its header."""
    made_by: str = ""
    """The command that generates the manifest, for its header."""

    def __post_init__(self) -> None:
        for field, described in options.declared(KubernetesJob).items():
            described.check(flag(field), getattr(self, field))
        if self.mem is not None:
            object.__setattr__(self, "mem", options.memory(self.mem))
        if self.image is None:
            raise ValueError("missing --image: the container image with mpicomm, its MPI and sshd")
        options.seconds_of(self.time, has_days=True)
        starters = [name for launcher in known_launchers.ALL for name in launcher.commands]
        options.check_program(self.command, starters, "the job starts the ranks with `mpicomm run`")
        _NAME.check("--name", self.title)

    @property
    def title(self) -> str:
        """Job name; the name of the program by default."""
        name = re.sub(r"[^a-z0-9-]+", "-", program_name(self.command).lower())
        return self.name or name.strip("-")[:40].strip("-") or "job"

    @property
    def seconds(self) -> int:
        """Time limit in seconds."""
        return options.seconds_of(self.time, has_days=True)

    @property
    def variables(self) -> dict[str, str]:
        """Names and values in `env`."""
        return dict(assignment.split("=", 1) for assignment in self.env)

    @property
    def claims(self) -> list[tuple[str, str]]:
        """Names and directories in `claim`."""
        return [(name, directory) for name, _, directory in (claim.partition(":") for claim in self.claim)]

    @property
    def submission(self) -> str:
        """The command line that submits the manifest."""
        return f"kubectl create -f {quoting.quoted(self.file or 'job.yaml')}"
