"""Randomly drawn data and arguments, equal on all ranks: a correct result or a clear error, never a hang."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpicomm
from tests.unit.test_pytree import CONTAINERS

OPERATIONS = ["all_reduce", "reduce", "broadcast", "gather", "all_gather", "reduce_scatter", "all_to_all", "scatter"]
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 7), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=3),
    st.sampled_from(["sum", "max", "node", "world", object()]),
)  # fmt: skip


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Return examples drawn on rank 0 (collective): two ranks with the same seed draw different examples."""
    found: list[Any] = []

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    if dist.get_rank() == 0:
        collect()
    packed = io.BytesIO()
    torch.save(found, packed)  # unlike pickle, it supports all dtypes
    objects = [packed.getvalue()]
    dist.broadcast_object_list(objects, 0)
    return torch.load(io.BytesIO(objects[0]), weights_only=False)


def test_any_arguments_are_right_or_refused_by_all(world: mpicomm.World) -> None:
    groups = st.one_of(st.none(), st.none(), st.none(), st.just("node"), ODD)  # most values of ODD are rejected
    calls = st.tuples(st.sampled_from(OPERATIONS), st.one_of(CONTAINERS, ODD), ODD, groups, st.booleans())
    for operation, data, second, group, is_async in drawn(calls, 100):
        try:
            result = getattr(mpicomm, operation)(data, second, group=group, async_op=is_async)
            if is_async:
                result.wait()
            refused = ""
        except (ValueError, TypeError, mpicomm.MpicommError) as error:
            refused = str(error) or "an error without a message"
        errors = mpicomm.all_gather_object(refused)
        assert len({bool(each) for each in errors}) == 1, (operation, data, second, errors)
        assert "an error without a message" not in errors
