"""NCCL inside a group: NCCL transfers the CUDA tensors, MPI all other tensors. Ranks may share a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from tests.worlds import Group

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def group(groups: dict[str, Group], world: mpicomm.World) -> Iterator[Group]:
    """A group of all ranks with NCCL."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        pytest.skip("needs a GPU and NCCL")
    handle = dist.new_group(backend="mpicomm_nccl")
    yield Group(handle, world.rank, world.size, list(range(world.size)))
    dist.destroy_process_group(handle)


def test_each_device_has_its_own(group: Group, world: mpicomm.World) -> None:
    for device in (torch.device("cpu"), world.device):
        tensor = torch.full((1000,), float(group.rank), device=device)
        for is_async in (False, True):
            tensor.fill_(group.rank)
            work = dist.all_reduce(tensor, group=group.handle, async_op=is_async)
            if work is not None:
                work.wait()
            assert torch.equal(tensor, torch.full_like(tensor, sum(range(group.size))))


def test_messages(group: Group, world: mpicomm.World) -> None:
    before, after = group.ranks[group.rank - 1], group.ranks[(group.rank + 1) % group.size]
    for device in (torch.device("cpu"), world.device):
        mine, got = torch.full((1000,), float(group.rank), device=device), torch.empty(1000, device=device)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, after, group.handle), dist.P2POp(dist.irecv, got, before, group.handle)]
        )
        for work in works:
            work.wait()
        assert got[0].item() == (group.rank - 1) % group.size


def test_objects_barrier_and_parts(group: Group, world: mpicomm.World) -> None:
    gathered: list[object] = [None] * group.size
    dist.all_gather_object(gathered, group.rank, group=group.handle)
    assert gathered == list(range(group.size))
    dist.barrier(group.handle)
    part = dist.new_group(list(range(0, group.size, 2)), backend="mpicomm_nccl")
    if group.rank % 2 == 0:
        tensor = torch.ones(4, device=world.device)
        dist.all_reduce(tensor, group=part)
        assert tensor[0].item() == (group.size + 1) // 2
        dist.destroy_process_group(part)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp, offloaded"])
def test_training(group: Group, world: mpicomm.World, kind: str) -> None:
    samples = torch.randn(4 * group.size, 16, generator=torch.Generator().manual_seed(3)).to(world.device)

    def model() -> torch.nn.Module:
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))

    one, many = model().to(world.device), model()
    if kind == "ddp":
        many = DistributedDataParallel(many.to(world.device), process_group=group.handle)  # type: ignore[arg-type]
    else:
        mesh = dist.DeviceMesh.from_group(group.handle, "cuda")
        fully_shard(many, mesh=mesh, **({"offload_policy": CPUOffloadPolicy()} if "offloaded" in kind else {}))
    for each, batch in ((one, samples), (many, samples.chunk(group.size)[group.rank])):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(batch).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(many(samples), one(samples))
