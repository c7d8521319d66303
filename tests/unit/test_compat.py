"""The pure parts of `python -m tests.compat`: the requested versions, and the table entry of a result."""

from __future__ import annotations

import pytest

from tests.compat import request, results
from tests.compat.request import NEWEST, OLDEST, Request
from tests.compat.suite import Part, marked_files
from tests.conformance.verdicts import FAIL, PASS, SKIP, Verdict
from tests.launching import ROOT, run_alone

GOOD = Part.of({"one": Verdict(PASS), "two": Verdict(SKIP, "no GPU")}, 1.0)
BAD = Part.of({"one": Verdict(PASS), "two": Verdict(FAIL, "ValueError: no such thing")}, 1.0)
VERSIONS = {
    "Open MPI": "5.0.11",
    "mpi4py": "4.1.2 (source)",
    "torch": "2.13.0+cpu",
    "Python": "3.11.7",
    "NumPy": "2.4.1",
}


@pytest.mark.parametrize(("floor", "version"), [("2.6", "2.6.0"), ("2.13.1", "2.13.1")])
def test_the_oldest_torch_is_the_lowest_of_pyproject(floor: str, version: str) -> None:
    assert request.version(OLDEST, f'dependencies = ["numpy", "torch>={floor},<3", "rich"]') == version


def test_pyproject_has_a_lowest_torch() -> None:
    assert request.version(OLDEST, (ROOT / "pyproject.toml").read_text())[0].isdigit()


@pytest.mark.parametrize("torch", [NEWEST, "2.10.0"])
def test_other_versions_of_torch_are_taken_as_they_are(torch: str) -> None:
    assert request.version(torch, "") == torch


def test_constraints_of_chosen_packages_are_left_out() -> None:
    assert request.constraints("# pins\ntorch==2.13.0\nmpi4py==4.1.2\nopenmpi==5.0.11\n") == "# pins\nopenmpi==5.0.11\n"


def test_a_request_names_the_packages_for_pip() -> None:
    asked = Request(NEWEST, "mpich", mpi4py="4.0.3")
    requirements = [asked.requirement(package) for package in ("torch", "mpi4py", "numpy")]
    assert requirements == ["torch", "mpi4py==4.0.3", "numpy"]


@pytest.mark.parametrize(("version", "has_wheels"), [("", True), ("4.1.2", True), ("4.0.3", False), ("3.1.6", False)])
def test_mpi4py_before_4_1_is_compiled(version: str, has_wheels: bool) -> None:
    assert request.has_wheels(version) is has_wheels


def test_a_part_without_a_passed_test_is_not_good() -> None:
    assert [part.is_good for part in (GOOD, BAD, Part.of({}, 0.0))] == [True, False, False]
    assert str(BAD) == "1 passed, 1 failed (1 s)"


def test_the_table_names_the_parts_that_failed() -> None:
    parts = {"p2p": vars(GOOD), "DDP": vars(BAD), "FSDP2": vars(Part.of({}, 0.0))}
    assert results.outcome(parts) == "1 of 3 parts, 2 tests; **failed: DDP (1 of 2), FSDP2 (0 of 0)**"
    assert results.outcome({"p2p": vars(GOOD)}) == "1 of 1 parts, 1 tests"


def test_the_file_is_named_by_the_versions() -> None:
    name = "torch-2.13.0-python-3.11-open-mpi-5.0.11-mpi4py-4.1.2-source-numpy-2.4.1"
    assert results.name_of(VERSIONS) == name


def test_results_are_sorted_by_number() -> None:
    found = [{"versions": {**VERSIONS, "torch": torch}} for torch in ("2.13.0", "2.6.0")]
    assert sorted(found, key=results.order) == found[::-1]


def test_the_marked_tests_are_in_the_suite() -> None:
    assert "tests/mpi/test_messages.py" in marked_files()
    assert "tests/mpi/test_matrix.py" not in marked_files()


def test_the_command_needs_no_packages() -> None:
    outcome = run_alone(["-S", "-m", "tests.compat", "--help"])
    assert outcome.status == 0, outcome
