"""DeepSpeed's shared-memory all-reduce for inference on CPUs beside that of mpicomm, Gloo and mpi4py.

`mpirun -n 2 --bind-to core python -m benchmarks.deepspeed_all_reduce` calls the kernel (csrc/cpu/comm/shm.cpp of
DeepSpeed) directly, not through torch.distributed. DeepSpeed compiles it on first use, which takes about a minute and
needs a C++ compiler and ninja. Rank 0 writes docs/results/deepspeed-<ranks>-<MPI>.json, or the file of --json.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mpicomm
from benchmarks import rank_results
from mpicomm.bench import compared_backends, sweep, timing
from mpicomm.bench.measured_operations import MeasuredOperation
from mpicomm.job.session import World

_SIZES = [2**exponent for exponent in range(13, 19)]  # bytes: 8 KiB to 256 KiB
_LEVEL = 2  # of vector instructions, as the kernel numbers them: AVX-512 on x86
_SEGMENT = "/dev/shm/deepspeed_allreduce_buffer"
_SIZE = "LOCAL_SIZE"  # the kernel reads the number of ranks of the node from this variable


def main() -> None:
    """Measure, and write the results on rank 0."""
    arguments = rank_results.options("benchmarks.deepspeed_all_reduce", __doc__, 7)
    with mpicomm.bootstrap("mpi") as world:
        kernel = load(world)

        def by_deepspeed(operation: MeasuredOperation, starts: bool) -> Callable[[], Any]:
            assert not starts, "the kernel is synchronous"
            return functools.partial(kernel, operation.receive)

        backends = {**compared_backends.make(["mpi", "gloo", "mpi4py"], world), "deepspeed": by_deepspeed}
        cases = sweep.cases(["all_reduce"], _SIZES, [torch.float32], torch.device("cpu"), world)
        measured = sweep.measure(cases, backends, timing.on_ranks_of(world, arguments.rounds))
    if world.rank == 0:
        quantity = "microseconds of the slowest rank, the mean of the fastest round; bandwidths in GB/s"
        rows = [dataclasses.asdict(row) for row in measured.rows]
        name = f"deepspeed-{world.size}"
        rank_results.write(name, world.size, quantity, arguments.json, inputs=sweep.REWRITTEN, rows=rows)


def load(world: World) -> Callable[[torch.Tensor], object]:
    """Compile and load the kernel, and return its in-place all_reduce (collective).

    Raises:
        RuntimeError: If the kernel cannot be compiled, or not run on this CPU.
    """
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # type: ignore[import-not-found]

    library = ShareMemCommBuilder().load(verbose=False)
    if (level := library.vector_kernel_level()) < _LEVEL:
        raise RuntimeError(f"DeepSpeed's all_reduce needs vector instructions of level {_LEVEL}, got {level}.")
    before = os.environ.get(_SIZE)
    os.environ[_SIZE] = str(world.size)
    try:
        library.initialize(world.size, world.rank)
    finally:
        os.environ.pop(_SIZE)
        if before is not None:
            os.environ[_SIZE] = before
    dist.barrier()  # every rank has opened the segments of all others
    name = f"{_SEGMENT}_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_{world.rank}"
    Path(name).unlink(missing_ok=True)  # the kernel leaves it behind
    return torch.ops.deepspeed.inference_all_reduce_


if __name__ == "__main__":
    main()
