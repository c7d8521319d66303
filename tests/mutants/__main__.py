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
    chosen = [each for each in MUTANTS if any(text in f"{each.file}: {each.fault}" for text in arguments.only or [""])]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        rows = _run_all(chosen, Path(directory), arguments.jobs)
    counts = collections.Counter(verdict.kind for _, verdict in rows)
    seconds = time.monotonic() - start
    print(f"{', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))} in {seconds:.0f} s")
    if arguments.write:
        result_files.write(_RESULTS, _results(rows))
    sys.exit(bool(counts["missed"] or counts["invalid"]))


def _run_all(mutants: list[Mutant], directory: Path, jobs: int) -> list[tuple[Mutant, Verdict]]:
    """Run the mutants' tests, `jobs` mutants at a time, each in a separate copy."""
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for number in range(jobs):
        copies.put(Copy(directory / str(number)))

    def run(mutant: Mutant) -> Verdict:
        copy = copies.get()
        try:
            verdict = copy.run(mutant)
        finally:
            copies.put(copy)
        line = f"{verdict.kind}: {mutant.file}: {mutant.fault}\n    {verdict.by} ({verdict.seconds:.0f} s)\n"
        print(line, end="", flush=True)
        return verdict

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return list(zip(mutants, pool.map(run, mutants), strict=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Run mutants of the package.")
    parser.add_argument("only", nargs="*", help="run the mutants whose file or fault contains one of these texts")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants to run at a time (%(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {_RESULTS.relative_to(ROOT)}")
    return parser.parse_args()


def _results(rows: list[tuple[Mutant, Verdict]]) -> dict[str, object]:
    """Return the results of these mutants, and the earlier results of the others."""
    head = job_info.description("for each fault, the first test that failed with it", "python -m tests.mutants --write")
    found = {(row["file"], row["fault"]): row for row in json.loads(_RESULTS.read_text())["mutants"]}
    for mutant, verdict in rows:
        row = {"file": mutant.file, "fault": mutant.fault, "verdict": verdict.kind, "by": verdict.by}
        found[mutant.file, mutant.fault] = {**row, "date": head["date"]}
    keys = [(mutant.file, mutant.fault) for mutant in MUTANTS]
    return {**head, "mutants": [found[key] for key in keys if key in found]}


if __name__ == "__main__":
    main()
