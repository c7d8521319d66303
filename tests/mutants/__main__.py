"""Mutation tests, which check that the tests detect faults: `python -m tests.mutants`, or `make mutants`.

Each mutant of the table (backend.py and the other modules in this directory) is one fault. It is applied alone to a
copy of the checkout, and the tests that the table names run there: at least one of them must fail. Without the fault
they must pass. Needs the MPI of this environment. docs/results/mutants.json has the last result of each mutant.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import queue
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mpicomm import job_info
from mpicomm.reports import result_files
from tests.launching import ROOT
from tests.mutants.mutant import Mutant
from tests.mutants.run import Copy, Verdict
from tests.mutants.table import MUTANTS

_RESULTS = ROOT / "docs" / "results" / "mutants.json"


def main() -> None:
    arguments = _arguments()
    recorded = _recorded() if arguments.new else {}
    chosen = [
        each
        for each in MUTANTS
        if _key(each) not in recorded and any(text in ": ".join(_key(each)) for text in arguments.only or [""])
    ]
    counts: collections.Counter[str] = collections.Counter()
    head = job_info.description("for each fault, the first test that failed with it", "python -m tests.mutants --write")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        for mutant, verdict in _run_all(chosen, Path(directory), arguments.jobs):
            counts[verdict.kind] += 1
            if arguments.write:  # after each, so that an interrupted run loses nothing
                result_files.write(_RESULTS, _results(head, mutant, verdict))
    seconds = time.monotonic() - start
    print(f"{', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))} in {seconds:.0f} s")
    sys.exit(bool(counts["missed"] or counts["invalid"]))


def _run_all(mutants: list[Mutant], directory: Path, jobs: int) -> Iterator[tuple[Mutant, Verdict]]:
    """Run the mutants' tests, `jobs` mutants at a time, each in a separate copy, and yield the verdicts in order."""
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for number in range(jobs):
        copies.put(Copy(directory / str(number)))

    def run(mutant: Mutant) -> Verdict:
        copy = copies.get()
        try:
            verdict = copy.run(mutant)
        finally:
            copies.put(copy)
        line = f"{verdict.kind}: {mutant.place}: {mutant.fault}\n    {verdict.by} ({verdict.seconds:.0f} s)\n"
        print(line, end="", flush=True)
        return verdict

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        yield from zip(mutants, pool.map(run, mutants), strict=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Run mutants of the package.")
    parser.add_argument("only", nargs="*", help="run the mutants whose place or fault contains one of these texts")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants to run at a time (%(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {_RESULTS.relative_to(ROOT)}")
    parser.add_argument("--new", action="store_true", help="run only the mutants that have no result in that file")
    return parser.parse_args()


def _key(mutant: Mutant) -> tuple[str, str]:
    return mutant.place, mutant.fault


def _recorded() -> dict[tuple[str, str], dict[str, object]]:
    return {(row["place"], row["fault"]): row for row in json.loads(_RESULTS.read_text())["mutants"]}


def _results(head: dict[str, object], mutant: Mutant, verdict: Verdict) -> dict[str, object]:
    """Return the result of this mutant, and the earlier results of the others."""
    row = {"place": mutant.place, "fault": mutant.fault, "verdict": verdict.kind, "by": verdict.by}
    found = {**_recorded(), _key(mutant): {**row, "date": head["date"]}}
    return {**head, "mutants": [found[_key(each)] for each in MUTANTS if _key(each) in found]}


if __name__ == "__main__":
    main()
