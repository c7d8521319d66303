"""`mpicomm run` of a training on two hosts, with srun and mpirun: it is signalled or killed, or loses a host.

No case may leave a process on any host, or end with status 0: Open MPI's mpirun does when a host dies. The jobs that
receive a signal run at the same time, since they mostly wait, and so do those that lose a host.
`tests/launch/test_supervisor.py` has the other signals with mpirun, on one host.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.cluster import hosts, processes
from tests.cluster.layout import ROOT
from tests.cluster.running import Cluster, Flavour
from tests.killed_run import KILLS, LEFT, WARNINGS, send_signal
from tests.launching import Outcome

SLOW = "tests.slow_run"
BEGUN_SECONDS = 300.0
GONE_SECONDS = 90.0
LIMIT = 500.0
PARTNERS = {hosts.kill: "node3", hosts.cut: "node4"}
"""The host that each fault of a host hits; the other faults use node1 and node2."""


STEPS = 10  # of a run that is restarted
WITH_SRUN = ("INT", "USR1", "KILL of a rank")
RESTARTED = "host killed, restarted"
HOST_FAULTS = {"host killed": hosts.kill, "host cut": hosts.cut, RESTARTED: hosts.kill}


@dataclasses.dataclass(frozen=True)
class Case:
    """One job of the matrix."""

    launcher: str
    vendor: str
    fault: str

    def __str__(self) -> str:
        return f"{self.launcher} {self.vendor} {self.fault}"

    @property
    def hosts(self) -> tuple[str, str]:
        fault = HOST_FAULTS.get(self.fault)
        return "node1", PARTNERS[fault] if fault else "node2"


CASES = [
    Case(launcher, vendor, fault)
    for launcher in ("srun", "mpirun")
    for vendor in ("Open MPI", "MPICH")
    for fault in (*KILLS, *HOST_FAULTS)
    if launcher == "srun" or fault not in WITH_SRUN
]


@dataclasses.dataclass
class Job:
    """A running job of the matrix."""

    case: Case
    folder: Path
    result: concurrent.futures.Future[Outcome]

    def wait_until_begun(self) -> None:
        """Wait until the run trains, and, if it is restarted, until it has saved a checkpoint."""
        awaited = ["begun", *(["checkpoints/step-*/COMPLETE"] if self.case.fault == RESTARTED else [])]

        def has_begun() -> bool:
            return all(any(self.folder.glob(each)) for each in awaited) or self.result.done()

        processes.wait_until(has_begun, BEGUN_SECONDS, f"{self.case} has begun")
        assert not self.result.done(), f"{self.case}: {self.result.result()}"


def allocate(cluster: Cluster, names: tuple[str, str]) -> dict[str, str]:
    """Return the variables of a new Slurm allocation, in which several steps may run at the same time."""
    nodes = ["--nodes=2", f"--nodelist={','.join(names)}", "--ntasks=2", "--ntasks-per-node=1"]
    outcome = cluster.run("salloc", "--no-shell", "--no-kill", *nodes)
    assert outcome.status == 0, outcome
    job = re.search(r"Granted job allocation (\d+)", outcome.stderr)
    assert job is not None, outcome
    of_job = {"SLURM_JOB_ID": job[1], "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    return {**of_job, "SLURM_JOB_NODELIST": ",".join(names), "SLURM_OVERLAP": "1"}


def start(cluster: Cluster, case: Case, python: Path, folder: Path, slurm: dict[str, str]) -> Outcome:
    environ = {"MPICOMM_HOST_TIMEOUT": "10", **(slurm if case.launcher == "srun" else {})}
    place = ["--hosts", ",".join(f"{name}:1" for name in case.hosts)] if case.launcher == "mpirun" else []
    wait = [python, "-m", "tests.killed_run", folder / "pid", f"{SLOW} {folder}", GONE_SECONDS]
    restarts = ["--max-restarts", 2, "--nnodes", "1:2"] if case.fault == RESTARTED else []
    steps = [STEPS] if restarts else []
    run = [python, "-m", "mpicomm", "run", "--grace-period", 60, *restarts, *place, "-m", SLOW, folder, *steps]
    # Slurm's own processes on a disconnected host outlive the job. Without TESTS_JOB, they do not count as leftover.
    settings = [f"{name}={value}" for name, value in environ.items()]
    return cluster.run("env", "--unset=TESTS_JOB", f"--chdir={ROOT}", *settings, *wait, *run, timeout=LIMIT)


def run_cases(cluster: Cluster, cases: list[Case], python: dict[str, Path]) -> dict[Case, tuple[Path, Outcome]]:
    """Start jobs at the same time; signal them, or kill or cut their second host, once they all train."""
    slurm = {names: allocate(cluster, names) for names in {case.hosts for case in cases}}
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        jobs = []
        for case in cases:
            folder = cluster.folder()
            result = pool.submit(start, cluster, case, python[case.vendor], folder, slurm[case.hosts])
            jobs.append(Job(case, folder, result))
        for job in jobs:
            job.wait_until_begun()
        for job in jobs:
            if job.case.fault in KILLS:
                send_signal(job.folder, job.case.fault)
        for fault in {HOST_FAULTS[case.fault] for case in cases if case.fault in HOST_FAULTS}:
            fault(cluster.layout, PARTNERS[fault])
        return {job.case: (job.folder, job.result.result()) for job in jobs}


@pytest.fixture(name="ends", scope="module")
def _ends(cluster: Cluster, open_mpi: Flavour, mpich: Flavour) -> dict[Case, tuple[Path, Outcome]]:
    python = {flavour.vendor: flavour.python for flavour in (open_mpi, mpich)}
    found = run_cases(cluster, [case for case in CASES if case.fault in KILLS], python)
    found |= run_cases(cluster, [case for case in CASES if case.fault in HOST_FAULTS], python)
    hosts.kill(cluster.layout, PARTNERS[hosts.cut])  # there, Slurm's own processes wait for the network
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case.fault != RESTARTED], ids=str)
def test_nothing_is_left_and_it_is_no_success(ends: dict[Case, tuple[Path, Outcome]], case: Case) -> None:
    folder, outcome = ends[case]
    assert LEFT not in outcome.stdout, outcome
    assert outcome.status != 0, outcome
    assert "came through" not in outcome.stdout, outcome
    if case.fault in WARNINGS:  # there is time for a checkpoint
        assert outcome.status == 85, outcome
        assert list(folder.glob("checkpoints/step-*/COMPLETE")), outcome
    if case.fault in ("host killed", "host cut", "KILL of a rank"):
        lines = [line for line in outcome.stderr.splitlines() if "mpicomm run: rank" in line]
        assert any(re.search(rf"ranks? .*\b1\b.* on .*{case.hosts[1]}", line) for line in lines), outcome


@pytest.mark.parametrize("case", [case for case in CASES if case.fault == RESTARTED], ids=str)
def test_the_run_continues_on_the_hosts_that_are_left(ends: dict[Case, tuple[Path, Outcome]], case: Case) -> None:
    folder, outcome = ends[case]
    assert outcome.status == 0, outcome
    assert re.findall("came through.*", outcome.stdout) == ["came through on 1"], outcome
    assert LEFT not in outcome.stdout, outcome
    assert f"no response from {case.hosts[1]}; 1 of 2 hosts are left" in outcome.stderr, outcome
    events = [json.loads(line) for line in (folder / "checkpoints" / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] >= 2 for each in events if each["event"] == "resume"] == [True], outcome
