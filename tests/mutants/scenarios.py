"""Chooses the scenarios, tests that start jobs, which `make test` runs: `python -m tests.mutants.scenarios STEP`.

`trace` runs all scenarios in an instrumented copy, and records how long each takes, and which of the mutants it
executes that only scenarios detect. `find` applies these mutants, runs the scenarios that execute them, and records
which detect them; it continues where it stopped. `choose` writes tests/scenarios.json: scenarios that together detect
every mutant, chosen by a greedy set cover, and those that are kept for another reason.
docs/results/scenarios.json has the records.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import queue
import shlex
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mpicomm import job_info
from mpicomm.reports import result_files
from tests import scenarios as choice
from tests.launching import ROOT
from tests.mutants.mutant import Mutant
from tests.mutants.run import JOB, Copy
from tests.mutants.table import MUTANTS
from tests.time_limits import scaled

RESULTS = ROOT / "docs" / "results" / "scenarios.json"
_COMMAND = "python -m tests.mutants.scenarios trace; python -m tests.mutants.scenarios find"
_CONTENT = "scenarios: seconds; mutants: the scenarios that execute each, and whether they detect it (null: not tried)"
_FILES_PER_RUN = 8  # of `trace`, after which the results are saved
_TESTS_PER_RUN = 6  # of `find`
_LEAST, _FACTOR = 240.0, 5.0  # the time limit with a fault, in seconds and as a multiple of the time without it


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.scenarios", description="Choose scenarios.")
    parser.add_argument("step", choices=["trace", "find", "choose"])
    parser.add_argument("files", nargs="*", help="the files of tests that `trace` runs (default: all)")
    parser.add_argument("--seconds", type=float, default=3600, help="time after which `find` stops (%(default)g)")
    parser.add_argument("--jobs", type=int, default=3, help="number of tests or mutants at a time (%(default)s)")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"scenarios": {}, "mutants": {}}
    if arguments.step == "choose":
        _choose(results)
        return
    with tempfile.TemporaryDirectory(prefix="scenarios-") as directory:
        if arguments.step == "trace":
            _trace(Copy(Path(directory) / "copy"), results, arguments.files or _test_files(), arguments.jobs)
        else:
            copies = [Copy(Path(directory) / str(number)) for number in range(arguments.jobs)]
            _find(copies, results, time.monotonic() + arguments.seconds)


def _trace(copy: Copy, results: dict[str, Any], files: list[str], jobs: int) -> None:
    """Run the tests without the mark `mpi` once, with a mark at each mutant."""
    copy.add_marks(MUTANTS)
    for some in _parts(files, _FILES_PER_RUN):
        earlier = _forget(results, some)
        for test in copy.outcomes([*some, "-m", "not mpi", "-n", str(jobs), "--dist", "loadfile"]):
            executed = copy.hits(test)
            if JOB in executed:
                results["scenarios"][test.name] = round(test.total_seconds, 1)
            for name in executed - {JOB}:
                detects = earlier.get((name, test.name))
                if JOB in executed or detects:
                    results["mutants"].setdefault(name, {})[test.name] = detects
        _write(results)
    for name in set(results["mutants"]) - _needed(results):
        del results["mutants"][name]
    _write(results)


def _forget(results: dict[str, Any], files: list[str]) -> dict[tuple[str, str], bool | None]:
    """Remove the records of the scenarios in some files; return which mutants they detect."""
    of_files = tuple(f"{file}::" for file in files)
    recorded = {*results["scenarios"], *(test for tried in results["mutants"].values() for test in tried)}
    forgotten = [test for test in recorded if test.startswith(of_files)]
    earlier = {
        (name, test): each[test] for name, each in results["mutants"].items() for test in forgotten if test in each
    }
    for test in forgotten:
        results["scenarios"].pop(test, None)
    for name, test in earlier:
        del results["mutants"][name][test]
    return earlier


def _test_files() -> list[str]:
    files = (path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    # A test in tests/unit is fast, even if it starts a process. A cluster is too slow: `KEPT` has the choice.
    return [str(path) for path in files if path.parts[1] not in {"unit", "cluster"}]


def _find(copies: list[Copy], results: dict[str, Any], end: float) -> None:
    """Run the scenarios of several mutants at a time: most jobs wait, and a fault may let one wait until its limit."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)
    lock = threading.Lock()
    scenarios = results["scenarios"]

    def run(mutant: Mutant, tests: list[str]) -> None:
        if time.monotonic() > end:
            return
        copy = free.get()
        try:
            usual = sum(seconds for name, seconds in scenarios.items() if name.startswith(tuple(tests)))
            limit = scaled(_LEAST + _FACTOR * usual)
            with copy.fault(mutant):
                begun = copy.outcomes([*tests, "-m", "not mpi"], limit)
        finally:
            free.put(copy)
        with lock:
            tried = results["mutants"][mutant.name]
            # The limit is several times the usual duration: a test that was killed has detected the fault.
            outcomes = {test.name: test.has_failed or not test.has_ended for test in begun}
            tried |= {test: detects for test, detects in outcomes.items() if test in scenarios or detects}
            _write(results)
            print(f"{mutant.name}: {sum(map(bool, tried.values()))} of {len(tried)} detect it", flush=True)

    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        for tasks in (_first_tasks(results), _other_tasks(results)):
            list(pool.map(run, *zip(*tasks, strict=True)))


def _first_tasks(results: dict[str, Any]) -> Iterator[tuple[Mutant, list[str]]]:
    """Yield the mutants without a scenario that detects them, and their tests in the table."""
    for mutant in _needed_mutants(results):
        if not any(results["mutants"].setdefault(mutant.name, {}).values()):
            yield mutant, shlex.split(mutant.tests)


def _other_tasks(results: dict[str, Any]) -> Iterator[tuple[Mutant, list[str]]]:
    """Yield the mutants, and the scenarios that execute them and have not been tried, some at a time.

    The first are those that are most likely to make the choice smaller: chosen scenarios, and then fast ones.
    """
    chosen, seconds = choice.chosen(), results["scenarios"]
    parts = []
    for mutant in _needed_mutants(results):
        tried = results["mutants"][mutant.name]
        left = [test for test in tried if tried[test] is None]
        left.sort(key=lambda test: (test not in chosen, seconds[test]))
        parts.append([(mutant, tests) for tests in _parts(left, _TESTS_PER_RUN)])
    for same_rank in itertools.zip_longest(*parts):
        yield from (task for task in same_rank if task)


def _needed_mutants(results: dict[str, Any]) -> list[Mutant]:
    needed = _needed(results)
    return [mutant for mutant in MUTANTS if mutant.name in needed]


def _needed(results: dict[str, Any]) -> set[str]:
    """Return the names of the mutants that the table expects a scenario to detect."""
    scenarios = list(results["scenarios"])
    return {
        mutant.name
        for mutant in MUTANTS
        if mutant.ranks == 0 and any(test.startswith(tuple(mutant.files)) for test in scenarios)
    }


def _choose(results: dict[str, Any]) -> None:
    seconds = results["scenarios"]
    detects: dict[str, set[str]] = {}
    needed = _needed(results)
    for name, tried in results["mutants"].items():
        tests = [test for test, is_detected in tried.items() if is_detected]
        if not set(tests) <= set(seconds):  # a test that starts no job detects it
            needed.discard(name)
        for test in tests if name in needed else ():
            detects.setdefault(test, set()).add(name)
    kept = {test for test in seconds if choice.reason_to_keep(test)}
    for mutant in MUTANTS:  # as long as no result is known, all tests that the table names
        if mutant.name in needed - set().union(*detects.values()):
            print(f"no scenario is known to detect it: {mutant.name}")
            kept |= {test for test in results["mutants"].get(mutant.name, ()) if test.startswith(tuple(mutant.files))}
    chosen = set(cover(detects, seconds, kept))
    choice.write({test: seconds[test] for test in sorted(chosen)}, sorted(set(seconds) - chosen))
    print(f"{len(chosen)} of {len(seconds)} scenarios, {sum(seconds[test] for test in chosen):.0f} s in sequence")


def cover(detects: dict[str, set[str]], seconds: dict[str, float], kept: Iterable[str]) -> list[str]:
    """Return tests that detect every mutant: repeatedly the one that detects the most further ones per second.

    Args:
        detects: The mutants that each test detects.
        seconds: The duration of each test.
        kept: Tests that are in the result in any case.
    """
    chosen = list(kept)
    left = set().union(*detects.values()) - set().union(*(detects.get(test, set()) for test in chosen))
    while left:
        best = max(detects, key=lambda test: len(detects[test] & left) / max(seconds[test], 0.1))
        chosen.append(best)
        left -= detects[best]
    return chosen


def _write(results: dict[str, Any]) -> None:
    ordered = {key: dict(sorted(results[key].items())) for key in ("scenarios", "mutants")}
    result_files.write(RESULTS, {**job_info.description(_CONTENT, _COMMAND), **ordered})


def _parts(values: list[str], size: int) -> Iterator[list[str]]:
    return (values[start : start + size] for start in range(0, len(values), size))


if __name__ == "__main__":
    main()
