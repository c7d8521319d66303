"""Generated mutants: `python -m tests.mutants.generated`, after `pip install mpicomm[mutants]`.

Applies the changes of mutations.py to a copy of the checkout, one at a time, and runs the unit tests of the changed
module. At least one of them should fail. docs/results/generated-mutants.json lists the changes that no test detects,
except those of equivalent.json, with which the module does the same as before.

A run continues an interrupted one: a detected change is not run again before its module changes, an undetected one
not before the tests change.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpicomm import job_info
from mpicomm.reports import result_files
from tests.launching import ROOT
from tests.mutants.generated import forked_pytest, mutations
from tests.mutants.generated.mutations import Candidate, Mutation
from tests.mutants.run import LEFT_OUT, replaced

MODULES = {
    "watchdog.coordinator": ["tests/unit/test_coordinator.py"],
    "horovod.negotiation": ["tests/horovod/test_negotiation.py"],
    "launch.detect": ["tests/unit/test_detect.py"],
    "backend.transfer.algorithms": ["tests/unit/test_algorithms.py"],
    "launch.jobscript": ["tests/unit/test_kubernetes.py", "tests/unit/test_jobscript.py"],
    "json_messages": [
        "tests/unit/test_coordinator.py",
        # The other tests of this file take seconds and are about sockets.
        "tests/unit/test_channel.py::test_a_message_that_is_not_valid_is_dropped",
        "tests/unit/test_channel.py::test_messages_arrive_as_they_were_sent",
        "tests/unit/test_channel.py::test_default_values_are_valid",
        "tests/unit/test_channel.py::test_a_text_that_is_not_an_object_is_an_error",
    ],
    "collective_ops.wire_format": ["tests/unit/test_pytree.py"],
}
"""The tests of each module or package."""

_RESULTS = ROOT / "docs" / "results" / "generated-mutants.json"
_STATE = ROOT / "docs" / "results" / "generated-mutants-state.json"
_EQUIVALENT = Path(__file__).parent / "equivalent.json"
_MOST = 150  # mutants of a module
_LONGEST = 300.0  # seconds for tests without a fault
_AT_LEAST, _FACTOR = 10.0, 5.0  # the time limit with a fault, in seconds and as a multiple of the time without it


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mutation of a file."""

    file: str
    """Relative to the root of the checkout."""

    mutation: Mutation

    def key(self) -> str:
        return _hash(f"{self.file}\n{self.mutation.source}")

    def description(self) -> dict[str, str]:
        module = self.file.removeprefix("mpicomm/").removesuffix(".py").replace("/", ".")
        return {"module": module, "function": self.mutation.function, "change": self.mutation.change}

    def is_in(self, equivalent: list[dict[str, str]]) -> bool:
        """Return whether an entry has this module and function, and this change or "*", which is any change."""
        description = self.description()
        entries = [{name: entry[name] for name in description} for entry in equivalent]
        return description in entries or description | {"change": "*"} in entries


class State:
    """The results of earlier runs, kept in a file, by mutant: "killed", or the hash of the tests that passed."""

    def __init__(self) -> None:
        self._results: dict[str, str] = json.loads(_STATE.read_text()) if _STATE.exists() else {}

    def is_killed(self, mutant: Mutant, tests: str) -> bool | None:
        """Return None if the mutant must run."""
        result = self._results.get(mutant.key())
        return {"killed": True, tests: False}.get(result or "")

    def has_run(self, mutant: Mutant) -> bool:
        """Return whether it has run, perhaps with other tests."""
        return mutant.key() in self._results

    def add(self, mutant: Mutant, tests: str, *, is_killed: bool) -> None:
        self._results[mutant.key()] = "killed" if is_killed else tests
        result_files.write(_STATE, self._results)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.generated", description="Run generated mutants.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"one of {', '.join(MODULES)}; default: all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no mutant after this time")
    arguments = parser.parse_args()
    if unknown := set(arguments.modules) - set(MODULES):
        parser.error(f"unknown module {min(unknown)!r}; expected one of {', '.join(MODULES)}")
    end = time.monotonic() + arguments.seconds
    head = job_info.description(
        f"changes of a module that its tests detect; at most {_MOST} of each module",
        "python -m tests.mutants.generated",
    )
    state = State()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy = Path(directory) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
        for module in arguments.modules or MODULES:
            row = _run_module(module, copy, state, end)
            recorded = json.loads(_RESULTS.read_text())["modules"] if _RESULTS.exists() else []
            rows = {recorded_row["module"]: recorded_row for recorded_row in recorded} | {module: row}
            result_files.write(_RESULTS, {**head, "modules": [rows[name] for name in MODULES if name in rows]})


def _run_module(module: str, copy: Path, state: State, end: float) -> dict[str, Any]:
    candidates = list(_candidates(module, copy))
    equivalent = json.loads(_EQUIVALENT.read_text())
    sampled = mutations.sample(candidates, _MOST)
    mutants = [Mutant(file, mutation) for file, candidate in sampled if (mutation := candidate.apply())]
    to_run = [mutant for mutant in mutants if not mutant.is_in(equivalent)]
    tests = _hash("".join((copy / path.partition("::")[0]).read_text() for path in MODULES[module]))
    missing = [mutant for mutant in to_run if state.is_killed(mutant, tests) is None]
    # Earlier survivors first. The keys are random, so that an interrupted run has changes of all parts of the module.
    missing.sort(key=lambda mutant: (not state.has_run(mutant), mutant.key()))
    if missing and time.monotonic() < end:
        has_passed, seconds = forked_pytest.run(copy, MODULES[module], _LONGEST)
        if not has_passed:
            raise SystemExit(f"the tests of {module} fail without a fault, or exceed {_LONGEST:.0f} s.\nRepair them.")
        limit = max(_AT_LEAST, _FACTOR * seconds)
        for mutant in missing:
            if time.monotonic() >= end:
                break
            is_killed = _is_killed(mutant, copy, MODULES[module], limit)
            state.add(mutant, tests, is_killed=is_killed)
            if not is_killed:
                print(": ".join(mutant.description().values()), flush=True)
    results = [state.is_killed(mutant, tests) for mutant in to_run]
    survivors = [mutant.description() for mutant, is_killed in zip(to_run, results, strict=True) if is_killed is False]
    row = {
        "module": module,
        "candidates": len(candidates),
        "mutants": len(mutants),
        "equivalent": len(mutants) - len(to_run),
        "killed": results.count(True),
        "survived": len(survivors),
        "not run": results.count(None),
    }
    print(", ".join(f"{name}: {value}" for name, value in row.items()), flush=True)
    return {**row, "survivors": survivors}


def _candidates(module: str, root: Path) -> Iterator[tuple[str, Candidate]]:
    path = root / "mpicomm" / module.replace(".", "/")
    for file in sorted(path.glob("*.py")) or [path.with_suffix(".py")]:
        for candidate in mutations.generate(file.read_text()):
            yield str(file.relative_to(root)), candidate


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_killed(mutant: Mutant, copy: Path, tests: list[str], limit_seconds: float) -> bool:
    with replaced(copy / mutant.file, mutant.mutation.source):
        return not forked_pytest.run(copy, tests, limit_seconds)[0]


if __name__ == "__main__":
    main()
