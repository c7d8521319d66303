"""The per-rank part of a checkpoint when a different number of ranks reads it."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from mpicomm.training import randomness, state
from mpicomm.training.logged_values import LoggedValues


@pytest.mark.parametrize("size", [1, 2, 5])
def test_losses_are_counted_once_on_another_number_of_ranks(size: int) -> None:
    before = randomness.states(torch.device("cpu"))
    owns = [{"losses": (1.5 * rank, rank), "logged": {"a": (2.0, rank)}, "random": before} for rank in range(4)]
    logged = [LoggedValues() for _ in range(size)]
    found = [types.SimpleNamespace(total=0.0, count=0) for _ in range(size)]
    drawn = []
    for rank, losses in enumerate(found):
        world = types.SimpleNamespace(rank=rank)
        parts: Any = types.SimpleNamespace(
            world=world, losses=losses, logged=logged[rank], position=state.Position(step=6)
        )
        state._share_out(owns, parts)
        drawn.append(torch.rand(()).item())
    randomness.restore(before, torch.device("cpu"))
    assert (sum(each.total for each in found), sum(each.count for each in found)) == (9.0, 6)
    assert [each.sums for each in logged] == [{"a": (8.0, 6)}, *[{}] * (size - 1)]
    assert len(set(drawn)) == size, "ranks have random numbers of their own"
