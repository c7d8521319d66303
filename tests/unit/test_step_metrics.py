"""The losses of a rank between two entries of the metrics file, on a device from which they are read late."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from mpicomm.errors import TrainingError
from mpicomm.training.data import Batch
from mpicomm.training.step_metrics import StepMetrics

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
