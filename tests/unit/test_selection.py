"""The launcher that `mpicomm run` selects, and its whole command line (`--dry-run`), on sites of different kinds.

The commands of a site are scripts that only print their version. What the lines do is tested elsewhere: those for PALS
in tests/launch/test_pals.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mpicomm import mpi
from mpicomm.cli import launching
from mpicomm.cli.main import main
from mpicomm.launch import queries, selection
from mpicomm.launch.jobscript import SCHEDULERS
from mpicomm.launch.mpi_library import Library
from mpicomm.launch.request import Machine
from tests.launching import refusal

CRAY = Library(
    "Cray MPICH", "8.1.28", "/opt/cray/lib/libmpi_gnu.so", description="MPI VERSION    : CRAY MPICH version 8.1.28"
)
AURORA = Library("MPICH", "5.0.0", "/opt/aurora/lib/libmpi.so.12", description="configure: --with-pmix=/usr")
MPICH = Library("MPICH", "5.0.2", "/opt/mpich/lib/libmpi.so.12", description="configure: --with-pm")
INTEL = Library("Intel MPI", "2021.13.0", "/opt/intel/lib/libmpi.so.12", description="Intel(R) MPI Library 2021.13")
OPEN_MPI = Library("Open MPI", "5.0.11", "/opt/openmpi/lib/libmpi.so.40", description="Open MPI v5.0.11")
WHEEL = Library("MPICH", "5.0.2", f"{sys.prefix}/lib/libmpi.so.12", description="configure: --with-pm")

PBS = {"PBS_JOBID": "7.pbs1", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "nodes", "NCPUS": "64"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_JOB_CPUS_PER_NODE": "64(x2)"}
OUTPUTS = {
    "pals/mpiexec": "mpiexec version 1.8.0 revision 5a0b1c2",
    "hydra/mpiexec": "HYDRA build details:",
    "slurm/srun": "srun: MPI types are...\nsrun: cray_shasta\nsrun: pmi2\nsrun: none",
    "slurm/scontrol": "node1\nnode2",
    "tacc/ibrun": "",
}
DEPTH_8 = "--no-abort-on-failure --cpu-bind depth --depth 8"
ON_FILE = f"THP_MEM_ALLOC_ENABLE=1 pals/mpiexec -n 8 --ppn 4 --hostfile nodes {DEPTH_8} python train.py"


@pytest.fixture(autouse=True)
def _site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("nodes").write_text("node1\nnode2\n" * 4)
    for name, output in OUTPUTS.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(f"#!/bin/sh\nprintf '{output}\\n'\n")
        Path(name).chmod(0o755)
    monkeypatch.setattr(os, "environ", {"HOME": "/home/u", "PATH": ""})
    use_machine(monkeypatch, gpus=0)
    queries.constant_output.cache_clear()
    yield
    queries.constant_output.cache_clear()


def use_machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    machine = Machine(cores=32, is_whole=True, is_root=False, python=sys.executable, gpus=gpus)
    monkeypatch.setattr(launching, "_machine", lambda _: machine)


def on_site(library: Library, directories: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mpi4py load the library, and PATH have these directories."""
    monkeypatch.setattr(mpi, "library", lambda: library)
    os.environ.update({**environ, "PATH": f"{directories}:/usr/bin:/bin"})


GOLDEN: list[tuple[Library, str, dict[str, str], str, str]] = [  # library, PATH, environment, arguments, line
    # PALS: the options of ALCF's "Running Jobs on Aurora" and "Running Jobs on Polaris"
    (CRAY, "pals", PBS, "train.py", f"OMP_NUM_THREADS=8 {ON_FILE}"),
    (CRAY, "hydra:pals", PBS, "train.py", f"OMP_NUM_THREADS=8 {ON_FILE}"),
    (AURORA, "pals", PBS, "train.py", f"OMP_NUM_THREADS=8 PALS_PMI=pmix {ON_FILE}"),
    (AURORA, "pals", {**PBS, "PALS_PMI": "cray"}, "train.py", f"OMP_NUM_THREADS=8 {ON_FILE}"),
    (CRAY, "pals", {**PBS, "OMP_NUM_THREADS": "4", "PALS_RANKID": "0"}, "train.py", f"env -u PALS_RANKID {ON_FILE}"),
    (
        CRAY,
        "pals",
        {**PBS, "PALS_CPU_BIND": "list:1:2:3:4"},
        "train.py",
        (
            "OMP_NUM_THREADS=8 THP_MEM_ALLOC_ENABLE=1 pals/mpiexec -n 8 --ppn 4 --hostfile nodes --no-abort-on-failure "
            "python train.py"
        ),
    ),
    (
        CRAY,
        "pals",
        {**PBS, "NCPUS": "16"},  # other jobs may use the remaining cores
        "-n 4 --tag-output train.py",
        (
            "OMP_NUM_THREADS=8 PALS_CPU_BIND=none THP_MEM_ALLOC_ENABLE=1 pals/mpiexec -n 4 --ppn 4 --hostfile nodes "
            "--no-abort-on-failure --label --line-buffer python train.py"
        ),
    ),
    (
        CRAY,
        "pals",
        PBS,
        "--nnodes 1 --nproc-per-node 2 train.py",
        (
            "OMP_NUM_THREADS=16 PALS_CPU_BIND=none THP_MEM_ALLOC_ENABLE=1 pals/mpiexec -n 2 --ppn 2 --hosts node1 "
            "--no-abort-on-failure python train.py"
        ),
    ),
    (
        CRAY,
        "pals",
        {},
        "--hosts a:2,b:2 train.py",
        (
            "OMP_NUM_THREADS=16 PALS_CPU_BIND=none THP_MEM_ALLOC_ENABLE=1 pals/mpiexec -n 4 --ppn 2 --hosts a,b "
            "--no-abort-on-failure python train.py"
        ),
    ),
    (
        MPICH,
        "pals:hydra",
        PBS,
        "train.py",
        "OMP_NUM_THREADS=8 THP_MEM_ALLOC_ENABLE=1 hydra/mpiexec -n 8 -f nodes -bind-to core:8 python train.py",
    ),
    (MPICH, "hydra:pals", PBS, "--launcher pals train.py", f"OMP_NUM_THREADS=8 {ON_FILE}"),
    (
        CRAY,
        "pals",
        PBS,
        "--launcher-arg=--cpu-bind=numa train.py",  # in place of ours
        f"OMP_NUM_THREADS=8 {ON_FILE}".replace(DEPTH_8, "--no-abort-on-failure --cpu-bind=numa"),
    ),
    # srun on Cray
    (
        CRAY,
        "slurm:pals",
        SLURM,
        "train.py",
        (
            "OMP_NUM_THREADS=16 THP_MEM_ALLOC_ENABLE=1 srun --mpi=cray_shasta --kill-on-bad-exit=0 --ntasks=8 "
            "--cpus-per-task=16 python train.py"
        ),
    ),
    (
        CRAY,
        "slurm:pals",
        {**SLURM, "SLURM_JOB_NODELIST": "node[1-2]"},
        "-n 2 --tag-output --nnodes 2 train.py",
        (
            "OMP_NUM_THREADS=64 THP_MEM_ALLOC_ENABLE=1 srun --mpi=cray_shasta --kill-on-bad-exit=0 --label --ntasks=2 "
            "--nodes=2 --nodelist=node1,node2 --cpus-per-task=64 python train.py"
        ),
    ),
    (
        MPICH,
        "slurm:hydra",
        SLURM,
        "--launcher mpiexec train.py",
        "OMP_NUM_THREADS=16 THP_MEM_ALLOC_ENABLE=1 hydra/mpiexec -n 8 python train.py",
    ),
    # ibrun: TACC's user guide of Stampede3
    (INTEL, "tacc", SLURM, "train.py", "OMP_NUM_THREADS=16 THP_MEM_ALLOC_ENABLE=1 ibrun python train.py"),
    (MPICH, "tacc:slurm", SLURM, "train.py", "OMP_NUM_THREADS=16 THP_MEM_ALLOC_ENABLE=1 ibrun python train.py"),
    (
        INTEL,
        "tacc",
        SLURM,
        "-n 4 --launcher-arg task_affinity train.py",  # the guide's program for -n
        "OMP_NUM_THREADS=32 THP_MEM_ALLOC_ENABLE=1 ibrun -n 4 -o 0 task_affinity python train.py",
    ),
    (INTEL, "tacc", SLURM, "-n 8 train.py", "OMP_NUM_THREADS=16 THP_MEM_ALLOC_ENABLE=1 ibrun python train.py"),
    (
        INTEL,
        "tacc",
        {**SLURM, "SLURM_CPUS_PER_TASK": "7", "SLURM_EXPORT_ENV": "NONE"},
        "-n 4 train.py",
        "OMP_NUM_THREADS=7 SLURM_EXPORT_ENV=ALL THP_MEM_ALLOC_ENABLE=1 ibrun -n 4 -o 0 python train.py",
    ),
    (
        CRAY,
        "pals",
        PBS,
        "-n 8 --bind numa train.py",
        (
            "PALS_CPU_BIND=none THP_MEM_ALLOC_ENABLE=1 pals/mpiexec -n 8 --ppn 4 --hostfile nodes "
            "--no-abort-on-failure python -m mpicomm.rank_binding numa 4 python train.py"
        ),
    ),
    (
        WHEEL,  # ibrun starts ranks of the site's MPI only
        "tacc:slurm",
        SLURM,
        "train.py",
        (
            "OMP_NUM_THREADS=16 THP_MEM_ALLOC_ENABLE=1 srun --mpi=pmi2 --kill-on-bad-exit=0 --ntasks=8 "
            "--cpus-per-task=16 python train.py"
        ),
    ),
    (
        WHEEL,
        "tacc:slurm",
        SLURM,
        "--launcher ibrun train.py",
        "OMP_NUM_THREADS=16 THP_MEM_ALLOC_ENABLE=1 ibrun python train.py",
    ),
]


@pytest.mark.parametrize(
    ("library", "path", "environ", "arguments", "expected"),
    GOLDEN,
    ids=[
        f"{library.vendor} {path} {arguments} {number}"
        for number, (library, path, _, arguments, _) in enumerate(GOLDEN)
    ],
)
def test_the_launch_command_of_a_site(
    library: Library,
    path: str,
    environ: dict[str, str],
    arguments: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_site(library, path, environ, monkeypatch)
    assert dry_run(arguments.split(), capsys) == expected


def dry_run(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["run", "--dry-run", *arguments]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    shown = output.out.strip().replace(sys.executable, "python")
    assert shown.count(" python -m mpicomm.rank_variables python ") == 1
    return shown.replace(" python -m mpicomm.rank_variables ", " ")


@pytest.mark.parametrize(("gpus", "options"), [(4, []), (0, ["-n", "8"]), (1, ["-n", "8"])])
def test_pals_starts_a_rank_for_each_gpu_or_those_of_the_user_where_pbs_has_one_line_for_each_node(
    gpus: int, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As at ALCF. `mpicomm job` writes -n if a directive for select has no mpiprocs."""
    on_site(CRAY, "pals", PBS, monkeypatch)
    use_machine(monkeypatch, gpus)
    Path("nodes").write_text("node1\nnode2\n")
    assert dry_run([*options, "train.py"], capsys) == f"OMP_NUM_THREADS=8 {ON_FILE}"


REFUSED: list[tuple[Library, str, dict[str, str], str, str]] = [
    (OPEN_MPI, "pals", PBS, "--launcher pals", "PALS starts ranks of Cray MPICH and of MPICH, got Open MPI 5.0.11"),
    (OPEN_MPI, "pals", PBS, "", "Found launchers of other MPIs: pals/mpiexec"),
    (CRAY, "tacc", PBS, "", "mpiexec of PALS, for Cray MPICH 8.1.28, which mpi4py loads, was not found."),
    (AURORA, "tacc", PBS, "", "pip install mpich==5.0.0, or load your site's module, or use the site's own launcher."),
    (CRAY, "tacc", PBS, "", "Load your site's module cray-pals, or use the site's own launcher."),
    (MPICH, "hydra", PBS, "--launcher pals", "Load your site's module cray-pals"),
    (CRAY, "pals", PBS, "--hosts a:2,b:1", "PALS needs the same number of ranks on every host, got a:2, b:1.\n"),
    (CRAY, "pals", PBS, "--fault-tolerant", "need Open MPI 5 with ULFM, got Cray MPICH 8.1.28"),
    (MPICH, "slurm", {}, "--launcher srun", "needs an allocation of Slurm, got a process outside of a job.\n"),
    (MPICH, "slurm", PBS, "--launcher srun", "needs an allocation of Slurm, got a process in a job of PBS.\n"),
    (MPICH, "slurm", PBS, "--launcher flux", "Start it in an allocation (flux alloc -n 4), or remove --launcher."),
    (MPICH, "slurm", SLURM, "--launcher srun --hosts a", "do not work with --launcher srun"),
    (MPICH, "slurm", SLURM, "--launcher srun --fault-tolerant", "but srun starts the ranks here"),
    (OPEN_MPI, "slurm", SLURM, "--launcher srun", "srun has no PMI for Open MPI 5.0.11, /opt/openmpi/lib/libmpi.so.40"),
    (INTEL, "tacc", SLURM, "-n 9", "at most the 8 tasks of this Slurm job, got -n 9.\nRequest 9 tasks"),
    (INTEL, "tacc", SLURM, "--tag-output", "Write a file for each rank (--log-dir DIR)"),
    (INTEL, "tacc", SLURM, "--bind numa", "--bind numa: ibrun binds the ranks itself.\nOmit --bind"),
    (
        INTEL,
        "tacc",
        {**SLURM, "SLURM_HET_SIZE": "2"},
        "--launcher ibrun",
        "in one component of a job, and this one has",
    ),
    (INTEL, "slurm", SLURM, "--launcher ibrun", "ibrun was not found in PATH"),
    (CRAY, "pals", PBS, "--bind numa --launcher-arg=--cpu-bind", "and --launcher-arg=--cpu-bind both bind the ranks"),
    (MPICH, "slurm", SLURM, "--bind cores --launcher-arg=--cpu-bind=none", "both bind the ranks.\nUse one of the two."),
    (INTEL, "tacc", SLURM, "--nnodes 1", "do not work in a Slurm job of ibrun, where the scheduler selects the hosts"),
    (MPICH, "pals", {}, "--launcher x", "invalid choice: 'x'"),
    (
        MPICH,
        "pals",
        {},
        "--launcher pals --nnodes 2 --node-rank 0 --master-addr a",
        "--launcher pals cannot be combined with --node-rank",
    ),
]


@pytest.mark.parametrize(
    ("library", "path", "environ", "options", "text"),
    REFUSED,
    ids=[f"{row[0].vendor} {row[3]} {row[4][:9]}" for row in REFUSED],
)
def test_a_launcher_that_cannot_start_the_ranks_is_an_error(
    library: Library,
    path: str,
    environ: dict[str, str],
    options: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_site(library, path, environ, monkeypatch)
    assert text in refusal(["run", "--dry-run", *options.split(), "train.py"], capsys)


def test_hosts_of_a_pbs_job_with_different_numbers_of_ranks_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_site(CRAY, "pals", PBS, monkeypatch)
    Path("nodes").write_text("node1\nnode1\nnode2\n")
    message = refusal(["run", "--dry-run", "train.py"], capsys)
    assert "got node1:2, node2:1.\nGive every host the same number of ranks" in message


def test_a_heterogeneous_job_is_not_for_ibrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_site(MPICH, "tacc:slurm", {**SLURM, "SLURM_HET_SIZE": "2"}, monkeypatch)
    assert "srun --mpi=pmi2 --kill-on-bad-exit=0 --het-group=0-1" in dry_run(["train.py"], capsys)


def test_every_launcher_is_one_of_a_scheduler() -> None:
    assert {name for system in SCHEDULERS.values() for name in system.launchers} == set(selection.LAUNCHERS)
