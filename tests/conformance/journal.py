"""The journal: rank 0 records each started test and its verdict, so that the last test of a dead job is known."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from mpicomm import mpi
from tests.conformance import verdicts
from tests.conformance.verdicts import FAIL, Verdict

_WAIT_SECONDS = 15.0  # for which a rank that failed waits for the others; PyTorch's own barrier times out after 10


@dataclasses.dataclass(frozen=True)
class Journal:
    """A file of one JSON object per line."""

    path: Path

    def start(self, label: str, name: str) -> None:
        self._write({"label": label, "start": name})

    def end(self, label: str, name: str, verdict: Verdict) -> None:
        self._write({"label": label, "end": name, "verdict": str(verdict)})

    def agree(self, comm: Any, label: str, name: str, own: Verdict, limit: float) -> Verdict:
        """Return the combined verdict, after all ranks have finished the test (collective).

        If this rank has failed while others wait, record that and end the job.
        """
        arrival = comm.Ibarrier()
        if not mpi.poll(arrival.Test, _WAIT_SECONDS if own.outcome == FAIL else limit):
            self.end(label, name, Verdict(FAIL, f"rank {comm.rank}: {own.reason} (while other ranks wait)"))
            comm.Abort(1)
        return verdicts.of_ranks(comm.allgather(own))

    def finish(self) -> None:
        """Record that all tests have run."""
        self._write({"is_finished": True})

    def names(self, label: str) -> set[str]:
        """Return the tests that have been started under a label."""
        return {line["start"] for line in self._lines() if line.get("label") == label and "start" in line}

    def verdicts(self, label: str) -> dict[str, Verdict]:
        """Return the verdicts under a label; the first verdict on a test counts."""
        found: dict[str, Verdict] = {}
        for line in self._lines():
            if line.get("label") == label and "end" in line:
                found.setdefault(line["end"], Verdict.parse(line["verdict"]))
        return found

    def labels(self) -> list[str]:
        """Return the labels of all entries."""
        return list(dict.fromkeys(line["label"] for line in self._lines() if "label" in line))

    def seconds(self, label: str) -> float:
        """Return the total seconds of the tests under a label, from the start of each to its verdict."""
        lines = [line for line in self._lines() if line.get("label") == label]
        starts = {line["start"]: line["time"] for line in lines if "start" in line}
        ends = {line["end"]: line["time"] for line in reversed(lines) if "end" in line}
        return sum(ends[name] - start for name, start in starts.items() if name in ends)

    def is_finished(self) -> bool:
        """Return whether all tests have run."""
        return any("is_finished" in line for line in self._lines())

    def last(self) -> tuple[str, str, bool] | None:
        """Return label and name of the most recently started test, and whether it has a verdict."""
        started = [line for line in self._lines() if "start" in line]
        if not started:
            return None
        label, name = started[-1]["label"], started[-1]["start"]
        return label, name, name in self.verdicts(label)

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**line, "time": time.monotonic()}) + "\n")

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
