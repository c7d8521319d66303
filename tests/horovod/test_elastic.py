"""hvd.elastic: states and samplers. The loop that calls a function again is in tests/launch/test_horovod_scripts.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mpicomm
import mpicomm.horovod as hvd

pytestmark = pytest.mark.usefixtures("dynamic")

# -- state -------------------------------------------------------------------------------------------------------------


def state_of(rank: int, **others: Any) -> hvd.elastic.TorchState:
    """Return a state that depends on the rank, of a model, an optimizer with momentum, a sampler and an object."""
    torch.manual_seed(rank)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    sampler = hvd.elastic.ElasticSampler(range(100))
    sampler.record_batch(0, rank + 1)
    return hvd.elastic.TorchState(model, optimizer, sampler=sampler, history=[rank], **others)


def content(state: hvd.elastic.TorchState) -> list[Any]:
    return copy.deepcopy(
        [
            [each.tolist() for each in state.model.state_dict().values()],
            [each["momentum_buffer"].tolist() for each in state.optimizer.state_dict()["state"].values()],
            state.optimizer.param_groups[0]["lr"],
            state.sampler.state_dict(),
            state.history,
        ]
    )


def change(state: hvd.elastic.TorchState) -> None:
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.sampler.record_batch(1, 5)
    state.history.append(1)


def test_an_object_of_two_kinds_is_saved_once(world: mpicomm.World) -> None:
    class Both(nn.Linear, hvd.elastic.ElasticSampler):
        def __init__(self) -> None:
            nn.Linear.__init__(self, 2, 2)

    state = hvd.elastic.TorchState(Both())
    assert list(state._handlers) == ["model"]


def test_sync_sends_the_state_of_rank_0_to_all_ranks(world: mpicomm.World) -> None:
    state = state_of(world.rank)
    state.sync()
    assert content(state) == content(state_of(0))


def test_restore_returns_to_the_last_commit_every_time(world: mpicomm.World) -> None:
    state = state_of(world.rank)
    change(state)
    state.commit()
    committed = content(state)
    for _ in range(2):
        change(state)
        assert content(state) != committed
        state.restore()
        assert content(state) == committed


def test_restore_after_sync_returns_to_the_state_of_rank_0(world: mpicomm.World) -> None:
    state = state_of(world.rank)
    state.sync()
    change(state)
    state.restore()
    assert content(state) == content(state_of(0))


def test_another_model_can_be_assigned(world: mpicomm.World) -> None:
    state = state_of(world.rank)
    state.model = nn.Linear(1, 1)
    state.sync()
    assert all(torch.equal(each, hvd.broadcast(each, 0)) for each in state.model.parameters())


def test_a_restored_optimizer_can_train(world: mpicomm.World) -> None:
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model, optimizer)
    state.sync()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.synchronize()
        state.restore()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, hvd.broadcast(model.weight, 0))


# -- the sampler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_the_samples_that_are_left_are_divided_among_the_ranks(
    world: mpicomm.World, shuffle: bool, length: int
) -> None:
    sampler = hvd.elastic.ElasticSampler(range(length), shuffle=shuffle, seed=3)
    sampler.set_epoch(2)
    order = list(sampler.remaining_indices)
    assert sorted(order) == list(range(length))
    assert (order != sorted(order)) == (shuffle and length > 1)
    first = -(-length // world.size) // 2
    found = hvd.allgather_object(list(sampler))
    assert {len(each) for each in found} == {len(sampler)} == {-(-length // world.size)}
    assert set().union(*found) == set(range(length))
    sampler.record_batch(0, first)
    done = {index for each in found for index in each[:first]}
    sampler.load_state_dict(sampler.state_dict())
    left = hvd.allgather_object(list(sampler))
    assert set().union(*left) == set(range(length)) - done
    sampler.set_epoch(3)
    assert sorted(sampler.remaining_indices) == list(range(length))


def test_no_sample_is_left_after_an_epoch(world: mpicomm.World) -> None:
    sampler = hvd.elastic.ElasticSampler(range(5))
    sampler.record_batch(0, 5)
    sampler.reset()
    assert list(sampler) == []
    assert len(sampler) == 0
