"""Batches of any structure: the model call, the number of samples, the copy to a device, and the checks of a loss."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, WeightedRandomSampler

from mpicomm.training import batches, data
from mpicomm.training.data import DataRank, LoaderOptions
from mpicomm.training.data_argument import make_source

A, B, C, T = (torch.full((2, 3), float(value)) for value in range(4))
META = torch.device("meta")


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    name: str
    edges: list[torch.Tensor]


class Encoding(collections.UserDict):
    """A mapping that is not a dict, as tokenizers return."""


class Movable:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> Movable:
        return Movable(device.type)


@pytest.mark.parametrize(
    ("content", "args", "kwargs", "targets"),
    [
        ((A, T), (A,), {}, T),
        ([A, T], (A,), {}, T),
        (Pair(A, T), (A,), {}, T),
        ((A, B, C, T), (A, B, C), {}, T),
        (([A, B], T), ([A, B],), {}, T),
        (((A, {"b": B}), T), ((A, {"b": B}),), {}, T),
        ((["one", "two"], T), (["one", "two"],), {}, T),
        ({"a": A, "name": ["x"], "labels": T}, (), {"a": A, "name": ["x"]}, T),
        (Encoding({"a": A, "labels": (T, B)}), (), {"a": A}, (T, B)),
    ],
)
def test_the_outermost_level_is_unpacked(content: Any, args: Any, kwargs: Any, targets: Any) -> None:
    call = batches.model_arguments(content, "labels")
    assert repr((call.args, call.kwargs, call.targets)) == repr((args, kwargs, targets))


@pytest.mark.parametrize(
    ("content", "args", "kwargs"),
    [(A, (A,), {}), ([A, T], (A, T), {}), ({"a": A, "labels": T}, (), {"a": A, "labels": T})],
)
def test_a_model_that_returns_its_loss_takes_the_whole_batch(content: Any, args: Any, kwargs: Any) -> None:
    assert batches.model_arguments(content, None) == batches.ModelArguments(args, kwargs, content)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (A, TypeError, r"expected batches of \(inputs, targets\), got a tensor of shape \[2, 3\]"),
        ([A], TypeError, r"expected batches of \(inputs, targets\), got a list of length 1"),
        (Movable(), TypeError, r"expected batches of \(inputs, targets\), got a Movable"),
        (
            {"image": A, "label": T},
            ValueError,
            r"no targets: expected the key 'labels', got 'image', 'label'\.\n.*target_key=",
        ),
    ],
)
def test_a_batch_without_targets_is_refused(content: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batches.model_arguments(content, "labels")


class TwoInputs(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


def test_a_batch_that_does_not_fit_the_model_is_refused() -> None:
    batches.check_arguments(TwoInputs(), batches.model_arguments((A, B, T), "labels"))
    with pytest.raises(TypeError) as error:
        batches.check_arguments(TwoInputs(), batches.model_arguments(((A, B), T), "labels"))
    first, rules, advice = str(error.value).splitlines()
    assert first == (
        "the batch does not fit the model's forward(a, b): missing a required argument: 'b', got (a tuple of length 2)."
    )
    assert "((a, b), target) calls model((a, b))" in rules
    assert advice == "Change the batches that the dataset returns, or the signature of forward()."
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'name', got \(a=a tensor of shape \[2, 3\], "):
        batches.check_arguments(
            TwoInputs(), batches.model_arguments({"a": A, "b": B, "name": "x", "labels": T}, "labels")
        )


def test_all_tensors_of_a_batch_are_moved() -> None:
    counts: Any = collections.Counter(a=1)
    content = (A, [Pair(B, "text"), {"c": (C, 3)}], Encoding(t=T), Graph(A, "g", [B]), Movable(), None, counts)
    a, (pair, mapping), encoding, graph, movable, nothing, counted = batches.moved(content, META)
    tensors = [a, pair.first, mapping["c"][0], encoding["t"], graph.nodes, graph.edges[0]]
    assert [each.device for each in tensors] == [META] * 6
    assert (type(pair), pair.second, mapping["c"][1], type(encoding)) == (Pair, "text", 3, Encoding)
    assert (type(graph), graph.name, movable.device, nothing, counted) == (Graph, "g", "meta", None, counts)
    assert content[0].device.type == content[2]["t"].device.type == "cpu", "the batch itself is left as it was"


@pytest.mark.parametrize(
    "content",
    [
        (torch.zeros(()), A),
        (["one", "two"], torch.zeros(2)),
        Encoding(weight=torch.tensor(1.0), x=A, wide=torch.zeros(5, 2)),
        Graph(A, "g", []),
    ],
)
def test_samples_are_counted_by_the_first_tensor_with_a_dimension(content: Any) -> None:
    assert batches.count_samples(content) == 2


def test_a_batch_whose_samples_cannot_be_counted_is_refused() -> None:
    with pytest.raises(TypeError, match="got a list of length 2 without a tensor that has a dimension"):
        batches.count_samples(["one", torch.zeros(())])


IMAGES = [(torch.zeros(3, size), number) for number, size in enumerate((5, 4, 7, 6, 3))]


def as_lists(samples: list[Any]) -> Any:
    """Collate images of different sizes, which cannot form one tensor, as a list."""
    return [image for image, _ in samples], [number for _, number in samples]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_a_loader_are_counted_by_their_samples(num_workers: int) -> None:
    """The first tensor, here one image of 3 channels, does not determine the number of samples."""
    loader: DataLoader[Any] = DataLoader(
        IMAGES, 2, sampler=range(5), num_workers=num_workers, persistent_workers=num_workers > 0, collate_fn=as_lists
    )
    assert len(list(loader)) == 3, "its workers have begun before the trainer has it"
    own = make_source(loader, LoaderOptions(), DataRank(0, 2))
    steps = list(own.steps(0, 0, 0))
    own.close()
    assert [step.count for step in steps] == [2, 2, 1]
    assert [step.batches[0].content[1] for step in steps] == [[0, 1], [2, 3], [4]]
    assert loader.collate_fn is as_lists, "the user's loader is left as it was"


def test_batches_of_a_sampler_of_batches_are_counted_too() -> None:
    loader: DataLoader[Any] = DataLoader(IMAGES, batch_sampler=[[0], [1, 2, 3]], collate_fn=as_lists)
    assert [step.count for step in make_source(loader, LoaderOptions(), DataRank(0, 2)).steps(0, 0, 0)] == [1, 3]


class Doubling(DataLoader[Any]):
    """A loader that builds new batches from those that it loads."""

    def __iter__(self) -> Any:
        return ((torch.cat([x, x]), torch.cat([y, y])) for x, y in super().__iter__())


def test_batches_of_a_loader_of_ones_own_are_taken_as_they_are() -> None:
    pairs = [(torch.zeros(1), 0)] * 4
    loader = Doubling(pairs, 2, sampler=WeightedRandomSampler(torch.ones(4), 4))
    assert [step.count for step in make_source(loader, LoaderOptions(), DataRank(0, 1)).steps(0, 0, 0)] == [4, 4]
    whole = DataLoader([torch.zeros(6, 2)], batch_size=None, sampler=SequentialSampler([0]))
    assert [step.count for step in make_source(whole, LoaderOptions(), DataRank(0, 1)).steps(0, 0, 0)] == [6]


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (0.5, TypeError, r"loss_fn must return a tensor of shape \[\], got a float\.\nReturn the tensor itself"),
        (None, TypeError, r"loss_fn must return a tensor of shape \[\], got a NoneType"),
        (A.sum(dim=1).requires_grad_(), ValueError, r"got a tensor of shape \[2\]\.\nUse reduction=\"mean\""),
        (A.sum().reshape(1).requires_grad_(), ValueError, r"a tensor of shape \[\], got a tensor of shape \[1\]"),
        (A.sum(), ValueError, r"got a tensor without a gradient\.\nCompute it from the model's outputs"),
    ],
)
def test_an_invalid_loss_is_refused(loss: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batches.check_loss(loss, is_of_model=False)


def test_a_loss_needs_no_gradient_where_nothing_is_trained() -> None:
    with torch.no_grad():
        assert batches.check_loss(A.sum(), is_of_model=False) == 0


@pytest.mark.parametrize(
    ("outputs", "found"), [(A, A), ({"loss": A, "logits": B}, A), (Pair(A, B), Pair), (Graph(A, "g", []), Graph)]
)
def test_the_loss_in_the_outputs_of_a_model(outputs: Any, found: Any) -> None:
    loss = batches.loss_in(outputs)
    assert loss is found or type(loss) is found
    with_loss = type("Output", (), {"loss": B, "logits": A})()
    assert batches.loss_in(with_loss) is B


@pytest.mark.parametrize("outputs", [A, {"logits": A}, (A, B)])
def test_a_model_that_returns_no_loss_is_refused(outputs: Any) -> None:
    message = r"without loss_fn, the model must return .*, or an output with a \"loss\", got .*\nPass a loss_fn"
    with pytest.raises((TypeError, ValueError), match=message):
        batches.check_loss(batches.loss_in(outputs), is_of_model=True)


@pytest.mark.parametrize("loss_fn", ["mse", nn.MSELoss, 3])
def test_an_invalid_loss_function_is_refused(loss_fn: Any) -> None:
    with pytest.raises(TypeError, match=r"loss_fn must be a function .*, got .*\nPass for example .*MSELoss\(\)"):
        batches.LOSS_FUNCTION.check(loss_fn, "loss_fn")


def test_samples_that_differ_have_different_digests() -> None:
    """Also one element of a column, which is contiguous but cannot be viewed as bytes."""
    column = torch.arange(4.0).reshape(2, 2)[:1, 0]
    assert data.digest([column]) == data.digest([column.clone()])
    assert data.digest([column]) != data.digest([column + 1])
