"""The manifests that `mpicomm job kubernetes` writes: their text, their fields, and their values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpicomm.cli import main
from mpicomm.launch.jobscript import KubernetesJob, quoting, script

COMMAND = ("python", "train.py", "--lr", "0.1")
IMAGE = "registry.example.org/train:1"

# The fields of MPIJob v2beta1 and their types, from pkg/apis/kubeflow/v2beta1/types.go of mpi-operator v0.8, and the
# required fields and valid words, from pkg/apis/kubeflow/validation. A set lists the valid words.
RUN_POLICY = {
    "cleanPodPolicy": {"None", "Running", "All"},
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "schedulingPolicy": dict,
    "suspend": bool,
    "managedBy": {"kubeflow.org/mpi-operator", "kueue.x-k8s.io/multikueue"},
}
SPEC = {
    "slotsPerWorker": int,
    "runLauncherAsWorker": bool,
    "runPolicy": dict,
    "mpiReplicaSpecs": dict,
    "sshAuthMountPath": str,
    "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
    "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
}
REPLICA = {"replicas": int, "template": dict, "restartPolicy": {"Never", "OnFailure"}}


def documents(**options: Any) -> list[dict[str, Any]]:
    """Return the parsed manifest of a job."""
    given: dict[str, Any] = {"command": COMMAND, "image": IMAGE, **options}
    return list(yaml.safe_load_all(script(KubernetesJob(**given))))


def pods(**options: Any) -> dict[str, dict[str, Any]]:
    """Return the specifications of the pods of an MPIJob."""
    (job,) = documents(**options)
    return {name: each["template"]["spec"] for name, each in job["spec"]["mpiReplicaSpecs"].items()}


def check_fields(found: dict[str, Any], table: dict[str, Any]) -> None:
    for name, value in found.items():
        assert name in table
        valid = table[name]
        assert value in valid if isinstance(valid, set) else type(value) is valid


# -- text --------------------------------------------------------------------------------------------------------------


def test_every_text_is_read_back() -> None:
    texts = [
        "", " ", "a b", "no", "On", "null", "~", "1", "1e3", "0x1f", "1:30", "2026-01-01", "-", "- a", "--", "a: b",
        "a #b", "#b", "'", '"', "\\", "a\nb\n", "\t", "\x00", "\x85", "\u2028", "\ufeff", "é", "\U0001f600", "{a}",
        "[a]", "*a", "&a", "!a", "|", ">", "%a", "@a", "`a`", "=", "<<", "/data", "a.b/c-d_e", "$(A)",
    ]  # fmt: skip
    for text in texts:
        assert "\n" not in quoting.yaml(text)
        assert yaml.safe_load(f"- {quoting.yaml(text)}\n") == [text]


def test_only_texts_that_need_quotes_have_them() -> None:
    for text in ("registry/train", "/data/x-1_2"):
        assert quoting.yaml(text) == text
    for text in ("1e3", "No", "null", 3):
        assert quoting.yaml(text) == f'"{text}"'


def test_the_header_has_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my job.yaml"
    line = ["job", "kubernetes", "--image", IMAGE, "-o", str(path), "--", *COMMAND]
    assert main.main(line) == 0
    assert capsys.readouterr().out == f"wrote {path}; submit it: kubectl create -f '{path}'\n"
    assert path.read_text().splitlines()[1:4] == [
        f"#     mpicomm job kubernetes --image {IMAGE} -o '{path}' -- python train.py --lr 0.1",
        "# Submit:",
        f"#     kubectl create -f '{path}'",
    ]


# -- fields ------------------------------------------------------------------------------------------------------------

MANY = {
    "nodes": 3,
    "ranks_per_node": 2,
    "gpus_per_node": 2,
    "mem": "8G",
    "claim": ("data:/data", "code:/code"),
    "env": ("A=1",),
    "chdir": "/code",
    "namespace": "team",
    "max_restarts": 2,
    "time": "2:00:00",
}


@pytest.mark.parametrize("options", [{}, MANY], ids=["few", "many"])
def test_an_mpi_job_has_the_fields_of_its_specification(options: dict[str, Any]) -> None:
    (job,) = documents(**options)
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    check_fields(job["spec"], SPEC)
    check_fields(job["spec"]["runPolicy"], RUN_POLICY)
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert replicas.keys() == {"Launcher", "Worker"}
    for each in replicas.values():
        check_fields(each, REPLICA)
        assert each.keys() == REPLICA.keys()
    assert replicas["Launcher"]["replicas"] == 1


def models() -> Any:
    """Return the models of Kubernetes and Kubeflow Trainer; each ignores unknown fields when it reads a dictionary."""
    return pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")


@pytest.mark.parametrize("options", [{}, MANY], ids=["few", "many"])
def test_pods_have_the_fields_of_kubernetes(options: dict[str, Any]) -> None:
    for pod in pods(**options).values():
        assert models().IoK8sApiCoreV1PodSpec.from_dict(pod).to_dict() == pod


@pytest.mark.parametrize("options", [{}, MANY], ids=["few", "many"])
def test_a_train_job_has_the_fields_of_its_specification(options: dict[str, Any]) -> None:
    runtime, job = documents(kind="trainjob", **options)
    assert models().TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
    assert models().TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}


# -- values ------------------------------------------------------------------------------------------------------------


def test_the_values_of_an_mpi_job() -> None:
    (job,) = documents(**MANY)
    assert job["metadata"] == {"name": "train", "namespace": "team"}
    assert job["spec"]["slotsPerWorker"] == 2
    assert job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 3
    assert job["spec"]["runPolicy"]["activeDeadlineSeconds"] == 2 * 3600
    assert job["spec"]["runPolicy"]["backoffLimit"] == 2
    (launcher,), (worker,) = (pod["containers"] for pod in pods(**MANY).values())
    assert launcher["command"] == ["mpicomm", "run", "--", *COMMAND]
    assert "nvidia.com/gpu" not in launcher["resources"]["limits"]
    assert worker["resources"]["limits"] == {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "2"}
    for pod in pods(**MANY).values():
        (container,) = pod["containers"]
        assert (container["image"], container["workingDir"]) == (IMAGE, "/code")
        claims = {each["name"]: each.get("persistentVolumeClaim", {}).get("claimName") for each in pod["volumes"]}
        mounts = {each["mountPath"]: claims[each["name"]] for each in container["volumeMounts"]}
        assert mounts == {"/dev/shm": None, "/data": "data", "/code": "code"}


def test_the_values_of_a_train_job() -> None:
    runtime, job = documents(kind="trainjob", **MANY)
    assert job["spec"]["trainer"]["numNodes"] == 3
    assert job["spec"]["trainer"]["numProcPerNode"] == 2
    assert job["spec"]["trainer"]["command"] == ["mpicomm", "run", "--", *COMMAND]
    assert job["spec"]["activeDeadlineSeconds"] == 2 * 3600
    spec = runtime["spec"]["template"]["spec"]
    assert spec["failurePolicy"] == {"maxRestarts": 2}
    # Trainer's MPI plugin finds the jobs by these names, and in both of them the container `node`.
    found = {each["name"]: each["template"]["spec"]["template"]["spec"] for each in spec["replicatedJobs"]}
    assert list(found) == ["node", "launcher"]
    assert [pod["containers"][0]["name"] for pod in found.values()] == ["node", "node"]
    assert found["node"]["dnsConfig"] == {"searches": ["train.team.svc.cluster.local"]}


def test_the_ranks_get_the_threads_and_the_variables() -> None:
    (launcher,) = pods(cpus_per_rank=4, env=("A=b=c d", "EMPTY="))["Launcher"]["containers"]
    environ = {each["name"]: each["value"] for each in launcher["env"]}
    assert environ.items() >= {"OMP_NUM_THREADS": "4", "A": "b=c d", "EMPTY": ""}.items()


def test_kubernetes_restores_every_dollar() -> None:
    """Kubernetes replaces $(NAME) in commands and values by the variable, and $$ by $."""
    words = ("sh", "-c", "echo $HOME $(date) $$ $$(A)")
    pod = pods(command=words, env=("A=$(B)$$",), launcher_arg=("--note=$(A)", "-x"))["Launcher"]
    (launcher,) = pod["containers"]

    def expanded(text: str) -> str:
        return re.sub(r"\$\$|\$\(\w+\)", lambda match: "$" if match[0] == "$$" else "replaced", text)

    arguments = ("--launcher-arg=--note=$(A)", "--launcher-arg=-x")
    assert tuple(map(expanded, launcher["command"])) == ("mpicomm", "run", *arguments, "--", *words)
    assert expanded({each["name"]: each["value"] for each in launcher["env"]}["A"]) == "$(B)$$"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "a/My_Train.py"), "my-train"),
        (("python", "-m", "mpicomm.examples.ddp", "x.py"), "ddp"),
        (("./solver",), "solver"),
        (("python", f"{'a' * 39}.b.py"), "a" * 39),
    ],
)
def test_a_job_has_the_name_of_its_program(command: tuple[str, ...], name: str) -> None:
    assert documents(command=command)[0]["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": None}, "missing --image"),
        ({"command": ()}, "missing program"),
        ({"command": ("mpirun", "-n", "2", "./a")}, "remove mpirun"),
        ({"command": ("torchrun", "train.py")}, "remove torchrun"),
        ({"command": ("mpicomm", "run", "train.py")}, "remove mpicomm"),
        ({"command": ("python", "1.py")}, "--name '1'"),
        ({"name": "My_job"}, "--name 'My_job': expected at most 40 lowercase letters"),
        ({"nodes": 0}, "--nodes 0: expected 1 or more"),
        ({"max_restarts": -1}, "--max-restarts -1: expected 0 or more"),
        ({"kind": "job"}, "--kind 'job': expected one of mpijob, trainjob"),
        ({"claim": ("data",)}, "--claim 'data': expected the name of a PersistentVolumeClaim"),
        ({"mem": "4"}, "--mem '4': expected a number with its unit"),
        ({"time": "0"}, "--time 0 must be positive"),
        ({"env": ("A",)}, "--env 'A': expected NAME=VALUE"),
    ],
)
def test_an_invalid_job_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        documents(**options)
