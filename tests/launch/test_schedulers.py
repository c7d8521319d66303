"""Job scripts and `mpicomm run` on two hosts of PBS, LSF and Flux, with stand-ins for the commands of the scheduler.

The stand-ins behave as recorded on a real OpenPBS 23.06, and as the manuals of LSF 10.1 and Flux describe: pbs_tmrsh
runs a program without a shell, with the job's first variables and without PATH; blaunch accepts the arguments of ssh.
The other host is this machine with another name: MPI distinguishes nodes by their names.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpicomm import mpi
from mpicomm.launch.jobscript import JobSpec, script
from tests.launching import ROOT, Outcome, run_command

BIN = Path(sys.executable).parent
HERE, OTHER = socket.gethostname(), "nodeb"
HOSTS = [HERE, HERE, OTHER, OTHER]
HAS_OPEN_MPI = mpi.library().vendor == "Open MPI"

TASK = 'env -i PATH=/usr/bin:/bin HOME="$HOME"'  # the environment of a task on another host, without the job's
TMRSH = f"""#!/bin/sh
host=$1
shift
cd /
exec unshare --uts {TASK} PBS_JOBID="$PBS_JOBID" PBS_TASKNUM=20000001 PBS_NODENUM=1 \\
    sh -c 'hostname "$0"; exec "$@"' "$host" "$@"
"""
BLAUNCH = f"""#!/bin/sh
while :; do case $1 in -*) shift ;; *) break ;; esac; done
host=$1
shift
exec unshare --uts {TASK} LSB_JOBID="$LSB_JOBID" LSF_PM_TASKID=2 sh -c 'hostname "$0"; exec sh -c "$1"' "$host" "$*"
"""
# flux run -N 2 -n 4: Flux provides PMI-1, as MPICH's mpiexec does, which takes its place with two hosts.
FLUX = f"""#!/bin/bash
case "$1 $2" in
    "resource list") echo "2 8 0"; exit ;;
    "config builtin") echo "$PLUGINS"; exit ;;
    "run -N") ;;
    *) exit 64 ;;
esac
[ "$3 $4 $5" = "2 -n 4" ] || exit 65
shift 7
while [ "$1" = "-o" ]; do shift 2; done
export HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC="${{0%/*}}/blaunch"
exec {BIN}/mpiexec -n 4 -hosts {HERE}:2,{OTHER}:2 bash -c \\
    'FLUX_TASK_RANK=$PMI_RANK FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=$MPI_LOCALRANKID exec "$@"' bash "$@"
"""
RANK = """
import json, os, sys
import mpicomm
world = mpicomm.bootstrap()
shown = [name for name in os.environ if name in sys.argv[1:]]
line = {"rank": world.rank, "size": world.size, "nodes": world.num_nodes, "host": world.hostname, "cwd": os.getcwd(),
        "arguments": sys.argv[1:], "environ": {name: os.environ[name] for name in ("A", "PATH", *shown)}}
os.write(1, (json.dumps(line) + chr(10)).encode())
"""


@pytest.fixture(name="stand_ins", autouse=True)
def _stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the commands of the schedulers, and one with the program, which is the working directory."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user cannot make hosts with unshare --uts")
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, text in {"pbs_tmrsh": TMRSH, "blaunch": BLAUNCH, "flux": FLUX}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "nodefile").write_text("".join(f"{host}\n" for host in HOSTS))
    monkeypatch.chdir(tmp_path)
    return directory


def run_job(scheduler: str, stand_ins: Path, environ: dict[str, str], *arguments: str, **options: Any) -> Outcome:
    """Run the job script of a program with four ranks on two hosts, as the scheduler would on the first one."""
    command = ("python", "rank.py", *arguments)
    Path("job.sh").write_text(script(JobSpec(scheduler, command, nodes=2, ranks_per_node=2, env=("A=x y",), **options)))
    path = f"{stand_ins}:{BIN}:/usr/bin:/bin"
    kept = {name: os.environ[name] for name in ("HOME", *filter(is_for_root, os.environ))}
    job = {"PATH": path, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""), **kept}
    words = [f"{name}={value}" for name, value in {**job, **environ}.items()]
    return run_command(["env", "-i", *words, "/bin/bash", "job.sh"])


def is_for_root(name: str) -> bool:
    return name.startswith(("OMPI_ALLOW_RUN", "PRTE_MCA_rmaps"))


def check(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the lines of the ranks by rank, after checking that they form one world on both hosts."""
    assert outcome.status == 0, outcome
    found = sorted((json.loads(line) for line in outcome.stdout.splitlines()), key=lambda line: line["rank"])
    assert [(line["rank"], line["size"], line["nodes"]) for line in found] == [(rank, 4, 2) for rank in range(4)]
    assert [line["host"] for line in found] == HOSTS
    assert {line["environ"]["A"] for line in found} == {"x y"}
    assert all(str(BIN) in line["environ"]["PATH"].split(":") for line in found)
    assert {line["cwd"] for line in found} == {str(Path.cwd())}
    return found


@pytest.mark.each_mpi
def test_an_array_of_pbs_on_two_hosts_without_ssh(stand_ins: Path) -> None:
    pbs = {
        "PBS_JOBID": "7[3].pbs1",
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_NODEFILE": str(Path("nodefile").absolute()),
        "PBS_O_WORKDIR": str(Path.cwd()),
        "PBS_ARRAY_INDEX": "3",
        "PBS_TASKNUM": "1",
        "PBS_NODENUM": "0",
    }
    found = check(run_job("pbs", stand_ins, pbs, "$PBS_ARRAY_INDEX", "PBS_JOBID", "PBS_ARRAY_INDEX", array="0-9"))
    assert {line["arguments"][0] for line in found} == {"3"}
    assert {(line["environ"]["PBS_JOBID"], line["environ"]["PBS_ARRAY_INDEX"]) for line in found} == {
        ("7[3].pbs1", "3")
    }


@pytest.mark.each_mpi
def test_lsf_on_two_hosts(stand_ins: Path) -> None:
    lsf = {"LSB_JOBID": "7", "LSB_JOBINDEX": "0", "LSB_MCPU_HOSTS": f"{HERE} 2 {OTHER} 2 ", "LSB_DJOB_NUMPROC": "4"}
    found = check(run_job("lsf", stand_ins, lsf, "LSB_JOBID"))
    assert {line["environ"]["LSB_JOBID"] for line in found} == {"7"}


@pytest.mark.each_mpi
def test_flux_on_two_nodes(stand_ins: Path) -> None:
    flux = {"FLUX_URI": "local:///run/flux/local", "FLUX_ENCLOSING_ID": "f2e73NP", "PLUGINS": str(stand_ins)}
    outcome = run_job("flux", stand_ins, flux)
    if HAS_OPEN_MPI:
        assert outcome.status != 0, outcome
        assert "this Flux has no PMIx plugin.\nInstall flux-pmix beside Flux" in outcome.stderr, outcome
    else:
        check(outcome)


@pytest.mark.parametrize("answers", [True, False], ids=["Flux answers", "Flux does not answer"])
def test_plain_python_in_a_flux_instance(stand_ins: Path, answers: bool) -> None:
    if not answers:
        (stand_ins / "flux").write_text("#!/bin/bash\nexit 1\n")
    flux = {"FLUX_URI": "local:///run/flux/local", "PATH": f"{stand_ins}:{os.environ['PATH']}"}
    outcome = run_command([sys.executable, "rank.py"], env={**flux, "A": ""})
    assert outcome.status == 0, outcome
    assert json.loads(outcome.stdout)["size"] == 1
    assert ("this Flux job has 8 tasks" in outcome.stderr) is answers, outcome
    assert "mpicomm/job/bootstrap.py" not in outcome.stderr, (
        f"the warning is to show the user's line, not ours\n{outcome}"
    )
