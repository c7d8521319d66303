"""Distributed checkpoints of sharded training: any number of ranks can load them, with bit-identical state."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import tempfile
import threading
import unittest.mock
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor

import mpicomm
from mpicomm.examples import async_checkpoint
from mpicomm.examples.async_checkpoint import AsyncSaves
from tests.time_limits import scaled

FEATURES, BATCH = 6, 3
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # flattens the optimizer state as well: one name per value


@dataclasses.dataclass
class Training:
    """A sharded network and its optimizer, whose state has the shapes of the network's parameters."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        inputs = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.optimizer.zero_grad()
        self.model(inputs).pow(2).mean().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with this rank's shards, in the form that DCP requires."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FLAT)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=FLAT,
        )

    def whole_state(self) -> dict[str, Any]:
        """Return a copy of the state by name, in full tensors (collective)."""
        state = self.state_dict()
        return {
            name: copy.deepcopy(value.full_tensor() if isinstance(value, DTensor) else value)
            for name, value in (state["model"] | state["optimizer"]).items()
        }


@pytest.fixture
def folder(world: mpicomm.World) -> Iterator[Path]:
    """Create a temporary directory for all ranks; rank 0 creates and removes it."""
    path = Path(world.comm.bcast(tempfile.mkdtemp(prefix="mpicomm-test-") if world.rank == 0 else None))
    yield path
    world.comm.Barrier()
    if world.rank == 0:
        shutil.rmtree(path)


def make_training(mesh: DeviceMesh, seed: int, steps: int) -> Training:
    """Return a training after some steps; the sizes of its network are not divisible by the number of ranks."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(steps):
        training.step()
    return training


def assert_identical(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    assert "state.0.weight.exp_avg_sq" in expected
    for name, value in expected.items():
        same = torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value
        assert same, name


def result_of(future: Future) -> Any:
    """Wait for an asynchronous save and for its thread."""
    result = future.result(timeout=scaled(60))
    for thread in threading.enumerate():
        if thread.name.startswith("AsyncCheckpointExecutor"):
            thread.join()
    return result


def assert_holds(folder: Path, expected: dict[str, Any], mesh: DeviceMesh) -> None:
    """Check that another training has the expected state after loading the checkpoint (collective over the mesh)."""
    training = make_training(mesh, seed=1, steps=1)
    assert not torch.equal(training.whole_state()["0.weight"], expected["0.weight"])
    dcp.load({"training": training}, checkpoint_id=folder, process_group=mesh.get_group())
    assert_identical(training.whole_state(), expected)


@pytest.mark.parametrize(
    ("savers", "loaders"),
    [("all", "all"), ("all", "all but one"), ("all but one", "all"), ("all", "one"), ("one", "all")],
)
def test_another_number_of_ranks(world: mpicomm.World, folder: Path, savers: str, loaders: str) -> None:
    sizes = {"all": world.size, "all but one": max(world.size - 1, 1), "one": 1}
    saving, loading = (DeviceMesh("cpu", list(range(sizes[which]))) for which in (savers, loaders))
    expected = None
    if world.rank < saving.size():
        training = make_training(saving, seed=0, steps=3)
        dcp.save({"training": training}, checkpoint_id=folder, process_group=saving.get_group())
        expected = training.whole_state()
    expected = world.comm.bcast(expected)  # rank 0 always saves
    if world.rank < loading.size():
        assert_holds(folder, expected, loading)


class PatientWriter(dcp.FileSystemWriter):
    """A writer that starts to write when `may_write` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_write = threading.Event()

    def write_data(self, *arguments: Any) -> Any:
        assert self.may_write.wait(timeout=scaled(60))
        return super().write_data(*arguments)


@pytest.mark.parametrize("saves_on", ["default group", "own group"])
def test_saving_while_training(world: mpicomm.World, folder: Path, saves_on: str) -> None:
    """The saving thread calls collectives on one group while the main thread calls collectives on another one."""
    another = dist.new_group(list(range(world.size)))
    saving, training_on = (another, dist.group.WORLD) if saves_on == "own group" else (dist.group.WORLD, another)
    mesh = DeviceMesh.from_group(training_on, "cpu")
    training = make_training(mesh, seed=0, steps=2)
    expected = training.whole_state()
    writer = PatientWriter(folder)
    future = dcp.async_save({"training": training}, storage_writer=writer, process_group=saving)
    for _ in range(5):
        training.step()
    assert not future.done()
    writer.may_write.set()
    for _ in range(5):
        training.step()
    result_of(future)
    assert_holds(folder, expected, mesh)


def make_replicated(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(FEATURES, 5))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def saves(world: mpicomm.World) -> Iterator[AsyncSaves]:
    """Create the saves of examples/async_checkpoint.py, without their output."""
    saves = AsyncSaves()
    with unittest.mock.patch.object(async_checkpoint, "report"):
        yield saves
    world.comm.Barrier()
    dist.destroy_process_group(saves._group)


def test_parameters_that_change_right_after_an_asynchronous_save(
    world: mpicomm.World, folder: Path, saves: AsyncSaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault of https://github.com/pytorch/pytorch/issues/144657: the checkpoint had the new values."""
    may_write, write_data = threading.Event(), dcp.FileSystemWriter.write_data

    def write_later(*arguments: Any) -> Any:
        assert may_write.wait(timeout=scaled(60))
        return write_data(*arguments)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write_later)
    mesh = DeviceMesh("cpu", list(range(world.size)))
    training, (replicated, _) = make_training(mesh, seed=0, steps=2), make_replicated(seed=0)
    expected, expected_weight = training.whole_state(), replicated.module.weight.detach().clone()
    saves.start({"training": training, "replicated": replicated.module.state_dict()}, folder / "a")
    with torch.no_grad():
        for parameter in (*training.model.parameters(), *replicated.parameters()):
            parameter.fill_(float("nan"))
    for state in training.optimizer.state.values():
        state["exp_avg_sq"].fill_(float("nan"))
    may_write.set()
    saves.wait()
    assert_holds(folder / "a", expected, mesh)
    loaded = {"weight": torch.empty(5, FEATURES)}
    dcp.load({"replicated": loaded}, checkpoint_id=folder / "a")
    assert torch.equal(loaded["weight"], expected_weight)


def test_saves_beside_training_do_not_deadlock(world: mpicomm.World, folder: Path, saves: AsyncSaves) -> None:
    """The fault of https://github.com/KempnerInstitute/KempnerForge/issues/104: a save and a barrier on one group."""
    mesh = DeviceMesh("cpu", list(range(world.size)))
    sharded, (model, optimizer) = make_training(mesh, seed=0, steps=1), make_replicated(seed=0)
    for number in range(50):
        sharded.step()  # asynchronous collectives on worker threads
        model(torch.full((BATCH, FEATURES), 1.0 + world.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        saves.start({"training": sharded, "model": model.module.state_dict()}, folder / str(number))
        dist.barrier()
        if number % 10 == 0:
            sharded.step()
            assert sum(mpicomm.all_gather(torch.ones(1))).item() == world.size
    saves.wait()
    assert len([*folder.glob("*/.metadata")]) == 50
    assert_holds(folder / "49", sharded.whole_state(), mesh)


def test_a_failed_asynchronous_save_is_an_error_on_every_rank(
    world: mpicomm.World, folder: Path, saves: AsyncSaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    training = make_training(DeviceMesh("cpu", list(range(world.size))), seed=0, steps=1)
    with monkeypatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr(dcp.FileSystemWriter, "write_data", fail)
        saves.start({"training": training}, folder / "full")
        training.step()
        with pytest.raises(RuntimeError, match=rf"full: rank {world.size - 1}: .*No space left on device"):
            saves.start({"training": training}, folder / "next")
    assert not (folder / "full" / ".metadata").exists()
    saves.start({"training": training}, folder / "next")
    saves.wait()
    assert (folder / "next" / ".metadata").exists()
