"""`mpicomm doctor` on this machine, with planted faults, and under a launcher."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import pytest

from tests import other_mpis
from tests.docs import doctor_transcript
from tests.launching import OTHER_MPI_ENV, Outcome, run_alone, run_command, run_ranks

DOCTOR = ["-m", "mpicomm", "doctor"]
CORES = len(os.sched_getaffinity(0))


def found_by(outcome: Outcome) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(outcome.stdout)
    return report


def statuses(report: dict[str, Any]) -> dict[str, str]:
    """Return the worst status of each check."""
    return {each["check"]: each["status"] for each in reversed(report["findings"])}


@pytest.mark.skipif(OTHER_MPI_ENV is None, reason="needs the environment with the other MPI")
def test_three_planted_faults_are_found_with_their_remedies() -> None:
    outcome = doctor_transcript.run()
    assert outcome.status == 1, outcome
    for check in doctor_transcript.FAULTS:
        assert re.search(rf"^problem  {check} .*(\n +[^-].*)*\n +-> ", outcome.stdout, re.MULTILINE), outcome
    assert re.search("^ok       test job ", outcome.stdout, re.MULTILINE), outcome  # mpicomm run finds its own mpiexec
    assert "\x1b" not in outcome.stdout
    committed = doctor_transcript.TRANSCRIPT.read_text()
    problems = [re.findall("^problem  (.*?)  ", each, re.MULTILINE) for each in (outcome.stdout, committed)]
    assert problems == [list(doctor_transcript.FAULTS)] * 2, outcome


@pytest.mark.each_mpi
def test_the_ranks_of_a_job_are_examined_together() -> None:
    outcome = run_ranks(4, [*DOCTOR, "--json", "--fabric"])
    report = found_by(outcome)
    assert (report["ranks"], report["hosts"]) == (4, [os.uname().nodename])
    assert [each["ranks"] for each in report["links"]] == [[a, b] for a in range(4) for b in range(a + 1, 4)]
    assert all(each["microseconds"] > 0 < each["gigabytes"] for each in report["links"])
    found = statuses(report)
    assert (found["versions"], found["MPI"], found["launcher"], found["thread level"]) == ("ok",) * 4
    assert (found["versions of hosts"], "test job" in found) == ("ok", False)
    of_all = {each["check"] for each in report["findings"] if each["ranks"] == [0, 1, 2, 3]}
    assert {"MPI", "versions", "CMA", "open files", "network devices", "rendezvous", "Gloo"} <= of_all
    assert outcome.status == (1 if report["status"] == "problem" else 0), outcome


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("env", "expected"), [({"OMP_PROC_BIND": "true"}, "problem"), ({"OMP_PROC_BIND": "false"}, None)]
)
def test_an_affinity_that_torch_narrows_is_found(env: dict[str, str], expected: str | None) -> None:
    outcome = run_alone([*DOCTOR, "--json", "--no-job"], env=env)
    assert statuses(found_by(outcome)).get("affinity") == expected, outcome


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("before", "mode", "expected"), [(["taskset", "--cpu-list", "1"], "none", "warning"), ([], "numa", "ok")]
)
def test_ranks_that_share_a_core_are_found(before: list[str], mode: str, expected: str) -> None:
    start = [sys.executable, "-m", "mpicomm", "run", "-n", "2", "--bind", mode]
    outcome = run_command([*before, *start, *DOCTOR, "--json"], env={"CUDA_VISIBLE_DEVICES": ""})
    assert statuses(found_by(outcome))["binding"] == expected, outcome


@other_mpis.each_launcher
def test_under_the_launcher_of_another_mpi_one_rank_reports(other: str) -> None:
    outcome = run_ranks(2, [*DOCTOR, "--json"], mpiexec=other_mpis.launcher(other, can_start=False))
    assert outcome.status == 1, outcome
    problems = [each for each in found_by(outcome)["findings"] if each["status"] == "problem"]
    assert [each["check"] for each in problems] == ["launcher"], outcome
    assert "mpi4py loads a different MPI" in problems[0]["message"]
    assert "mpiexec -n 2" in problems[0]["remedy"]
