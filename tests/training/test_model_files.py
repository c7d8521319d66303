"""Export of a model's weights to a file, for other programs and as the start of another run."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import mpicomm
from tests.training.test_steps import FEATURES, samples

pytestmark = pytest.mark.mpi


class Noted(nn.Module):
    """A model with layers, buffers, and state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        self.head = nn.Linear(3, 2, bias=False)
        self.note = "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def make_trainer(model: nn.Module, **options: Any) -> mpicomm.Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return mpicomm.Trainer(model, optimizer, nn.functional.cross_entropy, batch_size=8, progress="none", **options)


def whole(model: nn.Module) -> dict[str, Any]:
    """Return the full state dict on every rank (collective)."""
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in model.state_dict().items()
    }


def assert_same(found: Any, expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, each in expected.items():
        assert torch.equal(found[name], each) if isinstance(each, torch.Tensor) else found[name] == each, name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_go_to_a_file_and_into_another_run(world: mpicomm.World, directory: Path, strategy: str) -> None:
    path = directory / "made" / "model.pt"
    data = samples(16 * world.size)
    names = list(Noted().state_dict())
    model = Noted()
    model.note = "second"
    trainer = make_trainer(model, strategy=strategy)
    trainer.export(path)  # before the first step
    trainer.fit(data, 1)
    trainer.export(path)
    expected = whole(model)
    assert [each.name for each in path.parent.iterdir()] == ["model.pt"]
    content = torch.load(path, weights_only=True)
    assert list(content) == names
    assert_same(content, expected)
    assert all(each.device.type == "cpu" for each in content.values() if isinstance(each, torch.Tensor))
    alone = Noted()
    alone.load_state_dict(content)
    assert alone.note == "second"
    assert content._metadata["layers.1"] == {"version": 2}, "the versions of the modules are kept"
    for other in ("ddp", "fsdp"):
        torch.manual_seed(world.rank)
        again = Noted()
        begun = make_trainer(again, strategy=other, weights=path)
        assert_same(whole(again), expected)
        assert begun.evaluate(data)["loss"] == pytest.approx(trainer.evaluate(data)["loss"], rel=1e-5)


def test_a_checkpoint_takes_precedence_over_weights(world: mpicomm.World, directory: Path) -> None:
    path, data = directory / "model.pt", samples(16 * world.size)
    make_trainer(Noted()).export(path)
    model = Noted()
    make_trainer(model, checkpoint_dir=directory / "run", weights=path).fit(data, 1)
    expected, again = whole(model), Noted()
    trainer = make_trainer(again, checkpoint_dir=directory / "run", weights=path)
    assert_same(whole(again), torch.load(path, weights_only=True))
    trainer.fit(data, 1)
    assert_same(whole(again), expected)


def test_weights_that_cannot_be_loaded_are_refused_on_every_rank(world: mpicomm.World, directory: Path) -> None:
    path = directory / "model.pt"
    make_trainer(Noted()).export(path)
    with pytest.raises(mpicomm.CheckpointError) as error:
        make_trainer(nn.Sequential(nn.Linear(FEATURES, 2)), weights=path)
    text = str(error.value)
    assert text.startswith(f"rank 0 cannot load the weights in {str(path)!r}: Error(s) in loading state_dict for Sequ")
    assert 'Missing key(s) in state_dict: "0.weight", "0.bias"' in text
    assert 'Unexpected key(s) in state_dict: "_extra_state", "layers.0.weight", "layers.0.bias"' in text
    assert text.splitlines()[-1].startswith("Pass a file that is visible on all hosts and was written for this model")
    larger = Noted()
    larger.head = nn.Linear(3, 4, bias=False)
    with pytest.raises(mpicomm.CheckpointError, match=r"size mismatch for head\.weight"):
        make_trainer(larger, weights=path)
    absent = path if world.rank < world.size - 1 else directory / "absent.pt"
    with pytest.raises(mpicomm.CheckpointError, match=rf"rank {world.size - 1} cannot load .* No such file"):
        make_trainer(Noted(), weights=absent)
    if world.rank == 0:
        torch.save([1, 2], directory / "list.pt")
        (directory / "text.pt").write_text("no weights")
    mpicomm.barrier()
    with pytest.raises(mpicomm.CheckpointError, match=r"rank 0 cannot load .*: expected a state_dict, got a list"):
        make_trainer(Noted(), weights=directory / "list.pt")
    with pytest.raises(mpicomm.CheckpointError, match=r"rank 0 cannot load the weights in '.*text\.pt'"):
        make_trainer(Noted(), weights=directory / "text.pt")


def test_a_file_that_cannot_be_written_leaves_the_one_before(
    world: mpicomm.World, directory: Path, small_files: Any
) -> None:
    path = directory / "model.pt"
    trainer = make_trainer(Noted())
    trainer.export(path)
    before = path.read_bytes()
    if world.rank == 0:
        small_files(1000)
    with pytest.raises(mpicomm.CheckpointError, match=r"rank 0 cannot write the weights to '.*': .*File too large"):
        trainer.export(path)
    small_files(resource.RLIM_INFINITY)
    assert (path.read_bytes(), [each.name for each in directory.iterdir()]) == (before, ["model.pt"])
    with pytest.raises(mpicomm.CheckpointError, match=r"rank 0 cannot write the weights to .*\nPass a path on a disk"):
        trainer.export(path / "below" / "model.pt")


def test_a_file_is_synced_before_it_has_its_name(world: mpicomm.World, directory: Path, synced: list[str]) -> None:
    """Otherwise a power failure could leave a file under its final name without its content."""
    make_trainer(Noted()).export(directory / "model.pt")
    assert synced == (["sync model.pt.new", "rename to model.pt", "sync ."] if world.rank == 0 else [])
