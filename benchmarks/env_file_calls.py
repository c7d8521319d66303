"""File-system calls of a rank below the prefix of its environment, with and without a copy on local storage.

`python -m benchmarks.env_file_calls --json F` runs a short job with and without `mpicomm run --stage-env`, whose ranks
strace observes from the start of Python to their end.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mpicomm import job_info
from mpicomm.cli.argument_types import count
from mpicomm.cli.console import print_json
from mpicomm.reports import result_files

_JOB = "import torch, mpicomm; mpicomm.bootstrap(); torch.distributed.all_reduce(torch.ones(4))"
_COPY = re.compile(r'"[^"]*/mpicomm-env-[0-9a-f]+')


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the results, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.env_file_calls", description=__doc__)
    parser.add_argument("--ranks", type=count, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    parser.add_argument("--trace", metavar="D", type=Path, help=argparse.SUPPRESS)  # in a rank
    options = parser.parse_args(arguments)
    if options.trace is not None:
        trace = ("strace", "-f", "-qq", "-e", "trace=%file", "-o", str(options.trace / str(os.getpid())))
        os.execvp("strace", (*trace, sys.executable, "-c", _JOB))
    calls = {
        name: _measure(options.ranks, words) for name, words in (("in place", []), ("--stage-env", ["--stage-env"]))
    }
    quantity = "file-system calls of the rank with the most calls, from the start of Python to its end"
    head = job_info.description(quantity, shlex.join(["python", "-m", "benchmarks.env_file_calls", *sys.argv[1:]]))
    print_json(calls)
    if options.json is not None:
        result_files.write(options.json, head | {"ranks": options.ranks, "calls": calls})
    return 0


def _measure(ranks: int, words: Sequence[str]) -> dict[str, int]:
    """Run a job, and return the number of calls below the prefix, below the copy, and below other directories."""
    with tempfile.TemporaryDirectory() as directory:
        run = [sys.executable, "-m", "mpicomm", "run", "-n", str(ranks), *words]
        subprocess.run([*run, "-m", "benchmarks.env_file_calls", "--trace", directory], check=True)
        return max((_counts(path.read_text(errors="replace")) for path in Path(directory).iterdir()), key=_total)


def _total(calls: dict[str, int]) -> int:
    return sum(calls.values())


def _counts(trace: str) -> dict[str, int]:
    lines = [line for line in trace.splitlines() if "(" in line]
    below_prefix = sum(f'"{sys.prefix}/' in line or f'"{sys.prefix}"' in line for line in lines)
    below_copy = sum(_COPY.search(line) is not None for line in lines)
    return {
        "below the prefix": below_prefix,
        "below the copy": below_copy,
        "elsewhere": len(lines) - below_prefix - below_copy,
    }


if __name__ == "__main__":
    sys.exit(main())
