"""The compatibility suite continues after a test that ends its job."""

from __future__ import annotations

from pathlib import Path

from tests.compat import suite
from tests.conformance import jobs
from tests.conformance.journal import Journal
from tests.launching import ROOT, run_ranks

TESTS = """
import os

import pytest

from mpicomm import mpi

pytestmark = pytest.mark.mpi


@pytest.mark.each_torch("good")
def test_first():
    pass


@pytest.mark.each_torch("bad")
def test_fails_on_one_rank():
    assert mpi.job_comm().rank == 0


@pytest.mark.each_torch("bad")
def test_ends_the_job():
    os._exit(1)


@pytest.mark.each_torch("good")
def test_last():
    pass


def test_without_mark():
    pass
"""


def test_a_test_that_ends_its_job_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_unreadable.py").write_text("import no_such_name\n")
    journal = Journal(tmp_path / "journal")
    here = ["-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    command = [*suite.pytest_command(60), *here]
    outputs: list[str] = []

    def start() -> str:
        outcome = run_ranks(2, command, env={suite.JOURNAL: str(journal.path)})
        outputs.append(outcome.stdout + outcome.stderr)
        return outputs[-1]

    jobs.until_finished(journal, start)
    found = {label: journal.verdicts(label) for label in journal.labels()}
    (unreadable,) = found.pop("import of the tests").values()
    assert "no_such_name" in unreadable.reason
    found_verdicts = {
        name.partition("::")[2]: str(verdict) for part in found.values() for name, verdict in part.items()
    }
    assert found_verdicts == {
        "test_first": "pass",
        "test_fails_on_one_rank": "fail: Failed: the test passed here, but failed on ranks [1]",
        "test_ends_the_job": "fail: ended the job",
        "test_last": "pass",
    }
    assert len(outputs) == 2, outputs
