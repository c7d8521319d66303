"""A run as its metrics file tells it: the entries that count, whatever ended it and however often it was resumed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
PARTS = ("data", "compute", "communication")
"""What the time of steps is divided into."""

_BEGINNINGS = ("start", "resume")
_ONCE_AN_EPOCH = ("epoch", "eval")
_MARKS = (*_BEGINNINGS, "step", "epoch")  # from where the samples of the next step entry count

_Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of the file."""

    event: str
    step: int
    epoch: int
    """Epochs that are complete."""

    consumed: int
    """Samples of the next epoch that all ranks have taken."""

    values: _Values
    samples: int = 0
    """Of a step entry: how many all ranks have taken since the one before."""

    def number(self, name: str) -> float | None:
        """Return a value, if it is there and a number."""
        value = self.values.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def parts(self) -> dict[str, float]:
        """Where the time of a step entry's steps went, in seconds."""
        return {name: self.number(f"{name}_s") or 0.0 for name in PARTS}

    @property
    def seconds(self) -> float:
        """How long a step entry's steps took; the file has their rate."""
        rate = self.number("samples_per_s")
        return self.samples / rate if self.samples and rate else sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Run:
    """What counts of a run."""

    name: str
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()

    def of(self, *events: str) -> list[Entry]:
        """Return the entries of some events."""
        return [entry for entry in self.entries if entry.event in events]


def read_all(directories: Sequence[Path]) -> list[Run]:
    """Read runs, and name each by its directory, or by the whole path where that would name two.

    Raises:
        OSError: If one has no metrics file, or it cannot be read.
    """
    short = [directory.resolve().name for directory in directories]
    names = [name if short.count(name) == 1 else str(path) for name, path in zip(short, directories, strict=True)]
    return [read(directory, name) for directory, name in zip(directories, names, strict=True)]


def read(directory: Path, name: str) -> Run:
    """Read a run.

    Raises:
        OSError: If there is no metrics file, or it cannot be read.
    """
    _check(directory)
    path = directory / FILE
    lines = enumerate(path.read_bytes().split(b"\n"), start=1)
    found = [(number, _parsed(line)) for number, line in lines if line.strip()]
    written = _walked(values for _, values in found if values is not None)
    warnings = [
        f"line {number} of {path} is no entry and is left out; what it said is missing from the figures."
        for number in _damaged(found)
    ]
    if not written:
        warnings.append(f"{path} has no entries: the run has ended before its first one, or is about to begin.")
    return Run(name, tuple(_counting(written)), tuple(warnings))


def _check(directory: Path) -> None:
    if directory.is_file():
        raise NotADirectoryError(
            f"expected the directory of a run, got the file {directory}.\n"
            f"Name the directory it is in: {directory.parent}"
        )
    if not directory.exists():
        raise FileNotFoundError(f"there is no {directory}.\nName a directory that was a Trainer's checkpoint_dir.")
    if not (directory / FILE).is_file():
        raise FileNotFoundError(
            f"{directory} holds no run: it has no {FILE}.\nName a directory that was a Trainer's checkpoint_dir."
        )


def _parsed(line: bytes) -> _Values | None:
    """Return what a line holds; None if it is no entry."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("event"), str) else None


def _damaged(found: Sequence[tuple[int, _Values | None]]) -> list[int]:
    """Return the numbers of broken lines that no crash explains: it cuts the last line it writes and no other."""
    following = [values for _, values in found[1:]]
    return [
        number
        for (number, values), after in zip(found, following, strict=False)
        if values is None and (after is None or after["event"] not in _BEGINNINGS)
    ]


def _walked(found: Iterable[_Values]) -> list[Entry]:
    """Return all entries of the file; what a step entry covers is known from those before it, dropped later or not."""
    entries: list[Entry] = []
    last = mark = Entry("", 0, 0, 0, {})
    for values in found:
        event = values["event"]
        last = Entry(
            event,
            _whole(values, "step", last.step),
            _whole(values, "epoch", last.epoch),
            _whole(values, "consumed", last.consumed),
            values,
        )
        if event == "step":
            begun = mark.consumed if mark.epoch == last.epoch else 0
            last = dataclasses.replace(last, samples=max(last.consumed - begun, 0))
        if event in _MARKS:
            mark = last
        entries.append(last)
    return entries


def _whole(values: _Values, name: str, otherwise: int) -> int:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _counting(written: Iterable[Entry]) -> list[Entry]:
    """Leave out what was lost when the run went back to a checkpoint or began anew, and what was done again."""
    kept: list[Entry] = []
    for entry in written:
        if entry.event == "start":
            kept = []
        elif entry.event == "resume":
            kept = [each for each in kept if each.step <= entry.step or each.event in _BEGINNINGS]
        kept.append(entry)
    last = {(entry.event, entry.epoch): entry for entry in kept if entry.event in _ONCE_AN_EPOCH}
    return [entry for entry in kept if last.get((entry.event, entry.epoch), entry) is entry]
