"""`mpicomm run`, `mpicomm info`, `mpicomm bench` and the job scripts, on several nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mpicomm.recorder import rank_text
from tests import ibrun
from tests.cluster.running import Cluster, Flavour, places, quoted
from tests.cluster.test_slurm import PLACE, check_places
from tests.launching import ROOT

NODES = ["-N2", "--ntasks-per-node=2", "--nodelist=node3,node4"]
PAIR = ["-N2", "-n2", "--nodelist=node3,node4"]
HOST_OF_RANK_0 = ["-N1", "-n1", "-w", "node3"]


def test_run_takes_the_whole_allocation_and_writes_a_log_for_each_rank(cluster: Cluster, flavour: Flavour) -> None:
    logs = cluster.folder()
    outcome = cluster.run("salloc", *NODES, flavour.python, "-m", "mpicomm", "run", f"--log-dir={logs}", *PLACE)
    assert outcome.status == 0, outcome
    written = [logs / f"rank_{rank:03d}.log" for rank in range(4)]
    assert sorted(logs.iterdir()) == written
    check_places(
        [place for path in written for place in places(path.read_text())], ["node3", "node3", "node4", "node4"]
    )
    assert [place["rank"] for place in places(outcome)] == [0]
    assert f"srun --mpi={flavour.srun_type} " in outcome.stderr, outcome


UNCONVERTED = """
import os
if "RANK" not in os.environ:
    import torch
RANK, LOCAL_RANK = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(LOCAL_RANK), 1.0])
dist.all_reduce(total)
print(dist.get_backend(), dist.get_rank() == RANK, total.tolist())
dist.destroy_process_group()
"""


def test_a_program_without_bootstrap(cluster: Cluster, flavour: Flavour) -> None:
    """`mpicomm run` on two hosts, by srun and by mpiexec, and srun alone, which does not set RANK."""
    program = cluster.folder() / "program.py"
    program.write_text(UNCONVERTED)
    run = [flavour.python, "-m", "mpicomm", "run"]
    for start in (["salloc", *NODES, *run], [*run, "--hosts", "node1:2,node2:2"]):
        for backend, options in (("gloo", []), ("mpicomm", ["--backend", "mpi"])):
            outcome = cluster.run(*start, *options, program)
            assert outcome.status == 0, outcome
            assert outcome.stdout.splitlines() == [f"{backend} True [2.0, 4.0]"] * 4, outcome
    outcome = cluster.run("srun", *NODES, f"--mpi={flavour.srun_type}", flavour.python, program)
    assert outcome.status != 0, outcome
    assert "does not set RANK, which torchrun sets for its ranks" in outcome.stderr, outcome
    assert f"  mpicomm run {program}\n" in outcome.stderr, outcome


SHOW = "import os; print(*(os.environ.get(name) for name in ('FI_PROVIDER', 'NCCL_DEBUG', 'OTHER')))"
SET = ["env", "FI_PROVIDER=tcp", "NCCL_DEBUG=WARN", "OTHER=1"]


@pytest.mark.parametrize("is_step", [False, True], ids=["mpiexec", "srun"])
def test_ranks_on_all_hosts_get_the_same_variables(cluster: Cluster, flavour: Flavour, is_step: bool) -> None:
    run = [*SET, flavour.python, "-m", "mpicomm", "run", "--env", "OTHER", "--no-env", "NCCL_*"]
    if is_step:
        outcome = cluster.run("salloc", *PAIR, *run, "python", "-c", SHOW)
    else:
        outcome = cluster.run(*run, "--hosts", "node1,node2", "python", "-c", SHOW)
    assert outcome.status == 0, outcome
    assert outcome.stdout.splitlines() == ["tcp None 1"] * 2, outcome


@pytest.mark.parametrize(("options", "ranks"), [([], 4), (["-n", "3"], 3)])
def test_run_by_a_stand_in_for_ibrun(options: list[str], ranks: int, cluster: Cluster, mpich: Flavour) -> None:
    folder = cluster.folder()
    ibrun.install(folder, mpich.mpiexec[0])
    run = [mpich.python, "-m", "mpicomm", "run", "--launcher", "ibrun", *options, *PLACE]
    outcome = cluster.run("salloc", *NODES, "env", f"PATH={folder}:/usr/bin:/bin", *run)
    assert outcome.status == 0, outcome
    check_places(places(outcome), ["node3", "node3", "node4", "node4"][:ranks])


def test_run_takes_all_components_of_a_heterogeneous_job(cluster: Cluster, flavour: Flavour) -> None:
    step = quoted(flavour.python, "-m", "mpicomm", "run", *PLACE)
    folder = cluster.submit("het.sh", "-N1", "-n1", ":", "-N1", "-n2", lines=step)
    text = cluster.finish(folder)
    found = places(text)
    assert len(found) == 3, text
    first, second = (found[rank]["hostname"] for rank in (0, 1))
    assert first != second
    check_places(found, [first, second, second])


def test_directives_and_arguments_of_the_user_replace_ours(cluster: Cluster, open_mpi: Flavour) -> None:
    folder = cluster.folder()
    texts = ["--directive=--nodes=2", "--directive=--nodelist=node3,node4"]
    texts += [f"--launcher-arg={word}" for word in ("--nodes=1", "--nodelist=node4", "--overcommit")]
    options = ["-o", folder / "job.sh", "--output", folder / "0.out", "--nodes", 1, *texts]
    outcome = cluster.run(open_mpi.python, "-m", "mpicomm", "job", "slurm", *options, "--", open_mpi.python, *PLACE)
    assert outcome.status == 0, outcome
    outcome = cluster.run("sbatch", "--wait", f"--chdir={ROOT}", folder / "job.sh")
    text = (folder / "0.out").read_text()
    assert outcome.status == 0, text
    check_places(places(text), ["node4", "node4"])


def test_info_lists_every_host(cluster: Cluster, flavour: Flavour) -> None:
    step = ["srun", *NODES, f"--mpi={flavour.srun_type}", flavour.python, "-m", "mpicomm", "info", "--json"]
    outcome = cluster.run(*step)
    assert outcome.status == 0, outcome
    found = json.loads(outcome.stdout)
    assert (found["size"], found["num_nodes"]) == (4, 2)
    assert found["master_addr"] == cluster.layout.address("node3")
    assert [each["host"] for each in found["ranks"]] == ["node3", "node3", "node4", "node4"]
    assert [each["environment"]["SLURM_PROCID"] for each in found["ranks"]] == ["0", "1", "2", "3"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_bind_themselves_where_slurm_cannot(cluster: Cluster, flavour: Flavour) -> None:
    """This Slurm has no plugin task/affinity."""
    step = [flavour.python, "-m", "mpicomm", "run", "--bind", "numa", "-m", "mpicomm", "info", "--json"]
    outcome = cluster.run("salloc", *NODES, *step)
    assert outcome.status == 0, outcome
    assert "--cpu-bind" not in outcome.stderr, outcome
    cpus = [set(rank_text.parse_ranges(each["cpus"])) for each in json.loads(outcome.stdout)["ranks"]]
    assert len(cpus) == 4, outcome
    assert cpus[:2] == cpus[2:], outcome  # the hosts have the CPUs of this machine
    assert all(cpus), outcome
    assert cpus[0].isdisjoint(cpus[1]), outcome


def test_doctor_compares_the_hosts(cluster: Cluster, open_mpi: Flavour) -> None:
    """One host has another version of a package: its metadata come first in the path of modules."""
    other = cluster.folder()
    (other / "numpy-99.0.dist-info").mkdir()
    (other / "numpy-99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 99.0\n")
    doctor = quoted(open_mpi.python, "-m", "mpicomm", "doctor", "--json", "--fabric")
    task = f'[ "$SLURM_NODEID" = 0 ] || export PYTHONPATH={other}:"$PYTHONPATH"; exec {doctor}'
    outcome = cluster.run("srun", *PAIR, f"--mpi={open_mpi.srun_type}", "bash", "-c", task)
    found = json.loads(outcome.stdout)
    assert (found["ranks"], found["hosts"]) == (2, ["node3", "node4"])
    (link,) = found["links"]
    assert link["ranks"] == [0, 1]
    assert link["microseconds"] > 0 < link["gigabytes"]
    findings = {each["check"]: each for each in reversed(found["findings"])}
    assert findings["versions of hosts"]["status"] == "warning"
    assert findings["versions of hosts"]["message"].endswith("on node3; 99.0 on node4"), outcome
    assert findings["network devices"]["ranks"] == [0, 1], "the hosts have the same interfaces"
    assert "eth1" in findings["rendezvous"]["message"], outcome
    assert findings["srun"]["message"].startswith(f"srun --mpi={open_mpi.srun_type} starts ranks"), outcome
    assert outcome.status == (1 if found["status"] == "problem" else 0), outcome


def test_top_shows_a_job_of_srun(cluster: Cluster, open_mpi: Flavour) -> None:
    """In another step, on the host of rank 0."""
    begun = cluster.folder() / "begun"
    job = quoted("srun", f"--mpi={open_mpi.srun_type}", open_mpi.python, "-m", "tests.cluster.loop", begun)
    top = quoted("srun", "--overlap", *HOST_OF_RANK_0, open_mpi.python, "-m", "mpicomm", "top", "--json")
    lines = [
        f"{job} & step=$!",
        f"until [ -e {begun} ]; do sleep 0.1; kill -0 $step || exit 1; done",
        top,
        "scancel $SLURM_JOB_ID.0; wait $step",
    ]
    outcome = cluster.run("salloc", *PAIR, "bash", "-c", "\n".join(lines))
    start = outcome.stdout.index("{")
    found, _ = json.JSONDecoder().raw_decode(outcome.stdout[start:])
    assert [(rank["rank"], rank["host"]) for rank in found["ranks"]] == [(0, "node3"), (1, "node4")], outcome
    assert all(rank["line"].startswith("loop.py:") for rank in found["ranks"]), outcome
    assert all(rank["memory"] > 10 * 2**20 for rank in found["ranks"]), outcome


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("slurm_*.sbatch")), ids=lambda path: path.stem)
def test_slurm_takes_the_job_scripts(cluster: Cluster, path: Path) -> None:
    outcome = cluster.run("sbatch", "--test-only", path)
    assert outcome.status == 0, outcome
    assert "on nodes node" in outcome.stderr, outcome


@pytest.mark.parametrize(
    ("name", "text", "flavour"),
    [
        ("slurm_p2p", "rank 3: had 3, received 2 from rank 2", "Open MPI"),
        ("slurm_p2p", "rank 3: had 3, received 2 from rank 2", "MPICH"),
        ("slurm_ddp", "parameters identical on all ranks", "Open MPI"),  # on CPUs: only Slurm sees the simulated GPUs
    ],
    indirect=["flavour"],
)
def test_a_job_script_runs(cluster: Cluster, name: str, text: str, flavour: Flavour) -> None:
    """The script runs the first `mpicomm` in PATH, as after `source .venv/bin/activate`, with either MPI."""
    script = ROOT / "jobs" / f"{name}.sbatch"
    folder = cluster.folder()
    path = f'PATH={flavour.python.parent}:"$PATH"'
    submit = quoted("sbatch", "--parsable", f"--output={folder}/0.out", f"--chdir={ROOT}", script)
    outcome = cluster.shell(f"{path} {submit}")
    assert outcome.status == 0, outcome
    (folder / "job").write_text(outcome.stdout.strip())
    output = cluster.finish(folder)
    assert text in output, output
