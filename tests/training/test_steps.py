"""A step gives the same result as one process with all samples, regardless of the division into ranks and batches."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import mpicomm
from mpicomm.training.indexed_data import EpochPartition

pytestmark = [pytest.mark.mpi, pytest.mark.each_torch("trainer")]

FEATURES = 10


def samples(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


def make_model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 2))


def make_trainer(model: nn.Module, **options: Any) -> mpicomm.Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return mpicomm.Trainer(model, optimizer, nn.functional.cross_entropy, progress="none", **options)


def train(data: TensorDataset, epochs: int = 2, **options: Any) -> list[torch.Tensor]:
    """Return the parameters after training with `Trainer`."""
    model = make_model()
    make_trainer(model, **options).fit(data, epochs)
    return [each.detach().cpu() for each in model.parameters()]


def train_alone(data: TensorDataset, batch: int, size: int, epochs: int = 2) -> list[torch.Tensor]:
    """Return the parameters after training in one process, with all samples of a step in one batch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = data.tensors
    for epoch in range(epochs):
        order = order_of(data, epoch, size)
        for start, end in EpochPartition(len(data), batch, 1, size).bounds(0):
            chosen = order[start:end]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return [each.detach() for each in model.parameters()]


def order_of(data: TensorDataset, epoch: int, size: int) -> torch.Tensor:
    from mpicomm.training.data import DataRank, LoaderOptions
    from mpicomm.training.indexed_data import IndexedSource

    return IndexedSource(data, LoaderOptions(), DataRank(0, size)).order(epoch)


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [96, 101, 67, 3])
def test_all_ranks_train_as_one_process_would(world: mpicomm.World, count: int) -> None:
    """The last step may have fewer samples, and different numbers of them on the ranks; with 3, some have none."""
    data = samples(count)
    assert_close(train(data, batch_size=8), train_alone(data, 8, world.size))


@pytest.mark.parametrize("grad_accum_steps", [1, 3])
def test_fsdp_trains_as_ddp_does(world: mpicomm.World, grad_accum_steps: int) -> None:
    data = samples(61)
    whole = train(data, batch_size=4, grad_accum_steps=grad_accum_steps)
    model = make_model()
    trainer = make_trainer(model, batch_size=4, grad_accum_steps=grad_accum_steps, strategy="fsdp", max_grad_norm=100.0)
    trainer.fit(data, 2)
    assert_close([each.full_tensor().detach() for each in model.parameters()], whole)  # type: ignore[operator]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("count", [64, 37, 1])
def test_an_evaluation_counts_each_sample_once(world: mpicomm.World, count: int, strategy: str) -> None:
    data, model = samples(count, seed=1), nn.Sequential(*make_model(), nn.Dropout(0.5))
    x, y = data.tensors
    model.eval()
    with torch.no_grad():
        outputs = model(x)
        loss = nn.functional.cross_entropy(outputs, y, reduction="none").double().mean().item()
    model.train()
    right = (outputs.argmax(dim=1) == y).sum().item() / count
    trainer = make_trainer(model, batch_size=5, strategy=strategy)
    found = trainer.evaluate(
        data,
        {
            "accuracy": lambda out, target: out.argmax(dim=1) == target,
            "mean": lambda out, target: (out.argmax(dim=1) == target).double().mean(),
        },
    )
    assert (found["samples"], found["accuracy"]) == (count, right)
    assert found["mean"] == pytest.approx(right, abs=1e-12)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert model.training


def test_the_loss_of_an_epoch_is_the_mean_over_all_samples(world: mpicomm.World) -> None:
    data, model = samples(53), make_model()
    x, y = data.tensors
    before = nn.functional.cross_entropy(copy.deepcopy(model)(x), y).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = mpicomm.Trainer(model, optimizer, nn.functional.cross_entropy, batch_size=4, log_every=2, progress="none")
    (first,) = trainer.fit(data, 1)
    assert (first["epoch"], first["samples"]) == (1, 53)
    assert first["loss"] == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("grad_compression", ["bf16", "fp16", "powersgd"])
def test_compressed_gradients_reach_nearly_the_same_loss(world: mpicomm.World, grad_compression: str) -> None:
    data = samples(32 * world.size)
    whole, found = (
        make_trainer(make_model(), batch_size=8, grad_compression=each).fit(data, 5)
        for each in (None, grad_compression)
    )
    assert found[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=0.1)
    assert found[-1]["loss"] != whole[-1]["loss"], "the gradients were not compressed"
    assert found[-1]["loss"] < 0.8 * found[0]["loss"]


@pytest.mark.parametrize("max_grad_norm", [None, 0.2])
@pytest.mark.parametrize(("precision", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_sixteen_bits_reach_nearly_the_same_loss(
    world: mpicomm.World, precision: str, dtype: torch.dtype, max_grad_norm: float | None
) -> None:
    data, dtypes = samples(32 * world.size), []

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        dtypes.append(outputs.dtype)
        return nn.functional.cross_entropy(outputs, labels)

    model = make_model()
    trainer = make_trainer(model, batch_size=8, precision=precision, max_grad_norm=max_grad_norm)
    trainer.loss_fn = loss_fn
    trainer.fit(data, 2)
    assert set(dtypes) == {dtype}
    whole = train(data, batch_size=8, max_grad_norm=max_grad_norm)
    for mine, theirs, begin in zip(model.parameters(), whole, make_model().parameters(), strict=True):
        moved, error = (theirs - begin).norm().item(), (theirs - mine.cpu()).norm().item()
        assert 0 < error < 0.05 * moved


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_start_from_the_parameters_of_rank_0(world: mpicomm.World, strategy: str) -> None:
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    nn.init.normal_(model[1].running_mean)  # type: ignore[arg-type]
    expected = mpicomm.broadcast_object({name: each.clone() for name, each in model.state_dict().items()}, src=0)
    make_trainer(model, strategy=strategy)
    for name, each in model.state_dict().items():
        whole = each.full_tensor() if isinstance(each, DTensor) else each
        assert torch.equal(whole.cpu(), expected[name]), name


def test_each_rank_draws_random_numbers_of_its_own(world: mpicomm.World) -> None:
    drawn: list[tuple[float, ...]] = []

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        drawn.append((torch.rand(()).item(), random.random(), np.random.random()))
        return nn.functional.cross_entropy(outputs, labels)

    trainer = make_trainer(make_model(), batch_size=4)
    trainer.loss_fn = loss_fn
    trainer.fit(samples(4 * world.size), 1)
    for of_all_ranks in zip(*mpicomm.all_gather_object(drawn[-1]), strict=True):
        assert len(set(of_all_ranks)) == world.size


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_are_equal_on_all_ranks_after_an_epoch(world: mpicomm.World, strategy: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 2))
    trainer = make_trainer(model, batch_size=8, strategy=strategy)
    trainer.fit(samples(16 * world.size), 1)
    means = mpicomm.all_gather(trainer.wrapped.inner.state_dict()["0.running_mean"])
    assert all(torch.equal(each, means[0]) for each in means)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_without_a_finite_loss_is_skipped(world: mpicomm.World, bad: float) -> None:
    data = samples(16 * world.size)
    data.tensors[0][5] = bad
    model, entries = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    options = {"batch_size": 4, "on_nonfinite": "skip", "logger": entries.append, "progress": "none"}
    trainer = mpicomm.Trainer(model, optimizer, nn.functional.cross_entropy, scheduler=scheduler, **options)
    history = trainer.fit(data, 2)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**6, "the scheduler takes the steps of the optimizer"
    assert all(torch.isfinite(each).all() for each in model.parameters())
    assert all(0 < epoch["loss"] < 2 for epoch in history)
    skipped = [entry for entry in entries if entry["event"] == "skipped"]
    assert len(skipped) == (2 if world.rank == 0 else 0)
    assert all([5 in ids for ids in entry["rank_samples"].values()] == [True] for entry in skipped)


@pytest.mark.parametrize("which", [0, -1])
def test_parameters_that_differ_between_ranks_are_detected(world: mpicomm.World, which: int) -> None:
    model, ranks = make_model(), range(world.size)[which]
    trainer = make_trainer(model, batch_size=4, check_every=2)

    def spoil(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if world.rank == ranks and trainer.position.step == 1:
            with torch.no_grad():
                model[2].bias[1] += 1e-6  # type: ignore[index, operator]
        return nn.functional.cross_entropy(outputs, labels)

    trainer.loss_fn = spoil
    if world.size == 1:
        assert len(trainer.fit(samples(16), 1)) == 1
        return
    named = r"rank [01]" if world.size == 2 else f"rank {ranks}"
    message = rf"after step 2 the parameters of {named} differ from those of the other ranks, first in 2\.bias"
    with pytest.raises(mpicomm.TrainingError, match=message):
        trainer.fit(samples(16 * world.size), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, "precision must be 'float32', .* or 'fp16', got 'int8'"),
        ({"strategy": "zero"}, "strategy must be 'ddp' or 'fsdp', got 'zero'"),
        ({"grad_compression": "zip"}, "grad_compression must be 'bf16', .* or None, got 'zip'"),
        ({"grad_compression": "bf16", "strategy": "fsdp"}, "grad_compression='bf16' requires strategy='ddp', got"),
        ({"schedule": "day"}, "schedule must be 'step', 'epoch' or None, got 'day'"),
        ({"on_nonfinite": "hope"}, "on_nonfinite must be 'stop' or 'skip', got 'hope'"),
        ({"progress": "all"}, "progress must be .*, got 'all'"),
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"sync_batchnorm": True}, "sync_batchnorm=True requires GPUs .*, got the device cpu"),
        ({"rank_logs": True}, "rank_logs=True requires a checkpoint_dir"),
        ({"replicate_shards": True}, "replicate_shards=True requires strategy='fsdp' and on_failure='recover', got"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(world: mpicomm.World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mpicomm.Trainer(*_parts(), **options)


def test_recovery_without_a_job_that_continues_is_refused(world: mpicomm.World) -> None:
    with pytest.raises(
        mpicomm.MpicommError, match=r"requires a job that continues after a failure\.\nCall mpicomm\.boo"
    ):
        mpicomm.Trainer(*_parts(), on_failure="recover")


def _parts() -> tuple[Any, ...]:
    model = make_model()
    return model, torch.optim.SGD(model.parameters()), nn.functional.cross_entropy
