"""The pure parts of `python -m tests.compat`: the verdict on a part, and the table entry of a result."""

from __future__ import annotations

from tests.compat import results
from tests.compat.suite import Part, marked_files
from tests.conformance.verdicts import FAIL, PASS, SKIP, Verdict
from tests.launching import run_alone

GOOD = Part.of({"one": Verdict(PASS), "two": Verdict(SKIP, "no GPU")}, 1.0)
BAD = Part.of({"one": Verdict(PASS), "two": Verdict(FAIL, "ValueError: no such thing")}, 1.0)
VERSIONS = {
    "Open MPI": "5.0.11",
    "mpi4py": "4.1.2 (source)",
    "torch": "2.13.0+cpu",
    "Python": "3.11.7",
    "NumPy": "2.4.1",
}


def test_a_part_without_a_passed_test_is_not_good() -> None:
    assert [part.is_good for part in (GOOD, BAD, Part.of({}, 0.0))] == [True, False, False]
    assert str(BAD) == "1 passed, 1 failed (1 s)"


def test_the_table_names_the_parts_that_failed() -> None:
    parts = {"p2p": vars(GOOD), "DDP": vars(BAD), "FSDP2": vars(Part.of({}, 0.0))}
    assert results.outcome(parts) == "1 of 3 parts, 2 tests; **failed: DDP (1 of 2), FSDP2 (0 of 0)**"
    assert results.outcome({"p2p": vars(GOOD)}) == "1 of 1 parts, 1 tests"


def test_results_are_sorted_by_number() -> None:
    found = [{"versions": {**VERSIONS, "torch": torch}} for torch in ("2.13.0", "2.6.0")]
    assert sorted(found, key=results.order) == found[::-1]


def test_the_marked_tests_are_in_the_suite() -> None:
    assert "tests/mpi/test_messages.py" in marked_files()
    assert "tests/mpi/test_matrix.py" not in marked_files()


def test_the_command_needs_no_packages() -> None:
    outcome = run_alone(["-S", "-m", "tests.compat", "--help"])
    assert outcome.status == 0, outcome
