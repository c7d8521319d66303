"""`mpicomm job` writes the example jobs of the centres' pages, and the scripts start the ranks as the pages do.

A stand-in takes the place of srun: it lists the PMIs of the Cray systems, and records its arguments. Those of PALS and
ibrun start a program that prints their ranks instead of the ranks; mpirun is that of the MPI in use.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from mpicomm.cli.main import main
from mpicomm.launch import known_launchers
from tests import centres, ibrun
from tests.centres import CENTRES, Centre
from tests.launching import Outcome, run_command
from tests.pals import installation

SRUN = """#!/bin/bash
case $1 in
    --mpi=list) printf 'MPI plugin types are...\\n\\tcray_shasta\\n\\tnone\\n\\tpmi2\\n\\tpmix\\n'; exit ;;
esac
printf '%s\\0' "$@" >"$CALL"
"""
RECORDER = '#!/bin/sh\necho "OMP_NUM_THREADS=$OMP_NUM_THREADS OMP_PLACES=$OMP_PLACES $*"\n'
PROGRAM = """
import os, socket
size = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"]
os.write(1, f"a rank of {size} on {socket.gethostname()}\\n".encode())
"""
SCONTROL = "#!/bin/sh\nprintf 'node1\\nnode2\\n'\n"
PREFIXES = {"slurm": "#SBATCH ", "pbs": "#PBS "}
# In the step, srun reads these two from the allocation.
OF_ALLOCATION = {"--nodes", "--ntasks-per-node"}


def each_of(chosen: list[Centre]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("centre", chosen, ids=lambda centre: centre.system.partition(" ")[0])


each_centre = each_of(CENTRES)
each_with_srun = each_of([centre for centre in CENTRES if centre.launch.startswith("srun")])
each_with_another_launcher = each_of([centre for centre in CENTRES if not centre.launch.startswith("srun")])


def script(centre: Centre, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(centre.arguments) == 0
    return capsys.readouterr().out


def directives(centre: Centre, text: str) -> list[str]:
    prefix = PREFIXES[centre.scheduler]
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


def test_there_are_twelve_systems_and_every_launcher_of_a_page_is_known() -> None:
    assert len({centre.system for centre in CENTRES}) >= 12
    ours = {command for launcher in known_launchers.ALL for command in launcher.commands} | {"ibrun"}
    assert {centre.launch.split()[0] for centre in CENTRES} <= ours


@each_centre
def test_the_script_has_every_directive_of_the_page(centre: Centre, capsys: pytest.CaptureFixture[str]) -> None:
    expected = centres.effective(centre.scheduler, centre.directives)
    assert len(expected) == len(centre.directives)
    written = centres.effective(centre.scheduler, directives(centre, script(centre, capsys)))
    assert {name: written.get(name) for name in expected} == expected


@each_centre
def test_no_directive_contradicts_the_page(centre: Centre, capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm warns of no repetition; PBS ignores one, and refuses resources of the job beside select and place."""
    written = directives(centre, script(centre, capsys))
    assert len(centres.effective(centre.scheduler, written)) == len(written)
    resources = {line.removeprefix("-l ").partition("=")[0] for line in written if line.startswith("-l ")}
    assert not {"select", "place"} & resources or not {"ncpus", "ngpus", "mem", "nodes"} & resources


def of_slurm(requested: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the Slurm job that these directives request."""
    nodes, tasks, cpus = (int(requested[f"--{name}"]) for name in ("nodes", "ntasks-per-node", "cpus-per-task"))
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]" if nodes > 1 else "node1",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": requested.get("--ntasks", str(nodes * tasks)),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "SLURM_CPUS_PER_TASK": str(cpus),
        "SLURM_JOB_CPUS_PER_NODE": f"{tasks * cpus}(x{nodes})",
    }


def of_pbs(requested: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return the variables of the PBS job that these directives request, with its host file.

    By default a chunk has one line in the host file; resources of the job are those of one chunk (pbs_resources(7B)).
    """
    chunks, *resources = requested.get("-l select", f"1:ncpus={requested.get('-l ncpus')}").split(":")
    chunk = {"ncpus": "1", "mpiprocs": "1", **dict(resource.split("=") for resource in resources)}
    hosts = [f"node{number}" for number in range(int(chunks))] if chunks != "1" else [socket.gethostname()]
    lines = [host for host in hosts for _ in range(int(chunk["mpiprocs"]))]
    variables = installation.of_job(directory / "nodes", lines)
    return {**variables, "NCPUS": chunk["ncpus"], "PBS_O_WORKDIR": str(directory)}


def run_in_job(centre: Centre, ours: str, text: str, directory: Path, python: Path, **environ: str) -> Outcome:
    """Run a script in the allocation that the directives of our script request."""
    requested = centres.effective(centre.scheduler, directives(centre, ours))
    job = of_slurm(requested) if centre.scheduler == "slurm" else of_pbs(requested, directory)
    path = f"{directory}:{python.parent}:{os.environ['PATH']}"
    (directory / "train.py").write_text(PROGRAM)
    (directory / "job").write_text(text)
    return run_command(["env", "-C", str(directory), "bash", "job"], env={**environ, **job, "PATH": path})


def install(directory: Path, **texts: str) -> None:
    for name, text in texts.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)


@each_with_srun
def test_srun_gets_the_options_of_the_page(centre: Centre, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, call = script(centre, capsys), tmp_path / "call"
    install(tmp_path, srun=SRUN, scontrol=SCONTROL)
    outcome = run_in_job(centre, text, text, tmp_path, Path(sys.executable), CALL=str(call))
    assert outcome.status == 0, outcome
    words = call.read_text().split("\0")[:-1]
    if "torchrun" in centre.launch:
        start = words.index("torchrun")
        assert words[start + 1].startswith("--nproc-per-node=4")
        assert (words[start + 2], words[-1]) == ("--nnodes=2", "train.py")
        return
    assert words[-1] == "train.py"
    given, expected = centres.of_slurm(words), centre.launch_options
    compared = expected.keys() - OF_ALLOCATION
    assert {name: given.get(name) for name in compared} == {name: expected[name] for name in compared}
    requested = centres.effective(centre.scheduler, centre.directives)
    tasks = int(requested.get("--nodes", 1)) * int(requested.get("--ntasks-per-node", given["--ntasks"]))
    assert int(given["--ntasks"]) == int(expected.get("--ntasks", tasks))


@each_with_another_launcher
def test_the_launcher_starts_the_ranks_of_the_page(
    centre: Centre, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our script and the launch line of the page run in the same job, and start the same ranks on the same hosts."""
    text, python, environ = script(centre, capsys), Path(sys.executable), {}
    install(tmp_path, record=RECORDER)
    if centre.launch.startswith("mpiexec"):
        python = installation.mpich_python()
        environ = {**installation.install(tmp_path, python), "STAND_IN_HYDRA": str(tmp_path / "record")}
    elif centre.launch.startswith("ibrun"):
        ibrun.install(tmp_path, str(tmp_path / "record"))
    environ |= centre.variables
    ours, of_page = (
        run_in_job(centre, text, lines, tmp_path, python, **environ)
        for lines in (text, f"{centre.launch} {python.with_name('python')} train.py")
    )
    assert (ours.status, of_page.status) == (0, 0), f"{ours}\n{of_page}"
    started = ours.stdout.replace(f"{python.with_name('python')} -m mpicomm.rank_variables ", "")
    assert sorted(started.splitlines()) == sorted(of_page.stdout.splitlines()) != [], ours
