"""The results of Horovod's tests, and their file, which has those of all MPIs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpicomm import mpi
from mpicomm.reports import result_files
from tests.conformance.results import about
from tests.conformance.verdicts import Verdict
from tests.launching import ROOT

PATH = ROOT / "docs" / "results" / "horovod-tests.json"
_COMMAND = "python -m tests.horovod_upstream GIT_DIRECTORY --write"


@dataclasses.dataclass(frozen=True)
class Run:
    """The verdicts with one number of ranks."""

    verdicts: dict[str, Verdict]
    seconds: float

    def count(self, outcome: str) -> int:
        return sum(each.outcome == outcome for each in self.verdicts.values())

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "tests": {name: str(each) for name, each in self.verdicts.items()}}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Run:
        """Return the run from the object of `to_json`."""
        return cls({name: Verdict.parse(text) for name, text in raw["tests"].items()}, raw["seconds"])


def store(runs: Mapping[int, Run], file: Path, commit: str) -> None:
    """Write the runs of a test file, of a commit of Horovod, with the MPI of this environment."""
    found = json.loads(PATH.read_text()) if PATH.exists() else {}
    ours = {
        "source": {"commit": commit, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()},
        **about(_COMMAND),
        "runs": {str(size): run.to_json() for size, run in runs.items()},
    }
    result_files.write(PATH, dict(sorted({**found, mpi.library().vendor: ours}.items(), reverse=True)))


def read_all() -> dict[str, dict[str, Any]]:
    """Return the descriptions and the runs, by the name of the MPI."""
    found: dict[str, dict[str, Any]] = json.loads(PATH.read_text())
    for each in found.values():
        each["runs"] = {int(size): Run.from_json(run) for size, run in each["runs"].items()}
    return found
