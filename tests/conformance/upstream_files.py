"""Run PyTorch's test files on this backend and on Gloo: `python -m tests.conformance.upstream_files PATH...`.

Fetch the files from PyTorch's repository, such as test/distributed/test_functional_api.py, in a version that fits the
installed torch; they are not part of its wheels. Every test runs on as many ranks as it needs. `--write` writes
docs/results/pytorch-tests-<torch>.json and docs/conformance.md. The exit status is 1 if a test passes with Gloo only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.conformance import jobs, on_cpu, page, verdicts
from tests.conformance.file_results import NEITHER, ONLY_GLOO, ONLY_MPICOMM, File, FileResults, FileTest
from tests.conformance.journal import Journal
from tests.conformance.upstream_file import UpstreamFile
from tests.conformance.verdicts import FAIL, PASS, SKIP, Verdict

_MOST_RANKS = 8
_LEFT_OUT = Verdict(SKIP, "left out of this run with --leave-out")

Names = Mapping[str, list[str]]
"""Names of tests, by path of the file."""
Found = dict[str, dict[str, tuple[int, Verdict]]]
"""Numbers of ranks and verdicts, by path of the file and name of the test."""
Pending = dict[tuple[str, str], int]
"""Numbers of ranks, by path of the file and name of the test."""


def main() -> int:
    args = _parse()
    on_cpu.lift_requirements()
    files = [UpstreamFile(path) for path in args.paths]
    sizes = {
        str(path): {name: file.ranks_of(name) or 1 for name in file.names() if args.k in name}
        for path, file in zip(args.paths, files, strict=True)
    }
    runners = [_Runner(of_torch, args.limit, args.leave_out, shows=args.s) for of_torch in (False, True)]
    ours, gloo = found_by_backend = [runner.run(sizes) for runner in runners]
    for runner, mine, other in zip(runners, found_by_backend, reversed(found_by_backend), strict=True):
        runner.repeat_alone(mine, other)
    found = {Path(path).name: _file(Path(path), ours[path], gloo[path]) for path in sizes}
    _show(found)
    if args.write:
        FileResults.of(found).write()
        page.write()
    return 1 if any(file.of(ONLY_GLOO) for file in found.values()) else 0


def _parse() -> argparse.Namespace:
    parser = jobs.parser("tests.conformance.upstream_files", __doc__, limit=300)
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a test file of PyTorch's repository")
    parser.add_argument(
        "--leave-out", nargs="+", default=[], metavar="TEXT", help="do not run tests with TEXT in the name"
    )
    return parser.parse_args()


class _Runner:
    """Runs tests with one backend."""

    def __init__(self, of_torch: bool, limit: float, leave_out: Sequence[str], *, shows: bool) -> None:
        self._options = [*["--of-torch"] * of_torch, "--limit", str(limit)]
        self._leave_out = leave_out
        self._shows = shows

    def run(self, sizes: Mapping[str, Mapping[str, int]]) -> Found:
        """Run tests on the numbers of ranks that they need, then the failing ones again without the others.

        A test may fail because of what an earlier one left behind in the process; PyTorch starts processes for each.
        """
        found: Found = {path: {} for path in sizes}
        pending = {(path, name): size for path, of_file in sizes.items() for name, size in of_file.items()}
        for path, name in [key for key in pending if any(text in key[1] for text in self._leave_out)]:
            found[path][name] = pending.pop((path, name)), _LEFT_OUT
        self._run(pending, found)
        while failing := _failing(found):
            self._run(dict(failing), found)
            if _failing(found) == failing:
                break
        return found

    def repeat_alone(self, found: Found, other: Found) -> None:
        """Run each test that fails, and passes with the other backend, in a job of its own; that verdict counts."""
        for (path, name), size in _failing(found).items():
            if other[path][name][1].outcome == PASS:
                self._run({(path, name): size}, found)

    def _run(self, pending: Pending, found: Found) -> None:
        """Run tests in one job for each number of ranks; a test may say that it needs more."""
        while pending:
            size = min(pending.values())
            names = _by_path(key for key, ranks in pending.items() if ranks == size)
            for path, name, verdict in self._job(size, names):
                needed = verdicts.ranks_needed(verdict)
                if needed is not None and size < needed <= _MOST_RANKS:
                    pending[path, name] = needed
                else:
                    del pending[path, name]
                    found[path][name] = size, verdict

    def _job(self, size: int, names: Names) -> list[tuple[str, str, Verdict]]:
        with tempfile.TemporaryDirectory(prefix="upstream-files-") as scratch:
            journal, plan = Journal(Path(scratch, "journal")), Path(scratch, "plan")
            plan.write_text(json.dumps(names))
            options = ["--journal", str(journal.path), "--scratch", scratch, *self._options]
            command = ["-m", "tests.conformance.ranks", *options, "--plan", str(plan)]
            jobs.until_finished(journal, lambda: jobs.start(size, command), shows=self._shows)
            return [
                (path, name, verdict) for path in names for name, verdict in journal.verdicts(Path(path).name).items()
            ]


def _failing(found: Found) -> Pending:
    return {
        (path, name): size
        for path, tests in found.items()
        for name, (size, verdict) in tests.items()
        if verdict.outcome == FAIL
    }


def _by_path(keys: Iterator[tuple[str, str]]) -> Names:
    names: dict[str, list[str]] = {}
    for path, name in keys:
        names.setdefault(path, []).append(name)
    return names


def _file(path: Path, ours: Mapping[str, tuple[int, Verdict]], gloo: Mapping[str, tuple[int, Verdict]]) -> File:
    tests = {name: FileTest(ranks, verdict, gloo[name][1]) for name, (ranks, verdict) in sorted(ours.items())}
    return File(hashlib.sha256(path.read_bytes()).hexdigest(), tests)


def _show(files: Mapping[str, File]) -> None:
    for label, file in files.items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in file.counts().items())
        sys.stdout.write(f"{label}: {counts}\n")
        for name, test in file.tests.items():
            if test.outcome in (ONLY_GLOO, ONLY_MPICOMM, NEITHER):
                sys.stdout.write(f"  {test.outcome}: {name} ({test.ranks} ranks)\n")
                sys.stdout.write(f"    mpicomm: {test.mpicomm}\n    Gloo: {test.gloo}\n")


if __name__ == "__main__":
    sys.exit(main())
