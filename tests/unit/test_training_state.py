"""The state of a run: its per-rank part on a different number of ranks, and the part that all ranks share."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from mpicomm.training import parallel, randomness, state
from mpicomm.training.callbacks import CallbackList
from mpicomm.training.step_metrics import StepMetrics


@pytest.mark.parametrize("size", [1, 2, 5])
def test_losses_are_counted_once_on_another_number_of_ranks(size: int) -> None:
    before = randomness.states(torch.device("cpu"))
    owns = [{"losses": (1.5 * rank, rank), "logged": {"a": (2.0, rank)}, "random": before} for rank in range(4)]
    of_ranks = [StepMetrics(stops=True) for _ in range(size)]
    drawn = []
    for rank, metrics in enumerate(of_ranks):
        world = types.SimpleNamespace(rank=rank)
        parts: Any = types.SimpleNamespace(world=world, metrics=metrics, position=state.Position(step=6))
        state._share_out(owns, parts)
        drawn.append(torch.rand(()).item())
    randomness.restore(before, torch.device("cpu"))
    assert [metrics.sums for metrics in of_ranks] == [{"loss": (9.0, 6), "a": (8.0, 6)}, *[{}] * (size - 1)]
    assert len(set(drawn)) == size, "ranks have random numbers of their own"


class DeviceGenerator:
    """The generator of a simulated device, in place of the functions of torch.xpu."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = torch.tensor([7], dtype=torch.uint8)
        self.seeds: list[int] = []
        monkeypatch.setattr(torch.xpu, "get_rng_state", lambda device: self.state)
        monkeypatch.setattr(torch.xpu, "set_rng_state", lambda state, device: setattr(self, "state", state))
        monkeypatch.setattr(torch.xpu, "manual_seed_all", self.seeds.append)


def test_the_generator_of_a_device_of_any_vendor_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, device = DeviceGenerator(monkeypatch), torch.device("xpu", 0)
    before = randomness.states(device)
    generator.state = torch.tensor([8], dtype=torch.uint8)
    randomness.restore(before, device)
    assert (generator.state.tolist(), generator.seeds) == ([7], [])
    randomness.restore(before, torch.device("cpu"))  # a checkpoint of this device that is resumed on a CPU


def test_a_checkpoint_of_another_type_of_device_seeds_the_generator_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds depend on the state of the checkpoint: a run that is resumed twice draws the same numbers."""
    generator, device = DeviceGenerator(monkeypatch), torch.device("xpu", 0)
    first = {**randomness.states(torch.device("cpu")), "cuda": torch.zeros(16, dtype=torch.uint8)}
    torch.rand(1)
    second = randomness.states(torch.device("cpu"))
    for states in (first, second, first):
        randomness.restore(states, device)
    assert generator.seeds[0] == generator.seeds[2] != generator.seeds[1]
    assert generator.state.tolist() == [7]


def test_a_model_keeps_its_parameters_on_a_device_whose_extension_replaces_them() -> None:
    """`Module.to` replaces the parameters also for the device meta, which stands for that of an extension here."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moved = parallel._moved(model, torch.device("meta"))
    assert [parameter.is_meta for parameter in optimizer.param_groups[0]["params"]] == [True]
    assert moved[1].weight is moved[0].weight is optimizer.param_groups[0]["params"][0]  # type: ignore[index]
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_a_state_has_the_sums_of_its_steps_since_the_last_entry() -> None:
    """A sharded model returns to the step of its copies, and the steps after it are repeated."""
    metrics = StepMetrics(stops=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    parts: Any = types.SimpleNamespace(
        metrics=metrics,
        position=state.Position(),
        scheduler=None,
        precision=types.SimpleNamespace(scaler=scaler),
        callbacks=CallbackList(),
    )
    metrics.take()
    metrics.add_reduced([3.0, 2.0, 0])
    copied = state.shared_state(parts)
    metrics.add_reduced([50.0, 2.0, 0])
    state.load_shared_state(parts, copied)
    assert metrics.take_means() == {"loss": 1.5}
