"""Findings: the results of the checks, on one rank and together on all ranks."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

Status = Literal["ok", "warning", "problem"]
STATUSES: tuple[Status, ...] = ("problem", "warning", "ok")
"""The worst first."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check."""

    check: str
    """The object of the check, such as `mpiexec`."""

    status: Status
    message: str
    remedy: str = ""
    """The next step; empty if the status is ok."""

    ranks: tuple[int, ...] = ()
    """The ranks with this result; empty for a result about the whole job."""


def ok(check: str, message: str) -> Finding:
    """Return a finding without a fault."""
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str) -> Finding:
    """Return a finding that makes a job slow, or lets it fail in some uses."""
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    """Return a finding that makes a job fail, or many times slower."""
    return Finding(check, "problem", message, remedy)


def from_error(check: str, error: object) -> Finding:
    """Return the finding of an error of this package: the fault, indented lines with its place, then the remedy."""
    lines = str(error).splitlines()
    end = next((number for number, line in enumerate(lines) if number and not line.startswith("  ")), len(lines))
    remedy = "\n".join(lines[end:]) or "Correct this, and run `mpicomm doctor` again."
    return problem(check, "\n".join(lines[:end]), remedy)


def merged(findings_by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return each different finding once, with its ranks."""
    ranks_by_finding: dict[Finding, list[int]] = collections.defaultdict(list)
    for rank, findings in enumerate(findings_by_rank):
        for finding in findings:
            ranks_by_finding[finding].append(rank)
    return [dataclasses.replace(finding, ranks=tuple(ranks)) for finding, ranks in ranks_by_finding.items()]


def worst(findings: Iterable[Finding]) -> Status:
    """Return the worst status; ok without findings."""
    return min((finding.status for finding in findings), key=STATUSES.index, default="ok")
