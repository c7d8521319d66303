"""Run PyTorch's own backend tests on this backend: `python -m tests.conformance --at-least 100`.

`--write` runs them on 3 and 4 ranks, also with torch's Gloo for comparison, writes docs/results/conformance-<mpi>.json
for the MPI of this environment, and generates docs/conformance.md from these files. `--page` only generates the page.

`--device accelerator` runs the tests that use GPUs, on the GPUs of this machine or an emulated accelerator. `--write`
then runs them on 2 and 4 ranks, and writes docs/results/conformance-<device>-<mpi>.json.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.conformance import jobs, on_accelerator, page, verdicts
from tests.conformance.results import LABELS, Results, Run, measure


def main() -> int:
    args = _parse()
    if args.page:
        page.write()
        return 0
    options = {"limit": args.limit, "total": args.total, "pattern": args.k, "sample": args.sample, "shows": args.s}
    device, labels, sizes, with_gloo = "cpu", LABELS, [3, 4], args.write or args.gloo
    if args.device == "accelerator":
        device, labels, sizes, with_gloo = on_accelerator.device_type(), on_accelerator.LABELS, [2, 4], False
    runs = {}
    for size in args.ranks or (sizes if args.write else [4]):
        runs[size] = measure(size, labels, with_gloo=with_gloo, device=args.device, **options)
        _show(size, runs[size])
    measured = Results.of(runs, device, shlex.join(["python", "-m", "tests.conformance", *sys.argv[1:]]))
    if args.output:
        measured.write(args.output)
    if args.write:
        measured.write(measured.path())
        page.write()
    return _status(runs, args.at_least)


def _parse() -> argparse.Namespace:
    parser = jobs.parser("tests.conformance", __doc__, limit=60)
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="numbers of ranks (4)")
    parser.add_argument("--at-least", type=int, default=0, metavar="N", help="fail if fewer tests pass")
    parser.add_argument("--device", choices=["cpu", "accelerator"], default="cpu", help="the device of the tensors")
    parser.add_argument("--total", type=float, default=math.inf, metavar="S", help="start no test after S seconds")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--gloo", action="store_true", help="also run torch's own Gloo, for comparison")
    parser.add_argument("--page", action="store_true", help="only generate the page from the existing results")
    parser.add_argument("--sample", action="store_true", help="run only some tests of each kind (sample.py)")
    return parser.parse_args()


def _show(size: int, run: Run) -> None:
    """Print how many tests passed, and the shortfalls."""
    for column, counts in run.counts().items():
        print(f"{size} ranks, {column:8} " + ", ".join(f"{n:3} {outcome}" for outcome, n in counts.items()), flush=True)
    for name in page.shortfalls(run):
        print(f"  {name}: {run.verdict(name)}", flush=True)
    print(f"  {run.seconds:.0f} s", flush=True)


def _status(runs: Mapping[int, Run], at_least: int) -> int:
    """Return 1 if a test fails, or too few pass at the largest number of ranks."""
    totals = {size: run.counts()["all"] for size, run in runs.items()}
    if any(total[verdicts.FAIL] for total in totals.values()):
        return 1
    if totals[max(totals)][verdicts.PASS] < at_least:
        print(f"fewer than {at_least} tests pass", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
