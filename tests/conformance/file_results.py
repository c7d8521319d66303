"""The verdicts on PyTorch's test files with one version of torch, and their results file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from mpicomm.reports import result_files
from tests.conformance import results
from tests.conformance.results import DIRECTORY
from tests.conformance.verdicts import PASS, SKIP, Verdict

BOTH, ONLY_GLOO, ONLY_MPICOMM, NEITHER, SKIPPED = "both", "only Gloo", "only mpicomm", "neither", "skipped"
OUTCOMES = (BOTH, ONLY_GLOO, ONLY_MPICOMM, NEITHER, SKIPPED)
"""With which backends a test passes; a skipped test is skipped with both."""

_PREFIX = "pytorch-tests-"
_COMMAND = "python -m tests.conformance.upstream_files --write FILES"


@dataclasses.dataclass(frozen=True)
class FileTest:
    """The verdicts on a test."""

    ranks: int
    mpicomm: Verdict
    gloo: Verdict

    @property
    def outcome(self) -> str:
        passed = (self.mpicomm.outcome == PASS, self.gloo.outcome == PASS)
        if not any(passed):
            return SKIPPED if self.mpicomm.outcome == self.gloo.outcome == SKIP else NEITHER
        return {(True, True): BOTH, (False, True): ONLY_GLOO, (True, False): ONLY_MPICOMM}[passed]

    def to_json(self) -> dict[str, Any]:
        return {"ranks": self.ranks, "mpicomm": str(self.mpicomm), "gloo": str(self.gloo)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> FileTest:
        return cls(raw["ranks"], Verdict.parse(raw["mpicomm"]), Verdict.parse(raw["gloo"]))


@dataclasses.dataclass(frozen=True)
class File:
    """The verdicts on the tests of a file."""

    sha256: str
    tests: Mapping[str, FileTest]

    def added_to(self, earlier: File | None) -> File:
        """Return these verdicts, and those of an earlier run of the same file on other tests."""
        if earlier is None or earlier.sha256 != self.sha256:
            return self
        return dataclasses.replace(self, tests={**earlier.tests, **self.tests})

    def counts(self) -> dict[str, int]:
        return {outcome: len(self.of(outcome)) for outcome in OUTCOMES}

    def of(self, outcome: str) -> list[str]:
        """Return the names of the tests with an outcome."""
        return [name for name, test in self.tests.items() if test.outcome == outcome]


@dataclasses.dataclass(frozen=True)
class FileResults:
    """The files that were run with one version of torch."""

    about: Mapping[str, Any]
    """Date, command, versions and number of cores."""

    files: Mapping[str, File]
    """By file name."""

    @classmethod
    def of(cls, files: Mapping[str, File]) -> FileResults:
        """Describe files that were run now, in this environment, and add the other tests of its results file."""
        found = cls(results.about(_COMMAND), files)
        for earlier in read_all():
            if earlier.torch == found.torch:
                merged = {label: file.added_to(earlier.files.get(label)) for label, file in files.items()}
                return cls(found.about, {**earlier.files, **merged})
        return found

    @property
    def torch(self) -> str:
        return str(self.about["versions"]["torch"]).partition("+")[0]

    def write(self) -> None:
        files = {
            label: {
                "sha256": file.sha256,
                "counts": file.counts(),
                "tests": {name: test.to_json() for name, test in file.tests.items()},
            }
            for label, file in self.files.items()
        }
        result_files.write(DIRECTORY / f"{_PREFIX}{self.torch}.json", {**self.about, "files": files})


def read_all() -> list[FileResults]:
    """Read the files of all versions of torch."""
    return [_read(json.loads(path.read_text())) for path in sorted(DIRECTORY.glob(f"{_PREFIX}*.json"))]


def _read(raw: dict[str, Any]) -> FileResults:
    files = {
        label: File(file["sha256"], {name: FileTest.from_json(test) for name, test in file["tests"].items()})
        for label, file in raw.pop("files").items()
    }
    return FileResults(raw, files)
