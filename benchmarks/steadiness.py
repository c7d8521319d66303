"""How much the speed of this machine varies: `mpirun -n 2 --bind-to core python -m benchmarks.steadiness`.

Measures for a minute, in turn, the round trip of a one-byte message of MPI, and operations of 64 KiB, 1 MiB and 16 MiB
with mpicomm and with mpi4py. `mpicomm bench` measures each size of an operation within a second; here, the rounds of
each are spread over the whole minute. The host of a virtual machine may move its cores; between cores without a common
cache all take longer, operations in shared memory the most. The ratio of the times of one round compares both in the
same state of the machine. Rank 0 writes docs/results/steadiness-<ranks>-<MPI>.json, or the file of the option --json.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy
import torch
import torch.distributed as dist
from mpi4py import MPI

import mpicomm
from benchmarks import rank_results
from mpicomm.bench import sweep, timing
from mpicomm.bench.measured_operations import MeasuredOperation
from mpicomm.bench.timing import Call, Timed
from mpicomm.job.session import World

_ROUNDS, _SECONDS = 60, 0.015  # of each round
_NAMES = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all", "gather", "scatter")
_SIZES = (2**16, 2**20, 2**24)
_PERCENTILES = (0, 10, 50, 90, 100)
_ROUND_TRIP = "round trip of 1 B"
_OURS, _PLAIN = "mpicomm", "mpi4py"


def main() -> None:
    """Measure, and write the results on rank 0."""
    arguments = rank_results.options("benchmarks.steadiness", __doc__, _ROUNDS)
    torch.set_num_threads(1)
    with mpicomm.bootstrap("mpi") as world:
        assert world.comm is not None, "the backend mpi has a communicator"
        bench = timing.on_ranks_of(world, arguments.rounds, seconds=_SECONDS)
        times = timing.in_turn(bench, _calls(world, world.comm))
    if world.rank == 0:
        what = "percentiles of the rounds: means in microseconds, and mpi4py's time divided by mpicomm's"
        microseconds = {name: _percentiles(each.rounds) for name, each in times.items()}
        ratios = {
            name.removesuffix(_OURS).rstrip(", "): _percentiles(
                numpy.divide(times[name.replace(_OURS, _PLAIN)].rounds, each.rounds)
            )
            for name, each in times.items()
            if name.endswith(_OURS)
        }
        rank_results.write(
            f"steadiness-{world.size}", world.size, what, arguments.json, microseconds=microseconds, ratios=ratios
        )


def _calls(world: World, comm: MPI.Intracomm) -> dict[str, Call | Timed]:
    calls: dict[str, Call | Timed] = {_ROUND_TRIP: _round_trip(comm)}
    for case in sweep.cases(_NAMES, _SIZES, [torch.float32], torch.device("cpu"), world):
        operation = MeasuredOperation(case)
        try:
            plain = operation.by_mpi4py(comm)
        except NotImplementedError:  # MPI does not reduce and scatter in place
            continue
        name = f"{case.name}, {'in place' if case.in_place else 'out of place'}, {case.nbytes >> 10} KiB"
        calls[f"{name}, {_OURS}"] = _rewriting(operation, functools.partial(operation.by_torch, dist.group.WORLD))
        calls[f"{name}, {_PLAIN}"] = _rewriting(operation, plain)
    return calls


def _rewriting(operation: MeasuredOperation, call: Call) -> Timed:
    return Timed(call, operation.write_inputs)


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


def _percentiles(rounds: Iterable[float]) -> dict[int, float]:
    return {each: float(f"{numpy.percentile(list(rounds), each):.4g}") for each in _PERCENTILES}


if __name__ == "__main__":
    main()
