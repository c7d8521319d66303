"""A loop of the user with `mpicomm.prepare` trains as one process does on the same global batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mpicomm
from tests.training.test_steps import assert_close, make_model, samples, train_alone
from tests.training.test_uneven import IterableSource

pytestmark = [pytest.mark.mpi, pytest.mark.each_torch("trainer")]


def parts(data: Any, **loading: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, DataLoader(data, **loading)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("count", [96, 101, 3])
def test_a_loop_trains_as_one_process_does(world: mpicomm.World, count: int, strategy: str) -> None:
    """The last batch is uneven with 101 samples; with 3 samples some of four ranks have none."""
    data = samples(count)
    model, optimizer, loader = mpicomm.prepare(*parts(data, batch_size=8, shuffle=True), strategy=strategy)
    for _ in range(2):
        total = 0.0
        number = 0
        for x, y in loader:
            number += 1
            optimizer.zero_grad()
            loss = loader.weight * nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loader.weight
        assert number == len(loader) == max(1, -(-(count - world.size + 1) // (8 * world.size)))
        assert mpicomm.all_reduce(total, "mean") == pytest.approx(number)
    found = [each.detach() for each in model.parameters()]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
    assert_close(whole, train_alone(data, 8, world.size))


def test_the_ranks_share_an_epoch_in_the_order_of_its_number(world: mpicomm.World) -> None:
    count = 2 * world.size * 2 + world.size
    data = TensorDataset(torch.arange(count))
    _, _, loader, plain = mpicomm.prepare(
        *parts(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=2, num_workers=1)
    )

    def epoch(source: Any) -> list[list[int]]:
        batches = [batch.tolist() for (batch,) in source]
        gathered = mpicomm.all_gather_object(batches)
        return [sorted(index for of_rank in step for index in of_rank) for step in zip(*gathered, strict=True)]

    first, second = epoch(loader), epoch(loader)
    loader.set_epoch(0)
    assert epoch(loader) == first != second
    for each in (first, second):
        assert sorted(itertools.chain.from_iterable(each)) == list(range(count))
    whole = 2 * world.size
    expected = [list(range(start, min(start + whole, count))) for start in range(0, count, whole)]
    assert epoch(plain) == epoch(plain) == expected


def test_ranks_with_data_of_their_own_take_equal_numbers_of_batches(world: mpicomm.World) -> None:
    """Rank r has r + 1 batches; the ranks without samples get padding, with the weight 0."""
    loader = DataLoader(IterableSource(2 * (world.rank + 1)), batch_size=2)
    _, _, prepared = mpicomm.prepare(*parts(samples(1))[:2], loader)
    weights = [prepared.weight for _ in prepared]
    assert weights == [world.size / (world.size - max(step, 0)) * (step <= world.rank) for step in range(world.size)]
    with pytest.raises(TypeError, match="the number of batches is unknown"):
        len(prepared)


def test_arguments_of_wrong_types(world: mpicomm.World) -> None:
    model, optimizer, loader = parts(samples(8))
    with pytest.raises(TypeError, match=r"prepare: each loader must be a torch.utils.data.DataLoader, got"):
        mpicomm.prepare(model, optimizer, loader, samples(8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the optimizer has parameters that do not belong to the model"):
        mpicomm.prepare(make_model(), optimizer, loader)
