"""An all_reduce of a dict of 200 small tensors in one call: `mpirun -n 2 python -m benchmarks.pytrees`.

It is compared with one all_reduce of a tensor of the total size, and with 200 calls. Rank 0 writes
docs/results/pytrees-<ranks>-<MPI>.json.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

import mpicomm
from benchmarks import rank_results
from benchmarks.rounds import fastest, mean_microseconds

ROUNDS, CALLS, TENSORS = 21, 10, 200
COUNTS = (16, 256, 1024, 4096)  # elements of each tensor


def main() -> None:
    """Measure, and write the results on rank 0."""
    torch.set_num_threads(1)
    with mpicomm.bootstrap("mpi") as world:
        found = {f"{TENSORS} x {4 * count} B": _measure(count) for count in COUNTS}
    if world.rank == 0:
        what = "sums of zeros, the fastest round"
        rank_results.write(f"pytrees-{world.size}", world.size, what, microseconds=found)


def _measure(count: int) -> dict[str, float]:
    """Return microseconds, the minimum of interleaved rounds (collective)."""
    small = {f"p{index}": torch.zeros(count) for index in range(TENSORS)}
    fused = torch.zeros(TENSORS * count)

    def one_by_one() -> None:
        for each in small.values():
            dist.all_reduce(each)

    cases: dict[str, Callable[[], object]] = {
        "mpicomm.all_reduce of the dict": lambda: mpicomm.all_reduce(small),
        "dist.all_reduce of one tensor": lambda: dist.all_reduce(fused),
        "mpicomm.all_reduce of one tensor": lambda: mpicomm.all_reduce(fused),
        "200 calls of dist.all_reduce": one_by_one,
    }
    least = fastest({name: functools.partial(mean_microseconds, case, CALLS) for name, case in cases.items()}, ROUNDS)
    found = {name: round(value, 1) for name, value in least.items()}
    for caller in ("mpicomm", "dist"):
        ratio = least["mpicomm.all_reduce of the dict"] / least[f"{caller}.all_reduce of one tensor"]
        found[f"the dict's time to {caller}'s of one tensor"] = round(ratio, 2)
    return found


if __name__ == "__main__":
    main()
