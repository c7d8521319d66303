"""Operations on several nodes, with and without shared memory within each node: `srun -N2 --ntasks-per-node=2 ...`.

`python -m benchmarks.multi_node` measures all operations at 64 MiB (`--size`) in one run, with a group that may use
shared memory (in the hierarchical all_reduce) and with one that may not. Rank 0 writes
docs/results/multi-node-<nodes>x<ranks of each>-<MPI>.json; the name contains another size.
"""

from __future__ import annotations

import argparse
import dataclasses
import os

import torch
import torch.distributed as dist

import mpicomm
from benchmarks import rank_results
from mpicomm.bench import compared_backends, sweep, timing
from mpicomm.bench.measured_operations import OPERATIONS
from mpicomm.cli.argument_types import count

ROUNDS = 3
_BYTES = 2**26
_SETTING = "MPICOMM_SHARED_MEMORY"  # read when a group is created


def main() -> None:
    """Measure, and write the results on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multi_node", description="Measure several nodes.")
    parser.add_argument("--size", metavar="BYTES", type=count, default=_BYTES, help="size of the tensors (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.pop(_SETTING, None)
    with mpicomm.bootstrap("mpi") as world:
        os.environ[_SETTING] = "0"
        flat = dist.new_group(backend=dist.get_backend())
        os.environ.pop(_SETTING)
        backends = {
            "hierarchical": compared_backends.by_torch(dist.group.WORLD),
            "MPI alone": compared_backends.by_torch(flat),
        }
        names = [name for name in OPERATIONS if name != "barrier"]
        cases = sweep.cases(names, [options.size], [torch.float32], torch.device("cpu"), world)
        found = sweep.measure(cases, backends, timing.on_ranks_of(world, ROUNDS))
        dist.destroy_process_group(flat)
    if world.rank == 0:
        size = "" if options.size == _BYTES else f"-{options.size}"
        name = f"multi-node-{world.num_nodes}x{world.size // world.num_nodes}{size}"
        what = "microseconds of the slowest rank, the mean of the fastest round; bandwidths in GB/s"
        rows = [dataclasses.asdict(row) for row in found.rows]
        rank_results.write(name, world.size, what, nodes=world.num_nodes, inputs=sweep.REWRITTEN, rows=rows)


if __name__ == "__main__":
    main()
