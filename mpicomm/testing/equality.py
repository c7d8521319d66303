"""Compares a value of every rank: tensors and arrays by a digest, other values as pickled objects."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpicomm import agreement
from mpicomm.collective_ops import collectives, group_argument
from mpicomm.recorder import rank_text

_OPERATION = "assert_equal_on_all_ranks"
_SHOWN_VALUES = 8  # differing values in one message
_SHOWN_TEXT = 200  # characters of one value in a message
_WHOLE_ELEMENTS = 16  # a larger array is described by its first element that differs
_DEEPEST = 100  # levels of nesting, as in the other operations


@dataclasses.dataclass(frozen=True)
class _Array:
    """A tensor or an array without its elements."""

    kind: str
    shape: tuple[int, ...]
    digest: tuple[int, int]

    def is_like(self, other: object) -> bool:
        """Return whether another value is an array whose elements can be compared with those of this one."""
        return isinstance(other, _Array) and (other.kind, other.shape) == (self.kind, self.shape)


@dataclasses.dataclass(frozen=True)
class _Value:
    """One value of a rank, as it is compared and as messages show it."""

    compared: Any
    shown: str


def assert_equal_on_all_ranks(value: object, group: Any = None) -> None:
    """Check that a value is equal on all ranks (collective).

    Elements of tensors and arrays are compared exactly; NaN equals NaN, and 0.0 equals -0.0. Types, dtypes, shapes and
    keys must be equal, devices may differ. The elements stay on their rank unless they differ.

    Args:
        value: A tensor, an array, a plain value, or dicts, lists, tuples and dataclasses of these, nested to any depth.
        group: A torch `ProcessGroup`, an mpi4py communicator, "node" or "leaders"; all ranks by default.

    Raises:
        AssertionError: If a value differs, on all ranks: the message has its path, and the value of each rank.
        TypeError: If a value cannot be compared, on all ranks.
    """
    __tracebackhide__ = True  # of pytest
    leaves: dict[str, Any] = {}
    gathered = collectives.all_gather_object(_values_or_error(value, leaves), group=group)
    if errors := {rank: values for rank, values in enumerate(gathered) if isinstance(values, str)}:
        raise TypeError(f"{_OPERATION}: on {rank_text.name_ranks(list(errors))}: {next(iter(errors.values()))}")
    of_ranks = [values for values in gathered if not isinstance(values, str)]
    paths = [path for path in of_ranks[0] if all(path in values for values in of_ranks)]
    by_path = {path: [values[path] for values in of_ranks] for path in paths}
    different = {path: values for path, values in by_path.items() if not _are_equal(values)}
    if not different:
        return
    count = len(different)
    lines = [f"{count} value{'s differ' if count > 1 else ' differs'} between the ranks:"]
    for path, values in list(different.items())[:_SHOWN_VALUES]:
        compared = [ranks_value.compared for ranks_value in values]
        if isinstance(compared[0], _Array) and all(map(compared[0].is_like, compared)):
            lines += _compare_elements(path, compared[0], leaves[path], group)
        else:
            lines += [f"  {path}", *_by_ranks([ranks_value.shown for ranks_value in values])]
    if count > _SHOWN_VALUES:
        lines.append(f"  and {count - _SHOWN_VALUES} more")
    raise AssertionError("\n".join(lines))


def _values_or_error(value: object, leaves: dict[str, Any]) -> dict[str, _Value] | str:
    """Return the values by path, or why they cannot be compared: the other ranks wait for this rank."""
    try:
        return dict(_walk(value, "value", leaves))
    except (TypeError, ValueError) as error:
        return str(error)


def _walk(value: Any, path: str, leaves: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, _Value]]:
    """Yield each container and each leaf with its path, and store the arrays in `leaves`."""
    if depth > _DEEPEST:
        raise ValueError(
            f"the containers are nested more than {_DEEPEST} levels deep.\nCheck that none contains itself."
        )
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        leaves[path] = value
        compared = _Array(_kind_of(value), tuple(value.shape), agreement.digest(_rows(value).tobytes()))
        yield path, _Value(compared, _shown(value))
        return
    keys: tuple[Any, ...]
    if isinstance(value, Mapping):
        children = {f"{path}[{key!r}]": child for key, child in value.items()}
        keys = tuple(sorted(map(repr, value)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        children = {f"{path}.{name}": getattr(value, name) for name in names}
        keys = tuple(names)
    elif isinstance(value, (list, tuple)):
        children = {f"{path}[{index}]": child for index, child in enumerate(value)}
        keys = (len(value),)
    else:
        yield path, _Value(_plain(value), _shown(value))
        return
    kind = type(value).__name__
    described = f"{keys[0]} items" if isinstance(value, (list, tuple)) else f"the keys {', '.join(keys)}"
    yield path, _Value(("a container", kind, keys), f"a {kind} with {described}")
    for place, child in children.items():
        yield from _walk(child, place, leaves, depth + 1)


def _plain(value: Any) -> Any:
    """Return the form in which a plain value is compared.

    Raises:
        TypeError: If its copy from another rank could never be equal to it.
    """
    # Two NaN are not equal, and 1, 1.0 and True are; 0.0 == -0.0 as for tensors.
    is_nan = isinstance(value, (float, complex)) and value != value  # noqa: PLR0124
    if not is_nan and copy.deepcopy(value) != value:
        raise TypeError(
            f"objects of {type(value).__name__} cannot be compared: a copy is not equal (==).\n"
            f"Pass the fields, for example vars(value) or a tuple."
        )
    return type(value).__qualname__, "nan" if is_nan else value


def _kind_of(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        if value.dtype.hasobject:
            raise TypeError("expected an array of numbers, got one of Python objects.\nPass value.tolist().")
        return f"{type(value).__module__.partition('.')[0]} {value.dtype}"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"expected a plain tensor, got a {type(value).__name__}.\n"
            f"Pass a plain one; of a DTensor, full_tensor() or to_local()."
        )
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise TypeError(
            "expected a dense tensor that is not quantized.\n"
            "Convert it with to_dense(), dequantize() or to_padded_tensor()."
        )
    return str(value.dtype).removeprefix("torch.")


def _rows(value: Any) -> np.ndarray:
    """Return the bytes of each element as one row; equal elements have equal bytes."""
    if isinstance(value, torch.Tensor):
        size = value.numel()
        flat = _without_signs(value.detach().cpu().resolve_conj().resolve_neg()).contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy() if size else np.empty(0, np.uint8)
    else:
        size = value.size
        array = np.ascontiguousarray(value).reshape(-1)
        if array.dtype.kind in "fc":
            array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array + array.dtype.type(0))
        content = np.frombuffer(array.tobytes(), np.uint8)
    return content.reshape(size, -1 if size else 1)


def _without_signs(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose zeros have no sign, and whose NaN have the same bits."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.element_size() == 1:
        return tensor  # torch does not calculate with float8
    return (tensor + 0).masked_fill(tensor.isnan(), float("nan"))


def _are_equal(values: Sequence[_Value]) -> bool:
    return all(bool(value.compared == values[0].compared) for value in values[1:])


def _compare_elements(path: str, array: _Array, own: Any, group: Any) -> list[str]:
    """Describe how the arrays of the ranks differ, which have the same dtype and shape (collective)."""
    is_first = group_argument.resolve(group, _OPERATION).rank == 0
    rows = _rows(own)
    header = f"  {path}, {array.kind}{list(array.shape)}"
    if len(rows) <= _WHOLE_ELEMENTS:
        return [header, *_by_ranks(collectives.all_gather_object(_shortened(repr(own.tolist())), group=group))]
    # 1. compare with the first rank's elements
    reference = collectives.broadcast_object(rows if is_first else None, group=group)
    places = np.flatnonzero((rows != reference).any(axis=1))
    # 2. exchange the elements at the first place that differs on any rank
    first = min(collectives.all_gather_object(int(places[0]) if len(places) else len(rows), group=group))
    element = f"{own.reshape(-1)[first].item()!r}"
    counts = collectives.all_gather_object((element, len(places)), group=group)
    position = [int(index) for index in np.unravel_index(first, array.shape)]
    texts = [f"{text}{f' ({count} elements differ from rank 0)' if count else ''}" for text, count in counts]
    return [f"{header}, first at {position}", *_by_ranks(texts)]


def _by_ranks(texts: Sequence[str]) -> list[str]:
    ranks_of = agreement.ranks_by_value(texts, range(len(texts)))
    return [f"    {rank_text.name_ranks(ranks)}: {text}" for text, ranks in ranks_of.items()]


def _shown(value: Any) -> str:
    """Return a leaf as one line of limited length."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        is_small = math.prod(value.shape) <= _WHOLE_ELEMENTS
        return _shortened(f"{_kind_of(value)}{list(value.shape)}{f' {value.tolist()!r}' if is_small else ''}")
    return f"{_shortened(repr(value))} ({type(value).__name__})"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_TEXT else f"{line[:_SHOWN_TEXT]} ..."
