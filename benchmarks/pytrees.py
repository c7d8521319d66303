"""Containers of 200 tensors: `mpirun -n 2 python -m benchmarks.pytrees`.

An all_reduce of a dict of 200 small tensors in one call is compared with one all_reduce of a tensor of the total size,
and with 200 calls. The functions that flatten and rebuild containers are compared with those of torch.utils._pytree.
Rank 0 writes docs/results/pytrees-<ranks>-<MPI>.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as torch_pytree

import mpicomm
from benchmarks import rank_results
from mpicomm.bench import timing
from mpicomm.bench.timing import Bench
from mpicomm.collective_ops import pytree

ROUNDS, TENSORS = 21, 200
SECONDS = 0.01  # of a round
COUNTS = (16, 256, 1024, 4096)  # elements of each tensor
Cases = dict[str, Callable[[], object]]


def main() -> None:
    """Measure, and write the results on rank 0."""
    torch.set_num_threads(1)
    with mpicomm.bootstrap("mpi") as world:
        bench = timing.on_ranks_of(world, ROUNDS, seconds=SECONDS)
        found = {f"{TENSORS} x {4 * count} B": _all_reduces(count, bench) for count in COUNTS}
        found |= {name: _fastest(_with_both(container), bench) for name, container in _containers().items()}
    if world.rank == 0:
        what = "sums of zeros, the fastest round"
        rank_results.write(f"pytrees-{world.size}", world.size, what, microseconds=found)


def _all_reduces(count: int, bench: Bench) -> dict[str, float]:
    """Return microseconds of operations on a dict of tensors (collective)."""
    small = {f"p{index}": torch.zeros(count) for index in range(TENSORS)}
    fused = torch.zeros(TENSORS * count)

    def one_by_one() -> None:
        for each in small.values():
            dist.all_reduce(each)

    least = _fastest(
        {
            "mpicomm.all_reduce of the dict": lambda: mpicomm.all_reduce(small),
            "dist.all_reduce of one tensor": lambda: dist.all_reduce(fused),
            "mpicomm.all_reduce of one tensor": lambda: mpicomm.all_reduce(fused),
            "200 calls of dist.all_reduce": one_by_one,
        },
        bench,
    )
    for caller in ("mpicomm", "dist"):
        ratio = least["mpicomm.all_reduce of the dict"] / least[f"{caller}.all_reduce of one tensor"]
        least[f"the dict's time to {caller}'s of one tensor"] = round(ratio, 2)
    return least


def _containers() -> dict[str, Any]:
    tensors = [torch.zeros(16) for _ in range(TENSORS)]
    names = ("weight", "bias", "running_mean", "running_var")
    return {
        "a dict of 200 tensors": {f"p{index}": each for index, each in enumerate(tensors)},
        "50 dicts of 4 tensors": {
            f"layer{start}": dict(zip(names, tensors[start : start + 4], strict=True)) for start in range(0, TENSORS, 4)
        },
    }


def _with_both(container: Any) -> Cases:
    """Return the same work with mpicomm's functions and with those of torch.utils._pytree."""
    leaves: list[Any] = []
    plain = frozenset({torch.Tensor})
    structure = pytree.flatten(container, leaves, plain)
    of_torch, spec = torch_pytree.tree_flatten(container)

    def all_reduce_with_torch() -> Any:
        flat, around = torch_pytree.tree_flatten(container)
        return torch_pytree.tree_unflatten(mpicomm.all_reduce(flat), around)

    return {
        "flatten": lambda: pytree.flatten(container, [], plain),
        "flatten, torch": lambda: torch_pytree.tree_flatten(container),
        "rebuild": lambda: pytree.unflatten(structure, iter(leaves)),
        "rebuild, torch": lambda: torch_pytree.tree_unflatten(of_torch, spec),
        "all_reduce": lambda: mpicomm.all_reduce(container),
        "all_reduce, torch": all_reduce_with_torch,
    }


def _fastest(cases: Cases, bench: Bench) -> dict[str, float]:
    """Return the mean microseconds of a call in the fastest of the interleaved rounds (collective)."""
    return {name: round(times.least, 1) for name, times in timing.in_turn(bench, cases).items()}


if __name__ == "__main__":
    main()
