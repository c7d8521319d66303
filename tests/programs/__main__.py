"""Test programs: `all` handwritten ones, `random 200` generated ones, `threads 1000` calls on each of four threads.

`mpirun -n 4 python -m tests.programs random 200 [--seed S] [--only K]` repeats, with the printed seed, all programs or
the K-th.
"""

from __future__ import annotations

import argparse
import sys
import time

import mpicomm
from mpicomm import mpi
from tests.programs import drawn, threads
from tests.programs.both import Both, Program
from tests.programs.written import PROGRAMS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="of one program; then the job ends")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("all", help="run the programs written by hand")
    some = commands.add_parser("random", help="run programs drawn from a seed")
    some.add_argument("count", type=int, help="how many")
    some.add_argument("--only", type=int, default=None, metavar="K", help="run only the K-th of them")
    load = commands.add_parser("threads", help="run four threads on four groups")
    load.add_argument("operations", type=int, help="of each thread")
    for command in (some, load):
        command.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    with mpicomm.bootstrap("mpi") as world:
        if args.command == "all":
            return _compare(world, dict(PROGRAMS), args.limit)
        seed = mpi.job_comm().bcast(int(time.time()) if args.seed is None else args.seed)
        if args.command == "threads":
            return _load(world, args.operations, seed, args.limit)
        chosen = range(args.count) if args.only is None else [args.only]
        programs = {f"random {args.count} --seed {seed} --only {k}": drawn.DrawnProgram(seed, k) for k in chosen}
        return _compare(world, dict(programs), args.limit)


def _compare(world: mpicomm.World, programs: dict[str, Program], limit: float) -> int:
    both, failed, begun = Both(limit), 0, time.monotonic()
    for title, program in programs.items():
        found = mpi.job_comm().allgather(both.differences(title, program))
        failed += any(found)
        for rank, differences in enumerate(found):
            for each in differences:
                _print_on_rank_0(world, f"{title}: rank {rank}: {each}")
    _print_on_rank_0(world, f"{len(programs)} programs, {failed} of them wrong, {time.monotonic() - begun:.1f} s")
    return 1 if failed else 0


def _load(world: mpicomm.World, operations: int, seed: int, limit: float) -> int:
    begun = time.monotonic()
    threads.run(operations, seed, limit)
    _print_on_rank_0(
        world, f"{operations} operations on each thread, --seed {seed}: right, {time.monotonic() - begun:.1f} s"
    )
    return 0


def _print_on_rank_0(world: mpicomm.World, text: str) -> None:
    if world.rank == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
