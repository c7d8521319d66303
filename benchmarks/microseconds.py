"""Latency breakdown of a small all_reduce: `mpirun -n 2 python -m benchmarks.microseconds`.

Rank 0 writes docs/results/microseconds-<ranks>-<MPI>.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

import mpicomm
from benchmarks import rank_results
from mpicomm import mpi
from mpicomm.backend.execution.work import CompletedWork
from mpicomm.bench import timing

ROUNDS = 21
_TORCH = "of it torch, with a no-op group"


def main() -> None:
    """Measure each part separately, in interleaved rounds, and write the mean time per call of the fastest rounds."""
    world = mpicomm.bootstrap("mpi")
    assert world.comm is not None
    parts = _parts(world.comm)
    times = timing.in_turn(timing.on_ranks_of(world, ROUNDS), parts, times_calls=False)
    found = {name: each.least for name, each in times.items()}
    if world.rank == 0:
        us = {name: round(microseconds, 2) for name, microseconds in found.items()}
        what = "microseconds of a call, a sum of zeros; the fastest round"
        rank_results.write(f"microseconds-{world.size}", world.size, what, us=us)


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
        _TORCH: lambda: dist.all_reduce(tensor, group=idle),
        "of it the group's own method": lambda: group.allreduce(tensors, opts),
        "of that torch's options": options,
        "of that the tensor's properties": checks,
        "of that torch's Work": CompletedWork,
    }


if __name__ == "__main__":
    main()
