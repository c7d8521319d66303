"""Gradients of operations: `gradcheck` across ranks, on a function of the inputs of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from tests.worlds import Group

Operation = Callable[[torch.Tensor], torch.Tensor]


class OfRanks(torch.autograd.Function):
    """An operation as a function of one process: from the inputs of all ranks, one per row, to the outputs of all."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, inputs: torch.Tensor) -> torch.Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        with torch.enable_grad():
            mine = inputs[rank].detach().requires_grad_()
            output = operation(mine)
        ctx.mine, ctx.output = mine, output
        rows = [torch.empty_like(output) for _ in range(size)]
        dist.all_gather(rows, output.detach())
        return torch.stack(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        rank, size = dist.get_rank(), dist.get_world_size()
        ctx.mine.grad = None
        ctx.output.backward(gradient[rank], retain_graph=True)
        rows = [torch.empty_like(ctx.mine.grad) for _ in range(size)]
        dist.all_gather(rows, ctx.mine.grad)
        return None, torch.stack(rows)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    return mpicomm.sendrecv(tensor * 2, (rank + 1) % size, (rank - 1) % size)


def in_a_container(tensor: torch.Tensor) -> torch.Tensor:
    got = mpicomm.all_reduce({"a": tensor[:2] * 3, "b": [tensor[2:].square()], "count": 1})
    return torch.cat([got["a"], got["b"][0]])


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack(mpicomm.all_gather(tensor.sin())).cumsum(0)


def broadcast(tensor: torch.Tensor) -> torch.Tensor:
    last = dist.get_world_size() - 1
    received = mpicomm.broadcast(tensor.square() if dist.get_rank() == last else None, last)
    return received * tensor


def exchanged(tensor: torch.Tensor) -> torch.Tensor:
    size = dist.get_world_size()
    return torch.stack(mpicomm.all_to_all([(rank + 1) * tensor for rank in range(size)])).prod(0)


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    return mpicomm.reduce_scatter(tensor.repeat(dist.get_world_size(), 1).exp())[0]


def averaged(tensor: torch.Tensor) -> torch.Tensor:
    return mpicomm.reduce_scatter(tensor.repeat(dist.get_world_size(), 1), "mean")[0]


def in_the_background(tensor: torch.Tensor) -> torch.Tensor:
    return mpicomm.all_reduce(tensor.tanh(), "mean", async_op=True).wait()


OPERATIONS: dict[str, Operation] = {
    "all_reduce sum": mpicomm.all_reduce,
    "all_reduce mean": lambda tensor: mpicomm.all_reduce(tensor, "mean"),
    "in a container": in_a_container,
    "in the background": in_the_background,
    "broadcast": broadcast,
    "all_gather": gathered,
    "reduce_scatter sum": scattered,
    "reduce_scatter mean": averaged,
    "all_to_all": exchanged,
    "sendrecv": shifted,
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradcheck(world: mpicomm.World, name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(world.size, 4, dtype=dtype, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: OfRanks.apply(OPERATIONS[name], each), (inputs,), nondet_tol=0.0)


def test_operations_that_are_not_differentiable_have_no_gradient(world: mpicomm.World) -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert not mpicomm.all_reduce(tensor, "max").requires_grad
    assert not mpicomm.all_reduce(tensor.detach()).requires_grad
    with torch.no_grad():
        assert not mpicomm.all_reduce(tensor).requires_grad
        assert not mpicomm.broadcast(tensor if world.rank == 0 else None).requires_grad
        handles = [
            mpicomm.all_gather(tensor, async_op=True),
            mpicomm.all_to_all([tensor] * world.size, async_op=True),
            mpicomm.broadcast([tensor] if world.rank == 0 else None, async_op=True),
        ]
    for each in mpicomm.wait_all(handles):  # their last steps run on a thread of mpicomm
        assert not each[0].requires_grad
    got = mpicomm.gather(tensor, 0)
    assert got is None or not got[0].requires_grad
    assert not mpicomm.scatter([tensor] * world.size if world.rank == 0 else None).requires_grad


@pytest.mark.mpi(min_size=2)
def test_a_message_that_is_sent_without_gradients_has_none(world: mpicomm.World) -> None:
    if world.rank == 0:
        with torch.no_grad():
            assert mpicomm.send(torch.ones(3, requires_grad=True), 1) is None
    elif world.rank == 1:
        assert not mpicomm.recv(0).requires_grad


@pytest.mark.mpi(min_size=2)
def test_a_broadcast_to_ranks_that_want_no_gradient(world: mpicomm.World) -> None:
    """These ranks call it before rank 0, so that its last step runs later, on another thread."""
    tensor = torch.ones(3, requires_grad=True)
    if world.rank == 0:
        for rank in range(1, world.size):
            mpicomm.recv(rank)
        assert mpicomm.broadcast(tensor, async_op=True).wait().requires_grad
    else:
        with torch.no_grad():
            handle = mpicomm.broadcast(async_op=True)
        mpicomm.send(world.rank, 0)
        assert not handle.wait().requires_grad


def test_the_gradient_of_a_broadcast_in_a_group(groups: dict[str, Group]) -> None:
    """`src` is a rank within the group, forward and backward."""
    group = groups["parity"]
    src = group.size - 1
    mine = torch.full((2,), 3.0, requires_grad=True)
    received = mpicomm.broadcast(mine if group.rank == src else None, src, group=group.handle)
    ((group.rank + 1) * received).sum().backward()
    total = group.size * (group.size + 1) / 2
    assert mine.grad is None if group.rank != src else mine.grad.tolist() == [total] * 2


def test_whole_numbers_travel_beside_gradients(world: mpicomm.World) -> None:
    mine = torch.ones(2, requires_grad=True)
    got = mpicomm.all_gather({"x": mine, "n": torch.tensor([world.rank])})
    assert [each["n"].item() for each in got] == list(range(world.size))
    assert all(each["x"].requires_grad and not each["n"].requires_grad for each in got)
    sum(each["x"].sum() for each in got).backward()
    assert mine.grad.tolist() == [world.size] * 2


def test_gradients_of_gradients(world: mpicomm.World) -> None:
    tensor = torch.full((2,), float(world.rank + 1), dtype=torch.float64, requires_grad=True)
    total = mpicomm.all_reduce(tensor.pow(3))
    (first,) = torch.autograd.grad(total.sum(), tensor, create_graph=True)
    assert torch.allclose(first, 3 * world.size * tensor.square())
    (second,) = torch.autograd.grad(first.sum(), tensor)
    assert torch.allclose(second, 6.0 * world.size * tensor)


def test_the_backward_pass_follows_the_order_of_the_calls(world: mpicomm.World) -> None:
    """Steps run on other threads, where autograd has separate counters; gradients of equal shapes could be confused."""
    for number in range(40):
        x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        if (number + world.rank) % 2:
            time.sleep(2e-4)
        a = mpicomm.all_reduce(x, async_op=True).wait() if number % 3 else mpicomm.all_reduce(x)
        b = mpicomm.all_reduce(y, async_op=True).wait()
        (2 * a + 3 * b).sum().backward()
        assert (x.grad.item(), y.grad.item()) == (2 * world.size, 3 * world.size)


@pytest.mark.mpi(min_size=2)
def test_gradients_are_not_taken_for_messages(world: mpicomm.World) -> None:
    if world.rank == 0:
        x = torch.ones(2, requires_grad=True)
        token = mpicomm.send(x, 1)
        pending = mpicomm.irecv(1)
        token.backward()
        assert x.grad.tolist() == [3, 3]
        assert pending.wait() == 7
    elif world.rank == 1:
        (3 * mpicomm.recv(0)).sum().backward()
        mpicomm.send(7, 0)


@pytest.mark.mpi(min_size=2)
def test_an_exchange_where_one_rank_has_a_gradient(world: mpicomm.World) -> None:
    other = world.rank ^ 1
    if other < world.size:
        mine = torch.full((2,), 1.0 + world.rank, requires_grad=world.rank % 2 == 0)
        got = mpicomm.sendrecv(mine, other)
        assert got.tolist() == [1.0 + other] * 2
        (5 * got).sum().backward()
        assert mine.grad is None if world.rank % 2 else mine.grad.tolist() == [5, 5]
        assert mpicomm.sendrecv(42 + world.rank, other) == 42 + other


def test_all_to_all_where_one_rank_has_a_gradient(world: mpicomm.World) -> None:
    mine = torch.ones(2, requires_grad=world.rank == 0)
    got = mpicomm.all_to_all([mine * 2] * world.size)
    sum(each.sum() for each in got).backward()
    assert mine.grad is None if world.rank else mine.grad.tolist() == [2 * world.size] * 2


def test_results_may_be_written_into(world: mpicomm.World) -> None:
    weight = torch.ones(2, requires_grad=True)
    total = mpicomm.all_reduce(weight)
    total += 1
    parts = mpicomm.all_gather(weight)
    parts[-1] += 1
    plain = mpicomm.all_reduce({"a": torch.ones(2), "b": torch.ones(2, 1)})
    plain["a"].mul_(weight)
    plain["b"].add_(1)
    given = torch.ones(3)
    received = mpicomm.broadcast(given if world.rank == 0 else None)
    received += 1
    assert given.tolist() == [1, 1, 1]
    (total.sum() + sum(each.sum() for each in parts) + plain["a"].sum()).backward()
    assert weight.grad.tolist() == [2.0 * world.size + world.size] * 2  # from the sum, the parts and the product
