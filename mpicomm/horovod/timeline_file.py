"""The timeline of HOROVOD_TIMELINE: a trace of every tensor, in the format of chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from mpicomm.horovod.negotiation import Ready
from mpicomm.horovod.submission import Submission


class HorovodTimeline:
    """Writes the phases of each tensor of this rank to a file: NEGOTIATE_<operation>, then <operation>."""

    is_open = False
    """Whether a timeline is being written; the other methods need not be called otherwise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._rows: dict[str, int] = {}
        self._start = 0
        self._marks_cycles = False

    def start(self, path: str, *, marks_cycles: bool) -> None:
        """Start a timeline; one that is being written is completed first."""
        self.stop()
        with self._lock:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  stop() closes it
            self.is_open = True
            self._rows, self._start, self._marks_cycles = {}, time.monotonic_ns(), marks_cycles
            epoch = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._file.write("[\n" + json.dumps({"name": "clock", "ph": "M", "pid": 0, "args": epoch}))

    def stop(self) -> None:
        """Complete the file, if a timeline is being written."""
        with self._lock:
            file, self._file, self.is_open = self._file, None, False
            if file is not None:
                file.write("\n]\n")
                file.close()

    def mark_cycle(self) -> None:
        """Note the start of a cycle."""
        if self._marks_cycles:
            self._write([("cycles", "i", "CYCLE_START")])

    def start_negotiation(self, submission: Submission) -> None:
        """Note that this rank has submitted a tensor."""
        self._write([(submission.name, "B", f"NEGOTIATE_{submission.signature.kind.upper()}")])

    def end_negotiation(self, items: Iterable[Ready]) -> None:
        """Note that operations are ready on all ranks, and start."""
        own = [(item.name, item.signature.kind.upper()) for item in items if item.submission is not None]
        self._write([event for name, kind in own for event in ((name, "E", f"NEGOTIATE_{kind}"), (name, "B", kind))])

    def end_operations(self, items: Iterable[Ready]) -> None:
        """Note that operations are complete."""
        self._write([(item.name, "E", item.signature.kind.upper()) for item in items if item.submission is not None])

    def _write(self, events: Iterable[tuple[str, str, str]]) -> None:
        micros = (time.monotonic_ns() - self._start) / 1000
        with self._lock:
            if self._file is None:
                return
            for row, phase, name in events:
                if row not in self._rows:
                    self._rows[row] = len(self._rows) + 1
                    self._add({"name": "process_name", "ph": "M", "pid": self._rows[row], "args": {"name": row}})
                self._add({"name": name, "ph": phase, "ts": micros, "pid": self._rows[row], "tid": 0})

    def _add(self, event: dict[str, Any]) -> None:
        assert self._file is not None  # the caller holds the lock and has checked it
        self._file.write(",\n" + json.dumps(event))
