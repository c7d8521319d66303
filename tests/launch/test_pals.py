"""`mpicomm run` in a PBS job with PALS and Cray MPICH, by the stand-ins of tests/pals; on two hosts: tests/cluster."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from mpicomm.launch.jobscript import JobSpec, script
from tests.launching import Outcome, run_command
from tests.pals import installation

RANK = """
import json, os, sys
import mpicomm
world = mpicomm.bootstrap()
line = {"rank": world.rank, "size": world.size, "launcher": world.launcher, "local_size": world.local_size,
        "cpus": sorted(os.sched_getaffinity(0)), "environ": {name: os.environ.get(name) for name in sys.argv[2:]}}
os.write(1, (json.dumps(line) + chr(10)).encode())
sys.exit(int(sys.argv[1]))
"""
OF_OTHER_MPIS = [
    "--map-by core",
    "--bind-to core",
    "-host a:2",
    "--mca a b",
    "--oversubscribe",
    "-x PATH",
    "-bind-to core",
]


class PalsJob:
    """A PBS job of two ranks on this machine, in which PATH has the mpiexec of PALS."""

    def __init__(self, directory: Path) -> None:
        self.python = installation.mpich_python()
        self.mpiexec = directory / "mpiexec"
        self.environ = installation.install(directory, self.python)
        self.environ |= installation.of_job(directory / "nodes", [socket.gethostname()] * 2)
        self.environ["PATH"] = f"{directory}:/usr/bin:/bin"
        self.program = directory / "rank.py"
        self.program.write_text(RANK)

    def run(self, *words: object, **environ: str) -> Outcome:
        return self.command("run", *map(str, words), **environ)

    def command(self, *words: str, **environ: str) -> Outcome:
        return run_command([str(self.python), "-m", "mpicomm", *words], env=self.environ | environ)


@pytest.fixture(name="job")
def _job(tmp_path: Path) -> PalsJob:
    return PalsJob(tmp_path)


def test_point_to_point_messages(job: PalsJob) -> None:
    outcome = job.run("--tag-output", "-m", "mpicomm.examples.p2p")
    assert outcome.status == 0, outcome
    assert (
        f"{job.mpiexec} -n 2 --ppn 2 --hostfile {job.environ['PBS_NODEFILE']} --no-abort-on-failure" in outcome.stderr
    )
    assert outcome.stdout.count("had 1, received 0 from rank 0") == 7, outcome
    assert outcome.stdout.count("had 0, received 1 from rank 1") == 5, outcome


def test_ranks_are_those_of_pals_and_their_status_is_kept(job: PalsJob) -> None:
    """Without --no-abort-on-failure PALS would end with status 143."""
    names = ["A", "PALS_RANKID", "PALS_CPU_BIND"]
    outcome = job.run("--env", "A=x y", job.program, 85, *names, PALS_CPU_BIND="depth", PALS_RANKID="7")
    assert outcome.status == 85, outcome
    lines = sorted((json.loads(line) for line in outcome.stdout.splitlines()), key=lambda line: line["rank"])
    assert [(line["rank"], line["size"], line["local_size"]) for line in lines] == [(0, 2, 2), (1, 2, 2)]
    assert {line["launcher"] for line in lines} == {"PALS mpiexec"}
    assert {len(line["cpus"]) for line in lines} == {1}
    assert [line["environ"] for line in lines] == [
        {"A": "x y", "PALS_RANKID": str(rank), "PALS_CPU_BIND": "depth"} for rank in range(2)
    ]


def test_a_job_script_for_pals(job: PalsJob) -> None:
    text = script(
        JobSpec("pbs", (str(job.python), "rank.py", "0", "A"), ranks_per_node=2, launcher="pals", env=("A=x y",))
    )
    file = job.program.with_name("job.pbs")
    file.write_text(text)
    outcome = run_command(["bash", str(file)], env=job.environ | {"PBS_O_WORKDIR": str(file.parent)})
    assert outcome.status == 0, outcome
    assert f"{job.mpiexec} -n 2 --ppn 2 " in outcome.stderr, outcome
    assert [json.loads(line)["environ"] for line in outcome.stdout.splitlines()] == [{"A": "x y"}] * 2


def test_doctor_names_pals(job: PalsJob) -> None:
    findings = json.loads(job.command("doctor", "--json").stdout)["findings"]
    messages = {finding["check"]: finding["message"] for finding in findings}
    assert messages["mpiexec"].startswith(f"{job.mpiexec} of PALS, for "), messages


def test_ranks_that_the_user_starts_by_pals(job: PalsJob) -> None:
    command = [job.mpiexec, "-n", 2, "--ppn", 2, job.python, job.program, 0]
    outcome = run_command(list(map(str, command)), env=job.environ)
    assert outcome.status == 0, outcome
    assert {json.loads(line)["launcher"] for line in outcome.stdout.splitlines()} == {"PALS mpiexec"}


def test_ranks_that_pals_does_not_connect_report_the_option(job: PalsJob) -> None:
    command = [job.mpiexec, "--pmi", "none", "-n", 2, job.python, job.program, 0]
    outcome = run_command(list(map(str, command)), env=job.environ)
    assert outcome.status != 0, outcome
    assert "the launcher and MPI disagree: 2 processes were started, but MPI reports rank 0 of 1." in outcome.stderr
    assert f"\n  mpiexec --pmi cray -n 2 python {job.program} 0\n" in outcome.stderr, outcome


@pytest.mark.parametrize("options", OF_OTHER_MPIS)
def test_the_stand_in_rejects_options_of_other_launchers(options: str, job: PalsJob) -> None:
    outcome = run_command([str(job.mpiexec), "-n", "1", *options.split(), "true"], env=job.environ)
    assert (outcome.status, outcome.stdout) == (1, ""), outcome
    assert outcome.stderr.startswith("mpiexec: "), outcome
