"""Broadcasts of parameters, of an optimizer's state and of objects, and the all-gather of objects."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mpicomm.collective_ops import pytree
from mpicomm.horovod import context
from mpicomm.horovod.process_sets import ProcessSet, global_process_set, index_of_root
from mpicomm.horovod.tensor_operations import allgather, broadcast_, broadcast_async_, synchronize


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Copy the tensors of `root_rank` into those of the other ranks (collective).

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, a list of tensors or of pairs of a name and a tensor.
            Names, shapes and dtypes must be equal on all ranks.
        root_rank: The rank whose tensors are copied.

    Raises:
        ValueError: If `params` contains something else, or `root_rank` is not a rank.
        HorovodInternalError: If the tensors differ between ranks, or the ranks can no longer communicate.
    """
    index_of_root(root_rank, global_process_set, "broadcast_parameters")
    handles = [
        broadcast_async_(tensor, root_rank, None if name is None else f"broadcast_parameters.{name}")
        for name, tensor in _named_tensors(params)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Copy the options and the state of `root_rank`'s optimizer to the other ranks (collective).

    If this rank's optimizer has no state, its parameters without a gradient get a gradient of zeros, as in Horovod.

    Args:
        optimizer: The optimizer, with the same parameters on all ranks.
        root_rank: The rank whose optimizer is copied.
        model: The model; the gradients of its embeddings with `sparse=True` are sparse.

    Raises:
        ValueError: If the optimizer is an LBFGS, whose state does not belong to single parameters, or `root_rank` is
            not a rank; on every rank, if the parameter groups have different lengths on different ranks.
        HorovodInternalError: If the ranks can no longer communicate.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "broadcast_optimizer_state does not support LBFGS, whose state does not belong to single parameters.\n"
            "Use optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), root_rank))."
        )
    index_of_root(root_rank, global_process_set, "broadcast_optimizer_state")
    _fill_gradients(optimizer, model)
    # 1. the options and numbers, with the properties of the tensors in their place
    _check_counts(optimizer, root_rank)
    is_root = context.rank() == root_rank
    groups = _described(optimizer) if is_root else None
    groups = broadcast_object(groups, root_rank, "broadcast_optimizer_state")
    # 2. the tensors, in the order of the parameters
    tensors = _tensors(optimizer) if is_root else _replace_state(optimizer, groups)
    broadcast_parameters([(f"optimizer.{index}", tensor) for index, tensor in enumerate(tensors)], root_rank)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return `root_rank`'s object on every rank; it is sent pickled (collective).

    Args:
        obj: Any object that can be pickled. Ignored on ranks other than `root_rank`.
        root_rank: The rank of the object.
        name: The name by which the ranks match the call.
        process_set: The ranks that take part.

    Returns:
        The object; on other ranks a copy of it.

    Raises:
        TypeError: On every rank, if the object cannot be pickled.
        ValueError: If `root_rank` is not a rank of the process set.
        HorovodInternalError: If the ranks can no longer communicate.
    """
    index_of_root(root_rank, process_set, "broadcast_object")
    label = f"broadcast_object.{name or ''}"
    is_root = context.rank() == root_rank
    content = _pickled(obj, "broadcast_object") if is_root else None
    length = torch.tensor([content.numel() if isinstance(content, torch.Tensor) else 0])
    broadcast_(length, root_rank, f"{label}.length", process_set)
    _check_pickled(content, [root_rank], length.tolist())
    if not isinstance(content, torch.Tensor):
        content = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, f"{label}.content", process_set)
    return obj if is_root else pytree.unpickled(content)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks in a list by rank; they are sent pickled (collective).

    Args:
        obj: Any object that can be pickled.
        name: The name by which the ranks match the call.

    Raises:
        TypeError: On every rank, if a rank's object cannot be pickled.
        HorovodInternalError: If the ranks can no longer communicate.
    """
    label = f"allgather_object.{name or ''}"
    content = _pickled(obj, "allgather_object")
    length = content.numel() if isinstance(content, torch.Tensor) else 0
    lengths = allgather(torch.tensor([length]), f"{label}.length").tolist()
    _check_pickled(content, range(len(lengths)), lengths)
    assert isinstance(content, torch.Tensor)
    everything = allgather(content, f"{label}.content")
    return [pytree.unpickled(part) for part in everything.split(lengths)]


def _pickled(obj: Any, function: str) -> torch.Tensor | Exception:
    """Return the pickle of an object, or the error, which must be raised on all ranks."""
    data = pytree.or_error(lambda: pytree.pickled(obj, function))
    return data if isinstance(data, Exception) else data.tensors[0]


def _check_pickled(content: torch.Tensor | Exception | None, ranks: Iterable[int], lengths: list[int]) -> None:
    """Raise an error on all ranks if a rank could not pickle its object, for which it has sent the length 0."""
    if isinstance(content, Exception):
        raise content
    failed = [rank for rank, length in zip(ranks, lengths, strict=True) if not length]
    if failed:
        raise TypeError(
            f"rank {failed[0]} could not pickle its object; its own error states the type.\n"
            f"Pass the picklable parts of it."
        )


def _named_tensors(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str | None, torch.Tensor]]:
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            f"params must be a state_dict, or a list of tensors or of (name, tensor), got a {type(params).__name__}.\n"
            f"Pass model.state_dict()."
        )
    pairs = sorted(params.items()) if isinstance(params, Mapping) else params
    named = [pair if isinstance(pair, tuple) else (None, pair) for pair in pairs]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            argument = "params" if name is None else f"params[{name!r}]"
            got = f"one of {tensor.layout}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
            raise ValueError(f"{argument} must be a dense tensor, got {got}.\nSend it by hvd.broadcast_object.")
    return named


# -- the state of an optimizer -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Empty:
    """The properties of a tensor of the root rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool

    @classmethod
    def like(cls, value: Any) -> Any:
        """Return the properties of a tensor, and other values unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        return cls(tuple(value.shape), value.dtype, value.device.type == "cpu")

    @staticmethod
    def filled(value: Any, device: torch.device) -> Any:
        """Return a tensor with these properties, and other values unchanged."""
        if not isinstance(value, _Empty):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="cpu" if value.is_on_cpu else device)


def _fill_gradients(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
    """Set missing gradients to zeros, if the optimizer has no state: scripts read them after the broadcast."""
    if optimizer.state:
        return
    modules = model.modules() if model is not None else ()
    sparse = {id(module.weight) for module in modules if isinstance(module, nn.Embedding) and module.sparse}
    for parameter in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse
            parameter.grad = zeros.to_sparse() if is_sparse else zeros


def _check_counts(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Check on all ranks that the parameter groups have the same lengths on all ranks (collective)."""
    counts = allgather_object([len(group["params"]) for group in optimizer.param_groups], "optimizer.counts")
    for rank, lengths in enumerate(counts):
        if lengths != counts[root_rank]:
            raise ValueError(
                f"the optimizers have different parameters: groups of {counts[root_rank]} on rank {root_rank}, of "
                f"{lengths} on rank {rank}.\nCreate the optimizer with the same parameters on all ranks."
            )


def _described(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], list[dict[str, Any] | None]]]:
    """Return the options of every group and the state of its parameters, without the content of tensors."""
    return [
        (
            {name: _Empty.like(value) for name, value in group.items() if name != "params"},
            [
                {name: _Empty.like(value) for name, value in optimizer.state[parameter].items()}
                if parameter in optimizer.state
                else None
                for parameter in group["params"]
            ],
        )
        for group in optimizer.param_groups
    ]


def _replace_state(optimizer: torch.optim.Optimizer, groups: list[Any]) -> list[torch.Tensor]:
    """Set the options and the state that `_described` returned on the root rank, and return the tensors to fill."""
    optimizer.state.clear()
    for group, (options, states) in zip(optimizer.param_groups, groups, strict=True):
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        for name, value in options.items():
            group.pop(name, None)  # the tensors are filled in the order of the root's options
            group[name] = _Empty.filled(value, device)
        for parameter, state in zip(group["params"], states, strict=True):
            if state is not None:
                optimizer.state[parameter] = {
                    name: _Empty.filled(value, parameter.device) for name, value in state.items()
                }
    return _tensors(optimizer)


def _tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors among the options and the state, in the order of the parameters."""
    tensors = []
    for group in optimizer.param_groups:
        values = [value for name, value in group.items() if name != "params"]
        for parameter in group["params"]:
            values += optimizer.state[parameter].values() if parameter in optimizer.state else ()
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return tensors
