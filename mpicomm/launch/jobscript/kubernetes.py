"""Kubernetes jobs: an MPIJob of the MPI operator (v2beta1), or a TrainJob of Kubeflow Trainer v2 with its runtime.

Both have a launcher, which runs `mpicomm run`, and workers, which run sshd. The operator gives the launcher a host file
and all of them the keys for ssh.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import PurePath

from mpicomm.launch import known_launchers
from mpicomm.launch.jobscript import manifest, options, shell
from mpicomm.launch.jobscript.manifest import Value
from mpicomm.launch.jobscript.options import Form, Option, flag, option
from mpicomm.launch.jobscript.scheduler import program_name

KINDS = ("mpijob", "trainjob")

_NAME = Form(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "at most 40 lowercase letters, digits and -, with a letter first")
_NAMESPACE = Form(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "lowercase letters, digits and -")
_IMAGE = Form(r"[\w][\w./:@+-]*", "a container image, for example registry.example.org/train:1")
_CLAIM = Form(r"[a-z0-9][a-z0-9.-]*:/[^:\0]+", "the name of a PersistentVolumeClaim and a directory: data:/data")

# ssh refuses a private key of the user itself that others may read. Trainer mounts the keys as files of root with mode
# 640, so the containers run as another user, with the uid of the images of the MPI operator.
_USER = 1000
_SSH_DIRECTORY = "/home/mpiuser/.ssh"
_SSH_PORT = 2222  # needs no privilege
_SSH_OPTIONS = (
    f"-p {_SSH_PORT} -o ConnectionAttempts=10 -o LogLevel=ERROR "
    "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"  # the pods get new keys and names in every job
)
_SSHD = [
    "/usr/sbin/sshd", "-De", "-f", "/dev/null", "-p", str(_SSH_PORT), "-h", f"{_SSH_DIRECTORY}/id_rsa",
    "-o", "PidFile=none", "-o", "StrictModes=no",
]  # fmt: skip
_GRACE_SECONDS = 120  # from SIGTERM, when a pod is evicted, to SIGKILL: the time for a checkpoint
_LAUNCHER = {"cpu": "1", "memory": "1Gi"}
_BATCH = "trainer.kubeflow.org/v1alpha1"


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

    file: str | None = None
    """File name of the manifest, for its header."""
    made_by: str = ""
    """The command that generates the manifest, for its header."""

    def __post_init__(self) -> None:
        for field, each in OPTIONS.items():
            each.check(flag(field), getattr(self, field))
        if self.image is None:
            raise ValueError("missing --image: the container image with mpicomm, its MPI and sshd")
        options.seconds_of(self.time, has_days=True)
        _check_command(self.command)
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


OPTIONS: dict[str, Option] = {
    field.name: field.metadata["option"] for field in dataclasses.fields(KubernetesJob) if field.metadata
}
"""The options of `mpicomm job kubernetes` by field."""


def submission(file: str) -> str:
    """Return the command line that submits a manifest."""
    return f"kubectl create -f {shell.quoted(file)}"


def text(job: KubernetesJob) -> str:
    """Return the manifest of a job; equal jobs give equal texts."""
    documents = [_mpi_job(job)] if job.kind == "mpijob" else [_training_runtime(job), _train_job(job)]
    header = [
        *(["# Generated by:", f"#     {job.made_by}"] if job.made_by else []),
        *["# Submit:", f"#     {submission(job.file or 'job.yaml')}"],
    ]
    return "".join(f"{line}\n" for line in header) + manifest.text(documents)


# -- MPIJob ------------------------------------------------------------------------------------------------------------


def _mpi_job(job: KubernetesJob) -> Mapping[str, Value]:
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": _metadata(job),
        "spec": {
            "slotsPerWorker": job.ranks_per_node,
            "sshAuthMountPath": _SSH_DIRECTORY,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "activeDeadlineSeconds": job.seconds,
                "backoffLimit": job.max_restarts,
            },
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": "Never",
                    "template": _pod(job, _launcher(job, "launcher") | {"env": _variables(job)}),
                },
                "Worker": {
                    "replicas": job.nodes,
                    "restartPolicy": "Never",
                    "template": _pod(job, _worker(job, "worker")),
                },
            },
        },
    }


# -- TrainJob ----------------------------------------------------------------------------------------------------------


def _training_runtime(job: KubernetesJob) -> Mapping[str, Value]:
    """Return the runtime of this one job: the runtimes of Trainer have images of their own and no volumes."""
    return {
        "apiVersion": _BATCH,
        "kind": "TrainingRuntime",
        "metadata": _metadata(job),
        "spec": {
            "mlPolicy": {
                "numNodes": job.nodes,
                "mpi": {
                    "mpiImplementation": "OpenMPI",
                    "numProcPerNode": job.ranks_per_node,
                    "runLauncherAsNode": False,
                    "sshAuthMountPath": _SSH_DIRECTORY,
                },
            },
            "template": {
                "spec": {
                    "network": {"publishNotReadyAddresses": True},
                    "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
                    "failurePolicy": {"maxRestarts": job.max_restarts},
                    "replicatedJobs": [
                        {"name": "node", "template": _batch_job(_pod(job, _worker(job, "node"), job.title))},
                        {
                            "name": "launcher",
                            "dependsOn": [{"name": "node", "status": "Ready"}],
                            "template": {
                                # Trainer sets command and variables of the containers with this label.
                                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                **_batch_job(_pod(job, _launcher(job, "node"))),
                            },
                        },
                    ],
                }
            },
        },
    }


def _train_job(job: KubernetesJob) -> Mapping[str, Value]:
    return {
        "apiVersion": _BATCH,
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {
            "runtimeRef": {"kind": "TrainingRuntime", "name": job.title},
            "activeDeadlineSeconds": job.seconds,
            "trainer": {
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks_per_node,
                "command": _launcher(job, "node")["command"],
                "env": _variables(job),
            },
        },
    }


def _batch_job(pod: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    return {"spec": {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", **pod["spec"]}}}}


# -- pods --------------------------------------------------------------------------------------------------------------


def _metadata(job: KubernetesJob) -> Mapping[str, Value]:
    return {"name": job.title, "namespace": job.namespace}


def _pod(job: KubernetesJob, container: Mapping[str, Value], subdomain: str = "") -> dict[str, dict[str, Value]]:
    """Return the template of a pod with one container.

    Args:
        subdomain: The Service of the job, if the pod must resolve the short names of other pods: MPICH and Intel MPI
            connect to that of the launcher. The MPI operator configures that itself.
    """
    claims = [each.partition(":")[::2] for each in job.claim]
    mounts: list[Value] = [{"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [{"name": f"claim-{index}", "mountPath": path} for index, (_, path) in enumerate(claims)]
    volumes: list[Value] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]  # the default has 64 MB
    volumes += [
        {"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": name}}
        for index, (name, _) in enumerate(claims)
    ]
    searched: dict[str, Value] = {"searches": [f"{subdomain}.{job.namespace}.svc.cluster.local"]}
    return {
        "spec": {
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "securityContext": {"runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER},
            **({"dnsConfig": searched} if subdomain else {}),
            "containers": [
                {**container, **({"workingDir": job.chdir} if job.chdir else {}), "volumeMounts": mounts},
            ],
            "volumes": volumes,
        }
    }


def _launcher(job: KubernetesJob, name: str) -> dict[str, Value]:
    program = ["mpicomm", "run", "--", *map(_literal, job.command)]
    return {"name": name, "image": job.image or "", "command": program, "resources": _resources(_LAUNCHER)}


def _worker(job: KubernetesJob, name: str) -> dict[str, Value]:
    limits = {
        "cpu": str(job.ranks_per_node * job.cpus_per_rank),
        **({"memory": f"{job.mem}i"} if job.mem else {}),
        **({"nvidia.com/gpu": str(job.gpus_per_node)} if job.gpus_per_node else {}),
    }
    return {
        "name": name,
        "image": job.image or "",
        "command": list(_SSHD),
        "readinessProbe": {"tcpSocket": {"port": _SSH_PORT}, "periodSeconds": 2},
        "resources": _resources(limits),
    }


def _resources(limits: Mapping[str, str]) -> dict[str, Value]:
    return {"requests": dict(limits), "limits": dict(limits)}


def _variables(job: KubernetesJob) -> list[Value]:
    """Return the variables of the launcher, which `mpicomm run` passes to the ranks; it translates that of ssh."""
    given = dict(each.split("=", 1) for each in job.env)
    found = {"PRTE_MCA_plm_ssh_args": _SSH_OPTIONS, "OMP_NUM_THREADS": str(job.cpus_per_rank)} | given
    return [{"name": name, "value": _literal(value)} for name, value in found.items()]


def _literal(word: str) -> str:
    """Return a word from which Kubernetes restores the given one: it replaces $(NAME), and $$ by $."""
    return word.replace("$", "$$")


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_command(command: tuple[str, ...]) -> None:
    if not command or not command[0]:
        raise ValueError("missing program; append it after two dashes: -- python train.py")
    first = PurePath(command[0]).name
    starters = [name for each in known_launchers.ALL for name in each.commands]
    if first in starters or command[:2] == ("mpicomm", "run"):
        raise ValueError(
            f"the job starts the ranks with `mpicomm run`: remove {first} and its options from the command"
        )
