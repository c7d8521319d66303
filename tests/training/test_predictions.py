"""`Trainer.predict` returns the outputs of each sample once, in the order of the data, as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import mpicomm
from tests.training.test_steps import FEATURES, make_model, make_trainer, samples
from tests.training.test_uneven import IterableSource

pytestmark = pytest.mark.mpi


class Several(nn.Module):
    """A model of several outputs in nested containers, and of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.inner(x)
        return {"logits": logits, "more": (logits.argmax(dim=1), [x.sum(dim=1)])}


def alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one process."""
    with torch.no_grad():
        return model.eval()(x)


def assert_on_rank_0(world: mpicomm.World, found: Any, expected: torch.Tensor) -> None:
    if world.rank:
        assert found is None
    else:
        assert (found.device.type, found.requires_grad) == ("cpu", False)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("count", [64, 37, 1])
def test_each_sample_once_in_the_order_of_the_data(world: mpicomm.World, count: int, strategy: str) -> None:
    data, model = samples(count, seed=1), nn.Sequential(*make_model(), nn.Dropout(0.5))
    expected = alone(model, data.tensors[0])
    model.train()
    trainer = make_trainer(model, batch_size=5, strategy=strategy)
    assert_on_rank_0(world, trainer.predict(data), expected)
    assert model.training


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_shuffles_and_drops_samples(world: mpicomm.World, workers: int) -> None:
    count = 4 * world.size + 1  # with any number of ranks, the last step of drop_last lacks a sample
    data, model = samples(count), make_model()
    loader = DataLoader(data, batch_size=2, shuffle=True, drop_last=True, num_workers=workers)
    found = make_trainer(model).predict(loader, all_ranks=True)
    torch.testing.assert_close(found, alone(model, data.tensors[0]))


@pytest.mark.parametrize("batches", ["none", "full", "uneven"])
def test_a_stream_and_outputs_in_containers(world: mpicomm.World, batches: str) -> None:
    """With one sample, all ranks but one have no outputs."""
    count = {"none": 1, "full": 3 * 2 * world.size, "uneven": 3 * 2 * world.size + 3}[batches]
    x, model = samples(count).tensors[0], Several()
    found = make_trainer(model, batch_size=2).predict(IterableSource(count), all_ranks=True)
    logits = alone(model.inner, x)
    torch.testing.assert_close(found, {"logits": logits, "more": (logits.argmax(dim=1), [x.sum(dim=1)])})


def test_loaders_of_their_own_follow_each_other(world: mpicomm.World) -> None:
    """Rank r has r + 1 samples, the same ones in reverse order."""
    data, model = samples(world.size), make_model()
    loader = DataLoader(data, batch_size=2, sampler=range(world.rank, -1, -1))
    indices = [index for rank in range(world.size) for index in range(rank, -1, -1)]
    assert_on_rank_0(world, make_trainer(model).predict(loader), alone(model, data.tensors[0][indices]))


class Mappings(Dataset[Any]):
    def __init__(self, x: torch.Tensor, *, is_bare: bool) -> None:
        self._x, self._is_bare = x, is_bare

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Any:
        return self._x[index] if self._is_bare else {"input": self._x[index]}


def test_data_without_targets(world: mpicomm.World) -> None:
    x = samples(11).tensors[0]
    model = make_model()
    trainer = make_trainer(model, batch_size=2)
    assert_on_rank_0(world, trainer.predict(TensorDataset(x)), alone(model, x))
    assert_on_rank_0(world, trainer.predict(Mappings(x, is_bare=True)), alone(model, x))
    assert_on_rank_0(world, trainer.predict(Mappings(x, is_bare=False)), alone(model, x))
    bilinear = nn.Bilinear(FEATURES, FEATURES, 3)
    with torch.no_grad():
        bilinear.weight.fill_(0.5)
        bilinear.bias.fill_(1.0)
    trainer = make_trainer(bilinear, batch_size=2)
    with torch.no_grad():
        expected = bilinear(x, x + 1)
    assert_on_rank_0(world, trainer.predict(TensorDataset(x, x + 1), has_targets=False), expected)


class Offset(nn.Linear):
    """A model that accepts the targets as a second argument."""

    def forward(self, x: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if offset is None else super().forward(x) + offset


@pytest.mark.parametrize("has_targets", [True, False])
def test_a_training_step_gets_the_targets_but_the_model_does_not(world: mpicomm.World, has_targets: bool) -> None:
    x, model = samples(4 * world.size).tensors[0], Offset(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = mpicomm.Trainer(model, optimizer, training_step=lambda _, batch: batch[1].mean(), progress="none")
    data = TensorDataset(x, torch.full((len(x), 1), 100.0))
    with torch.no_grad():
        expected = model(x) if has_targets else model(x) + 100
    assert_on_rank_0(world, trainer.predict(data, has_targets=has_targets), expected)


class Returning(nn.Module):
    """A model that returns its loss and the outputs, as models of Hugging Face do, or only one of them."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.inner, self._make = make_model(), make

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.inner(x)
        return self._make(nn.functional.cross_entropy(logits, y), logits)


def predicted(make: Any, count: int = 16) -> Any:
    model = Returning(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mpicomm.Trainer(model, optimizer, batch_size=2, progress="none").predict(samples(count), all_ranks=True)


def test_a_model_that_returns_its_loss(world: mpicomm.World) -> None:
    found = predicted(lambda loss, logits: {"loss": loss, "logits": logits})
    assert list(found) == ["logits"]
    torch.testing.assert_close(found["logits"], alone(make_model(), samples(16).tensors[0]))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda loss, _: loss, ValueError, r"one row per sample \(\d\), got a tensor of shape \[\]"),
        (lambda _, logits: logits.tolist(), TypeError, "must return a tensor, or a container of tensors, got float"),
        (lambda _, logits: None, TypeError, "got no tensor"),
    ],
)
def test_outputs_without_a_row_per_sample(world: mpicomm.World, make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        predicted(make)


def test_outputs_of_different_shapes(world: mpicomm.World) -> None:
    widths = iter(range(2, 100))
    with pytest.raises(ValueError, match=r"must have equal shapes, got \[3\] after \[2\]"):
        predicted(lambda _, logits: logits[:, :1].expand(-1, next(widths)), count=4 * world.size)
    if world.size > 1:
        width = 2 if world.rank == world.size - 1 else 1
        with pytest.raises(mpicomm.TrainingError, match=f"the outputs of rank {world.size - 1} have another structure"):
            predicted(lambda _, logits: logits[:, :width])
