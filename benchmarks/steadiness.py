"""How much the speed of this machine varies: `mpirun -n 2 --bind-to core python -m benchmarks.steadiness`.

Measures for some seconds the round trip of a one-byte message of MPI, and an all_reduce of 1 MiB with mpicomm and with
mpi4py, in turn. The host of a virtual machine may move its cores; between cores without a common cache all three take
longer. Rank 0 writes docs/results/steadiness-<ranks>-<MPI>.json, or the file of the option --json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from mpi4py import MPI

import mpicomm
from benchmarks import rank_results
from mpicomm.bench import timing
from mpicomm.bench.timing import Call, Timed
from mpicomm.cli.argument_types import count

_ROUNDS, _SECONDS = 300, 0.02  # of each round
_BYTES = 2**20
_PERCENTILES = (0, 10, 50, 90, 100)


def main() -> None:
    """Measure, and write the results on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steadiness", description=__doc__)
    parser.add_argument("--json", metavar="F", type=Path, help="write the results to this JSON file")
    parser.add_argument("--rounds", metavar="R", type=count, default=_ROUNDS, help="rounds (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with mpicomm.bootstrap("mpi") as world:
        assert world.comm is not None, "the backend mpi has a communicator"
        bench = timing.on_ranks_of(world, arguments.rounds, seconds=_SECONDS)
        times = timing.in_turn(bench, _calls(world.comm))
    if world.rank == 0:
        found = {name: dict(zip(_PERCENTILES, _percentiles(each.rounds), strict=True)) for name, each in times.items()}
        what = "percentiles of the rounds' means, in microseconds"
        rank_results.write(f"steadiness-{world.size}", world.size, what, arguments.json, microseconds=found)


def _calls(comm: MPI.Intracomm) -> dict[str, Call | Timed]:
    tensor = torch.zeros(_BYTES // 4)
    array = tensor.numpy()
    return {
        "round trip of 1 B": _round_trip(comm),
        "all_reduce of 1 MiB, mpicomm": Timed(lambda: dist.all_reduce(tensor), tensor.zero_),
        "all_reduce of 1 MiB, mpi4py": Timed(lambda: comm.Allreduce(MPI.IN_PLACE, array), tensor.zero_),
    }


def _round_trip(comm: MPI.Intracomm) -> Call:
    """Return a call that sends a byte between ranks 0 and 1, and back."""
    byte = bytearray(1)

    def call() -> None:
        if comm.rank == 0:
            comm.Send(byte, 1)
            comm.Recv(byte, 1)
        elif comm.rank == 1:
            comm.Recv(byte, 0)
            comm.Send(byte, 0)

    return call


def _percentiles(rounds: tuple[float, ...]) -> list[float]:
    return [round(float(each), 2) for each in numpy.percentile(rounds, _PERCENTILES)]


if __name__ == "__main__":
    main()
