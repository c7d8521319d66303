"""Runs the test parts of `.ci/run` on a busy machine: `python -m tests.under_load [RUNS]`.

`stress-ng --cpu` keeps as many processes busy as there are cores. Each run is appended to docs/results/under-load.json:
the commit, and for each part the duration, the status, the numbers in pytest's summaries and the tests that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from mpicomm import job_info
from mpicomm.reports import result_files
from tests.launching import ROOT

RESULTS = ROOT / "docs" / "results" / "under-load.json"
_CONTENT = "runs of the test parts of .ci/run beside `stress-ng --cpu <cores>`; seconds of each part"
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?|rerun|skipped)\b")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_COLORS = re.compile(r"\x1b\[[\d;]*m")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.under_load", description="Run CI's tests under load.")
    parser.add_argument("runs", nargs="?", type=int, default=1, help="number of runs (%(default)s)")
    arguments = parser.parse_args()
    if changed := _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(ROOT)}"):
        parser.error(f"the results name a commit, and these files are not committed:\n{changed}")
    is_green = True
    for _ in range(arguments.runs):
        parts: dict[str, dict[str, Any]] = {}
        row = {"commit": _git("rev-parse", "HEAD"), "date": time.strftime("%Y-%m-%d %H:%M"), "parts": parts}
        try:
            with load():
                for part in test_parts((ROOT / ".ci" / "run").read_text()):
                    parts[part] = run(part)
        except BaseException as error:
            row["aborted"] = repr(error)
            raise
        finally:
            append(row)
        is_green = is_green and all(map(_is_green, parts.values()))
    sys.exit(not is_green)


def _is_green(part: dict[str, Any]) -> bool:
    return part["status"] == 0 and part["counts"].get("passed", 0) > 0 and not part["counts"].get("rerun")


def test_parts(script: str) -> list[str]:
    """Return the commands of `.ci/run` that run tests of this checkout in its environments."""
    words = next(shlex.split(line) for line in script.splitlines() if line.startswith("tests/parts.sh"))
    return [word for word in words if word.startswith(("make test", "make conformance"))]


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Keep all cores busy.

    Raises:
        FileNotFoundError: If stress-ng is not installed.
        RuntimeError: If it ended before the end of the block.
    """
    process = subprocess.Popen(["stress-ng", "--cpu", str(os.cpu_count())], stderr=subprocess.DEVNULL)
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"stress-ng ended with status {process.returncode} before the tests. Run them again.")
    finally:
        process.terminate()
        process.wait()


def run(part: str) -> dict[str, Any]:
    """Run a command; return its status, its duration and what pytest reports."""
    start = time.monotonic()
    done = subprocess.run(shlex.split(part), cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"{part}: status {done.returncode}", flush=True)
    if done.returncode != 0:
        print(done.stdout[-20_000:], done.stderr[-5_000:], flush=True)
    return {"seconds": round(time.monotonic() - start), "status": done.returncode, **summary(done.stdout)}


def summary(output: str) -> dict[str, Any]:
    """Return the sums of the numbers in pytest's last lines, and the tests that failed."""
    output = _COLORS.sub("", output)
    counts: dict[str, int] = {}
    for line in (line for line in output.splitlines() if re.search(r" in \d[\d.]*s|\(\d+ s\)$", line)):
        for number, kind in _COUNTS.findall(line):
            counts[kind] = counts.get(kind, 0) + int(number)
    return {"counts": counts, "failed": sorted(set(_FAILED.findall(output)))}


def append(row: dict[str, Any]) -> None:
    """Add a run to the results."""
    rows = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    head = job_info.description(_CONTENT, "python -m tests.under_load")
    result_files.write(RESULTS, {**head, "runs": [*rows, row]})


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
