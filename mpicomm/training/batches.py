"""Batches of any structure: the arguments of the model, checks of the loss, and the move to a device."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from mpicomm import arguments

LossFunction = Callable[[Any, Any], torch.Tensor]
"""A function of the model's outputs and the targets that returns the mean loss of a batch, a tensor of shape []."""

OwnStep = Callable[[Any, Any], Any]
"""A training step of the user: a function of the wrapped model and a batch. It returns the mean loss of the batch, or a
mapping of it ("loss") and further means of the batch by name."""

_RULES = (
    "A batch (x, target) calls model(x), a batch (a, b, target) calls model(a, b), a batch ((a, b), target) calls "
    "model((a, b)), and a mapping calls model(**batch)."
)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelArguments:
    """The arguments with which the model is called for a batch."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: Any
    """The second argument of the loss function and of metrics: the whole batch if the model returns its loss."""


def model_arguments(content: Any, target_key: str | None) -> ModelArguments:
    """Return the arguments of the model for a batch. Only the outermost level of the batch is unpacked.

    Args:
        content: The batch.
        target_key: The key of the targets in a mapping; None if the model takes the whole batch and returns its loss.

    Raises:
        TypeError: If the batch is neither a mapping nor a sequence of inputs and targets.
        ValueError: If a mapping lacks target_key.
    """
    if isinstance(content, Mapping):
        if target_key is None:
            return ModelArguments((), content, content)
        if target_key not in content:
            raise ValueError(
                f"the batch has no targets: expected the key {target_key!r}, got {', '.join(map(repr, content))}.\n"
                f'Pass the key of the targets: Trainer(..., target_key="...").'
            )
        return ModelArguments(
            (), {name: value for name, value in content.items() if name != target_key}, content[target_key]
        )
    is_sequence = isinstance(content, (list, tuple))
    if target_key is None:
        return ModelArguments(tuple(content) if is_sequence else (content,), {}, content)
    if not is_sequence or len(content) < 2:
        raise TypeError(
            f"expected batches of (inputs, targets), got {_describe(content)}.\n"
            f"Return such pairs or mappings from the dataset, or omit loss_fn and return the loss from the model."
        )
    return ModelArguments(tuple(content[:-1]), {}, content[-1])


def model_arguments_without_targets(content: Any, target_key: str | None) -> ModelArguments:
    """Return the arguments of the model for a batch whose targets are not needed, and may be absent.

    Args:
        content: The batch.
        target_key: The key of the targets in a mapping; None if the batch has no targets.
    """
    if target_key is not None and isinstance(content, Mapping):
        return ModelArguments((), {name: value for name, value in content.items() if name != target_key}, None)
    if target_key is not None and isinstance(content, (list, tuple)) and len(content) > 1:
        return ModelArguments(tuple(content[:-1]), {}, None)
    return model_arguments(content, None)


def check_arguments(model: nn.Module, inputs: ModelArguments) -> None:
    """Check that a batch fits the signature of the model's forward().

    Raises:
        TypeError: If it does not fit. The message contains the rules by which a batch becomes arguments.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # forward() is not written in Python and has no signature
        return
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        parameters = [item.replace(annotation=inspect.Parameter.empty) for item in signature.parameters.values()]
        given = [*map(_describe, inputs.args), *(f"{name}={_describe(value)}" for name, value in inputs.kwargs.items())]
        raise TypeError(
            f"the batch does not fit the model's forward({', '.join(map(str, parameters))}): "
            f"{error}, got ({', '.join(given)}).\n{_RULES}\n"
            f"Change the batches that the dataset returns, or the signature of forward()."
        ) from None


LOSS_FUNCTION = arguments.function(
    "a function of the model's outputs and the targets, or None if the model returns its loss",
    "Pass for example torch.nn.functional.cross_entropy or torch.nn.MSELoss().",
)
OWN_STEP = arguments.function(
    "a function of the model and a batch, or None",
    'Pass a function that calls the model, and returns the loss or {"loss": loss, "accuracy": accuracy}.',
)


def loss_in(outputs: Any) -> Any:
    """Return the loss in the outputs of a model: their item "loss", their attribute `loss`, or the outputs."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss", outputs)
    return getattr(outputs, "loss", outputs)


def check_loss(loss: Any, *, is_of_model: bool, is_of_step: bool = False) -> torch.Tensor:
    """Return the loss, after checking that it is a tensor of shape [] with a gradient.

    Args:
        loss: The loss.
        is_of_model: Whether the model returned it, because there is no loss function.
        is_of_step: Whether a training step of the user returned it.

    Raises:
        TypeError: If it is not a tensor.
        ValueError: If its shape is not [], or it has no gradient while gradients are enabled.
    """
    if isinstance(loss, torch.Tensor) and not loss.dim() and (loss.requires_grad or not torch.is_grad_enabled()):
        return loss
    if is_of_step:
        function, or_output = "training_step", ', or a mapping with a "loss"'
        if_no_tensor = "Return the tensor itself, without .item()."
        if_no_mean = "Return the mean loss of the batch."
    elif is_of_model:
        function, or_output = "without loss_fn, the model", ', or an output with a "loss"'
        if_no_tensor = "Pass a loss_fn to the Trainer, or return the loss from the model as well."
        if_no_mean = "Pass a loss_fn to the Trainer, or return the mean loss of the batch."
    else:
        function, or_output = "loss_fn", ""
        if_no_tensor = "Return the tensor itself, without .item()."
        if_no_mean = 'Use reduction="mean", as torch\'s losses do by default, or return loss.mean().'
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"{function} must return a tensor of shape []{or_output}, got {_describe(loss)}.\n{if_no_tensor}"
        )
    if loss.dim():
        raise ValueError(
            f"{function} must return the mean loss of the batch, a tensor of shape []{or_output}, got "
            f"{_describe(loss)}.\n{if_no_mean}"
        )
    raise ValueError(
        f"{function} must return a loss that depends on the model's parameters, got a tensor without a gradient.\n"
        f"Compute it from the model's outputs without detach(), .item(), torch.no_grad() or argmax(), and check that "
        f"at least one parameter has requires_grad=True."
    )


def moved(content: Any, device: torch.device) -> Any:
    """Return a batch on a device. Moves tensors and objects with a `to` method, in any nesting of containers.

    Other values are returned unchanged.
    """

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value.to(device)

    return mapped(content, move)


def mapped(content: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same classes in which tensors and other objects with a `to` method are changed.

    Other values are returned unchanged.
    """
    if callable(getattr(content, "to", None)):  # tensors, packed sequences, graphs, encodings
        return change(content)
    if isinstance(content, Mapping):
        same = copy.copy(content) if isinstance(content, MutableMapping) else dict(content)  # a copy keeps the class
        for name, value in content.items():
            same[name] = mapped(value, change)
        return same
    if isinstance(content, tuple) and hasattr(content, "_fields"):
        return type(content)(*[mapped(value, change) for value in content])
    if isinstance(content, (list, tuple)):
        return type(content)(mapped(value, change) for value in content)
    if dataclasses.is_dataclass(content) and not isinstance(content, type):
        names = [field.name for field in dataclasses.fields(content) if field.init]
        return dataclasses.replace(content, **{name: mapped(getattr(content, name), change) for name in names})
    return content


def count_samples(content: Any) -> int:
    """Return the number of samples: the length of the first tensor in a batch with at least one dimension.

    Raises:
        TypeError: If the batch has no such tensor.
    """
    length = _first_length(content)
    if length is None:
        raise TypeError(
            f"cannot count the samples of a batch: got {_describe(content)} without a tensor that has a dimension.\n"
            f"Set batch_size on the DataLoader, so that it collates and counts the samples."
        )
    return length


def _first_length(content: Any) -> int | None:
    if isinstance(content, torch.Tensor):
        return content.shape[0] if content.dim() else None
    if isinstance(content, Mapping):
        children: Any = content.values()
    elif dataclasses.is_dataclass(content) and not isinstance(content, type):
        children = [getattr(content, field.name) for field in dataclasses.fields(content)]
    else:
        children = content if isinstance(content, (list, tuple)) else ()
    return next((length for child in children if (length := _first_length(child)) is not None), None)


def _describe(content: Any) -> str:
    """Return a short description of a value: its type, and the shape of a tensor or the length of a sequence."""
    if isinstance(content, torch.Tensor):
        return f"a tensor of shape {list(content.shape)}"
    if isinstance(content, (list, tuple)):
        return f"a {type(content).__name__} of length {len(content)}"
    return f"a {type(content).__name__}"
