"""Read the metrics file of a run. Entries of steps that were lost by an interruption and repeated are left out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicomm.metrics_file import NAME, PARTS

BEGINNINGS = ("start", "resume", "recovery")
_CONTINUATIONS = ("resume", "recovery")
_NEVER_DROPPED = (*BEGINNINGS, "recovered")  # also where the run continues from an earlier step
_PASS = "Pass the checkpoint_dir of a Trainer, a file of `mpicomm bench --json`, or a directory below mpicomm-dumps."
_ONCE_AN_EPOCH = ("epoch", "eval")
_SAMPLE_COUNT_STARTS = (
    *BEGINNINGS,
    "step",
    "epoch",
)  # events from which the samples of the next step entry are counted

_Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A line of the metrics file."""

    event: str = ""
    step: int = 0
    epoch: int = 0
    """Complete epochs."""

    consumed: int = 0
    """Samples of the current epoch that all ranks have taken."""

    values: _Values = dataclasses.field(default_factory=dict)
    samples: int = 0
    """Step entries only: samples that all ranks have taken since the previous step entry."""

    def number(self, name: str) -> float | None:
        """Return a value if it is present and a number, else None."""
        value = self.values.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of the steps of a step entry, by part."""
        return {name: self.number(f"{name}_s") or 0.0 for name in PARTS}

    @property
    def seconds(self) -> float:
        """The duration of the steps of a step entry, from its samples per second if possible, else from its parts."""
        rate = self.number("samples_per_s")
        return self.samples / rate if self.samples and rate else sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Run:
    """The valid entries of a run."""

    name: str
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()

    def select(self, *events: str) -> list[Entry]:
        """Return the entries of some events."""
        return [entry for entry in self.entries if entry.event in events]


@dataclasses.dataclass(frozen=True)
class Window:
    """Consecutive step entries, whose steps took about as long as those of the other windows of the run."""

    step: int
    """The last step."""

    samples: int
    seconds: float
    parts: Mapping[str, float]
    """The seconds of rank 0 by part."""


def windows(run: Run, number: int) -> list[Window]:
    """Return the step entries in windows of equal time.

    A window is at least as long as the training time divided by `number`, or half as long before a resume, a recovery
    and the end of the run. A process with less time than that has one window.
    """
    least = sum(entry.seconds for entry in run.select("step")) / number
    collected: list[list[Entry]] = []
    for steps in _steps_of_processes(run):
        of_process: list[list[Entry]] = []
        seconds = least  # of the last window
        for entry in steps:
            if seconds >= least:
                of_process.append([])
                seconds = 0.0
            of_process[-1].append(entry)
            seconds += entry.seconds
        if len(of_process) > 1 and seconds < least / 2:
            rest = of_process.pop()
            of_process[-1] += rest
        collected += of_process
    return [
        Window(
            entries[-1].step,
            sum(entry.samples for entry in entries),
            sum(entry.seconds for entry in entries),
            {part: sum(entry.parts[part] for entry in entries) for part in PARTS},
        )
        for entries in collected
    ]


def _steps_of_processes(run: Run) -> list[list[Entry]]:
    """Return the step entries between the starts, resumes and recoveries of a run."""
    processes: list[list[Entry]] = [[]]
    for entry in run.select("step", *BEGINNINGS):
        if entry.event == "step":
            processes[-1].append(entry)
        else:
            processes.append([])
    return processes


def percentages(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the percentages of the seconds of parts; empty if they are 0."""
    total = sum(parts.values())
    return {name: 100 * seconds / total for name, seconds in parts.items()} if total > 0 else {}


def read_all(directories: Sequence[Path]) -> list[Run]:
    """Read runs. The name of a run is the name of its directory, or its path if two directories have the same name.

    Raises:
        OSError: If a directory has no metrics file, or the file cannot be read.
    """
    short = [directory.resolve().name for directory in directories]
    names = [name if short.count(name) == 1 else str(path) for name, path in zip(short, directories, strict=True)]
    return [read(directory, name) for directory, name in zip(directories, names, strict=True)]


def read(directory: Path, name: str) -> Run:
    """Read a run.

    Raises:
        OSError: If the directory has no metrics file, or the file cannot be read.
    """
    _check(directory)
    path = directory / NAME
    lines = enumerate(path.read_bytes().split(b"\n"), start=1)
    parsed = [(number, _parsed(line)) for number, line in lines if line.strip()]
    written = _with_sample_counts(values for _, values in parsed if values is not None)
    warnings = [
        f"line {number} of {path} is not a valid entry and is skipped; the report lacks its values."
        for number in _damaged(parsed)
    ]
    if not written:
        warnings.append(f"{path} has no entries: the run ended before its first entry, or has not started yet.")
    return Run(name, tuple(_without_repeated(written)), tuple(warnings))


def _check(directory: Path) -> None:
    if directory.is_file():
        raise NotADirectoryError(
            f"expected the directory of a run, got the file {directory}.\n"
            f"Pass the directory that contains it: {directory.parent}"
        )
    if not directory.exists():
        raise FileNotFoundError(f"the directory {directory} does not exist.\n{_PASS}")
    if not (directory / NAME).is_file():
        raise FileNotFoundError(
            f"{directory} is neither the directory of a run, which has a {NAME}, nor that of dump files.\n{_PASS}"
        )


def _parsed(line: bytes) -> _Values | None:
    """Return the entry in a line; None if the line is not a valid entry."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and isinstance(values.get("event"), str) else None


def _damaged(lines: Sequence[tuple[int, _Values | None]]) -> list[int]:
    """Return the numbers of invalid lines that a crash does not explain.

    A crash truncates only the last line of the file, or the line before a start or resume entry.
    """
    following = [values for _, values in lines[1:]]
    return [
        number
        for (number, values), after in zip(lines, following, strict=False)
        if values is None and (after is None or after["event"] not in BEGINNINGS)
    ]


def _with_sample_counts(valid: Iterable[_Values]) -> list[Entry]:
    """Return all entries of the file, with the samples of step entries.

    The samples follow from the preceding entries, including those that `_without_repeated` leaves out.
    """
    entries: list[Entry] = []
    last = count_start = Entry()
    for values in valid:
        event = values["event"]
        last = Entry(
            event,
            _integer(values, "step", last.step),
            _integer(values, "epoch", last.epoch),
            _integer(values, "consumed", last.consumed),
            values,
        )
        if event == "step":
            consumed_before = count_start.consumed if count_start.epoch == last.epoch else 0
            last = dataclasses.replace(last, samples=max(last.consumed - consumed_before, 0))
        if event in _SAMPLE_COUNT_STARTS:
            count_start = last
        entries.append(last)
    return entries


def _integer(values: _Values, name: str, otherwise: int) -> int:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _without_repeated(written: Iterable[Entry]) -> list[Entry]:
    """Return the entries without those that were lost when the run resumed, recovered or started again.

    Of repeated epoch and evaluation entries only the last one is kept.
    """
    kept: list[Entry] = []
    for entry in written:
        if entry.event == "start":
            kept = []
        elif entry.event in _CONTINUATIONS:
            kept = [earlier for earlier in kept if earlier.step <= entry.step or earlier.event in _NEVER_DROPPED]
        kept.append(entry)
    last = {(entry.event, entry.epoch): entry for entry in kept if entry.event in _ONCE_AN_EPOCH}
    return [entry for entry in kept if last.get((entry.event, entry.epoch), entry) is entry]
