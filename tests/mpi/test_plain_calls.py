"""The fast path of small synchronous collectives: same results as the general path, also where ranks mix the paths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.backend.transfer.algorithms import Algorithm

pytestmark = [pytest.mark.each_mpi, pytest.mark.mpi(min_size=2)]

COUNT = 6
REDUCTIONS = {f"all_reduce {op}": getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "MIN", "MAX")}
OPERATIONS = [
    *REDUCTIONS, "reduce", "broadcast", "all_gather_single", "all_gather_single in place", "all_gather", "gather",
    "scatter", "reduce_scatter_single", "all_to_all_single",
]  # fmt: skip


def tensors_after(name: str, dtype: torch.dtype, *, is_strided: bool) -> list[torch.Tensor]:
    """Run an operation and return all its tensors; those that are not dense take the general path."""
    rank, size, gap = dist.get_rank(), dist.get_world_size(), 2 if is_strided else 1

    def numbers(count: int, first: int) -> torch.Tensor:
        values = torch.arange(count) % 7 + first + rank
        return torch.zeros(gap * count, dtype=dtype)[::gap].copy_(values)

    root, mine, blocks, received = size - 1, numbers(COUNT, 1), numbers(size * COUNT, 2), numbers(size * COUNT, 3)
    of_ranks = [numbers(COUNT, 10 * other) for other in range(size)]
    at_root = of_ranks if rank == root else None
    calls: dict[str, Callable[[], object]] = {
        "reduce": lambda: dist.reduce(mine, root),
        "broadcast": lambda: dist.broadcast(mine, root),
        "all_gather_single": lambda: dist.all_gather_into_tensor(received, mine),
        "all_gather_single in place": lambda: dist.all_gather_into_tensor(blocks, blocks[rank * COUNT :][:COUNT]),
        "all_gather": lambda: dist.all_gather(of_ranks, mine),
        "gather": lambda: dist.gather(mine, at_root, root),
        "scatter": lambda: dist.scatter(mine, at_root, root),
        "reduce_scatter_single": lambda: dist.reduce_scatter_tensor(mine, blocks),
        "all_to_all_single": lambda: dist.all_to_all_single(received, blocks),
    }
    if name in REDUCTIONS:
        dist.all_reduce(mine, REDUCTIONS[name])
    else:
        calls[name]()
    return [mine, blocks, received, *of_ranks]


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
    expected = tensors_after(name, dtype, is_strided=True)
    executor, prepared = dist.group.WORLD._executor, []  # type: ignore[union-attr]
    if is_by_mpi:
        monkeypatch.setattr(executor.algorithms, "select", lambda *_: Algorithm.MPI)
    submit = executor.submit
    monkeypatch.setattr(executor, "submit", lambda *args: prepared.append(args[0]) or submit(*args))
    is_general = world.rank in slow_ranks
    for _ in range(3):
        torch.testing.assert_close(tensors_after(name, dtype, is_strided=is_general), expected, rtol=0, atol=0)
    assert len(prepared) == (3 if is_general else 0)
