"""Profiles of training steps: the ranks, the steps and the content of the traces, also in a run that is resumed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mpicomm
from mpicomm.training import step_profile
from tests.training.test_steps import make_model, samples
from tests.training.test_uneven import make_trainer

pytestmark = pytest.mark.mpi


def names_in(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def test_a_resumed_run_completes_the_profile_and_keeps_the_first_trace(world: mpicomm.World, directory: Path) -> None:
    ranks = sorted({0, world.size - 1})
    data = samples(2 * world.size * 8)
    options: dict[str, Any] = {"checkpoint_dir": directory, "profile": range(2, 6), "profile_ranks": ranks}
    with pytest.raises(mpicomm.Preempted):
        make_trainer(make_model(), leave_at=3, **options).fit(data, 1)
    make_trainer(make_model(), **options).fit(data, 1)
    mpicomm.barrier()
    found = {path.name: names_in(path) for path in (directory / "profile").iterdir()}
    assert sorted(found) == [f"rank_{rank:03d}-step-{step:09d}.json" for rank in ranks for step in (2, 4)]
    for name, names in found.items():
        steps = (2, 3) if "2.json" in name else (4, 5)
        assert {each for each in names if each.startswith("step ")} == {f"step {step}" for step in steps}
        assert "aten::addmm" in names
        assert any("all_reduce" in each or "allreduce" in each for each in names)
        assert any("Optimizer.step" in each for each in names)


def test_a_trace_of_the_same_steps_is_another_file(world: mpicomm.World, tmp_path: Path) -> None:
    for _ in range(2):
        profiler = step_profile.StepProfiler(range(1, 2), tmp_path / "profile", world)
        profiler.count(0)
        torch.ones(3).sin()
        profiler.count(1)
    name = f"rank_{world.rank:03d}-step-000000001"
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [f"{name}-2.json", f"{name}.json"]
    assert all("aten::sin" in names_in(path) for path in (tmp_path / "profile").iterdir())


@pytest.mark.parametrize(("device", "activities"), [("cpu", [torch.profiler.ProfilerActivity.CPU]), ("xpu", None)])
def test_an_accelerator_of_any_vendor_is_in_the_profile(
    world: mpicomm.World, device: str, activities: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a list of activities torch records the accelerator for which it was built; a run on CPUs records none."""
    recorded: list[Any] = []
    profile = torch.profiler.profile
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: (recorded.append(activities), profile())[1])
    world = dataclasses.replace(world, device=torch.device(device))
    profiler = step_profile.StepProfiler(range(1, 2), tmp_path / "profile", world)
    profiler.count(0)
    profiler.close()
    assert recorded == [activities]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": range(3), "checkpoint_dir": "run"}, "a range of consecutive steps from 1"),
        ({"profile": range(1, 3)}, "profile requires a checkpoint_dir"),
    ],
)
def test_profiles_that_cannot_be_written(world: mpicomm.World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(make_model(), **options)
