"""Every argument of every public function: a wrong type or a value out of range raises before any communication.

Data that a rank cannot send are an exception: all ranks raise an error. One rank makes the calls. The error names the
argument or the operation, the value that it got, and a remedy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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


RANKS = ["0", 1.0, True, -1, 99, [0], Unknown()]
FLAGS = ["yes", 1, 0.0, None, Unknown()]
TIMEOUTS = ["5", -1, float("nan"), True, [5], Unknown()]
POSITIVE = ["1", 1.5, True, 0, -1, Unknown()]
SECONDS = ["1", True, -1.0, float("nan"), Unknown()]
WORDS = ["word", "", 3, True, ["ddp"], Unknown()]
PATHS = [3, 1.5, True, b"runs", ["runs"], Unknown()]
DATASETS = [5, nn.Linear(1, 1), Unknown()]

# Wrong values, and the arguments for which they are wrong: of all functions, or of one.
WRONG: dict[str, Sequence[Any]] = {
    argument: values
    for values, arguments in (
        ([7, "nodes", "", True, [0, 1], Unknown()], "group"),
        ([*RANKS, None], "src dst"),
        (RANKS, "recv.src irecv.src recv_object.src sendrecv.src"),
        (["0", 1.0, True, None, -1, 2**40], "tag"),
        (FLAGS, "async_op inplace all_ranks has_targets abort_on_error sync_batchnorm find_unused_parameters"),
        (FLAGS, "compile_model deterministic rank_logs replicate_shards"),
        ([flag for flag in FLAGS if flag is not None], "shard eval_shard"),
        (["median", "", 3, None, True, ["sum"], Unknown()], "op"),
        (TIMEOUTS, "timeout"),
        ([*TIMEOUTS, 0], "barrier.timeout"),
        ([*TIMEOUTS, 1e-3], "bootstrap.timeout"),
        (["text", {1, 2}, Unknown(), torch.eye(2).to_sparse()], "send.data isend.data sendrecv.data"),
        ([lambda: 1], "send_object.thing"),
        (["text", 1, Unknown()], "recv.out irecv.out"),
        # Every value is valid, or is refused on all ranks (test_errors.py), or has no keyword.
        ([], "data items out thing loaders values options"),
        ([5, None, "ab", [5], [None], Unknown()], "handles"),
        (PATHS, "directory weights checkpoint_dir"),
        ([*PATHS, None], "path"),
        (WORDS, "backend schedule monitor grad_compression"),
        ([*WORDS, None], "precision on_failure on_nonfinite progress"),
        ([*WORDS[:-2], None, Unknown()], "strategy"),
        (POSITIVE, "min_ranks save_every check_every replicate_every max_steps eval_every limit_batches"),
        ([*POSITIVE, None], "batch_size epochs grad_accum_steps keep_checkpoints log_every"),
        ([*SECONDS, 0], "max_grad_norm max_time node_mtbf_hours"),
        (SECONDS, "stop_margin"),
        (["0", 1.5, True, None], "seed"),
        (["0", 1.5, True, -1, None], "num_workers"),
        ([5, True, None, Unknown()], "why event"),
        ([3, None, True, Unknown()], "target_key"),
        ([5, "world", Unknown()], "comm"),
        ([1.5, True, [0], Unknown()], "device"),
        ([5, "group"], "state"),
        ([5, None], "bucket"),
        ([5, None, "22", [0], [1.5], [5], [1] * 4, Unknown()], "grid"),
        (POSITIVE, "width"),
        ([5, None, "no", [1], [True, False], Unknown()], "periodic"),
        ([None, 5, nn.Linear, Unknown()], "model"),
        ([None, 5, torch.optim.SGD, Unknown()], "optimizer"),
        ([5, "mse", nn.MSELoss, Unknown()], "loss_fn training_step"),
        ([5, "cosine", Unknown()], "scheduler"),
        ([5, "comet", True, Unknown()], "logger"),
        ([5, [len], [mpicomm.EMA], mpicomm.EMA(0.5), Unknown()], "callbacks"),
        ([5, True, "1", Unknown()], "profile"),
        ([5, ["0"], [-1], Unknown()], "profile_ranks"),
        ([5, ["accuracy"], {"accuracy": 5}, {5: len}, Unknown()], "metrics"),
        ([None, *DATASETS], "Trainer.fit.train_data Trainer.evaluate.data Trainer.predict.data"),
        (DATASETS, "eval_data"),
    )
    for argument in arguments.split()
}
GIVEN = {"data": 1, "thing": 1, "dst": 0, "src": 0, "handles": [], "state": None, "bucket": None, "backend": "mpi"}
"""Valid values of arguments without a default, and of some with one."""


def functions() -> dict[str, Callable[..., object]]:
    """Return the public functions, the trainer and its methods by name."""
    public = {name: getattr(mpicomm, name) for name in mpicomm.__all__}
    of_trainer = {f"Trainer.{name}": each for name, each in vars(mpicomm.Trainer).items() if not name.startswith("_")}
    both = {**public, **of_trainer}
    classes = {"Trainer", "HaloExchange"}
    return {name: each for name, each in both.items() if inspect.isfunction(each) or name in classes}


CASES = [
    pytest.param(name, argument, id=f"{name}-{argument}")
    for name, function in functions().items()
    for argument in inspect.signature(function).parameters
    if argument != "self"
]


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


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_each_argument_of_each_function(world: mpicomm.World, name: str, argument: str) -> None:
    function = functions()[name]
    samples = TensorDataset(torch.ones(9, 2), torch.ones(9, 1))
    model = nn.Linear(2, 1)
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "loss_fn": nn.functional.mse_loss}
    given = {**GIVEN, **parts, "items": [1] * world.size, "grid": [world.size], "train_data": samples, "epochs": 1}
    if name.startswith("Trainer."):
        function = getattr(mpicomm.Trainer(**parts, progress="none"), name.removeprefix("Trainer."))  # collective
        given["data"] = samples
    elif name == "reduce_scatter":
        given["data"] = torch.ones(4)
    accepted = {each: given[each] for each in inspect.signature(function).parameters if each in given}
    # Whether all ranks can use their data is agreed on: one that cannot is an error on all.
    by_all = name.startswith("Trainer.") and argument in {"train_data", "eval_data", "data"}
    wrong = WRONG[f"{name}.{argument}" if f"{name}.{argument}" in WRONG else argument]
    is_refused(function, accepted, argument, wrong, by_all=by_all)


def test_a_handle(world: mpicomm.World) -> None:
    handle = mpicomm.all_reduce(1, async_op=True)
    is_refused(handle.wait, {}, "timeout", TIMEOUTS)
    assert handle.wait() == world.size


def test_a_work_of_torch_is_no_handle(world: mpicomm.World) -> None:
    work = dist.barrier(async_op=True)
    with pytest.raises(TypeError, match=r"handles\[0\] must be a Handle, .*\n.*work\.wait\(\)"):
        mpicomm.wait_all([work])
    work.wait()


def test_an_integer_of_numpy_is_an_integer(world: mpicomm.World) -> None:
    assert mpicomm.broadcast(world.rank, src=np.int64(world.size - 1)) == world.size - 1
