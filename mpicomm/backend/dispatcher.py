"""Operations that pass through torch's dispatcher, where dispatch modes and tensor subclasses receive them.

torch.distributed calls the methods of a process group that Python implements directly, so that torch's dispatcher does
not see the operation. If a dispatch mode is active (`CommDebugMode`, `FakeTensorMode`) or an argument is a tensor
subclass that defines `__torch_dispatch__`, the method calls torch's operator instead, for example `c10d::allreduce_`.
After all modes and subclasses, the operator's kernel calls the method again, with the tensors that it received.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import torch_internals
from mpicomm.backend.execution.work import JointWork


@dataclasses.dataclass(frozen=True)
class _DispatchedCall:
    """A call of an operator by a method of a group."""

    group: dist.ProcessGroup
    name: str
    tensors: Sequence[Any]
    rest: Sequence[Any]
    works: list[dist.Work | None]
    """The works that the operator's kernel started: more than one if a subclass contains several tensors."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.calls: list[_DispatchedCall] = []
        self.kernels = 0
        """The number of kernels in progress; their operations do not pass through the dispatcher again."""


_local = _Local()
_adding_kernel = threading.Lock()


def is_needed(*arguments: Any) -> bool:
    """Return whether torch's dispatcher must receive an operation.

    Args:
        arguments: The operation's tensors, lists of tensors, and lists of such lists.
    """
    is_seen = torch_internals.active_modes() > 0 or any(map(_has_override, arguments))
    return is_seen and not _local.kernels and not torch_internals.is_dispatch_disabled()


def _has_override(argument: Any) -> bool:
    kind = type(argument)
    if kind is list or kind is tuple:
        return any(map(_has_override, argument))
    return torch_internals.overrides_dispatch(argument)


def call(group: dist.ProcessGroup, name: str, tensors: Sequence[Any], *rest: Any) -> Any:
    """Call a method of a group through torch's dispatcher.

    Args:
        tensors: The method's first arguments: tensors, lists of tensors, and lists of such lists.
        rest: Its other arguments.

    Returns:
        The work of the operation; None if it is part of a coalesced batch; the work that a mode or subclass returns if
        the operation does not reach the kernel.
    """
    operator, arguments = torch_internals.operator_call(name, [*tensors, *rest], group)
    if not torch_internals.KERNELS_CALL_BACKENDS:
        with _adding_kernel:
            torch_internals.add_kernel(operator, _run_current)
    made = _DispatchedCall(group, name, tensors, rest, [])
    _local.calls.append(made)
    try:
        result = operator(*arguments)
    finally:
        _local.calls.pop()
    if not made.works:
        return dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
    works = [work for work in made.works if work is not None]
    return JointWork(works) if len(works) > 1 else made.works[0]


def run(group: Any, name: str, *arguments: Any) -> dist.Work | None:
    """Run a method of a group for a kernel of torch's dispatcher."""
    _local.kernels += 1
    try:
        work = getattr(group, name)(*arguments)
    finally:
        _local.kernels -= 1
    if _local.calls and _local.calls[-1].group is group:
        _local.calls[-1].works.append(work)
    return work


def _run_current(group: dist.ProcessGroup, tensors: Sequence[Any]) -> Any:
    """Run the call in progress on a group with the tensors that its operator received."""
    if not _local.calls or _local.calls[-1].group is not group:
        return NotImplemented
    current = _local.calls[-1]
    # The operator of a barrier has a tensor that selects the device; the method has none.
    return run(group, current.name, *tensors[: len(current.tensors)], *current.rest)


def as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a list of tensors, given as such or as its only element."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def as_lists(lists: Sequence[Any]) -> Sequence[Any]:
    """Return a list of lists of tensors, given as such or as its only element."""
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else lists


def first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """Return the first tensor in the values and their nested lists, or None."""
    for value in values:
        if isinstance(value, (list, tuple)):  # first: quicker to check than for a tensor
            if (tensor := first_tensor(value)) is not None:
                return tensor
        elif isinstance(value, torch.Tensor):
            return value
    return None
