"""The tests' own ground: a failure on one rank is one on all, and a rank that leaves does not hang the rest."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.launching import Outcome, run_ranks

HEADER = """
import os, pytest
from mpicomm import mpi
pytestmark = pytest.mark.mpi
comm = mpi.job_comm()
"""


@pytest.fixture
def run_tests(tmp_path: Path):
    """Return a function that runs a file of tests on four ranks, with this project's conftest."""

    def run(code: str, timeout: float = 60) -> Outcome:
        (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\nmarkers = mpi\n")
        (tmp_path / "test_it.py").write_text(HEADER + textwrap.dedent(code))
        return run_ranks(4, ["-m", "pytest", "--with-mpi", "--color=no", str(tmp_path)], timeout=timeout)

    return run


def test_a_failure_on_one_rank_fails_the_test_on_all(run_tests) -> None:
    outcome = run_tests(
        """
        def test_one():
            assert comm.rank != 1, "this is rank 1"

        def test_two():
            comm.Barrier()
        """
    )
    assert outcome.status != 0, outcome
    assert "failed on ranks [1]" in outcome.stdout, outcome
    assert "1 failed, 1 passed" in outcome.stdout, outcome
    said = outcome.stdout + outcome.stderr
    assert re.search(r"\[rank 1\].*this is rank 1", said), outcome
    assert "[rank 2]" not in said, outcome


def test_a_rank_that_raises_before_a_collective_ends_the_job(run_tests) -> None:
    outcome = run_tests(
        """
        def test_it():
            if comm.rank == 1:
                raise ValueError("only rank 1")
            comm.Barrier()
        """
    )
    assert outcome.status != 0, outcome
    assert re.search(r"\[rank 1\] .*test_it failed here while others wait", outcome.stderr), outcome
    assert "ValueError: only rank 1" in outcome.stderr, outcome


def test_a_fixture_that_fails_on_one_rank_fails_the_test_on_all(run_tests) -> None:
    outcome = run_tests(
        """
        @pytest.fixture
        def broken():
            assert comm.rank != 2, "no fixture on rank 2"

        def test_it(broken):
            comm.Barrier()

        def test_after():
            comm.Barrier()
        """
    )
    assert outcome.status != 0, outcome
    assert "failed on ranks [2]" in outcome.stdout, outcome
    assert "1 passed" in outcome.stdout, outcome
    assert "no fixture on rank 2" in outcome.stdout + outcome.stderr, outcome


def test_a_skip_on_one_rank_is_no_failure(run_tests) -> None:
    outcome = run_tests(
        """
        def test_it():
            if comm.rank == 1:
                pytest.skip("not here")
        """
    )
    assert outcome.status == 0, outcome


def test_what_a_test_leaves_behind_fails_it(run_tests) -> None:
    outcome = run_tests(
        """
        def test_it():
            os.environ["LEFT_BEHIND"] = "1"
        """
    )
    assert outcome.status != 0, outcome
    assert "left environment variables behind" in outcome.stdout, outcome


def test_only_marked_tests_run_under_mpirun(run_tests) -> None:
    outcome = run_tests(
        """
        pytestmark = []

        def test_alone():
            pass

        @pytest.mark.mpi
        def test_together():
            pass
        """
    )
    assert outcome.status == 0, outcome
    assert "1 passed, 1 deselected" in outcome.stdout, outcome
    assert outcome.stdout.count("1 passed") == 1, f"ranks other than 0 are to be quiet\n{outcome}"
