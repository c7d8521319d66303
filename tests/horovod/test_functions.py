"""Broadcasts of parameters, of optimizers and of objects, and the all-gather of objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import mpicomm
import mpicomm.horovod as hvd

pytestmark = pytest.mark.usefixtures("dynamic")


def model_of(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def trained(model: nn.Module, kind: Any, steps: int, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer after some steps with gradients of one."""
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


# -- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        lambda model: model.state_dict(),
        lambda model: list(model.parameters()),
        lambda model: model.named_parameters(),
    ],
    ids=["state_dict", "list", "named"],
)
def test_parameters_of_the_root(world: mpicomm.World, params: Any) -> None:
    root = world.size - 1
    model = model_of(world.rank)
    hvd.broadcast_parameters(params(model), root_rank=root)
    for mine, expected in zip(model.parameters(), model_of(root).parameters(), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("params", [3, torch.zeros(2), {"scale": 1.0}, [None], [torch.ones(1).to_sparse()]], ids=str)
def test_other_things_than_tensors_are_refused(world: mpicomm.World, params: Any) -> None:
    with pytest.raises(ValueError, match="must be a"):
        hvd.broadcast_parameters(params, root_rank=0)


@pytest.mark.parametrize("root", [99, -1, "0", None])
def test_errors_about_the_root_name_the_function(world: mpicomm.World, root: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    calls = {
        "broadcast_parameters": lambda: hvd.broadcast_parameters([torch.zeros(1)], root),
        "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(optimizer, root),
        "broadcast_object": lambda: hvd.broadcast_object(1, root),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{name}: root_rank must be one of the ranks \[0.*, got {root!r}\."):
            call()


# -- the state of an optimizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.Rprop, {})],
    ids=["SGD", "Adam", "Rprop"],
)
@pytest.mark.parametrize("others", [0, 2], ids=["fresh", "trained"])
@pytest.mark.parametrize("steps", [0, 3], ids=["from-fresh", "from-trained"])
def test_the_state_is_that_of_the_root(world: mpicomm.World, kind: Any, options: dict, steps: int, others: int) -> None:
    root = world.size - 1
    expected = trained(model_of(7), kind, steps, lr=0.1 * (root + 1), **options)
    is_root = world.rank == root
    mine = trained(model_of(7), kind, steps if is_root else others, lr=0.1 * (world.rank + 1), **options)
    hvd.broadcast_optimizer_state(mine, root_rank=root)
    found, wanted = mine.state_dict(), expected.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert found["state"][index].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(found["state"][index][name], value, rtol=0, atol=0)


def test_numbers_and_none_in_a_state_are_sent(world: mpicomm.World) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.state[parameter] = {"calls": world.rank + 5, "buffer": None if world.rank == 0 else torch.ones(3)}
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5 + world.rank)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.state[parameter] == {"calls": 5, "buffer": None}
    assert optimizer.param_groups[0]["lr"].item() == 0.5


def test_missing_gradients_become_zeros_of_their_layout(world: mpicomm.World) -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), root_rank=0, model=model)
    assert model[0].weight.grad.is_sparse
    assert torch.equal(model[1].weight.grad, torch.zeros(1, 2))
    assert model[1].bias.grad is None


def test_lbfgs_is_refused(world: mpicomm.World) -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model_of(0).parameters()), root_rank=0)


def test_optimizers_of_different_models_are_an_error_on_all_ranks(world: mpicomm.World) -> None:
    if world.size == 1:
        pytest.skip("needs two ranks")
    count = 3 if world.rank == 1 else 2
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1)) for _ in range(count)], lr=0.1)
    with pytest.raises(ValueError, match=r"groups of \[2\] on rank 0, of \[3\] on rank 1"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


# -- objects ---------------------------------------------------------------------------------------------------------


def test_objects(world: mpicomm.World) -> None:
    root = world.size - 1
    assert hvd.broadcast_object({"rank": world.rank, 1: "x" * world.rank}, root, name="a") == {
        "rank": root,
        1: "x" * root,
    }
    assert hvd.allgather_object(list(range(world.rank))) == [list(range(rank)) for rank in range(world.size)]


def test_an_object_among_the_ranks_of_a_process_set(world: mpicomm.World) -> None:
    last = world.size - 1
    process_set = hvd.add_process_set([0, last] if last else [0])
    if process_set.included():
        assert hvd.broadcast_object(world.rank, last, process_set=process_set) == last
    hvd.remove_process_set(process_set)


@pytest.mark.parametrize("of_one_rank", [hvd.broadcast_object, hvd.allgather_object], ids=["broadcast", "allgather"])
def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks(world: mpicomm.World, of_one_rank: Any) -> None:
    with pytest.raises(TypeError, match="pickle"):
        of_one_rank((lambda: 0) if world.rank == 0 else 0)
    assert hvd.broadcast_object("next", 0) == "next"


def test_options_of_an_optimizer_in_another_order(world: mpicomm.World) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    own = {"first": torch.tensor(1.0 + world.rank), "second": torch.tensor(2.0 + world.rank)}
    optimizer.param_groups[0].update(own if world.rank == 0 else dict(reversed(own.items())))
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert [float(optimizer.param_groups[0][name]) for name in own] == [1.0, 2.0]
