"""The fast path of small synchronous collectives: same results as the general path, also where ranks mix the paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.backend.transfer.algorithms import Algorithm

pytestmark = [pytest.mark.each_mpi, pytest.mark.mpi(min_size=2)]

COUNT = 6
Layout = Callable[[torch.Tensor], torch.Tensor]
Operation = Callable[[mpicomm.World, torch.dtype, Layout], tuple[Any, Any]]
"""Runs on tensors of this rank's layout; returns the result, and the expected result for inputs r + 1 of rank r."""


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that takes the general path."""
    wide = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    wide[::2] = tensor
    return wide[::2]


def _mine(world: mpicomm.World, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    return torch.full((count,), world.rank + 1, dtype=dtype)


def _of_all(world: mpicomm.World, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.full((COUNT,), rank + 1, dtype=dtype) for rank in range(world.size)]


def _numbered(world: mpicomm.World, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Return an input with a block for each rank: block b of rank r holds 10 * r + b."""
    return torch.tensor([10 * rank + block for block in range(world.size) for _ in range(COUNT)], dtype=dtype)


def _reduced(world: mpicomm.World, op: Any) -> float:
    size = world.size
    return {"SUM": size * (size + 1) / 2, "AVG": (size + 1) / 2, "MIN": 1.0, "MAX": float(size)}[op]


def _all_reduce(op: str) -> Operation:
    def run(world: mpicomm.World, dtype: torch.dtype, layout: Layout) -> tuple[Any, Any]:
        tensor = layout(_mine(world, dtype))
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        return tensor, torch.full((COUNT,), _reduced(world, op)).to(dtype)

    return run


def _reduce(world: mpicomm.World, dtype: torch.dtype, layout: Layout) -> tuple[Any, Any]:
    root = world.size - 1
    tensor = layout(_mine(world, dtype))
    dist.reduce(tensor, root)
    return tensor, torch.full((COUNT,), _reduced(world, "SUM") if world.rank == root else world.rank + 1).to(dtype)


def _broadcast(world: mpicomm.World, dtype: torch.dtype, layout: Layout) -> tuple[Any, Any]:
    tensor = layout(_mine(world, dtype))
    dist.broadcast(tensor, world.size - 1)
    return tensor, torch.full((COUNT,), world.size, dtype=dtype)


def _all_gather_single(world: mpicomm.World, dtype: torch.dtype, layout: Layout) -> tuple[Any, Any]:
    output = layout(torch.zeros(world.size * COUNT, dtype=dtype))
    dist.all_gather_into_tensor(output, layout(_mine(world, dtype)))
    return output, torch.cat(_of_all(world, dtype))


def _all_gather_in_place(world: mpicomm.World, dtype: torch.dtype, layout: Layout) -> tuple[Any, Any]:
    output = layout(torch.zeros(world.size * COUNT, dtype=dtype))
    mine = output[world.rank * COUNT : (world.rank + 1) * COUNT]
    mine.fill_(world.rank + 1)
    dist.all_gather_into_tensor(output, mine)
    return output, torch.cat(_of_all(world, dtype))


def _all_gather(world: mpicomm.World, dtype: torch.dtype, layout: Layout) -> tuple[Any, Any]:
    outputs = [layout(torch.zeros(COUNT, dtype=dtype)) for _ in range(world.size)]
    dist.all_gather(outputs, layout(_mine(world, dtype)))
    return torch.cat(outputs), torch.cat(_of_all(world, dtype))


def _gather(world: mpicomm.World, dtype: torch.dtype, layout: Layout) -> tuple[Any, Any]:
    root, outputs = world.size - 1, []
    if world.rank == root:
        outputs = [layout(torch.zeros(COUNT, dtype=dtype)) for _ in range(world.size)]
    dist.gather(layout(_mine(world, dtype)), outputs or None, root)
    return torch.cat(outputs or [torch.zeros(0)]), torch.cat(_of_all(world, dtype) if outputs else [torch.zeros(0)])


def _scatter(world: mpicomm.World, dtype: torch.dtype, layout: Layout) -> tuple[Any, Any]:
    root, output = world.size - 1, layout(torch.zeros(COUNT, dtype=dtype))
    dist.scatter(output, [layout(each) for each in _of_all(world, dtype)] if world.rank == root else None, root)
    return output, _mine(world, dtype)


def _reduce_scatter(world: mpicomm.World, dtype: torch.dtype, layout: Layout) -> tuple[Any, Any]:
    output = layout(torch.zeros(COUNT, dtype=dtype))
    dist.reduce_scatter_tensor(output, layout(_numbered(world, dtype, world.rank)))
    expected = sum(10 * rank + world.rank for rank in range(world.size))
    return output, torch.full((COUNT,), expected).to(dtype)


def _all_to_all(world: mpicomm.World, dtype: torch.dtype, layout: Layout) -> tuple[Any, Any]:
    output = layout(torch.zeros(world.size * COUNT, dtype=dtype))
    dist.all_to_all_single(output, layout(_numbered(world, dtype, world.rank)))
    expected = [10 * rank + world.rank for rank in range(world.size) for _ in range(COUNT)]
    return output, torch.tensor(expected, dtype=dtype)


OPERATIONS: dict[str, Operation] = {
    **{f"all_reduce {op}": _all_reduce(op) for op in ("SUM", "AVG", "MIN", "MAX")},
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather_single": _all_gather_single,
    "all_gather_single in place": _all_gather_in_place,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("slow_ranks", "is_by_mpi"),
    [((), False), ((), True), ((0,), False), ((1,), False)],
    ids=["fast", "fast by MPI", "rank 0 general", "rank 1 general"],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_do_not_depend_on_the_path(
    world: mpicomm.World,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    slow_ranks: tuple[int, ...],
    is_by_mpi: bool,
    dtype: torch.dtype,
) -> None:
    executor, prepared = dist.group.WORLD._executor, []  # type: ignore[union-attr]
    if is_by_mpi:
        monkeypatch.setattr(executor.algorithms, "select", lambda *_: Algorithm.MPI)
    submit = executor.submit
    monkeypatch.setattr(executor, "submit", lambda *args: prepared.append(args[0]) or submit(*args))
    is_general = world.rank in slow_ranks
    for _ in range(3):
        result, expected = OPERATIONS[name](world, dtype, strided if is_general else dense)
        assert torch.equal(result, expected)
    assert len(prepared) == (3 if is_general else 0)
