"""Plain calls of the extension module: same results as the general path, also where ranks mix the paths."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import torch_internals
from mpicomm.backend import plain_calls
from mpicomm.backend.transfer.algorithms import Algorithm
from mpicomm.recorder import flight_recorder

pytestmark = [
    pytest.mark.each_mpi,
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(plain_calls.PlainCalls is None, reason="the extension module was not built"),
]

COUNT = 6
NEVER = 2**64 - 1
NEVER_PLAIN = ("all_reduce MIN", "all_reduce MAX")
NEVER_PLAIN_BY_MPI = ("all_gather", "gather", "scatter")
REDUCTIONS = {f"all_reduce {op}": getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "MIN", "MAX")}
OPERATIONS = [
    *REDUCTIONS, "reduce", "broadcast", "all_gather_single", "all_gather_single in place", "all_gather", "gather",
    "scatter", "reduce_scatter_single", "all_to_all_single",
]  # fmt: skip


class Subclass(torch.Tensor):
    pass


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
        executor.algorithms.plain.use([(NEVER, NEVER)] * 8)
    submit = executor.submit
    monkeypatch.setattr(executor, "submit", lambda *args: prepared.append(args[0]) or submit(*args))
    is_general = world.rank in slow_ranks
    try:
        for _ in range(3):
            torch.testing.assert_close(tensors_after(name, dtype, is_strided=is_general), expected, rtol=0, atol=0)
    finally:
        executor.algorithms.publish_to(executor.algorithms.plain)
    needs_conversion = is_by_mpi and ("AVG" in name or (dtype is torch.bfloat16 and "reduce" in name))
    is_general = is_general or name in NEVER_PLAIN or needs_conversion or (is_by_mpi and name in NEVER_PLAIN_BY_MPI)
    assert len(prepared) == (3 if is_general else 0)


def test_the_inputs_of_a_queued_call_stay_alive() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    source, output = torch.full((COUNT * size,), 1.0 + rank), torch.empty(COUNT)
    alive = weakref.ref(source)
    work = dist.reduce_scatter_tensor(output, source, async_op=True)
    del source
    assert alive() is not None
    work.wait()  # type: ignore[union-attr]
    assert bool((output == size * (size + 1) / 2).all())
    del work
    collected = alive()
    assert collected is None


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_each_call_is_recorded_with_its_own_line() -> None:
    """The distance of the program's frame differs between these calls of one operation."""
    tensor, received = torch.ones(1), torch.empty(dist.get_world_size())

    def nested() -> None:
        dist.all_gather_into_tensor(received, tensor)

    def direct() -> None:
        dist.group.WORLD.all_gather_single(received, tensor, torch_internals.AllgatherOptions())  # type: ignore[union-attr]

    for call in (nested, direct, nested, direct, direct, nested):
        call()
        operation = flight_recorder.last()
        assert operation is not None
        first = call.__code__.co_firstlineno
        assert operation.where == f"test_plain_calls.py:{first + 1} ({call.__name__})"
        assert (operation.name, operation.count, operation.peer) == ("all_gather", 1, None)
    exec(compile("dist.all_gather_into_tensor(received, tensor)", "other.py", "exec"), locals() | {"dist": dist})
    assert flight_recorder.last().where == "other.py:1"  # type: ignore[union-attr]


def test_numbers_of_calls_are_those_of_the_group() -> None:
    handle = dist.new_group()
    for count in range(1, 4):
        dist.all_reduce(torch.ones(1), group=handle)
        operation = flight_recorder.last()
        assert operation is not None
        assert operation.sequence == count == handle._get_sequence_number_for_group()
        assert operation.end is not None
        assert flight_recorder.running() == []
    dist.destroy_process_group(handle)


def test_arguments_that_do_not_qualify_are_left_to_the_general_path() -> None:
    plain, opts = dist.group.WORLD._plain, torch_internals.AllreduceOptions()  # type: ignore[union-attr]
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # the first call opens the shared memory
    work = plain.allreduce([tensor], opts)
    assert work is not None
    work.wait()
    for arguments in (
        (), ([tensor],), ([tensor], None), ([tensor], opts, 1), (tensor, opts), ((tensor,), opts), ([], opts),
        ([tensor, tensor], opts), ([None], opts), ([1.0], opts), ([tensor], torch_internals.BroadcastOptions()),
        ([torch.ones(2, device="meta")], opts), ([torch.ones(0)], opts), ([torch.ones(2, dtype=torch.complex64)], opts),
        ([torch.ones(2).to_sparse()], opts), ([torch.ones(4)[::2]], opts),
        ([torch.ones(1, dtype=torch.complex64).conj().imag], opts), ([torch.ones(2).as_subclass(Subclass)], opts),
    ):  # fmt: skip
        assert plain.allreduce(*arguments) is None
    with pytest.raises(TypeError):
        plain.allreduce([tensor], opts=opts)
    for wrong in (-1, dist.get_world_size(), 2**31 - 1):
        of_root = torch_internals.BroadcastOptions()
        of_root.rootRank = wrong
        assert plain.broadcast([tensor], of_root) is None


def test_no_memory_is_lost() -> None:
    tensor, received = torch.ones(4), [torch.empty(4) for _ in range(dist.get_world_size())]

    def call() -> None:
        for is_async in (False, True):
            for work in (
                dist.all_reduce(tensor, async_op=is_async),
                dist.all_gather(received, tensor, async_op=is_async),
            ):
                if work is not None:
                    work.wait()

    counts = []
    for _ in range(3):
        for _ in range(2 * flight_recorder.RING):
            call()
        gc.collect()
        counts.append((sys.getrefcount(tensor), sys.getrefcount(received[0]), sys.getrefcount(None) // 1000))
    assert counts[1] == counts[2]
