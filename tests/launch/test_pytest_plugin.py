"""The pytest plugin: a failure on one rank fails the test on all ranks, and a rank that exits does not hang the others.

The jobs load it through its entry point.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.launching import Outcome, python, run_command, run_ranks

HEADER = """
import os, unittest, pytest
from mpicomm import mpi
pytestmark = pytest.mark.mpi
comm = mpi.job_comm()
"""
CONFTEST = "from tests.conftest import *\n"  # of this project


@pytest.fixture
def run_tests(tmp_path: Path) -> Callable[..., Outcome]:
    """Return a function that runs a test file, and one without the mark, on three ranks."""

    def run(code: str, conftest: str = "", options: Sequence[str] = ()) -> Outcome:
        (tmp_path / "conftest.py").write_text(conftest)
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\nmarkers = mpi\n")
        (tmp_path / "test_it.py").write_text(HEADER + textwrap.dedent(code))
        (tmp_path / "test_unmarked.py").write_text("def test_alone():\n    pass\n")
        command = ["-m", "pytest", "--with-mpi", "--color=no", *options, str(tmp_path)]
        return run_ranks(3, command, env={"COLUMNS": "200"})  # pytest shortens its summary to the width

    return run


def test_failures_and_skips_of_some_ranks(run_tests: Callable[..., Outcome]) -> None:
    """In each test of one job, some ranks fail or skip; all ranks start the next test together, and rank 0 reports."""
    outcome = run_tests(
        """
        def test_fails_on_rank_1():
            print(f"printed by rank {comm.rank}")
            assert comm.rank != 1, "this is rank 1"

        def test_fails_on_all_ranks():
            assert comm.size == 1, "the same on all"

        @pytest.fixture
        def broken():
            assert comm.rank != 2, "no fixture on rank 2"

        def test_fixture_fails_on_rank_2(broken):
            comm.Barrier()

        @pytest.fixture(scope="module")
        def broken_in_module():
            assert comm.rank != 0, "no fixture of the module on rank 0"
            return 1

        @pytest.mark.parametrize("number", [1, 2])
        def test_module_fixture_fails_on_rank_0(broken_in_module, number):
            comm.Barrier()

        @pytest.mark.xfail(raises=ValueError, strict=True)
        def test_is_expected_to_fail():
            if comm.rank == 1:
                raise ValueError

        def test_a_subtest_fails_on_rank_2(subtests):
            for number in range(comm.rank):
                with subtests.test(number=number):
                    assert number == 0, "the last one"

        class TestOfUnittest(unittest.TestCase):
            def test_fails_on_rank_1(self):
                self.assertNotEqual(comm.rank, 1)

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

        def test_exits_on_rank_2():
            if comm.rank == 2:
                pytest.exit("no more tests")

        def test_is_not_started():
            comm.Barrier()
        """,
        CONFTEST,
    )
    report = outcome.stdout
    assert outcome.status != 0, outcome
    assert "4 failed, 3 passed, 1 skipped, 1 deselected, 1 xfailed, 4 errors" in report, outcome
    for line in (
        "FAILED .*::test_fails_on_rank_1 - rank 1: AssertionError: this is rank 1",
        "FAILED .*::test_fails_on_all_ranks - AssertionError: the same on all",
        "FAILED .*::test_a_subtest_fails_on_rank_2 - rank 2: 1 subtests failed",
        "FAILED .*::TestOfUnittest::test_fails_on_rank_1 - rank 1: AssertionError: 1 == 1",
        "ERROR .*::test_fixture_fails_on_rank_2 - rank 2: AssertionError: no fixture on rank 2",
        r"ERROR .*::test_module_fixture_fails_on_rank_0\[1\] - AssertionError: no fixture of the module",
        r"ERROR .*::test_module_fixture_fails_on_rank_0\[2\] - AssertionError: no fixture of the module",
        "ERROR .*::test_leaves_a_variable - AssertionError: the test changed environment variables",
    ):
        assert re.search(f"^{line}", report, re.MULTILINE), (line, outcome)
    assert re.search("-- rank 1 --+\n", report), outcome
    assert "printed by rank 1" in report, outcome
    assert "printed by rank 0" not in report, outcome
    assert report.count("E       AssertionError: the same on all") == 1, outcome
    assert "the session ended on rank 2" in report, outcome
    assert "[rank 2] Exit: no more tests" in outcome.stderr, outcome
    assert (report + outcome.stderr).count("test session starts") == 1, outcome


def test_a_test_reaches_its_time_limit(run_tests: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = run_tests(
        """
        import mpicomm
        mpicomm.bootstrap("mpi")

        def test_fails():
            assert comm.rank != 1, "an earlier failure"

        @pytest.mark.rank_timeout(3)
        def test_hangs():
            if comm.rank == 0:
                return
            if comm.rank == 1:
                mpicomm.recv(src=2)
            while True:
                comm.Iprobe()
        """,
        options=["--rank-timeout=100", f"--junitxml={tmp_path / 'report.xml'}"],
    )
    assert outcome.status not in (0, None), outcome
    for rank, position in (
        (0, "this rank has finished the test of .*, and waits for the other ranks"),
        (1, r"  in recv from rank 2.*, for \d+ s"),
        (2, "    comm.Iprobe"),
    ):
        assert re.search(rf"^\[rank {rank}\] .*test_hangs timed out after 3 s", outcome.stderr, re.MULTILINE), outcome
        assert re.search(rf"^\[rank {rank}\].*{position}", outcome.stderr, re.MULTILINE), outcome
    assert re.search("^FAILED .*test_fails - rank 1: AssertionError: an earlier failure", outcome.stdout, re.MULTILINE)
    assert re.search("^FAILED .*test_hangs - timed out after 3 s", outcome.stdout, re.MULTILINE), outcome
    assert "2 failed" in outcome.stdout, outcome
    cases = ElementTree.parse(tmp_path / "report.xml").findall(".//testcase")
    assert [(case.get("name"), len(case.findall("failure"))) for case in cases] == [
        ("test_fails", 1),
        ("test_hangs", 1),
    ]


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
    assert re.search(rf"\[rank 1\] {phase} .*test_it ended here while others wait", outcome.stderr), outcome
    assert "ValueError: only rank 1" in outcome.stderr, outcome


def test_a_file_that_one_rank_cannot_import_ends_all(run_tests: Callable[..., Outcome]) -> None:
    outcome = run_tests('if comm.rank == 1: raise ImportError("only rank 1")\n\ndef test_it():\n    comm.Barrier()\n')
    assert outcome.status != 0, outcome
    assert "the collection failed on rank 1" in outcome.stdout, outcome
    assert re.search(r"-- rank 1 --+\n(.*\n)+E   ImportError: only rank 1", outcome.stdout), outcome


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
