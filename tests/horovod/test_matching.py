"""The ranks match tensors by name, and different arguments raise the same error on all ranks."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

import mpicomm.horovod as hvd
from mpicomm.horovod.process_sets import registry
from tests.time_limits import wait_until

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("started")]


def errors_of_all_ranks(call: Any) -> list[str]:
    """Return the messages of the errors that a call raises on the ranks."""
    import torch.distributed as dist

    with pytest.raises(hvd.HorovodInternalError) as caught:
        call()
    messages: list[Any] = [None] * hvd.size()
    dist.all_gather_object(messages, str(caught.value))
    return messages


def test_a_steady_step_in_any_order_costs_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = registry.engines[0]._negotiation._exchange
    lengths = {f"steady {index}": 3 + index for index in range(6)}
    order = random.Random(hvd.rank())

    def step() -> None:
        names = order.sample(sorted(lengths), len(lengths))
        tensors = {name: torch.full((lengths[name],), hvd.rank() + lengths[name]) for name in names}
        handles = {name: hvd.allreduce_async(tensor, name=name, op=hvd.Max) for name, tensor in tensors.items()}
        for name, handle in handles.items():
            assert hvd.synchronize(handle).tolist() == [hvd.size() - 1 + lengths[name]] * lengths[name]

    step()
    hvd.barrier()
    texts: list[str] = []
    original = exchange.all_gather_text
    monkeypatch.setattr(exchange, "all_gather_text", lambda text: texts.append(text) or original(text))
    for _ in range(20):
        step()
        hvd.barrier()
    assert texts == []


CASES = {
    "shape": (lambda rank: hvd.allreduce(torch.ones(3 + rank), name="case"), "the tensor shapes differ", "(3)", "(4)"),
    "dtype": (
        lambda rank: hvd.allreduce(torch.ones(3, dtype=(torch.int32, torch.float32)[rank > 0]), name="case"),
        "the data types differ",
        "torch.int32",
        "torch.float32",
    ),
    "op": (
        lambda rank: hvd.allreduce(torch.ones(3), name="case", op=(hvd.Sum, hvd.Max)[rank > 0]),
        "the reduction operations differ",
        "Sum",
        "Max",
    ),
    "factor": (
        lambda rank: hvd.allreduce(torch.ones(3), name="case", prescale_factor=1.0 + rank),
        "the prescale and postscale factors differ",
        "(1.0, 1.0)",
        "(2.0, 1.0)",
    ),
    "root": (lambda rank: hvd.broadcast(torch.ones(3), rank, name="case"), "the root ranks differ", "0", "1"),
    "broadcast": (
        lambda rank: hvd.broadcast(torch.ones(3 + rank), 0, name="case"),
        "the tensor shapes differ",
        "(3)",
        "(4)",
    ),
    "columns": (
        lambda rank: hvd.allgather(torch.ones(2, 3 + rank), name="case"),
        "the tensor shapes differ",
        "(any, 3)",
        "(any, 4)",
    ),
    "dimensions": (
        lambda rank: hvd.alltoall(torch.ones([2 * hvd.size()] * (1 + rank)), name="case"),
        "the tensor shapes differ",
        "(any)",
        "(any, ",
    ),
    "rows": (
        lambda rank: hvd.reducescatter(torch.ones(8 + rank), name="case"),
        "the tensor shapes differ",
        "(8)",
        "(9)",
    ),
    "number": (
        lambda rank: hvd.grouped_allreduce([torch.ones(2)] * (1 + rank), name="case"),
        "the numbers of tensors differ",
        "1",
        "2",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_the_same_error_on_all_ranks(case: str) -> None:
    call, *texts = CASES[case]
    messages = errors_of_all_ranks(lambda: call(hvd.rank()))
    assert set(messages) == {messages[0]}
    assert messages[0].startswith(f"{messages[0].split('.')[0]}.case: ")
    assert f"rank 0 has {texts[1]}, rank 1 has {texts[2]}" in messages[0]
    assert texts[0] in messages[0]
    assert messages[0].endswith("\nPass equal arguments under one name on all ranks.")
    # the name can be used again
    assert torch.equal(hvd.allreduce(torch.ones(4), name="case", op=hvd.Sum), torch.full((4,), float(hvd.size())))


def test_a_name_that_is_pending_is_an_error() -> None:
    first = hvd.allreduce_async(torch.ones(3), name="twice", op=hvd.Sum)
    with pytest.raises(ValueError, match=r"^allreduce.twice was submitted while an operation of this name is pending"):
        hvd.allreduce_async(torch.ones(3), name="twice")
    assert hvd.synchronize(first).tolist() == [hvd.size()] * 3
    assert hvd.allreduce(torch.ones(3), name="twice").tolist() == [1.0] * 3


def test_an_operation_completes_without_a_thread_that_waits() -> None:
    handle = hvd.allreduce_async(torch.ones(2), name="polled", op=hvd.Sum)
    wait_until(lambda: hvd.poll(handle), "the operation has completed")
    assert handle.result[0].tolist() == [hvd.size()] * 2


def test_sets_of_ranks_are_independent(parity: hvd.ProcessSet) -> None:
    ranks = parity.ranks
    assert parity.included()
    assert parity.size() == len(ranks)
    assert ranks[parity.rank()] == hvd.rank()
    for number in range(5 + 10 * (hvd.rank() % 2)):  # the sets make different numbers of calls
        value = torch.full((2,), float(hvd.rank() + number))
        expected = sum(rank + number for rank in ranks)
        assert hvd.allreduce(value, op=hvd.Sum, process_set=parity).tolist() == [expected] * 2
        assert hvd.broadcast(value, ranks[-1], process_set=parity).tolist() == [ranks[-1] + number] * 2
    hvd.barrier(process_set=parity)
    with pytest.raises(ValueError, match=f"root_rank must be one of the ranks .*, got {1 - hvd.rank() % 2}"):
        hvd.broadcast(torch.ones(1), 1 - hvd.rank() % 2, process_set=parity)


def test_invalid_sets(parity: hvd.ProcessSet) -> None:
    with pytest.raises(ValueError, match="already registered"):
        hvd.add_process_set(range(hvd.size()))
    with pytest.raises(ValueError, match="ranks must be different ranks from 0 to"):
        hvd.add_process_set([0, hvd.size()])
    with pytest.raises(ValueError, match="the process set is not registered"):
        hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))
    others = [rank for rank in range(hvd.size()) if rank not in parity.ranks]
    other = next(each for each in registry.sets.values() if each.ranks == others)
    with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not a member"):
        hvd.allreduce(torch.ones(1), process_set=other)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS")
        with pytest.raises(ValueError, match="Set HOROVOD_DYNAMIC_PROCESS_SETS=1"):
            hvd.add_process_set([0])


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_without_data_contribute_zeros(first: int) -> None:
    """Rank r makes r more calls than the first one; the others see zeros for it."""
    rank, size = hvd.rank(), hvd.size()
    extra = (rank - first) % size
    for number in range(extra):
        present = [other for other in range(size) if (other - first) % size > number]
        got = hvd.allreduce(torch.full((3,), float(rank + 1)), name=f"joined {number}", op=hvd.Sum)
        assert got.tolist() == [sum(other + 1 for other in present)] * 3
        averaged = hvd.grouped_allreduce([torch.full((2,), float(rank)), torch.ones(1)])
        assert averaged[0].tolist() == pytest.approx([sum(present) / size] * 2)
        assert averaged[1].tolist() == pytest.approx([len(present) / size])
    assert hvd.join() == (first - 1) % size
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def test_ranks_number_calls_without_a_name_anew_after_a_join() -> None:
    import torch.distributed as dist

    for _ in range(hvd.rank()):
        hvd.allreduce(torch.ones(1))
    hvd.join()
    names: list[Any] = [None] * hvd.size()
    dist.all_gather_object(names, registry.engines[0].next_name("allreduce"))
    assert names == [names[0]] * hvd.size()


def test_operations_without_zeros_fail_after_a_join() -> None:
    if hvd.rank() != 0:
        for call in (hvd.allgather, hvd.reducescatter, lambda tensor: hvd.broadcast(tensor, 1)):
            with pytest.raises(hvd.HorovodInternalError, match=r"is not supported while ranks \[0\] have joined"):
                call(torch.ones(hvd.size()))
    assert hvd.join() >= 0


def test_a_barrier_waits_for_all_ranks() -> None:
    last = hvd.size() - 1
    if hvd.rank() == last:
        time.sleep(0.3)
        start = time.time()
    hvd.barrier()
    end = time.time()
    ends = hvd.allgather(torch.tensor([end], dtype=torch.float64)).tolist()
    started = torch.tensor([start if hvd.rank() == last else 0.0], dtype=torch.float64)
    assert min(ends) >= hvd.broadcast(started, last).item()
