"""`assert_equal_on_all_ranks`: equal values pass; an error names the path, the ranks and their values."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch

import mpicomm
from mpicomm.testing import assert_equal_on_all_ranks


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    name: str


def test_equal_values(world: mpicomm.World) -> None:
    is_last = world.rank == world.size - 1
    zero = -0.0 if is_last else 0.0
    nan = np.array([0x7FC00000 + is_last], np.uint32).view(np.float32)  # two of the bit patterns of NaN
    keys = reversed("abc") if is_last else "abc"
    assert_equal_on_all_ranks(
        {
            "tensors": [torch.tensor([1.0, zero, float("nan")]), torch.arange(3), torch.ones(2, dtype=torch.bfloat16)],
            "NaN": (nan, torch.from_numpy(nan), float("nan"), torch.tensor(complex(zero, 1))),
            "arrays": [np.full((3, 4), zero), np.array(["a", "b"]), np.float32(2), np.zeros((0, 3)), torch.zeros(0)],
            "plain": [None, 1, 2.5, "text", b"bytes", {"a", "b"}, torch.float32, torch.device("cpu")],
            "dataclass": Point(torch.ones(2), "p"),
            "order of keys": dict.fromkeys(keys, 1),
            3: torch.ones(3).to_sparse().to_dense().t(),
        }
    )


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("equal", "different", "message"),
    [
        (0.5, 0.25, "value\n    RANKS: 0.5 (float)\n    rank 1: 0.25 (float)"),
        (1, True, "value\n    RANKS: 1 (int)\n    rank 1: True (bool)"),
        ({"a": [1, 2]}, {"a": [1]}, "value['a']\n    RANKS: a list with 2 items\n    rank 1: a list with 1 items"),
        ({"a": 1}, {"b": 1}, "value\n    RANKS: a dict with the keys 'a'\n    rank 1: a dict with the keys 'b'"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "value, int64[2]\n    RANKS: [1, 2]\n    rank 1: [1, 3]"),
        (torch.ones(2), torch.ones(1), "value\n    RANKS: float32[2] [1.0, 1.0]\n    rank 1: float32[1] [1.0]"),
        (np.ones(2), torch.ones(2), "value\n    RANKS: numpy float64[2] [1.0, 1.0]\n    rank 1: float32[2] [1.0, 1.0]"),
        (
            {"a": Point(torch.ones(5, 20), "p"), "b": "same"},
            {"a": Point(torch.ones(5, 20).index_fill(1, torch.tensor(3), 7.0), "p"), "b": "same"},
            "value['a'].x, float32[5, 20], first at [0, 3]\n"  # noqa: ISC004
            "    RANKS: 1.0\n    rank 1: 7.0 (5 elements differ from rank 0)",
        ),
    ],
)
def test_a_value_that_differs_on_rank_1(world: mpicomm.World, equal: Any, different: Any, message: str) -> None:
    others = [rank for rank in range(world.size) if rank != 1]
    ranks = "rank 0" if world.size == 2 else f"ranks {', '.join(map(str, others[:3]))}"
    if world.size > 4:
        ranks = f"ranks 0, 2-{world.size - 1}"
    expected = "1 value differs between the ranks:\n  " + message.replace("RANKS", ranks)
    with pytest.raises(AssertionError, match=f"^{re.escape(expected)}$"):
        assert_equal_on_all_ranks(different if world.rank == 1 else equal)


def test_a_value_that_cannot_be_compared_on_one_rank(world: mpicomm.World) -> None:
    last = world.size - 1
    with pytest.raises(TypeError, match=f"on rank {last}: objects of object cannot be compared"):
        assert_equal_on_all_ranks([object() if world.rank == last else 1])
    with pytest.raises(TypeError, match=f"on rank {last}: expected a dense tensor"):
        assert_equal_on_all_ranks({"a": torch.eye(2).to_sparse() if world.rank == last else torch.eye(2)})


def test_only_the_ranks_of_the_group_are_compared(world: mpicomm.World, new_group: Any) -> None:
    group = new_group([0])
    if world.rank == 0:
        assert_equal_on_all_ranks(world.rank, group=group)
