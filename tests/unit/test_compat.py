"""The pure parts of `python -m tests.compat`: the verdict on a part, and the table entry of a result."""

from __future__ import annotations

from tests.compat.suite import Part, marked_files
from tests.conformance.verdicts import FAIL, PASS, SKIP, Verdict
from tests.launching import run_alone

GOOD = Part.of({"one": Verdict(PASS), "two": Verdict(SKIP, "no GPU")}, 1.0)
BAD = Part.of({"one": Verdict(PASS), "two": Verdict(FAIL, "ValueError: no such thing")}, 1.0)


def test_a_part_without_a_passed_test_is_not_good() -> None:
    assert [part.is_good for part in (GOOD, BAD, Part.of({}, 0.0))] == [True, False, False]
    assert str(BAD) == "1 passed, 1 failed (1 s)"


def test_the_marked_tests_are_in_the_suite() -> None:
    assert "tests/mpi/test_messages.py" in marked_files()
    assert "tests/mpi/test_matrix.py" not in marked_files()


def test_the_command_needs_no_packages() -> None:
    outcome = run_alone(["-S", "-m", "tests.compat", "--help"])
    assert outcome.status == 0, outcome
