"""Kill ranks of training runs at random points: `python -m tests.recovery 100`.

Every run must go on with the remaining ranks, or with spares in the places of the killed ones, and end with the
parameters of a run in which no rank was killed: without spares, of one that continues on as many ranks from the same
step. `--write` writes the gaps between a kill and the next completed step to docs/results. `--digits` runs the digits
example with ten spares and ten kills instead, and compares its results with those of a run without kills.
"""

from __future__ import annotations

import argparse
import collections
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpicomm import job_info
from mpicomm.reports import result_files
from tests.launching import ROOT
from tests.recovery import digits, killed_runs
from tests.recovery.killed_runs import Result

RESULTS = ROOT / "docs" / "results" / f"recovery-{killed_runs.RANKS}-openmpi.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recovery", description=__doc__.splitlines()[0])
    parser.add_argument("kills", type=int, nargs="?", default=100, help="the number of kills (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument("--only", type=int, metavar="K", help="run the K-th case only")
    parser.add_argument("--digits", action="store_true", help="kill ten ranks of the digits example")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    if arguments.digits:
        problems = digits.run(folder)
        _print("\n".join(problems) or "ten kills, ten spares: bit-identical to the run without kills")
        return bool(problems)
    begun = time.monotonic()
    results = []
    for number, case in enumerate(killed_runs.cases(arguments.kills, arguments.seed)):
        if arguments.only in (None, number):
            results.append(killed_runs.run(case, folder / f"case-{number}"))
            shown = " ".join(f"{gap:.2f}" for gap in results[-1].gaps)
            _print(f"{number}: {case.name}, {case.spares} spares: {results[-1].seconds:.0f} s, gaps {shown or '-'}")
    killed_runs.compare(results, folder)
    bad = [each for each in results if each.problems]
    for each in bad:
        _print(f"{each.case.name}, {each.case.spares} spares: {'; '.join(each.problems)}; see {each.directory}")
    found = _summary(results)
    _print(f"{found['kills']} kills in {len(results)} runs, {len(bad)} of them wrong; {time.monotonic() - begun:.0f} s")
    _print("gaps in seconds: " + ", ".join(f"{name} {value}" for name, value in found["gap_s"].items()))
    if arguments.write and not bad:
        what = "seconds from the SIGKILL of a rank to the next step that the remaining ranks complete"
        command = shlex.join(["python", "-m", "tests.recovery", *[each for each in sys.argv[1:] if each != "--write"]])
        result_files.write(RESULTS, {**job_info.description(what, command), "ranks": killed_runs.RANKS, **found})
    if not bad:
        shutil.rmtree(folder)
    return bool(bad)


def _summary(results: Sequence[Result]) -> dict[str, Any]:
    points = collections.Counter(point for each in results for point in each.points)
    return {
        "kills": points.total(),
        "kills_by_point": dict(sorted(points.items())),
        "gap_s": percentiles([gap for each in results for gap in each.gaps]),
        "gap_s_without_spares": percentiles([gap for each in results if not each.case.spares for gap in each.gaps]),
        "gap_s_with_spares": percentiles([gap for each in results if each.case.spares for gap in each.gaps]),
    }


def percentiles(gaps: Sequence[float]) -> dict[str, float]:
    """Return the number of gaps, their median, 95th percentile and maximum."""
    if len(gaps) < 2:
        return {"number": len(gaps)} | ({"max": round(gaps[0], 3)} if gaps else {})
    cuts = statistics.quantiles(gaps, n=20, method="inclusive")
    found = {"p50": statistics.median(gaps), "p95": cuts[-1], "max": max(gaps)}
    return {"number": len(gaps)} | {name: round(value, 3) for name, value in found.items()}


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
