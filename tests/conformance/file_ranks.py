"""The ranks' program of `upstream_files.py`: `mpirun -n 2 python -m tests.conformance.file_ranks ... PLAN`.

PLAN is a JSON file with the names of the tests to run, by path of the test file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import mpicomm
from mpicomm.backend import registration
from tests.conformance import on_cpu
from tests.conformance.group_creation import GroupCreation
from tests.conformance.journal import Journal
from tests.conformance.ranks import Ranks
from tests.conformance.upstream_file import UpstreamFile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="a directory that all ranks can access")
    parser.add_argument("--of-torch", action="store_true", help="run torch's Gloo, for comparison")
    parser.add_argument("--limit", type=float, required=True, help="time limit of a test in seconds")
    args = parser.parse_args()
    world = mpicomm.bootstrap(None)
    assert world.comm is not None
    on_cpu.lift_requirements()
    creation = GroupCreation("gloo" if args.of_torch else registration.NAME, world.rank, world.size)
    creation.install()
    ranks = Ranks(world.comm, Journal(args.journal), args.scratch, is_ours=not args.of_torch, limit=args.limit)
    for path, names in json.loads(args.plan.read_text()).items():
        ranks.run(UpstreamFile(Path(path), world.rank, creation), names.__contains__)
    if world.rank == 0:
        Journal(args.journal).finish()


if __name__ == "__main__":
    main()
