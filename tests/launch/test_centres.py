"""`mpicomm job` writes the example jobs of the centres' pages, and the scripts start the ranks as the pages do.

A stand-in takes the place of srun: it lists the PMIs of the Cray systems, and records its arguments.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mpicomm.cli.main import main
from mpicomm.launch import known_launchers
from tests import centres
from tests.centres import CENTRES, Centre
from tests.launching import Outcome, run_command

SRUN = """#!/bin/bash
case $1 in
    --mpi=list) printf 'MPI plugin types are...\\n\\tcray_shasta\\n\\tnone\\n\\tpmi2\\n\\tpmix\\n'; exit ;;
esac
printf '%s\\0' "$@" >"$CALL"
"""
SCONTROL = "#!/bin/sh\nprintf 'node1\\nnode2\\n'\n"
PREFIXES = {"slurm": "#SBATCH ", "pbs": "#PBS "}
# In the step, srun reads these two from the allocation.
OF_ALLOCATION = {"--nodes", "--ntasks-per-node"}

each_centre = pytest.mark.parametrize("centre", CENTRES, ids=lambda centre: centre.system.partition(" ")[0])
each_with_srun = pytest.mark.parametrize(
    "centre",
    [centre for centre in CENTRES if centre.launch.startswith("srun")],
    ids=lambda centre: centre.system.partition(" ")[0],
)


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


def run_script(centre: Centre, directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Outcome, list[str]]:
    """Run the script in the allocation that its directives request; return the words of srun as well."""
    text = script(centre, capsys)
    requested = centres.effective(centre.scheduler, directives(centre, text))
    nodes, tasks, cpus = (int(requested[f"--{name}"]) for name in ("nodes", "ntasks-per-node", "cpus-per-task"))
    (directory / "train.py").touch()
    (directory / "job").write_text(text)
    for name, stand_in in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (directory / name).write_text(stand_in)
        (directory / name).chmod(0o755)
    call = directory / "call"
    environ = {
        "PATH": f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CALL": str(call),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]" if nodes > 1 else "node1",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_TASKS_PER_NODE": f"{tasks}(x{nodes})",
        "SLURM_CPUS_PER_TASK": str(cpus),
        "SLURM_JOB_CPUS_PER_NODE": f"{tasks * cpus}(x{nodes})",
    }
    outcome = run_command(["env", "-C", str(directory), "bash", "job"], env=environ)
    return outcome, call.read_text().split("\0")[:-1] if call.exists() else []


@each_with_srun
def test_srun_gets_the_options_of_the_page(centre: Centre, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome, words = run_script(centre, tmp_path, capsys)
    assert outcome.status == 0, outcome
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
