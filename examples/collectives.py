"""The collectives of `torch.distributed` in the world that `bootstrap()` creates, and collectives of `mpicomm`.

Rank r starts with a tensor filled with r + 1. Each line shows the values of all ranks afterwards, in rank order; rank 0
prints them. The tensors are on the GPU if the ranks have GPUs.

    $ mpirun -n 4 python -m mpicomm.examples.collectives
    at the start                  1 | 2 | 3 | 4
    broadcast from rank 0         1 | 1 | 1 | 1
    reduce to rank 0              10 | - | - | -
    all_reduce                    10 | 10 | 10 | 10
    all_reduce in bfloat16        10 | 10 | 10 | 10
    all_reduce in the background  4 | 4 | 4 | 4
    all_gather                    1 2 3 4 | 1 2 3 4 | 1 2 3 4 | 1 2 3 4
    mpicomm: mean of a dict       2.5 | 2.5 | 2.5 | 2.5
    mpicomm: any shape and dtype  40 | 40 | 40 | 40
    mpicomm: different lengths    1 2 3 4 | 1 2 3 4 | 1 2 3 4 | 1 2 3 4
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

import mpicomm

COUNT = 1000  # elements in each tensor; all are checked, one is printed


def main() -> None:
    world = mpicomm.bootstrap(device=parse_arguments().device)
    show(world, "at the start", shown(start(world)))
    show(world, "broadcast from rank 0", broadcast(world))
    show(world, "reduce to rank 0", reduce(world))
    show(world, "all_reduce", all_reduce(world, torch.float32))
    show(world, "all_reduce in bfloat16", all_reduce(world, torch.bfloat16))
    show(world, "all_reduce in the background", all_reduce_in_background(world))
    show(world, "all_gather", all_gather(world))
    show(world, "mpicomm: mean of a dict", mean_of_a_dict(world))
    show(world, "mpicomm: any shape and dtype", broadcast_of_anything(world))
    show(world, "mpicomm: different lengths", gather_of_any_lengths(world))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="device of each rank, such as cpu or xpu:1 (default: chosen by bootstrap())")
    return parser.parse_args()


def broadcast(world: mpicomm.World) -> str:
    """Copy rank 0's tensor to every rank."""
    tensor = start(world)
    dist.broadcast(tensor, src=0)
    check(tensor, 1)
    return shown(tensor)


def reduce(world: mpicomm.World) -> str:
    """Reduce to rank 0; the result is undefined on the other ranks."""
    tensor = start(world)
    dist.reduce(tensor, dst=0)
    if world.rank != 0:
        return "-"
    check(tensor, total(world))
    return shown(tensor)


def all_reduce(world: mpicomm.World, dtype: torch.dtype) -> str:
    """Reduce the sum to every rank."""
    tensor = start(world, dtype)
    dist.all_reduce(tensor)
    check(tensor, total(world))
    return shown(tensor)


def all_reduce_in_background(world: mpicomm.World) -> str:
    """Reduce the maximum to every rank, and compute meanwhile."""
    tensor = start(world)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
    square = start(world) ** 2  # the operation runs; do not use `tensor` before wait() returns
    work.wait()
    check(tensor, world.size)
    check(square, (world.rank + 1) ** 2)
    return shown(tensor)


def all_gather(world: mpicomm.World) -> str:
    """Gather the tensors of all ranks on every rank."""
    tensor = start(world)
    gathered = [torch.empty_like(tensor) for _ in range(world.size)]
    dist.all_gather(gathered, tensor)
    for rank, each in enumerate(gathered):
        check(each, rank + 1)
    return " ".join(shown(each) for each in gathered)


def mean_of_a_dict(world: mpicomm.World) -> str:
    """Average a pytree in one operation; the input is unchanged, the result is a new dict."""
    metrics: dict[str, Any] = {"loss": float(world.rank + 1), "gradient": start(world)}
    mean = mpicomm.all_reduce(metrics, "mean")
    check(mean["gradient"], (world.size + 1) / 2)
    return f"{mean['loss']:.1f}"


def broadcast_of_anything(world: mpicomm.World) -> str:
    """Broadcast an object of rank 0; the other ranks receive its shape and dtype first."""
    made = torch.ones(world.size, 10, device=world.device) if world.rank == 0 else None
    return str(mpicomm.broadcast(made, src=0).numel())


def gather_of_any_lengths(world: mpicomm.World) -> str:
    """Gather tensors of different lengths: rank r has r + 1 rows."""
    rows = mpicomm.all_gather(torch.zeros(world.rank + 1, 3, device=world.device))
    return " ".join(str(len(each)) for each in rows)


def start(world: mpicomm.World, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return this rank's tensor, filled with its rank plus one."""
    return torch.full((COUNT,), world.rank + 1, dtype=dtype, device=world.device)


def total(world: mpicomm.World) -> int:
    """Return the sum over the ranks: 1 + 2 + ... + size."""
    return world.size * (world.size + 1) // 2


def check(tensor: torch.Tensor, value: float) -> None:
    """Fail unless all elements equal `value`, to the precision of the dtype."""
    torch.testing.assert_close(tensor, torch.full_like(tensor, value))


def shown(tensor: torch.Tensor) -> str:
    return f"{tensor[0]:.0f}"


def show(world: mpicomm.World, what: str, mine: str) -> None:
    """Print the values of all ranks on rank 0 (collective)."""
    everyone: list[str] | None = [""] * world.size if world.rank == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is not None:
        print(f"{what:30}{' | '.join(everyone)}", flush=True)


if __name__ == "__main__":
    main()
