"""The pytest plugin: a failure on one rank fails the test on all ranks, and a rank that exits does not hang the others.

The jobs load it through its entry point.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import Outcome, python, run_command, run_ranks

HEADER = """
import os, pytest
from mpicomm import mpi
pytestmark = pytest.mark.mpi
comm = mpi.job_comm()
"""
CONFTEST = "from tests.conftest import *\n"  # of this project


@pytest.fixture
def run_tests(tmp_path: Path) -> Callable[..., Outcome]:
    """Return a function that runs a test file on three ranks."""

    def run(code: str, conftest: str = "") -> Outcome:
        (tmp_path / "conftest.py").write_text(conftest)
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\nmarkers = mpi\n")
        (tmp_path / "test_it.py").write_text(HEADER + textwrap.dedent(code))
        return run_ranks(3, ["-m", "pytest", "--with-mpi", "--color=no", str(tmp_path)])

    return run


def test_failures_and_skips_of_some_ranks(run_tests: Callable[..., Outcome]) -> None:
    """In each test of one job, some ranks fail or skip; all ranks start the next test together."""
    outcome = run_tests(
        """
        def test_fails_on_rank_1():
            assert comm.rank != 1, "this is rank 1"

        @pytest.fixture
        def broken():
            assert comm.rank != 2, "no fixture on rank 2"

        def test_fixture_fails_on_rank_2(broken):
            comm.Barrier()

        def test_skips_on_rank_1():
            if comm.rank == 1:
                pytest.skip("not here")

        @pytest.fixture
        def elsewhere():
            if comm.rank == 1:
                pytest.skip("not here")

        def test_fixture_skips_on_rank_1(elsewhere):
            comm.Barrier()

        def test_leaves_a_variable():
            os.environ["LEFT_BEHIND"] = "1"

        def test_passes():
            comm.Barrier()
        """,
        CONFTEST,
    )
    assert outcome.status != 0, outcome
    assert "1 failed, 3 passed, 1 skipped, 2 errors" in outcome.stdout, outcome
    assert "failed on ranks [1]" in outcome.stdout, outcome
    assert "failed on ranks [2]" in outcome.stdout, outcome
    assert "the test changed environment variables or did not remove them" in outcome.stdout, outcome
    output = outcome.stdout + outcome.stderr
    assert re.search(r"\[rank 1\].*this is rank 1", output), outcome
    assert re.search(r"\[rank 2\].*no fixture on rank 2", output), outcome


def test_ranks_other_than_0_are_quiet_and_unmarked_tests_are_left_out(run_tests: Callable[..., Outcome]) -> None:
    outcome = run_tests(
        """
        pytestmark = []

        def test_alone():
            pass

        @pytest.mark.mpi
        def test_together():
            pass
        """,
        CONFTEST,
    )
    assert outcome.status == 0, outcome
    assert "1 passed, 1 deselected" in outcome.stdout, outcome
    assert (outcome.stdout + outcome.stderr).count("1 passed") == 1, outcome


@pytest.mark.parametrize(
    ("phase", "code"),
    [
        (
            "the test of",
            """
            def test_it():
                if comm.rank == 1:
                    raise ValueError("only rank 1")
                comm.Barrier()
            """,
        ),
        (
            "the tear-down of",
            """
            @pytest.fixture
            def broken():
                yield
                if comm.rank == 1:
                    raise ValueError("only rank 1")
                comm.Barrier()

            def test_it(broken):
                pass
            """,
        ),
    ],
)
def test_a_rank_that_raises_before_a_collective_ends_the_job(
    phase: str, code: str, run_tests: Callable[..., Outcome]
) -> None:
    outcome = run_tests(code)
    assert outcome.status != 0, outcome
    assert re.search(rf"\[rank 1\] {phase} .*test_it failed here while others wait", outcome.stderr), outcome
    assert "ValueError: only rank 1" in outcome.stderr, outcome


def test_a_file_that_one_rank_cannot_import_ends_all(run_tests: Callable[..., Outcome]) -> None:
    outcome = run_tests('if comm.rank == 1: raise ImportError("only rank 1")\n\ndef test_it():\n    comm.Barrier()\n')
    assert outcome.status != 0, outcome
    assert "the collection failed on ranks [1]" in outcome.stdout, outcome
    assert re.search(r"\[rank 1\] .*ImportError: only rank 1", outcome.stdout + outcome.stderr), outcome


def test_the_report_of_a_killed_rank_is_printed_although_pytest_captures_it(run_tests: Callable[..., Outcome]) -> None:
    outcome = run_tests(
        """
        import signal, mpicomm
        mpicomm.bootstrap("mpi")

        def test_it():
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            mpicomm.barrier()
        """
    )
    assert outcome.status != 0, outcome
    assert re.search(r"\[mpicomm\] rank 1 of 3 on \S+ died", outcome.stderr), outcome


def test_without_a_job_the_plugin_changes_nothing() -> None:
    program = """
import sys
stderr = sys.__stderr__
from mpicomm.testing import pytest_plugin
assert sys.__stderr__ is stderr
assert not {"torch", "mpi4py"} & sys.modules.keys()
"""
    outcome = run_command(python(["-c", program]))
    assert outcome.status == 0, outcome
