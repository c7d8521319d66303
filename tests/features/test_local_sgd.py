"""Ranks train separately and average their models periodically, with the results of a list of models in one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from tests.features.problem import assert_same, batches, dense_model, loss_of, sgd, train

STEPS, TOGETHER, PERIOD = 8, 2, 3  # after TOGETHER steps the ranks train separately, and average every PERIOD steps


def average(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by the mean of all tensors."""
    mean = torch.stack([each.detach() for each in tensors]).mean(0)
    for each in tensors:
        each.detach().copy_(mean)


def average_gradients(models: Sequence[torch.nn.Module]) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        average([parameter.grad for parameter in parameters])


def average_models(models: Sequence[torch.nn.Module]) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        average(parameters)


def backward(models: Sequence[torch.nn.Module], samples: torch.Tensor) -> None:
    for model, own in zip(models, samples, strict=True):
        model.zero_grad()
        loss_of(model, own).backward()


def teams(size: int) -> list[list[int]]:
    """Return pairs of consecutive ranks; the last rank is alone if the number of ranks is odd."""
    return [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]


def test_post_local_sgd(world: mpicomm.World) -> None:
    """All ranks average their gradients at first, later only teams; all ranks average their models periodically."""
    data = batches(world, STEPS)
    models = [dense_model() for _ in range(world.size)]
    optimizers = [sgd(model) for model in models]
    for step, samples in enumerate(data):
        backward(models, samples)
        for team in [range(world.size)] if step < TOGETHER else teams(world.size):
            average_gradients([models[rank] for rank in team])
        for optimizer in optimizers:
            optimizer.step()
        if step >= TOGETHER and (step - TOGETHER) % PERIOD == 0:
            average_models(models)

    team, _ = dist.new_subgroups_by_enumeration(teams(world.size))
    parallel = DistributedDataParallel(dense_model())
    parallel.register_comm_hook(PostLocalSGDState(None, team, start_localSGD_iter=TOGETHER), post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=TOGETHER)
    optimizer = PostLocalSGDOptimizer(sgd(parallel), averager)
    train(parallel, optimizer, data[:, world.rank])
    assert_same(parallel.module, models[world.rank])
    dist.destroy_process_group(team)


@pytest.mark.mpi(min_size=2)  # torch would use the world as the group of a team of one rank
def test_hierarchy_of_averages(world: mpicomm.World) -> None:
    """Teams average their models every second step, all ranks every fourth step."""
    data = batches(world, STEPS)
    team_size = 2 if world.size % 2 == 0 and world.size > 2 else 1
    models = [dense_model() for _ in range(world.size)]
    optimizers = [sgd(model) for model in models]
    for step, samples in enumerate(data):
        backward(models, samples)
        for optimizer in optimizers:
            optimizer.step()
        members = world.size if step % 4 == 0 else team_size if step % 2 == 0 else 1
        for first in range(0, world.size, members):
            average_models(models[first : first + members])

    averager = HierarchicalModelAverager({2: team_size, 4: world.size})
    model = dense_model()
    optimizer = sgd(model)
    for samples in data[:, world.rank]:
        train(model, optimizer, samples[None])
        averager.average_parameters(model.parameters())
    assert_same(model, models[world.rank])
    dist.destroy_process_group(averager.period_process_group_dict[2])
