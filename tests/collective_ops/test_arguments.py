"""Every argument of every public function: a wrong type or a value out of range raises before any communication.

Data that a rank cannot send are an exception: all ranks raise an error. One rank makes the calls. The error names the
argument or the operation, the value that it got, and a remedy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import mpicomm

pytestmark = pytest.mark.mpi(min_size=2)


class Unknown:
    """A value of a type that no argument accepts."""


GROUPS = [7, "nodes", "", True, [0, 1], Unknown()]
RANKS = ["0", 1.0, True, -1, 99, [0], Unknown()]
TAGS = ["0", 1.0, True, None, -1, 2**40]
FLAGS = ["yes", 1, 0.0, None, Unknown()]
SHARDS = [each for each in FLAGS if each is not None]
OPS = ["median", "", 3, None, True, ["sum"], Unknown()]
TIMEOUTS = ["5", -1, float("nan"), True, [5], Unknown()]
DATA = ["text", {1, 2}, Unknown(), torch.eye(2).to_sparse()]
POSITIVE = ["1", 1.5, True, 0, -1, Unknown()]
WORDS = ["word", "", 3, True, ["ddp"], Unknown()]
PATHS = [3, 1.5, True, b"runs", ["runs"], Unknown()]
ANY: list[Any] = []  # every value is valid, or is refused on all ranks: test_errors.py

COMMON = {"group": GROUPS, "async_op": FLAGS}
MESSAGE = {**COMMON, "tag": TAGS}
Wrong = dict[str, Sequence[Any]]

OPERATIONS: dict[str, tuple[dict[str, Any], Wrong]] = {
    "barrier": ({}, {**COMMON, "timeout": [*TIMEOUTS, 0]}),
    "all_reduce": ({"data": 1}, {**COMMON, "data": ANY, "op": OPS, "inplace": FLAGS}),
    "reduce": ({"data": 1}, {**COMMON, "data": ANY, "op": OPS, "dst": [*RANKS, None]}),
    "reduce_scatter": ({"data": torch.ones(4)}, {**COMMON, "data": ANY, "op": OPS}),
    "broadcast": ({"data": 1}, {**COMMON, "data": ANY, "src": [*RANKS, None], "out": ANY}),
    "gather": ({"data": 1}, {**COMMON, "data": ANY, "dst": [*RANKS, None]}),
    "all_gather": ({"data": 1}, {**COMMON, "data": ANY}),
    "all_to_all": ({"items": None}, {**COMMON, "items": ANY}),
    "broadcast_object": ({"thing": 1}, {**COMMON, "thing": ANY, "src": [*RANKS, None]}),
    "gather_object": ({"thing": 1}, {**COMMON, "thing": ANY, "dst": [*RANKS, None]}),
    "all_gather_object": ({"thing": 1}, {**COMMON, "thing": ANY}),
    "all_to_all_object": ({"items": None}, {**COMMON, "items": ANY}),
    "send": ({"data": 1, "dst": 0}, {**MESSAGE, "data": DATA, "dst": [*RANKS, None]}),
    "isend": ({"data": 1, "dst": 0}, {"group": GROUPS, "tag": TAGS, "data": DATA, "dst": [*RANKS, None]}),
    "recv": ({"src": 0}, {**MESSAGE, "src": RANKS, "out": ["text", 1, Unknown()]}),
    "irecv": ({"src": 0}, {"group": GROUPS, "tag": TAGS, "src": RANKS, "out": ["text", 1, Unknown()]}),
    "sendrecv": ({"data": 1, "dst": 0, "src": 0}, {**MESSAGE, "data": DATA, "dst": [*RANKS, None], "src": RANKS}),
    "scatter": ({"items": None}, {**COMMON, "items": ANY, "src": [*RANKS, None]}),
    "send_object": ({"thing": 1, "dst": 0}, {**MESSAGE, "thing": [lambda: 1], "dst": [*RANKS, None]}),
    "recv_object": ({"src": 0}, {**MESSAGE, "src": RANKS}),
    "scatter_object": ({"items": None}, {**COMMON, "items": ANY, "src": [*RANKS, None]}),
}

HANDLES = [5, None, "ab", [5], [None], Unknown()]
OTHERS: dict[str, tuple[dict[str, Any], Wrong]] = {
    "wait_all": ({"handles": []}, {"handles": HANDLES, "timeout": TIMEOUTS}),
    "as_completed": ({"handles": []}, {"handles": HANDLES}),
    "current_world": ({}, {}),
    "dump_flight_recorder": ({}, {"directory": PATHS}),
    "recover": ({}, {}),
    "shutdown": ({}, {}),
    "bf16_compression_hook": ({"state": None, "bucket": None}, {"state": [5, "group"], "bucket": [5, None]}),
    "bootstrap": (
        {"backend": "mpi"},
        {
            "backend": WORDS,
            "timeout": [*TIMEOUTS, 1e-3],
            "comm": [5, "world", Unknown()],
            "device": [1.5, True, [0], Unknown()],
            "abort_on_error": FLAGS,
            "on_failure": [*WORDS, None],
            "min_ranks": POSITIVE,
        },
    ),
}

TRAINER: Wrong = {
    "model": [None, 5, nn.Linear, Unknown()],
    "optimizer": [None, 5, torch.optim.SGD, Unknown()],
    "loss_fn": [5, "mse", nn.MSELoss, Unknown()],
    "weights": PATHS,
    "target_key": [3, None, True, Unknown()],
    "scheduler": [5, "cosine", Unknown()],
    "schedule": WORDS,
    "monitor": WORDS,
    "precision": [*WORDS, None],
    "batch_size": [*POSITIVE, None],
    "grad_accum_steps": [*POSITIVE, None],
    "max_grad_norm": ["1", True, 0, -1.0, float("nan"), Unknown()],
    "strategy": [*WORDS[:-2], None, Unknown()],
    "grad_compression": WORDS,
    "sync_batchnorm": FLAGS,
    "find_unused_parameters": FLAGS,
    "compile_model": FLAGS,
    "deterministic": FLAGS,
    "checkpoint_dir": PATHS,
    "save_every": POSITIVE,
    "keep_checkpoints": [*POSITIVE, None],
    "log_every": [*POSITIVE, None],
    "seed": ["0", 1.5, True, None],
    "num_workers": ["0", 1.5, True, -1, None],
    "on_nonfinite": [*WORDS, None],
    "check_every": POSITIVE,
    "stop_margin": ["1", True, -1.0, float("nan"), Unknown()],
    "progress": [*WORDS, None],
    "logger": [5, "mlflow", True, Unknown()],
    "training_step": [5, "step", nn.MSELoss, Unknown()],
    "callbacks": [5, [len], [mpicomm.EMA], mpicomm.EMA(0.5), Unknown()],
    "profile": [5, True, "1", Unknown()],
    "profile_ranks": [5, ["0"], [-1], Unknown()],
    "rank_logs": FLAGS,
    "on_failure": [*WORDS, None],
    "replicate_shards": FLAGS,
    "replicate_every": POSITIVE,
}
TEXTS = [5, True, None, Unknown()]
_OF_PREPARE = ("model", "optimizer", "strategy", "find_unused_parameters", "compile_model", "seed")
PREPARE: Wrong = {
    **{name: TRAINER[name] for name in _OF_PREPARE},
    "shard": SHARDS,
    "loaders": [],
}  # loaders have no keyword
DATASETS = [None, 5, torch.nn.Linear(1, 1), Unknown()]
METRICS = [5, ["accuracy"], {"accuracy": 5}, {5: len}, Unknown()]
METHODS: dict[str, tuple[dict[str, Any], Wrong]] = {
    "fit": (
        {"train_data": TensorDataset(torch.ones(9, 2), torch.ones(9, 1)), "epochs": 1},
        {
            "train_data": DATASETS,
            "epochs": [*POSITIVE, None],
            "eval_data": DATASETS[1:],
            "metrics": METRICS,
            "shard": SHARDS,
            "eval_shard": SHARDS,
            "max_steps": POSITIVE,
            "max_time": ["1", True, 0, -1.0, float("nan"), Unknown()],
            "eval_every": POSITIVE,
            "limit_batches": POSITIVE,
        },
    ),
    "evaluate": (
        {"data": TensorDataset(torch.ones(9, 2), torch.ones(9, 1))},
        {"data": DATASETS, "metrics": METRICS, "shard": SHARDS},
    ),
    "predict": (
        {"data": TensorDataset(torch.ones(9, 2), torch.ones(9, 1))},
        {"data": DATASETS, "shard": SHARDS, "has_targets": FLAGS, "all_ranks": FLAGS},
    ),
    "export": ({}, {"path": [*PATHS, None]}),
    "log": ({}, {"values": []}),  # any names
    "stop": ({}, {"why": TEXTS}),
    "save_checkpoint": ({}, {}),
    "write_metrics": ({}, {"event": TEXTS, "values": []}),
}


def cases(table: dict[str, tuple[dict[str, Any], Wrong]]) -> list[Any]:
    return [pytest.param(name, argument, id=f"{name}-{argument}") for name in table for argument in table[name][1]]


def is_refused(
    call: Callable[..., object], given: dict[str, Any], argument: str, values: Sequence[Any], *, by_all: bool = False
) -> None:
    """Make one call for each value, on the last rank only or on all, and check the error."""
    if not by_all and dist.get_rank() != dist.get_world_size() - 1:
        return
    for value in values:
        with pytest.raises((TypeError, ValueError, mpicomm.DeviceError)) as caught:
            call(**{**given, argument: value})
        first, *rest = str(caught.value).splitlines()
        shown = f"{argument}={value!r}: {caught.value!r}"
        assert argument in first or "expected" in first or "pickled" in first or "cannot be" in first, shown
        assert "got " in first or "cannot be" in first or "is not in" in first, shown
        assert rest, f"no remedy: {shown}"
        assert all(line.strip() for line in rest), shown


@pytest.mark.parametrize(("name", "argument"), cases(OPERATIONS))
def test_the_arguments_of_the_operations(world: mpicomm.World, name: str, argument: str) -> None:
    given, wrong = OPERATIONS[name]
    items = {"items": [1] * world.size} if "items" in given else {}
    is_refused(getattr(mpicomm, name), {**given, **items}, argument, wrong[argument])


@pytest.mark.parametrize(("name", "argument"), cases(OTHERS))
def test_other_functions(world: mpicomm.World, tmp_path: Path, name: str, argument: str) -> None:
    given, wrong = OTHERS[name]
    is_refused(getattr(mpicomm, name), given, argument, wrong[argument])


@pytest.mark.parametrize("argument", TRAINER)
def test_the_trainer(world: mpicomm.World, argument: str) -> None:
    is_refused(mpicomm.Trainer, parts(), argument, TRAINER[argument])


@pytest.mark.parametrize("argument", PREPARE)
def test_prepare(world: mpicomm.World, argument: str) -> None:
    given = parts()
    del given["loss_fn"]
    is_refused(mpicomm.prepare, given, argument, PREPARE[argument])


@pytest.mark.parametrize(("name", "argument"), cases(METHODS))
def test_methods_of_the_trainer(world: mpicomm.World, name: str, argument: str) -> None:
    given, wrong = METHODS[name]
    trainer = mpicomm.Trainer(**parts(), progress="none")  # collective
    # Whether all ranks can use their data is agreed on: one that cannot is an error on all.
    by_all = argument in {"train_data", "eval_data", "data"}
    is_refused(getattr(trainer, name), given, argument, wrong[argument], by_all=by_all)


def parts() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "loss_fn": nn.functional.mse_loss}


def test_a_handle(world: mpicomm.World) -> None:
    handle = mpicomm.all_reduce(1, async_op=True)
    is_refused(handle.wait, {}, "timeout", TIMEOUTS)
    assert handle.wait() == world.size


def test_a_work_of_torch_is_no_handle(world: mpicomm.World) -> None:
    work = dist.barrier(async_op=True)
    with pytest.raises(TypeError, match=r"handles\[0\] must be a Handle, .*\n.*work\.wait\(\)"):
        mpicomm.wait_all([work])
    work.wait()


def test_every_argument_of_every_public_function_is_here() -> None:
    tables = {**OPERATIONS, **OTHERS, "Trainer": ({}, TRAINER), "prepare": ({}, PREPARE)}
    functions = {name: getattr(mpicomm, name) for name in mpicomm.__all__}
    functions = {name: each for name, each in functions.items() if inspect.isfunction(each) or name == "Trainer"}
    methods = {name: each for name, each in vars(mpicomm.Trainer).items() if not name.startswith("_")}
    methods = {name: each for name, each in methods.items() if inspect.isfunction(each)}
    for name, function in {**functions, **methods}.items():
        _, wrong = {**tables, **METHODS}[name]
        known = [each for each in inspect.signature(function).parameters if each != "self"]
        assert sorted(wrong) == sorted(known), name


def test_an_integer_of_numpy_is_an_integer(world: mpicomm.World) -> None:
    assert mpicomm.broadcast(world.rank, src=np.int64(world.size - 1)) == world.size - 1
