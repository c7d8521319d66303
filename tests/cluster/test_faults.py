"""A host is disconnected or dies during training: the job ends in time, and reports the host.

Without Slurm, the end of the job depends on mpirun: if a host dies, it ends all processes at once, before the ranks can
report it. test_kill_matrix.py tests that with `mpicomm run`, which reports the host.
"""

from __future__ import annotations

import concurrent.futures
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import hosts, processes
from tests.cluster.layout import Layout
from tests.cluster.running import SECONDS, Cluster, Flavour
from tests.failures import ways
from tests.launching import Outcome
from tests.time_limits import scaled

DEADLINE = 60.0  # seconds from the fault to the end of the job
LEFT = "node1"
LOOP = "tests.cluster.loop"
Fault = Callable[[Layout, str], None]
End = tuple[Outcome, float]
"""The outcome of a job, and the seconds from the fault to its end."""

LOST: dict[Fault, str] = {hosts.cut: "node2", hosts.kill: "node3"}


def inject(cluster: Cluster, fault: Fault, lost: str, begun: list[Path]) -> float:
    """Inject a fault into a host once all jobs have begun there; return the time of the fault."""
    processes.wait_until(lambda: all(path.exists() for path in begun), SECONDS, "the training has begun")
    fault(cluster.layout, lost)
    return time.time()


def train(cluster: Cluster, begun: Path, *launcher: object) -> Outcome:
    # Ranks on the disconnected host exit later than srun, which has given them up. Without TESTS_JOB, `run_command`
    # does not report them as leftover processes.
    command = ["env", "--unset=TESTS_JOB", *launcher, "-m", LOOP, begun]
    return cluster.run(*command, timeout=SECONDS + DEADLINE)


@pytest.fixture(scope="module")
def ends(cluster: Cluster, open_mpi: Flavour, mpich: Flavour) -> dict[tuple[Fault, str], End]:
    """How training ends under srun, by fault and MPI. All jobs run at the same time, since they mostly wait."""
    begun = {(fault, flavour.vendor): cluster.folder() / "begun" for fault in LOST for flavour in (open_mpi, mpich)}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = {}
        for fault, lost in LOST.items():
            for flavour in (open_mpi, mpich):
                step = ["srun", f"--nodelist={LEFT},{lost}", "--kill-on-bad-exit=1", f"--mpi={flavour.srun_type}"]
                job = fault, flavour.vendor
                jobs[job] = pool.submit(train, cluster, begun[job], *step, flavour.python)
        injected = {
            fault: pool.submit(inject, cluster, fault, lost, [path for job, path in begun.items() if job[0] is fault])
            for fault, lost in LOST.items()
        }
        found = {job: (end.result(), end.result().ended - injected[job[0]].result()) for job, end in jobs.items()}
    # The ranks on the disconnected host must exit by themselves: no other process can end them.
    processes.wait_until(lambda: not ranks(cluster), DEADLINE, "the ranks end on every host")
    hosts.kill(cluster.layout, LOST[hosts.cut])  # there, Slurm's own processes wait for the network
    return found


def ranks(cluster: Cluster) -> list[str]:
    return [line for line in cluster.job_processes().values() if LOOP in line]


@pytest.mark.parametrize("vendor", ["Open MPI", "MPICH"])
@pytest.mark.parametrize("fault", LOST, ids=["cut off", "dies"])
def test_the_lost_host_is_reported_in_time(ends: dict[tuple[Fault, str], End], fault: Fault, vendor: str) -> None:
    outcome, seconds = ends[fault, vendor]
    assert outcome.status != 0, outcome
    assert seconds < scaled(DEADLINE), outcome
    if fault is hosts.kill:
        assert f"rank 1 of 2 on {LOST[fault]} died" in outcome.stderr, outcome
    else:
        assert re.search(rf"rank 0 of 2 on {LEFT} timed out after \d+ s in all_reduce", outcome.stderr), outcome
        silent = [line for line in outcome.stderr.splitlines() if "rank 1  not responding" in line]
        assert silent, outcome
        assert all(line.endswith(f" on {LOST[fault]}") for line in silent), outcome


@pytest.fixture
def shared_files(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare the fault cases for srun: put their files in a directory that all hosts share."""
    monkeypatch.setattr(tempfile, "tempdir", str(cluster.layout.scratch))
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("shared_files")
def test_a_stopped_rank_is_ended_by_the_other_ranks(mpich: Flavour) -> None:
    """Under srun, MPICH's ranks abort one by one; without -K, srun waits indefinitely for a rank that cannot abort."""
    srun = ["srun", "--kill-on-bad-exit=0", "--nodes=2", "--ntasks-per-node=2", f"--mpi={mpich.srun_type}"]
    environment = mpich.python.parent.parent

    def run(rank: int) -> ways.Result:
        return ways.run(ways.BY_NAME["SIGSTOP"], rank, environment=environment, launcher=srun)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # rank 2 is the hub of its node, rank 3 is not a hub
        for result in pool.map(run, (2, 3)):
            assert result.ended, result.stderr
            assert result.named == [result.rank], result.stderr
            assert not result.left
