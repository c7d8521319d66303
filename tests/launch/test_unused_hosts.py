"""Ranks on fewer hosts than a Kubernetes operator gave the job, because the MPI ignores the operator's variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_alone, run_ranks

BOOTSTRAP = "import mpicomm; mpicomm.bootstrap(); print('started')"


@pytest.mark.each_mpi
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_on_one_of_two_hosts(ranks: int, tmp_path: Path) -> None:
    hosts = tmp_path / "hostfile"
    hosts.write_text("pi-worker-0.pi.default.svc slots=1\npi-worker-1.pi.default.svc slots=1\n")
    variables = {"OMPI_MCA_orte_default_hostfile": str(hosts)}
    outcome = run_alone(BOOTSTRAP, env=variables) if ranks == 1 else run_ranks(ranks, BOOTSTRAP, env=variables)
    assert outcome.status not in (0, None), outcome
    assert "started" not in outcome.stdout
    assert outcome.stderr.count("LaunchError: the ranks run on 1 of 2 hosts: ") == 1, outcome
    assert "Start the ranks with `mpicomm run train.py`." in outcome.stderr
