"""The throughput of GPU tensors over MPI: `mpirun -n 2 python -m benchmarks.gpu_throughput [MEBIBYTES ...]`.

It measures all_reduce and broadcast of GPU tensors and of host tensors, and plain copies through pinned memory: with
perfect overlap, staging takes as long as the slowest of these. Rank 0 writes
docs/results/gpu-staged-<ranks>-<MPI>.json, or gpu-direct-... if MPI is GPU-aware.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import mpicomm
from benchmarks import rank_results
from mpicomm.backend.gpu.transport import GPUDirect
from mpicomm.bench import timing
from mpicomm.bench.timing import Bench, Timed
from mpicomm.devices import accelerator
from mpicomm.errors import DeviceError

ROUNDS = 7
SECONDS = 0.01  # of a round
MEBIBYTES = (1, 4, 16, 64, 256)


def main() -> None:
    """Measure, and write the results on rank 0."""
    with mpicomm.bootstrap("mpi") as world:
        if world.device.type == "cpu":
            raise DeviceError("there is no GPU.\nRun this where there is one.")
        bench = timing.on_ranks_of(world, ROUNDS, device=world.device.type, seconds=SECONDS)
        sizes = [int(word) for word in sys.argv[1:]] or MEBIBYTES
        found = {f"{size} MiB": _measure(size, world.device, bench) for size in sizes}
        if world.rank == 0:
            group: Any = dist.group.WORLD
            is_direct = isinstance(group._executor.transport, GPUDirect)
            how = {"GPU": accelerator.device_name(world.device), "GPU-aware MPI": is_direct}
            what = "sums and copies of ones, which are written again before each call; the fastest round"
            name = f"gpu-{'direct' if is_direct else 'staged'}-{world.size}"
            rank_results.write(name, world.size, what, **how, gibibytes_per_second=found)


def _measure(mebibytes: int, device: torch.device, bench: Bench) -> dict[str, float]:
    """Return the throughput in GiB/s, the best of interleaved rounds (collective)."""
    count = mebibytes * 2**20 // 4
    on_gpu, on_host = torch.ones(count, device=device), torch.ones(count)
    narrow, pinned = torch.ones(2 * count, dtype=torch.bfloat16, device=device), torch.empty(count, pin_memory=True)
    cases: dict[str, Callable[[], object]] = {
        "all_reduce, GPU": lambda: dist.all_reduce(on_gpu),
        "all_reduce, GPU, bfloat16": lambda: dist.all_reduce(narrow),
        "all_reduce, host": lambda: dist.all_reduce(on_host),
        "broadcast, GPU": lambda: dist.broadcast(on_gpu, 0),
        "broadcast, host": lambda: dist.broadcast(on_host, 0),
        "plain copy from the GPU": lambda: pinned.copy_(on_gpu, non_blocking=True),
        "plain copy to the GPU": lambda: on_gpu.copy_(pinned, non_blocking=True),
    }

    def rewrite() -> None:
        for tensor in (on_gpu, on_host, narrow):
            tensor.fill_(1)

    times = timing.in_turn(bench, {name: Timed(case, rewrite) for name, case in cases.items()})
    return {name: round(mebibytes / 1024 / (1e-6 * each.least), 2) for name, each in times.items()}


if __name__ == "__main__":
    main()
