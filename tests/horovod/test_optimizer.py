"""hvd.DistributedOptimizer gives the parameters of the same training in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import mpicomm
import mpicomm.horovod as hvd
from tests.features.problem import (
    FEATURES,
    RATE,
    assert_identical_on_all_ranks,
    assert_same,
    batches,
    dense_model,
    loss_of,
    sgd,
    train,
    train_alone,
)

pytestmark = pytest.mark.usefixtures("dynamic")


def wrapped(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), **options)


class Branches(nn.Module):
    """A network of which each step uses one of two branches, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)]).double()

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](inputs)


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        lambda model: {},
        lambda model: {"gradient_predivide_factor": 4.0},
        lambda model: {"groups": 1},
        lambda model: {"groups": 4},
        lambda model: {"groups": [[*model[0].parameters()], [model[2].weight, model[4].bias]]},
    ],
    ids=["plain", "predivided", "one-group", "four-groups", "listed-groups"],
)
def test_training_equals_training_alone(world: mpicomm.World, options: Callable[[nn.Module], dict]) -> None:
    data, model = batches(world, steps=5), dense_model()
    alone = copy.deepcopy(model)
    train_alone(alone, data)
    train(model, wrapped(model, **options(model)), data[:, world.rank])
    assert_same(model, alone)
    assert_identical_on_all_ranks(model)


def test_the_ranks_may_pass_the_parameters_in_different_orders(world: mpicomm.World) -> None:
    data, model = batches(world, steps=3), dense_model()
    alone = copy.deepcopy(model)
    train_alone(alone, data)
    named = list(model.named_parameters())
    named = named[world.rank :] + named[: world.rank]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=RATE, momentum=0.9)
    train(model, hvd.DistributedOptimizer(optimizer, named_parameters=named, groups=2), data[:, world.rank])
    assert_same(model, alone)


def test_compressed_gradients_are_rounded(world: mpicomm.World) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)
    (model.weight * (1 + 2**-12)).sum().backward()  # rounded to 1
    optimizer.step()
    assert model.weight.item() == -1
    assert model.weight.grad.dtype == torch.float32


def test_a_sum_of_the_gradients(world: mpicomm.World) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    (model.weight * (world.rank + 1)).sum().backward()
    optimizer.synchronize()
    assert model.weight.grad.item() == world.size * (world.size + 1) / 2


@pytest.mark.parametrize("buckets", [None, 1])
def test_gradients_of_several_backward_passes_are_reduced_once(world: mpicomm.World, buckets: int | None) -> None:
    data, model = batches(world, steps=4), dense_model()
    alone = copy.deepcopy(model)
    reference = sgd(alone)
    for pair in data.split(2):
        reference.zero_grad()
        for samples in pair:
            loss_of(alone, samples.flatten(0, 1)).backward()
        reference.step()
    optimizer = wrapped(model, backward_passes_per_step=3, groups=buckets)
    optimizer.set_backward_passes_per_step(2)
    for pair in data[:, world.rank].split(2):
        optimizer.zero_grad()
        for samples in pair:
            loss_of(model, samples).backward()
        optimizer.step()
    assert_same(model, alone)


def test_a_step_before_all_backward_passes_reduces_the_gradients(world: mpicomm.World) -> None:
    data, model = batches(world, steps=2), dense_model()
    alone = copy.deepcopy(model)
    train_alone(alone, data)
    train(model, wrapped(model, backward_passes_per_step=2), data[:, world.rank])
    assert_same(model, alone)


@pytest.mark.parametrize("buckets", [None, 2])
def test_a_parameter_without_a_gradient_takes_part_with_zeros(world: mpicomm.World, buckets: int | None) -> None:
    samples, model = batches(world, steps=1)[0, world.rank], Branches()
    optimizer = wrapped(model, groups=buckets)
    loss_of(model, samples, world.rank % 2).backward()
    optimizer.synchronize()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, mean_gradient(model, world, parameter))


def mean_gradient(model: nn.Module, world: mpicomm.World, parameter: torch.Tensor) -> torch.Tensor:
    """Return the mean over the ranks of the gradient of a branch that depends on the rank."""
    total = torch.zeros_like(parameter)
    for rank, samples in enumerate(batches(world, steps=1)[0]):
        (gradient,) = torch.autograd.grad(loss_of(model, samples, rank % 2), parameter, allow_unused=True)
        total += 0 if gradient is None else gradient
    return total / world.size


def test_gradients_can_be_clipped_before_the_step(world: mpicomm.World) -> None:
    data, model = batches(world, steps=3), dense_model()
    alone = copy.deepcopy(model)
    reference, optimizer = sgd(alone), wrapped(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for samples in data:
            reference.zero_grad()
            loss_of(alone, samples.flatten(0, 1)).backward()
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            reference.step()
            optimizer.zero_grad()
            loss_of(model, samples[world.rank]).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
    assert_same(model, alone)


def test_the_gradients_of_a_closure_are_reduced(world: mpicomm.World) -> None:
    data, model = batches(world, steps=3), dense_model()
    alone = copy.deepcopy(model)
    train_alone(alone, data)
    optimizer = wrapped(model)
    for samples in data[:, world.rank]:

        def closure(samples: torch.Tensor = samples) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, samples)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    assert_same(model, alone)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients(world: mpicomm.World, sparse_as_dense: bool) -> None:
    model = nn.Embedding(world.size + 2, 3, sparse=True, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense)
    model(torch.tensor([world.rank, world.size])).sum().backward()
    optimizer.step()
    expected = torch.full((world.size + 2, 3), -1 / world.size, dtype=torch.float64)
    expected[world.size] = -1  # on all ranks
    expected[world.size + 1] = 0  # on none
    torch.testing.assert_close(model.weight.detach(), expected)
    assert model.weight.grad.is_sparse


def test_a_process_set_reduces_among_its_ranks(world: mpicomm.World) -> None:
    even = hvd.add_process_set(range(0, world.size, 2))
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, process_set=even, groups=1)
    (model.weight * (world.rank + 1)).sum().backward()
    optimizer.step()
    mean = sum(rank + 1 for rank in even.ranks) / len(even.ranks)
    assert model.weight.item() == pytest.approx(-mean if even.included() else -(world.rank + 1))
    hvd.remove_process_set(even)


# -- Adasum ------------------------------------------------------------------------------------------------------------


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def test_adasum_adds_orthogonal_changes_and_averages_equal_ones(world: mpicomm.World) -> None:
    if not is_power_of_two(world.size):
        pytest.skip("Adasum needs a power of two of ranks")
    weights = nn.Parameter(torch.zeros(world.size + 1)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(weights, lr=0.5, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    for step in (1, 2):
        optimizer.zero_grad()
        (weights[0][world.rank] + weights[1].sum()).backward()
        optimizer.step()
        change = -0.5 * (1 if step == 1 else 1 + 1.9)  # with momentum
        expected = torch.full((world.size + 1,), change)
        expected[world.size] = 0
        torch.testing.assert_close(weights[0].detach(), expected)
        torch.testing.assert_close(weights[1].detach(), torch.full((2,), 1 + change))
    with pytest.raises(AssertionError, match="skip_synchronize"), optimizer.skip_synchronize():
        pass


# -- the optimizer as an object ----------------------------------------------------------------------------------------


def test_it_is_an_optimizer_of_the_same_class_and_state(world: mpicomm.World) -> None:
    model = dense_model()
    inner = sgd(model)
    scheduler = StepLR(inner, step_size=1, gamma=0.5)  # replaces inner.step
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.state is inner.state
    loss_of(model, batches(world, steps=1)[0, world.rank]).backward()
    optimizer.step()
    assert_identical_on_all_ranks(model)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == RATE / 2
    assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}


def test_hooks_of_a_step_run_once(world: mpicomm.World) -> None:
    model = dense_model()
    optimizer, calls = wrapped(model), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, batches(world, steps=1)[:, world.rank])
    assert calls == ["before"]


def test_parameters_can_be_added(world: mpicomm.World) -> None:
    data, model = batches(world, steps=3), dense_model()
    alone = copy.deepcopy(model)
    train_alone(alone, data)
    optimizer = torch.optim.SGD(model[:3].parameters(), lr=RATE, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer)
    optimizer.add_param_group({"params": model[3:].parameters()})
    train(model, optimizer, data[:, world.rank])
    assert_same(model, alone)


def test_a_loaded_state_forgets_reductions_in_flight(world: mpicomm.World) -> None:
    data, model = batches(world, steps=2), dense_model()
    optimizer = wrapped(model)
    saved = copy.deepcopy(optimizer.state_dict())
    loss_of(model, data[0, world.rank]).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.load_state_dict(saved)
    train(model, optimizer, data[:, world.rank])
    assert_identical_on_all_ranks(model)


# -- misuse ------------------------------------------------------------------------------------------------------------


def two_linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda model: {"named_parameters": [*model[0].named_parameters(), *model[1].named_parameters()]}, "unique"),
        (lambda model: {"named_parameters": model[0].named_parameters()}, r"no name for 2 .*0\.2 of shape \(1, 1\)"),
        (lambda model: {"named_parameters": model.parameters()}, "pairs of a name and a parameter"),
        (lambda model: {"backward_passes_per_step": 0}, "positive integer, got 0"),
        (lambda model: {"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "requires op=hvd.Average"),
        (lambda model: {"groups": 0}, "groups must be a positive integer"),
        (lambda model: {"groups": (model[0].bias,)}, r"lists of parameters, got a tuple\.$"),
        (lambda model: {"groups": [model[0].bias]}, r"^groups\[0\] must be a list of parameters, got a Parameter\.$"),
        (lambda model: {"groups": [[], 2]}, r"^groups\[1\] must be a list of parameters, got a int\.$"),
        (lambda model: {"groups": [[model[0].bias, 1]]}, r"^groups\[0\]\[1\] must be a parameter, got a int\.$"),
        (lambda model: {"op": 17}, r"^DistributedOptimizer: op must be .*, got 17\.$"),
        (
            lambda model: {"process_set": hvd.ProcessSet([0])},
            "^DistributedOptimizer: the process set is not registered",
        ),
        (lambda model: {"groups": [[model[0].bias], [model[0].bias]]}, "must not contain a parameter twice"),
    ],
    ids=[
        "repeated",
        "unnamed",
        "no-pairs",
        "passes",
        "predivided-sum",
        "no-group",
        "tuple",
        "tensor",
        "number",
        "no-tensor",
        "op",
        "set",
        "twice",
    ],
)
def test_arguments_are_checked(world: mpicomm.World, options: Callable[[nn.Module], dict], message: str) -> None:
    model = two_linear()
    with pytest.raises(ValueError, match=f"(?m){message}"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **options(model))


def test_a_group_may_be_an_iterator_of_parameters(world: mpicomm.World) -> None:
    model = two_linear()
    optimizer = wrapped(model, groups=[model[0].parameters()])
    assert optimizer._reducer._bucket_of == {
        parameter: tuple(model[0].parameters()) if name.startswith("0") else (parameter,)
        for name, parameter in model.named_parameters()
    }


def test_an_optimizer_is_wrapped_once(world: mpicomm.World) -> None:
    with pytest.raises(ValueError, match="DistributedOptimizer already"):
        hvd.DistributedOptimizer(wrapped(two_linear()))


def test_adasum_does_not_support_process_sets(world: mpicomm.World) -> None:
    if world.size == 1:
        pytest.skip("Adasum is not used on one rank")
    first = hvd.add_process_set([0])
    with pytest.raises(NotImplementedError, match="process_set"):
        wrapped(two_linear(), op=hvd.Adasum, process_set=first)
    hvd.remove_process_set(first)


def test_num_groups_is_deprecated(world: mpicomm.World) -> None:
    with pytest.warns(DeprecationWarning, match="Use groups"):
        wrapped(two_linear(), num_groups=1)


def test_gradients_must_be_used_before_they_are_computed_again(world: mpicomm.World) -> None:
    if world.size == 1:
        pytest.skip("gradients are not reduced on one rank")
    model = nn.Linear(1, 1, bias=False)
    optimizer = wrapped(model)
    model.weight.sum().backward()
    with pytest.raises(AssertionError, match="weight was computed more than backward_passes_per_step=1 times"):
        model.weight.sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()


def test_a_step_after_synchronize_warns(world: mpicomm.World) -> None:
    model = nn.Linear(1, 1)
    optimizer = wrapped(model)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
