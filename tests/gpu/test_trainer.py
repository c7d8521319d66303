"""The trainer on GPUs: the tests of its steps, and what it does only there: generators, memory, devices of threads."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import mpicomm
from mpicomm.training.checkpoint import Checkpoints
from tests.training.conftest import directory  # noqa: F401  a fixture
from tests.training.test_steps import (  # noqa: F401  tests that this module repeats on GPUs
    FEATURES,
    make_trainer,
    samples,
    test_all_ranks_start_from_the_parameters_of_rank_0,
    test_all_ranks_train_as_one_process_would,
    test_an_evaluation_counts_each_sample_once,
    test_compressed_gradients_reach_nearly_the_same_loss,
    test_fsdp_trains_as_ddp_does,
    test_sixteen_bits_reach_nearly_the_same_loss,
)


@pytest.fixture(autouse=True)
def _has_gpu(world: mpicomm.World) -> None:
    if world.device.type == "cpu":
        pytest.skip("needs a GPU")


def model_with_dropout() -> nn.Module:
    """Return a model whose dropout draws from the generator of the device, and whose first layers share weights."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.Dropout(0.5), nn.Linear(FEATURES, 2)
    )
    model[1].weight = model[0].weight
    return model


def trained(data: TensorDataset, epochs: int, **options: Any) -> list[torch.Tensor]:
    model = model_with_dropout()
    make_trainer(model, batch_size=4, **options).fit(data, epochs)
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_a_resumed_run_draws_the_numbers_of_its_device(world: mpicomm.World, directory: Path) -> None:  # noqa: F811
    """Parameters with tied weights are equal bit by bit to those of a run that was not interrupted."""
    data = samples(12 * world.size)
    whole = trained(data, 3)
    trained(data, 1, checkpoint_dir=directory)
    torch.rand(100, device=world.device)
    resumed = trained(data, 3, checkpoint_dir=directory)
    assert len(whole) == 5  # of 3 weights and 3 biases, 2 weights are one
    assert all(torch.equal(first, second) for first, second in zip(whole, resumed, strict=True))


def test_the_memory_of_an_entry_is_that_of_the_device(world: mpicomm.World) -> None:
    entries: list[dict[str, Any]] = []
    module = torch.get_device_module(world.device)
    gc.collect()
    module.reset_peak_memory_stats(world.device)  # which earlier tests have raised
    before = module.memory_allocated(world.device)
    ballast = torch.empty(2**20, 8, device=world.device)  # 32 MiB
    trained(samples(8 * world.size), 1, log_every=1, logger=entries.append)
    peaks = [entry["memory_mib"] for entry in entries if entry["event"] == "step"]
    assert (len(peaks) > 0) == (world.rank == 0)
    assert all(32 <= peak - before / 2**20 < 128 for peak in peaks)  # less than any process has resident
    del ballast


def test_batches_are_copied_from_pinned_memory(world: mpicomm.World) -> None:
    entries: list[dict[str, Any]] = []
    trained(samples(8 * world.size), 1, logger=entries.append)
    assert all(entry["pin_memory"] for entry in entries if entry["event"] == "start")


def test_the_thread_that_saves_uses_the_device_of_its_rank(world: mpicomm.World, directory: Path) -> None:  # noqa: F811
    checkpoints = Checkpoints(directory, 1, world.device)
    index = checkpoints._pool.submit(torch.accelerator.current_device_index).result()
    checkpoints.close()
    assert index == world.device.index


def test_a_profile_of_steps_is_written(world: mpicomm.World, directory: Path) -> None:  # noqa: F811
    trained(samples(8 * world.size), 1, checkpoint_dir=directory, profile=range(1, 3))
    mpicomm.barrier()
    assert [path.suffix for path in (directory / "profile").iterdir()] == [".json"]
