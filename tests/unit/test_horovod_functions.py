"""The public functions of `mpicomm.horovod` that are derived from one declaration: their signatures and docstrings."""

from __future__ import annotations

import enum
import inspect
import pickle
import re
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpicomm.horovod as hvd

REDUCTION = ["prescale_factor", "postscale_factor", "process_set"]
PARAMETERS = {
    "allreduce": ["average", "name", "compression", "op", *REDUCTION],
    "allreduce_": ["average", "name", "op", *REDUCTION],
    "allreduce_async": ["average", "name", "op", *REDUCTION],
    "allreduce_async_": ["average", "name", "op", *REDUCTION],
    "allgather": ["name", "process_set"],
    "allgather_async": ["name", "process_set"],
    "broadcast": ["root_rank", "name", "process_set"],
    "broadcast_": ["root_rank", "name", "process_set"],
    "broadcast_async": ["root_rank", "name", "process_set"],
    "broadcast_async_": ["root_rank", "name", "process_set"],
    "alltoall": ["splits", "name", "process_set"],
    "alltoall_async": ["splits", "name", "process_set"],
    "reducescatter": ["name", "compression", "op", "process_set", "prescale_factor", "postscale_factor"],
    "reducescatter_async": ["name", "op", "process_set", "prescale_factor", "postscale_factor"],
}
FORMS = {name: ["tensor", *others] for name, others in PARAMETERS.items()} | {
    f"grouped_{name}": ["tensors", *others]
    for name, others in PARAMETERS.items()
    if not name.startswith(("broadcast", "alltoall"))
}


@pytest.mark.parametrize("name", FORMS)
def test_signatures_are_those_of_horovod(name: str) -> None:
    function = getattr(hvd, name)
    assert function.__name__ == name
    assert list(inspect.signature(function).parameters) == FORMS[name]
    assert list(typing.get_type_hints(function)) == [*FORMS[name], "return"]


@pytest.mark.parametrize("name", FORMS)
def test_docstrings_describe_the_form(name: str) -> None:
    text = inspect.getdoc(getattr(hvd, name))
    described = re.findall(r"^    (\w+): ", text.split("Returns:")[0], re.MULTILINE)
    assert described == FORMS[name]
    assert ("returns without waiting" in text) == ("_async" in name)
    assert ("is differentiable" in text) == (not name.endswith("_") and "_async" not in name)
    assert "{" not in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hvd.allreduce_(torch.ones(1), nme="x"), r"^allreduce_\(\) got an unexpected keyword argument 'nme'"),
        (lambda: hvd.grouped_allgather([], None, None, None), r"^grouped_allgather\(\) takes from 1 to 3 positional"),
        (lambda: hvd.broadcast(torch.ones(1)), r"^broadcast\(\) missing 1 required positional argument: 'root_rank'"),
        (lambda: hvd.broadcast(root_rank=0), r"^broadcast\(\) missing 1 required positional argument: 'tensor'"),
    ],
    ids=["unknown", "many", "few", "no-tensor"],
)
def test_errors_about_arguments_name_the_function(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_a_star_import_leaves_the_variables_of_a_program() -> None:
    names: dict[str, Any] = {}
    exec("from mpicomm.horovod import *", names)
    assert [name for name, value in names.items() if isinstance(value, types.ModuleType)] == ["elastic"]
    assert "annotations" not in names
    assert names["DistributedOptimizer"] is hvd.DistributedOptimizer
    assert names["Average"] == hvd.Average


def test_pickles_name_the_public_module() -> None:
    for public in (hvd.SyncBatchNorm, hvd.ProcessSet, hvd.Compression, hvd.HorovodInternalError):
        assert public.__module__ == "mpicomm.horovod"
        assert pickle.loads(pickle.dumps(public)) is public
        typing.get_type_hints(public)
    assert hvd.elastic.ElasticSampler.__module__ == "mpicomm.horovod.elastic"


def test_process_sets_accept_integers_only() -> None:
    rank = enum.IntEnum("Rank", ["FIRST", "SECOND"])
    assert str(hvd.ProcessSet([rank.SECOND, rank.FIRST])).startswith("ProcessSet(process_set_id=None, ranks=[1, 2],")
    for ranks in ([True], [0.0], ["0"], 3):
        with pytest.raises(ValueError, match=r"^ProcessSet: ranks_or_comm must be ranks \(integers\) or an mpi4py"):
            hvd.ProcessSet(ranks)
