"""A pipeline of stages on several ranks gives the losses and gradients of the unsplit model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, ScheduleZBVZeroBubble
from torch.nn.functional import mse_loss

import mpicomm
from tests.features.together import numbers

WIDTH, ROWS = 6, 3  # rows in a microbatch
CPU = torch.device("cpu")


def layers(count: int) -> list[torch.nn.Module]:
    """Return the stages of a model, equal on all ranks."""
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64), torch.nn.Tanh()) for _ in range(count)
    ]


class Problem:
    """The loss and gradients of the unsplit model, and the stages of the pipeline."""

    def __init__(self, stages: int, microbatches: int) -> None:
        self.stages = layers(stages)
        self.inputs = numbers(0, microbatches * ROWS, WIDTH)
        self.targets = numbers(1, microbatches * ROWS, WIDTH)
        self.whole = copy.deepcopy(self.stages)
        self.outputs = torch.nn.Sequential(*self.whole)(self.inputs)
        self.loss = mse_loss(self.outputs, self.targets)
        self.loss.backward()

    def assert_solved(self, stage: int) -> None:
        """Compare the gradients of one stage with those of the unsplit model."""
        for mine, theirs in zip(self.stages[stage].parameters(), self.whole[stage].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-11)

    def assert_end(self, outputs: torch.Tensor, losses: list[torch.Tensor]) -> None:
        """Compare the outputs and losses, which the rank with the last stage has."""
        torch.testing.assert_close(outputs, self.outputs, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(torch.stack(losses).mean(), self.loss, rtol=1e-9, atol=1e-11)


def run(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti, problem: Problem, stages: list[PipelineStage]
) -> None:
    """Run one step, and compare this rank's part of the results."""
    inputs = [problem.inputs] if any(stage.is_first for stage in stages) else []
    has_end = any(stage.is_last for stage in stages)
    losses: list[torch.Tensor] = []
    outputs = schedule.step(*inputs, target=problem.targets if has_end else None, losses=losses)
    if has_end:
        problem.assert_end(outputs, losses)
    for stage in stages:
        problem.assert_solved(stage.stage_index)


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("more", [0, 3], ids=["as-many-microbatches-as-ranks", "more-microbatches"])
def test_one_stage_on_each_rank(world: mpicomm.World, kind: type[PipelineScheduleSingle], more: int) -> None:
    microbatches = world.size + more
    problem = Problem(world.size, microbatches)
    stage = PipelineStage(problem.stages[world.rank], world.rank, world.size, CPU)
    run(kind(stage, microbatches, loss_fn=mse_loss), problem, [stage])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleZBVZeroBubble])
def test_two_stages_on_each_rank(world: mpicomm.World, kind: type[PipelineScheduleMulti]) -> None:
    """ScheduleInterleaved1F1B passes through the ranks twice in one direction, ScheduleZBVZeroBubble there and back."""
    count, microbatches = 2 * world.size, 2 * world.size
    second = count - 1 - world.rank if kind is ScheduleZBVZeroBubble else world.size + world.rank
    problem = Problem(count, microbatches)
    stages = [PipelineStage(problem.stages[index], index, count, CPU) for index in (world.rank, second)]
    run(kind(stages, microbatches, loss_fn=mse_loss), problem, stages)
