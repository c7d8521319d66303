"""The methods of a process group that follow from the table of operations: signatures, options, errors."""

from __future__ import annotations

import datetime
import inspect
import sys
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mpicomm import torch_internals
from mpicomm.backend.composite import CompositeProcessGroup
from mpicomm.backend.operations import TABLE
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.collective_ops import collectives

ONES, OTHER = torch.ones(2), torch.zeros(2)
SECONDS = datetime.timedelta(seconds=7)
MAX = dist.ReduceOp.MAX
OPERATIONS = {operation.method: operation for operation in TABLE}


def test_a_barrier_that_returns_no_work() -> None:
    """NCCL and XCCL return None for a synchronous operation."""
    group = mock.Mock()
    group.barrier.return_value = None
    collectives._barrier_within(group, None)
    assert not group.barrier.mock_calls[0].args[0].asyncOp


def test_a_tensor_is_complete_while_another_thread_imports_the_functional_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "torch.distributed._functional_collectives"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert torch_internals.wait_if_pending(ONES) is ONES


def bind(method: str, *args: Any, **keywords: Any) -> tuple[dict[str, Any], Any]:
    return OPERATIONS[method].bind(args, keywords)


@pytest.mark.parametrize(
    ("method", "args", "keywords", "fields"),
    [
        ("allreduce", (ONES, MAX), {}, {"reduceOp": MAX}),
        ("allreduce", (ONES,), {"opts": MAX}, {"reduceOp": MAX}),
        ("allreduce", (), {"tensors": ONES, "op": MAX, "timeout": SECONDS}, {"reduceOp": MAX, "timeout": SECONDS}),
        ("allreduce", (ONES, None, SECONDS), {}, {"reduceOp": dist.ReduceOp.SUM, "timeout": SECONDS}),
        ("reduce", (ONES, 2, MAX, SECONDS), {}, {"rootRank": 2, "reduceOp": MAX, "timeout": SECONDS}),
        ("reduce", (ONES,), {"op": MAX, "root": np.int64(2)}, {"rootRank": 2, "reduceOp": MAX}),
        ("broadcast", (ONES,), {"opts": 1}, {"rootRank": 1}),
        ("allgather", ([ONES], OTHER, SECONDS), {}, {"timeout": SECONDS}),
        ("allgather", ([ONES], OTHER, None, SECONDS), {}, {"timeout": SECONDS}),
        ("all_to_all_single", (ONES, OTHER, [2], [2], SECONDS), {}, {"timeout": SECONDS}),
        ("all_to_all_single", (ONES, OTHER, [2], [2], None, SECONDS), {}, {"timeout": SECONDS}),
        ("reduce_scatter_single", (ONES, OTHER, MAX, SECONDS), {}, {"reduceOp": MAX, "timeout": SECONDS}),
    ],
)
def test_options_of_calls_without_options(
    method: str, args: tuple[Any, ...], keywords: dict[str, Any], fields: dict[str, Any]
) -> None:
    _, opts = bind(method, *args, **keywords)
    assert type(opts) is OPERATIONS[method].options
    assert {name: getattr(opts, name) for name in fields} == fields


def test_options_are_passed_on() -> None:
    opts = torch_internals.AllreduceOptions()
    for arguments in (bind("allreduce", ONES, opts), bind("allreduce", ONES, opts=opts)):
        assert arguments == ({"tensors": ONES}, opts)


def test_split_sizes_have_defaults() -> None:
    arguments, _ = bind("all_to_all_single", ONES, source=OTHER)
    assert list(arguments.values()) == [ONES, OTHER, (), ()]


@pytest.mark.parametrize(
    ("method", "args", "keywords", "message"),
    [
        ("allreduce", (), {}, "all_reduce: missing a required argument: 'tensors'.*\nThe method is allreduce"),
        ("allreduce", (ONES,), {"foo": 1}, "all_reduce: got an unexpected keyword argument 'foo'"),
        ("allreduce", (ONES,), {"tensors": OTHER}, "all_reduce: multiple values for argument 'tensors'"),
        ("allreduce", (ONES, MAX, SECONDS, 7), {}, "all_reduce: too many positional arguments"),
        ("allreduce", (ONES, 1), {}, "all_reduce: expected a ReduceOp for op, got int"),
        (
            "allreduce",
            (ONES,),
            {"opts": torch_internals.AllreduceCoalescedOptions()},
            "all_reduce: .* got AllreduceCoalescedOptions.*\n.*AllreduceOptions for opts",
        ),
        ("allreduce", (ONES, torch_internals.AllreduceOptions(), SECONDS), {}, "got opts and also timeout"),
        ("allreduce", (ONES, MAX), {"op": MAX}, "got opts and also op"),
        ("broadcast", (ONES, MAX), {}, "broadcast: expected an int for root, got"),
        ("broadcast", (ONES, 0, 7), {}, "broadcast: expected a timedelta for timeout, got int"),
    ],
)
def test_invalid_arguments(method: str, args: tuple[Any, ...], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        bind(method, *args, **keywords)


@pytest.mark.parametrize("group", [MPIProcessGroup, CompositeProcessGroup])
def test_methods_show_their_signatures(group: type[dist.ProcessGroup]) -> None:
    assert str(inspect.signature(group.reduce)) == "(self, tensors, opts=None, op=None, timeout=None, *, root=None)"
    assert str(inspect.signature(group.allgather)) == "(self, outputs, inputs, opts=None, timeout=None)"
    assert group.allgather.__qualname__ == "MPIProcessGroup.allgather"
