"""Verdicts on a test: of one rank, of all ranks, and under all labels. Pure functions."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PASS, FAIL, SKIP = "pass", "fail", "skip"

# The reasons in `TEST_SKIPS` of PyTorch's tests for a missing GPU, and for too few ranks.
_NEEDS_GPU = re.compile(r"CUDA is not available|Need at least \d+ CUDA device|accelerator is not available")
_TOO_SMALL = "Skipped due to small world size"
_LONGEST_REASON = 300


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a test, and the reason if it did not pass."""

    outcome: str
    reason: str = ""

    @property
    def needs_gpu(self) -> bool:
        """Whether the test was skipped because it needs a GPU."""
        return self.outcome == SKIP and _NEEDS_GPU.match(self.reason) is not None

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason else self.outcome

    @classmethod
    def parse(cls, text: str) -> Verdict:
        """Return the verdict that `str` wrote."""
        outcome, _, reason = text.partition(": ")
        return cls(outcome, reason)


def of_ranks(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the combined verdict: all ranks must pass the test, or skip it for the same reason."""
    failed = [(f"rank {rank}", each.reason) for rank, each in enumerate(verdicts) if each.outcome == FAIL]
    if failed:
        return Verdict(FAIL, _grouped(failed))
    if len(set(verdicts)) == 1:
        return verdicts[0]
    return Verdict(FAIL, "the ranks disagree: " + _grouped((f"rank {r}", str(v)) for r, v in enumerate(verdicts)))


def of_labels(verdicts: Mapping[str, Verdict]) -> Verdict:
    """Return the verdict under all labels: passed if it passed under at least one, and failed under none.

    A test that is skipped under all labels gets the most specific reason: a wrong label does not count if the test gets
    further under another label.
    """
    failed = [(label, each.reason) for label, each in verdicts.items() if each.outcome == FAIL]
    if failed:
        return Verdict(FAIL, _grouped(failed))
    if any(each.outcome == PASS for each in verdicts.values()):
        return Verdict(PASS)
    return max(verdicts.values(), key=lambda each: (each.needs_gpu, each.reason.startswith(_TOO_SMALL)))


def of_report(report: Any) -> Verdict:
    """Return the verdict of a report of pytest that did not pass, with the reason, and the line of a failure."""
    if isinstance(report.longrepr, tuple):  # file, line and reason of a skip
        return Verdict(SKIP, in_one_line(report.longrepr[2].removeprefix("Skipped: ")))
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = [line for line in report.longreprtext.splitlines() if line.startswith(">")]
    where = f" in `{lines[-1][1:].strip()}`" if lines else ""
    reason = in_one_line(f"{crash.message if crash else report.longreprtext}{where}")
    return Verdict(FAIL if report.failed else SKIP, reason)


def needs_ranks(ranks: int) -> str:
    """Return the reason to skip a test in a job with another number of ranks than the test needs."""
    return f"needs {ranks} ranks"


def ranks_needed(verdict: Verdict) -> int | None:
    """Return the number of ranks that a test needs if it was skipped for that reason."""
    found = re.fullmatch(r"needs (\d+) ranks", verdict.reason)
    return int(found[1]) if found and verdict.outcome == SKIP else None


def count(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Return the numbers of passed, failed and skipped tests."""
    counted = collections.Counter(each.outcome for each in verdicts)
    return {outcome: counted[outcome] for outcome in (PASS, FAIL, SKIP)}


def in_one_line(text: str) -> str:
    """Return a reason as one short line, without paths."""
    line = " ".join(re.sub(r"(?<![\w:/])(/[\w.+-]+){2,}", "...", text).split())
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."


def _grouped(reasons: Iterable[tuple[str, str]]) -> str:
    """Merge equal reasons: "rank 0, rank 2: barrier timeout; rank 1: ..."."""
    by_reason: dict[str, list[str]] = {}
    for ranks, reason in reasons:
        by_reason.setdefault(reason, []).append(ranks)
    return "; ".join(f"{', '.join(ranks)}: {reason}" for reason, ranks in by_reason.items())
