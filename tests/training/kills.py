"""Jobs that train: their commands, their checkpoints and metrics files, and their final state."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launching import on_ranks, run_command


def newest(directory: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    marks = sorted(directory.glob("step-*/COMPLETE"))
    return json.loads(marks[-1].read_text())["step"] if marks else 0


def starts(directory: Path) -> list[int]:
    """Return the steps from which a run started or resumed, for the starts that recorded it in the metrics file."""
    path = directory / "metrics.jsonl"
    entries = [json.loads(line) for line in whole_lines(path)] if path.exists() else []
    return [entry["step"] for entry in entries if entry["event"] in ("start", "resume")]


def whole_lines(path: Path) -> list[str]:
    """Return the complete lines of a metrics file, whose last line may be truncated."""
    lines = path.read_text().split("\n")
    return [line for line in lines[:-1] if line.endswith("}")]


def final(directory: Path) -> list[str]:
    return [path.read_text() for path in sorted(directory.glob("final-*.json"))]


def run_to_the_end(directory: Path, ranks: int, *arguments: str) -> None:
    outcome = run_command(on_ranks(ranks, ["-m", "tests.training.job", str(directory), *arguments]))
    assert outcome.status == 0, outcome
