"""The results with one MPI library, and their file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import rank_results
from mpicomm import job_info, mpi
from mpicomm.reports import result_files
from tests.conformance import jobs, verdicts
from tests.conformance.verdicts import Verdict
from tests.launching import ROOT

DIRECTORY = ROOT / "docs" / "results"
LABELS = ("mpicomm", "mpi", "gloo")
"""The backend names under which PyTorch's tests run on mpicomm: each enables tests that the others do not."""
GLOO = "Gloo"
"""The column of torch's own Gloo."""


def about(command: str) -> dict[str, Any]:
    """Return the date, the command, the versions and the number of cores of results that are made now."""
    head = job_info.description("", command)
    return {name: head[name] for name in ("date", "command", "versions")} | {"cores": head["machine"]["cores"]}


@dataclasses.dataclass(frozen=True)
class Run:
    """The verdicts on all tests with one number of ranks."""

    ours: dict[str, dict[str, Verdict]]
    """The verdicts by label and test."""

    gloo: dict[str, Verdict]
    """The verdicts of torch's own Gloo by test; empty if it was not run."""

    seconds: float
    """The duration with mpicomm."""

    def names(self) -> list[str]:
        return sorted(set[str]().union(*self.ours.values()))

    def verdict(self, name: str) -> Verdict:
        """Return the verdict on a test under all labels."""
        return verdicts.of_labels({label: found[name] for label, found in self.ours.items() if name in found})

    def verdicts(self) -> dict[str, Verdict]:
        return {name: self.verdict(name) for name in self.names()}

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the numbers of passed, failed and skipped tests, in total and by column."""
        columns = {"all": self.verdicts(), **self.ours, **({GLOO: self.gloo} if self.gloo else {})}
        return {column: verdicts.count(found.values()) for column, found in columns.items()}

    def to_json(self) -> dict[str, Any]:
        columns = {**self.ours, GLOO: self.gloo}
        tests = {
            name: {
                "all": str(self.verdict(name)),
                **{c: str(found[name]) for c, found in columns.items() if name in found},
            }
            for name in self.names()
        }
        return {"seconds": self.seconds, "counts": self.counts(), "tests": tests}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Run:
        """Return the run from the object of `to_json`."""

        def column(name: str) -> dict[str, Verdict]:
            return {test: Verdict.parse(row[name]) for test, row in raw["tests"].items() if name in row}

        labels = [name for name in raw["counts"] if name not in ("all", GLOO)]
        return cls({label: column(label) for label in labels}, column(GLOO), raw["seconds"])


def measure(size: int, labels: Sequence[str], *, with_gloo: bool, **options: Any) -> Run:
    """Run the tests on `size` ranks under all labels; `jobs.run` describes the options."""
    ours, seconds = jobs.run(size, labels, **options)
    gloo = jobs.run(size, ["gloo"], of_torch=True, **options)[0]["gloo"] if with_gloo else {}
    return Run(ours, gloo, seconds)


@dataclasses.dataclass(frozen=True)
class Results:
    """The runs with one MPI, and their date, command and versions."""

    mpi: str
    """The library's name."""

    device: str
    """The type of the device of the tensors."""

    about: dict[str, Any]
    runs: dict[int, Run]
    """By number of ranks."""

    @classmethod
    def of(cls, runs: dict[int, Run], device: str, command: str) -> Results:
        """Describe runs that were made now, in this environment."""
        return cls(mpi.library().vendor, device, about(command), runs)

    def path(self) -> Path:
        """Return the file for these results."""
        device = "" if self.device == "cpu" else f"{self.device}-"
        return DIRECTORY / f"conformance-{device}{rank_results.mpi_name(self.mpi)}.json"

    def write(self, path: Path) -> None:
        runs = {str(size): run.to_json() for size, run in self.runs.items()}
        result_files.write(path, {"mpi": self.mpi, "device": self.device, **self.about, "runs": runs})


def read_all() -> list[Results]:
    """Read the files of all MPIs and devices."""
    return [read(path) for path in sorted(DIRECTORY.glob("conformance-*.json"), reverse=True)]


def read(path: Path) -> Results:
    raw = json.loads(path.read_text())
    runs = {int(size): Run.from_json(run) for size, run in raw.pop("runs").items()}
    return Results(raw.pop("mpi"), raw.pop("device", "cpu"), raw, runs)
