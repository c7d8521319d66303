"""Run Horovod's own test/parallel/test_torch.py on mpicomm.horovod: `python -m tests.horovod_upstream PATH`.

PATH is that file in a checkout of Horovod, or a git directory of Horovod. The file runs unmodified, on 2 and 4 ranks.
`--write` writes docs/results/horovod-tests.json, in which the results of each MPI are replaced by its next run, and the
table in docs/horovod-tests.md. The file's helpers need `pip install mock cloudpickle packaging`.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tests.conformance import jobs, verdicts
from tests.conformance.journal import Journal
from tests.horovod_upstream import page
from tests.horovod_upstream.plugin import LABEL
from tests.horovod_upstream.results import Run, store

_TEST = Path("test", "parallel", "test_torch.py")
_NEEDED = ("mock", "cloudpickle", "packaging")
_JOB_LIMIT = 1800.0  # seconds for all tests of a job
# Without the plugins of this checkout, such as pytest-mpi, which skip tests under mpirun.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "MPICOMM_HANG_SECONDS": "1000"}


def main() -> int:
    args = _parse()
    if args.page:
        page.write()
        return 0
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(f"Horovod's tests need {', '.join(missing)}.\nRun: pip install {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="horovod-tests-") as scratch:
        file, commit = _source(args.path, Path(scratch))
        runs = {}
        for size in args.ranks:
            runs[size] = _run(size, file, args)
            _show(size, runs[size])
        if args.write:
            store(runs, file, commit)
            page.write()
    return int(any(run.count(verdicts.FAIL) for run in runs.values()))


def _parse() -> argparse.Namespace:
    parser = jobs.parser("tests.horovod_upstream", __doc__, limit=180)
    parser.add_argument("path", nargs="?", type=Path, help="Horovod's test_torch.py, or a git directory of Horovod")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="numbers of ranks (2 4)")
    parser.add_argument("--page", action="store_true", help="only generate the page from the existing results")
    args = parser.parse_args()
    if args.path is None and not args.page:
        parser.error("PATH is missing: pass Horovod's test_torch.py or a git directory of Horovod")
    return args


def _source(path: Path, scratch: Path) -> tuple[Path, str]:
    """Return the test file, and the commit of a git directory, from which the tests are extracted to `scratch`."""
    if path.is_file():
        return path.resolve(), ""
    commit = subprocess.run(["git", "-C", path, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    archive = subprocess.run(["git", "-C", path, "archive", "HEAD", "test"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(scratch, filter="data")
    return scratch / _TEST, commit.stdout.strip()


def _run(size: int, file: Path, args: argparse.Namespace) -> Run:
    """Run the tests of a file on `size` ranks, repeatedly until every test has a verdict."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="horovod-tests-") as scratch:
        journal = Journal(Path(scratch, "journal"))
        command = ["-m", "mpicomm.horovod", "-m", "pytest", str(file), "-s", "-q"]
        command += ["-p", "tests.horovod_upstream.plugin", "-p", "no:cacheprovider"]
        command += ["-k", args.k, "--rootdir", str(file.parent)]
        command += ["--journal", str(journal.path), "--limit", str(args.limit)]
        jobs.until_finished(journal, lambda: jobs.start(size, command, _ENVIRONMENT, _JOB_LIMIT), shows=args.s)
        return Run(journal.verdicts(LABEL), round(time.monotonic() - start, 1))


def _show(size: int, run: Run) -> None:
    counts = ", ".join(f"{run.count(outcome)} {outcome}" for outcome in (verdicts.PASS, verdicts.FAIL, verdicts.SKIP))
    print(f"{size} ranks: {counts}; {run.seconds:.0f} s", flush=True)
    for name, verdict in run.verdicts.items():
        if verdict.outcome != verdicts.PASS:
            print(f"  {name}: {verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
