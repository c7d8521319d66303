"""Data of every kind that the operations accept, with different values on each rank, and their comparison."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

AMONG = ["all", "parity", "staged", "gloo"]
"""The groups of the tests: all ranks; the even or the odd ranks; all ranks, staged as on GPUs or over Gloo."""


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Batch:
    inputs: Any
    count: int
    rest: Any = None


@dataclasses.dataclass
class Shifted:
    """A dataclass whose constructor changes one field and sets another."""

    value: Any
    given: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.given = self.value
        self.value += 1


def nested(value: float) -> dict[str, Any]:
    return {
        "weight": torch.full((3, 2), value),
        "list": [torch.full((5,), value, dtype=torch.float64), int(value)],
        "pair": Pair(np.full((2,), value, dtype=np.float32), torch.tensor(int(value))),
        "batch": Batch(torch.full((2, 2), value, dtype=torch.bfloat16), int(value)),
        "ordered": collections.OrderedDict(b=torch.full((1,), value), a=float(value)),
        3: (),
        "nothing": None,
        "empty": torch.zeros(0, 4),
    }


KINDS: dict[str, Callable[[float], Any]] = {
    "tensor": lambda value: torch.full((4, 3), value),
    "strided": lambda value: torch.full((3, 4), value).t(),
    "bfloat16": lambda value: torch.full((4, 3), value, dtype=torch.bfloat16),
    "scalar tensor": torch.tensor,
    "array": lambda value: np.full((4, 2), value),
    "int array": lambda value: np.full((4, 2), int(value), dtype=np.int32),
    "array scalar": np.float32,
    "int": int,
    "float": float,
    "nested": nested,
    "many": lambda value: {f"p{index}": torch.full((index % 7,), value) for index in range(200)},
    "empty tensor": lambda value: torch.zeros(0, 3),
    "empty container": lambda value: {},
}


def same(got: Any, expected: Any) -> bool:
    """Return whether two values and all values in them are equal and of the same type."""
    if type(got) is not type(expected):
        return False
    if isinstance(got, torch.Tensor):
        return got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(_bits(got), _bits(expected))
    if isinstance(got, np.ndarray):
        return got.dtype == expected.dtype and got.shape == expected.shape and np.array_equal(got, expected)
    if isinstance(got, dict):
        return list(got) == list(expected) and all(same(got[key], expected[key]) for key in got)
    if isinstance(got, (list, tuple)):
        return len(got) == len(expected) and all(map(same, got, expected))
    if dataclasses.is_dataclass(got):
        return same(vars(got), vars(expected))
    return got == expected


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the content as bytes: torch cannot compare all dtypes."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def make(kind: str, value: float) -> Any:
    """Return data of a kind, filled with a value."""
    return KINDS[kind](float(value))


def averaged(kind: str, value: float) -> Any:
    """Return data of a kind, filled with a mean.

    Tensors and arrays of integers truncate the mean toward zero, Python numbers do not.
    """
    if kind == "int":
        return value
    made = make(kind, value)
    if kind == "nested":
        made["list"][1] = made["batch"].count = value
    return made
