"""An error of a collective reaches the program with its own type and message, through any part of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpicomm
from mpicomm.backend.execution.executor import Executor
from tests.features.problem import BATCH, FEATURES, SMALL_BUCKETS, dense_model, loss_of, sgd

Step = Callable[[], object]


class PlantedError(Exception):
    """An error with state that cannot be copied or pickled."""

    def __init__(self, message: str, lock: object) -> None:
        super().__init__(message)
        self.lock = lock


def errors() -> list[Exception]:
    return [
        PlantedError("planted", threading.Lock()),
        TimeoutError("planted"),
        RuntimeError("planted"),
        mpicomm.MpicommError("planted"),
        mpicomm.RankFailedError("planted", [1], ["host"], "killed"),
    ]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Return a function with which every later collective fails on all ranks, after it has completed."""
    run = Executor._run

    def let_fail(error: Exception) -> None:
        def run_and_fail(*arguments: Any) -> None:
            run(*arguments)
            raise error

        monkeypatch.setattr(Executor, "_run", run_and_fail)
        monkeypatch.setattr(dist.group.WORLD, "_plain", None)  # plain calls do not call it

    return let_fail


def samples() -> torch.Tensor:
    return torch.ones(BATCH, FEATURES, dtype=torch.float64)


def backward(**options: object) -> Step:
    parallel = DistributedDataParallel(dense_model(), bucket_cap_mb=SMALL_BUCKETS, **options)
    inputs = samples()
    return lambda: loss_of(parallel, inputs).backward()


def hooked_backward(hook: Callable, state: object = None) -> Step:
    parallel = DistributedDataParallel(dense_model().float())
    parallel.register_comm_hook(state, hook)
    inputs = samples().float()
    return lambda: loss_of(parallel, inputs).backward()


def failing_callback() -> Step:
    """Return a step whose hook adds a callback that fails."""

    def hook(_state, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    return hooked_backward(hook)


def powersgd() -> Step:
    return hooked_backward(powerSGD_hook, PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5))


def sharded_model() -> Step:
    model = fully_shard(dense_model(), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, inputs = sgd(model), samples()

    def step() -> None:
        loss_of(model, inputs).backward()
        optimizer.step()

    return step


def functional_all_reduce() -> Step:
    return lambda: functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1


def compiled_all_reduce() -> Step:
    compiled = torch.compile(lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 1, backend="aot_eager")
    compiled(torch.ones(3))
    return lambda: compiled(torch.ones(3))


STEPS = {
    "DDP": backward,
    "DDP, static graph": lambda: backward(static_graph=True),
    "DDP, unused parameters": lambda: backward(find_unused_parameters=True),
    "DDP, fp16 hook": lambda: hooked_backward(default_hooks.fp16_compress_hook),
    "DDP, our bf16 hook": lambda: hooked_backward(mpicomm.bf16_compression_hook),
    "DDP, PowerSGD": powersgd,
    "DDP, callback": failing_callback,
    "FSDP2": sharded_model,
    "functional": functional_all_reduce,
    "compile": compiled_all_reduce,
}


@pytest.mark.each_torch("errors")
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("error", errors(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", STEPS)
def test_an_error_keeps_its_type_and_its_message(
    name: str, error: Exception, fail: Callable[[Exception], None]
) -> None:
    step = STEPS[name]()
    for _ in range(3):
        step()
    fail(error)
    with pytest.raises(type(error), match="planted"):
        step()
