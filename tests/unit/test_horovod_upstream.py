"""The report of Horovod's own tests."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tests.conformance.verdicts import FAIL, PASS, SKIP, Verdict
from tests.horovod_upstream import page, plugin, results


def report(outcome: str, text: Any = "") -> Any:
    """Return what the verdict needs of pytest's report."""
    crash = types.SimpleNamespace(message="AssertionError: 1 != 2")
    longrepr = text if isinstance(text, tuple) else types.SimpleNamespace(reprcrash=crash)
    return types.SimpleNamespace(
        failed=outcome == "failed", skipped=outcome == "skipped", longrepr=longrepr, longreprtext=str(text)
    )


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report("passed"), report("passed"), report("passed")], Verdict(PASS)),
        (
            [report("passed"), report("skipped", ("f", 1, "Skipped: No GPUs available")), report("passed")],
            Verdict(SKIP, "No GPUs available"),
        ),
        (
            [report("passed"), report("passed"), report("failed", "  a\n>   assert 1 == 2\nE  1 != 2")],
            Verdict(FAIL, "AssertionError: 1 != 2 in `assert 1 == 2`"),
        ),
    ],
    ids=["pass", "skip", "fail"],
)
def test_the_verdict_of_a_rank(reports: list[Any], expected: Verdict) -> None:
    assert plugin._verdict(reports) == expected


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
