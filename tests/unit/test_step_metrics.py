"""The losses of a rank between two entries of the metrics file, on a device from which they are read late."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpicomm.errors import RankFailedError, TrainingError
from mpicomm.training import parallel, rank_sync
from mpicomm.training.data import Batch, Step
from mpicomm.training.resumable_run import Votes
from mpicomm.training.step_metrics import StepMetrics
from mpicomm.training.training_loop import TrainingLoop

GPU = torch.device("cuda")  # only its type matters: no tensor of these tests is on it


def metrics_of_a_gpu() -> StepMetrics:
    metrics = StepMetrics(stops=True)
    metrics.enter_world(GPU)
    return metrics


def test_inputs_are_not_kept_until_the_losses_are_read() -> None:
    metrics, inputs = metrics_of_a_gpu(), []
    for step in range(3):
        content = torch.ones(2, 3)
        inputs.append(weakref.ref(content))
        metrics.end_batch(step, Batch((content, torch.ones(2)), 2, [2 * step, 2 * step + 1]), torch.tensor(1.0))
        del content
    gc.collect()
    assert [each() for each in inputs] == [None] * 3


def test_an_error_read_late_names_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    metrics = metrics_of_a_gpu()
    metrics.end_batch(3, Batch(torch.ones(2), 2, [5, 6]), torch.tensor(1.0))
    metrics.end_batch(4, Batch(torch.ones(2), 2, [7, 8]), torch.tensor(float("nan")))
    with pytest.raises(TrainingError, match="the loss of step 4 is nan on rank 1, for the samples 7, 8"):
        metrics.check()


def test_a_skipped_step_in_which_a_rank_fails_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that remain repeat it, and with it the reduction of its losses."""

    def fail(*_: Any) -> Any:
        raise RankFailedError("rank 1 of 2 failed")

    monkeypatch.setattr(rank_sync, "gather_nonfinite_samples", fail)
    monkeypatch.setattr(parallel, "share_buffers", lambda _: None)
    metrics = StepMetrics(stops=False)
    parts = types.SimpleNamespace(
        step=types.SimpleNamespace(accumulate=lambda *_: False),
        metrics=metrics,
        options=types.SimpleNamespace(recovers=True, skips=True),
        wrapped=types.SimpleNamespace(inner=None),
    )
    run = types.SimpleNamespace(start_vote=lambda **_: None, votes=lambda: (Votes(nonfinite=1), [6.0, 4.0, 0]))
    loop: Any = types.SimpleNamespace(parts=parts, run=run, reporter=types.SimpleNamespace(timer=None))
    with pytest.raises(RankFailedError):
        TrainingLoop._take_step(loop, Step([]), 4)
    assert metrics.reduced == {}


def test_both_reductions_of_a_step_of_a_stream_count_as_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def reduce(values: list[float], _: Any) -> list[float]:
        calls.append("reduce")
        return values

    monkeypatch.setattr(rank_sync, "_reduce", reduce)
    source: Any = types.SimpleNamespace(is_counted=False)
    timer: Any = types.SimpleNamespace(add=calls.append)
    steps = iter([Step([Batch(torch.ones(2), 2, None)])])
    (step,) = rank_sync.aligned_steps(source, steps, lambda _: Step([]), timer)
    assert step.total == 2
    assert calls == ["data", "reduce", "reduce", "communication", "data", "reduce", "communication"]
