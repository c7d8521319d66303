"""Latency of small operations, and of the parts of an all_reduce: `mpirun -n 2 python -m benchmarks.microseconds`.

Rank 0 writes docs/results/microseconds-<ranks>-<MPI>.json, or the file of the option --json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

import mpicomm
from benchmarks import rank_results
from mpicomm import mpi
from mpicomm.backend.execution.work import CompletedWork
from mpicomm.bench import compared_backends, sweep, timing
from mpicomm.bench.compared_backends import ASYNCHRONOUS, MPI4PY, NOTHING, OURS
from mpicomm.bench.measured_operations import OPERATIONS, Case, MeasuredOperation

ROUNDS = 21
SIZES = (4, 2**10, 2**16)
_TORCH = "of it torch, with a no-op group"


def main() -> None:
    """Measure in interleaved rounds, and write the mean time per call of the fastest and of the median rounds."""
    arguments = rank_results.options("benchmarks.microseconds", __doc__, ROUNDS)
    world = mpicomm.bootstrap("mpi")
    assert world.comm is not None
    bench = timing.on_ranks_of(world, arguments.rounds, seconds=0.02)
    times = timing.in_turn(bench, _parts(world.comm), times_calls=False)
    us = {name: round(each.least, 2) for name, each in times.items()}
    backends = compared_backends.make([MPI4PY, NOTHING, OURS, ASYNCHRONOUS], world)
    rows = [_row(case, bench, backends) for case in _cases(world)]
    if world.rank == 0:
        what = "microseconds of a call, a sum of zeros; `us`: the fastest round, `operations`: the median round"
        rank_results.write(f"microseconds-{world.size}", world.size, what, arguments.json, us=us, operations=rows)


def _cases(world: mpicomm.World) -> list[Case]:
    names = [name for name in OPERATIONS if not name.endswith("_avg")]
    every = sweep.cases(names, SIZES, [torch.float32], torch.device("cpu"), world)
    return [case for case in every if not case.in_place or OPERATIONS[case.name].places == (True,)]


def _row(case: Case, bench: timing.Bench, backends: Mapping[str, compared_backends.Backend]) -> dict[str, Any]:
    """Return the times of an operation with each backend, and what this package adds to torch and MPI (collective)."""
    operation = MeasuredOperation(case)
    calls = {name: backend(operation, False) for name, backend in backends.items()}
    times = timing.in_turn(bench, calls, times_calls=False)
    us = {name: each.median / operation.kind.repeats for name, each in times.items()}
    added = us[OURS] - us[MPI4PY] - us[NOTHING]
    return {"operation": case.name, "bytes": case.nbytes} | {
        name: round(value, 2) for name, value in {**us, "added": added}.items()
    }


def _parts(comm: Any) -> dict[str, Callable[[], Any]]:
    group: Any = dist.group.WORLD
    idle: Any = dist.new_group()
    tensor, tensors, opts = torch.zeros(1), [torch.zeros(1)], AllreduceOptions()
    opts.asyncOp = False
    work = CompletedWork()
    idle.allreduce = lambda _tensors, _opts: work
    memory = mpi.api().memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
    arguments = (mpi.api().IN_PLACE, (memory, 1, mpi.api().FLOAT), mpi.api().SUM)
    total: Any = dist.ReduceOp.SUM

    def options() -> None:
        _ = opts.asyncOp, opts.reduceOp == total, opts.timeout

    def checks() -> None:
        _ = (
            type(tensor), tensor.layout, tensor.dtype, tensor.nbytes, tensor.is_contiguous(), tensor.is_cpu,
            tensor.is_neg(), tensor.numel(), tensor.data_ptr(),
        )  # fmt: skip

    return {
        "mpi4py alone": lambda: comm.Allreduce(*arguments),
        "dist.all_reduce": lambda: dist.all_reduce(tensor),
        "mpicomm.all_reduce": lambda: mpicomm.all_reduce(tensor),
        _TORCH: lambda: dist.all_reduce(tensor, group=idle),
        "of it the group's own method": lambda: group.allreduce(tensors, opts),
        "of that torch's options": options,
        "of that the tensor's properties": checks,
        "of that torch's Work": CompletedWork,
    }


if __name__ == "__main__":
    main()
