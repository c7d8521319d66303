"""The metrics file of a run, which `Trainer` writes and `mpicomm report` reads: an entry in JSON on each line.

Each entry has `event`, `time`, and the position in the run: `step`, `epoch` and `consumed`. A number that is not finite
is null, because JSON has neither NaN nor Infinity.
"""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"
PARTS = ("data", "compute", "communication")
"""The parts of the time of steps; a step entry has the seconds of each known part, as `data_s`."""

EVENTS = frozenset({
    "start", "resume", "recovery", "recovered", "step", "skipped", "epoch", "eval", "step_eval", "checkpoint",
    "save_interval", "preempted", "ended", "end",
})  # fmt: skip
"""The events of the Trainer."""

ENTRY_FIELDS = frozenset({"event", "time", "step", "epoch", "consumed"})
"""The fields that each entry has."""


def check_names(names: Iterable[str], call: str, fields: Collection[str] = ENTRY_FIELDS, entry: str = "entry") -> None:
    """Check that the names of values of the user are not those of fields, whose values they would replace.

    Args:
        names: The names.
        call: The function that takes them, for the error.
        fields: The fields of the entry.
        entry: What kind of entry it is, for the error.

    Raises:
        ValueError: If one of the names is that of a field.
    """
    for name in names:
        if name in fields:
            raise ValueError(
                f"{call}: {name!r} is the name of a field of each {entry}.\nUse another name, such as 'my_{name}'."
            )


def check_event(event: str, call: str) -> None:
    """Check that an entry of the user has no name of the trainer, whose entries describe the run.

    Args:
        event: The name.
        call: The function that takes it, for the error.

    Raises:
        ValueError: If it is that of the trainer's entries.
    """
    if event in EVENTS:
        raise ValueError(f"{call}: the Trainer writes the entries {event!r}.\nUse another name, such as 'my_{event}'.")


class MetricsFile:
    """A metrics file that is open for appending. Each line is written completely or not at all.

    After a crash that truncated the last line, the next entry starts on a new line.
    """

    def __init__(self, path: Path) -> None:
        """Open the file for appending."""
        self._file: io.FileIO | None = path.open("a+b", buffering=0)
        if _is_truncated(self._file):
            self._append(self._file, b"\n")

    def write(self, entry: dict[str, Any]) -> None:
        """Write an entry."""
        if self._file is not None:
            self._append(self._file, _json(entry).encode() + b"\n")

    def _append(self, file: io.FileIO, line: bytes) -> None:
        """Write a line. On a full disk, warn and close the file; the run continues while its checkpoints succeed."""
        size = os.fstat(file.fileno()).st_size
        try:
            while line:  # on a nearly full disk, a write is partial and the next one fails
                line = line[file.write(line) :]
        except OSError as error:
            file.truncate(size)
            warnings.warn(f"metrics are no longer written to {file.name!r}: {error}", RuntimeWarning, stacklevel=2)
            file.close()
            self._file = None

    def close(self) -> None:
        """Sync the file to disk and close it."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _json(entry: Any) -> str:
    try:
        return json.dumps(entry, allow_nan=False)
    except ValueError:  # a number that is not finite
        return json.dumps(finite(json.loads(json.dumps(entry))), allow_nan=False)


def finite(value: Any) -> Any:
    """Return a value for JSON, with None in place of infinities and NaN, in dictionaries and lists too."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_truncated(file: io.FileIO) -> bool:
    """Return whether the last line of a file lacks its newline."""
    size = os.fstat(file.fileno()).st_size
    return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
