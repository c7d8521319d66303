"""Training that continues after failures, on several hosts: a rank is killed, or a host is cut off.

Both runs take place at the same time. `python -m tests.cluster.recovery` measures them one after the other.
"""

from __future__ import annotations

import concurrent.futures

import pytest

from tests.cluster import recovery
from tests.cluster.recovery import CUT, IN_PLACE, RANK, RESTARTED, Result
from tests.cluster.running import Cluster, Flavour

PLACES = {RANK: {"node1": 1, "node2": 2}, CUT: {"node1": 1, "node4": 1}}
EPOCHS = 4
OPTIONS = {RANK: [], CUT: ["--max-restarts", 1, "--env", "MPICOMM_HOST_TIMEOUT=5"]}


@pytest.fixture(name="results", scope="module")
def _results(cluster: Cluster, open_mpi: Flavour) -> dict[str, Result]:
    with concurrent.futures.ThreadPoolExecutor(len(PLACES)) as pool:
        running = {
            what: pool.submit(recovery.run, cluster, open_mpi.python, places, what, *OPTIONS[what], epochs=EPOCHS)
            for what, places in PLACES.items()
        }
        return {what: result.result() for what, result in running.items()}


def test_ranks_on_two_hosts_continue_in_place(results: dict[str, Result]) -> None:
    found = results[RANK]
    assert (found.outcome.status, found.way, found.survivors) == (0, IN_PLACE, 2), found.outcome
    assert "rank 2 of 3 on node2 failed" in found.outcome.stderr, found.outcome
    assert found.gap_s > 0


def test_the_run_is_restarted_without_an_unreachable_host(results: dict[str, Result]) -> None:
    """`test_kill_matrix.py` restarts runs of which a host is killed."""
    found = results[CUT]
    outcome = found.outcome
    assert (outcome.status, found.way, found.survivors) == (0, RESTARTED, 1), outcome
    assert "no response from node4; 1 of 2 hosts are left" in outcome.stderr, outcome
    assert found.gap_s > 0
    assert "[mpicomm] rank 1 of 2 on node4 died: its host is unreachable" in outcome.stderr, outcome
    assert "mpicomm run: rank 1 of 2 on node4 died: its host is unreachable" in outcome.stderr, outcome
