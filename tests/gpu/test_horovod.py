"""Horovod's API on GPU tensors: values, streams of the caller and of the engine, and training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import mpicomm
import mpicomm.horovod as hvd

COUNT = 5000


@pytest.fixture(autouse=True, scope="module")
def _started(world: mpicomm.World) -> Iterator[None]:
    if world.device.type == "cpu":
        pytest.skip("needs a GPU")
    hvd.init()
    yield
    hvd.shutdown()


def of_rank(rank: int, device: torch.device, count: int = COUNT) -> torch.Tensor:
    return (torch.arange(count, device=device) % 7 + rank).float()


def test_tensors_are_fused_and_arrive_late(world: mpicomm.World) -> None:
    """The inputs are written by the caller's stream after the submission of earlier ones, and dropped at once."""
    handles = [
        hvd.allreduce_async(of_rank(world.rank + number, world.device), op=hvd.Sum, name=f"late.{number}")
        for number in range(20)
    ]
    for number, handle in enumerate(handles):
        expected = sum(of_rank(rank + number, torch.device("cpu")) for rank in range(world.size))
        assert torch.equal(hvd.synchronize(handle).cpu(), expected)


def test_results_are_in_order_on_the_stream_of_the_caller(world: mpicomm.World) -> None:
    tensor = of_rank(world.rank, world.device)
    for _ in range(10):
        hvd.allreduce_(tensor, op=hvd.Average, name="in place")
        tensor += world.rank - (world.size - 1) / 2
    expected = of_rank(world.rank, torch.device("cpu"))
    assert torch.allclose(tensor.cpu(), expected)


def test_other_operations(world: mpicomm.World) -> None:
    device, size = world.device, world.size
    own = of_rank(world.rank, device, 4 * size)
    gathered = hvd.allgather(own[: world.rank + 1], name="rows")
    assert torch.equal(
        gathered.cpu(), torch.cat([of_rank(rank, torch.device("cpu"), rank + 1) for rank in range(size)])
    )
    assert torch.equal(hvd.broadcast(own, root_rank=size - 1).cpu(), of_rank(size - 1, torch.device("cpu"), 4 * size))
    splits = torch.full((size,), 4, dtype=torch.int32, device=device)
    received, counts = hvd.alltoall(own, splits=splits)
    part = slice(4 * world.rank, 4 * world.rank + 4)
    expected = torch.cat([of_rank(rank, torch.device("cpu"), 4 * size)[part] for rank in range(size)])
    assert torch.equal(received.cpu(), expected)
    assert counts.tolist() == [4] * size
    share = hvd.reducescatter(own, op=hvd.Sum)
    total = sum(of_rank(rank, torch.device("cpu"), 4 * size) for rank in range(size))
    assert torch.equal(share.cpu(), total[part])


def test_an_optimizer_trains_as_one_process_would(world: mpicomm.World) -> None:
    samples = torch.randn(4 * world.size, 16, generator=torch.Generator().manual_seed(3))

    def train(device: torch.device, batch: torch.Tensor, *, is_distributed: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if is_distributed:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(batch.to(device)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    alone = train(torch.device("cpu"), samples, is_distributed=False)
    together = train(world.device, samples.chunk(world.size)[world.rank], is_distributed=True)
    for found, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_rank_that_has_joined_contributes_zeros_on_the_device(world: mpicomm.World) -> None:
    total = None
    if world.rank:
        total = hvd.allreduce(of_rank(1, world.device), op=hvd.Sum, name="after a join")
    hvd.join()
    expected = (world.size - 1) * of_rank(1, torch.device("cpu"))
    assert total is None or torch.equal(total.cpu(), expected)
