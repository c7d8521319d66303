"""The trainer's division of the time of a step, measured with a simulated timer."""

from __future__ import annotations

import types

import pytest
import torch

import mpicomm
from mpicomm.training import step_metrics

pytestmark = pytest.mark.mpi


def test_each_second_of_a_step_counts_once(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 10.0, 13.0, 20.0, 30.0, 31.0, 31.5])
    monkeypatch.setattr(step_metrics, "time", types.SimpleNamespace(monotonic=lambda: next(moments)))
    last = types.SimpleNamespace(called_at=18.0)  # the last operation of the backward pass
    monkeypatch.setattr(step_metrics.flight_recorder, "last", lambda: last)
    timer = step_metrics.StepTimer(torch.device("cpu"))
    timer.start()  # at 10 s
    timer.add("data")  # at 13 s
    timer.add_backward(is_synchronized=True)  # at 20 s, after waiting since 18 s
    timer.add_backward(is_synchronized=False)  # at 30 s
    timer.add_backward(is_synchronized=True)  # at 31 s; the last operation was called before this pass began
    timer.add("compute")
    assert timer.reset() == {"data": 3.0, "compute": 5.0 + 10.0 + 1.0 + 0.5, "communication": 2.0}
    assert timer.reset() == {"data": 0.0, "compute": 0.0, "communication": 0.0}
