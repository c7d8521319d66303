"""What the ranks of a new world agree on: who has the newest state of a run, and who holds which shards."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from mpicomm.errors import TrainingError
from mpicomm.training import checkpoint, newest_state, parallel, randomness, shard_replicas
from mpicomm.training.newest_state import Failure, RankState
from mpicomm.training.shard_replicas import HeldShards
from mpicomm.training.state import Position

FAILURE = Failure((2,), ("alpha",), "killed by signal 9", 70.0)


def rank_state(*progress: int, at: float | None = None, has_joined: bool = False, trainer: int = 0) -> RankState:
    return RankState(trainer, progress or None, at, (FAILURE,) if progress else (), has_joined)


def test_a_rank_that_has_completed_the_step_sends_it_to_the_others() -> None:
    newest = newest_state.find([rank_state(1, 7), rank_state(1, 8), rank_state(1, 8), rank_state(1, 7)])
    assert (newest.source, newest.ranks_without) == (1, (0, 3))


def test_nothing_is_sent_if_all_ranks_have_the_same_state() -> None:
    newest = newest_state.find([rank_state(1, 7)] * 3)
    assert (newest.source, newest.ranks_without, newest.joined) == (0, (), ())


def test_a_spare_gets_the_state_also_in_the_place_of_rank_0() -> None:
    newest = newest_state.find([rank_state(has_joined=True), rank_state(1, 7), rank_state(1, 7)])
    assert (newest.source, newest.ranks_without, newest.joined) == (1, (0,), (0,))


def test_a_new_run_takes_the_parameters_of_rank_0() -> None:
    newest = newest_state.find([rank_state()] * 3)
    assert (newest.source, newest.ranks_without) == (0, (1, 2))


def test_an_evaluated_epoch_is_newer_than_its_last_step() -> None:
    position = Position()
    position.advance(10)
    progress = [position.progress]
    position.end_epoch(is_evaluated=False)
    progress.append(position.progress)
    position.add_evaluation({"eval_loss": 1.0})
    progress.append(position.progress)
    position.advance(10)
    progress.append(position.progress)
    assert progress == sorted(progress)
    assert len(set(progress)) == 4


def test_a_spare_in_another_trainer_is_an_error_on_all_ranks() -> None:
    with pytest.raises(TrainingError, match=r"(?s)trainer 1 .* in trainer 3.*one Trainer") as caught:
        newest_state.find([rank_state(1, 7, trainer=2), rank_state(has_joined=True)])
    assert caught.value.is_on_all_ranks


def test_a_recovery_has_the_failures_of_the_source_and_the_time_of_its_last_step() -> None:
    position = Position(step=7)
    recovery = newest_state.find([rank_state(has_joined=True), rank_state(1, 7, at=60.0)]).recovery(position, 2)
    position.advance(3)
    assert (recovery.position.step, recovery.last_step_at, recovery.joined) == (7, 60.0, (0,))
    assert recovery.describe(0.25) == (
        "rank 2 on alpha failed: killed by signal 9; continued from step 7 on 2 ranks, 1 of them spares, after 0.25 s "
        "without a step"
    )
    assert newest_state.find([rank_state()]).recovery(position, 1) is None


def test_without_a_step_the_gap_begins_with_the_failure() -> None:
    recovery = newest_state.find([rank_state(0, 0)]).recovery(Position(), 1)
    assert recovery.last_step_at == FAILURE.detected_at


# -- shards ------------------------------------------------------------------------------------------------------------


def held(version: tuple[int, int], size: int, *ranks: int) -> tuple[HeldShards, ...]:
    return (HeldShards(version, ranks, size),)


def test_the_next_rank_holds_the_shard_of_a_failed_rank() -> None:
    # Rank r of four held the shards r and r - 1; rank 2 has failed, and the others have been renumbered.
    found = [held((0, 20), 4, 0, 3), held((0, 20), 4, 1, 0), held((0, 20), 4, 3, 2)]
    assert shard_replicas.newest_complete(found) == ((0, 20), [0, 1, 2, 0])


def test_two_failed_neighbours_leave_no_complete_version() -> None:
    assert shard_replicas.newest_complete([held((0, 20), 4, 0, 3), held((0, 20), 4, 3, 2)]) == (None, [])


def test_an_interrupted_refresh_leaves_the_earlier_version() -> None:
    both = (*held((0, 10), 3, 0, 2), *held((0, 20), 3, 0, 2))
    assert shard_replicas.newest_complete([both, held((0, 10), 3, 1, 0)])[0] == (0, 10)
    assert shard_replicas.newest_complete([both, held((0, 20), 3, 1, 0)])[0] == (0, 20)


def test_a_version_of_a_later_world_is_newer_at_an_earlier_step() -> None:
    assert shard_replicas.newest_complete([(*held((0, 20), 1, 0), *held((1, 18), 1, 0))])[0] == (1, 18)


# -- the parts of a transfer -------------------------------------------------------------------------------------------


def test_packed_objects_are_small_and_keep_their_tensors() -> None:
    large = torch.arange(100_000.0)
    content = {"a": [large, (1, "text")], "b": {"c": nn.Parameter(torch.ones(3)), "d": None}}
    packed, tensors = checkpoint.pack(content)
    assert len(packed) < 1000
    assert tensors[0].data_ptr() == large.data_ptr()
    found = checkpoint.unpack(packed, [each.clone() for each in tensors])
    assert torch.equal(found["a"][0], large)
    assert (found["a"][1], found["b"]["c"].tolist(), found["b"]["d"]) == ((1, "text"), [1.0, 1.0, 1.0], None)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def test_seeds_depend_on_the_point_the_number_the_rank_and_the_seed() -> None:
    places = [("step", 0, 7, 0), ("step", 0, 7, 1), ("step", 0, 8, 0), ("step", 1, 7, 0), ("epoch", 0, 7, 0)]
    found = []
    for place in (*places, *places):
        randomness.seed_at(*place)
        found.append(drawn())
    assert found[: len(places)] == found[len(places) :]
    for values in zip(*found, strict=True):
        assert len(set(values)) == len(places)


def test_the_template_of_a_replicated_model_is_the_model() -> None:
    model = nn.Linear(2, 2)
    template = parallel.ModelTemplate(model, copies=False)
    assert template.make(torch.device("cpu")) is model
    assert template.make(torch.device("cpu")) is model


def test_the_template_of_a_sharded_model_is_a_copy_without_values() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    model.register_buffer("table", torch.arange(3.0), persistent=False)
    expected = copy.deepcopy(dict(model.named_buffers()))
    template = parallel.ModelTemplate(model, copies=True)
    assert template.make(torch.device("cpu")) is model
    again = template.make(torch.device("cpu"))
    assert again is not model
    shapes = [(name, each.shape, each.requires_grad) for name, each in model.named_parameters()]
    assert [(name, each.shape, each.requires_grad) for name, each in again.named_parameters()] == shapes
    assert {each.device.type for each in again.parameters()} == {"cpu"}
    assert not {id(each) for each in model.parameters()} & {id(each) for each in again.parameters()}
    for name, each in again.named_buffers():
        assert torch.equal(each, expected[name])
