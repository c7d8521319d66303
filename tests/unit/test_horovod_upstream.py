"""The report of Horovod's own tests."""

from __future__ import annotations

from tests.conformance.verdicts import PASS, SKIP
from tests.horovod_upstream import page, results


def test_the_page_is_that_of_the_results() -> None:
    assert page.PATH.read_text() == page.text(results.read_all())


def test_all_tests_that_need_no_gpu_pass() -> None:
    """Of the 115 tests, 9 need a GPU, and 2 do not apply to MPI."""
    runs = [run for each in results.read_all().values() for run in each["runs"].values()]
    assert len(runs) == 4
    for run in runs:
        reasons = [page.explained(each.reason, name) for name, each in run.verdicts.items() if each.outcome == SKIP]
        assert sorted(reasons) == ["does not apply to MPI"] * 2 + ["needs a GPU"] * 9
        assert run.count(PASS) == len(run.verdicts) - 11 == 104
