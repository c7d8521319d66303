"""How a verb is started: in the call, or in the background."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpicomm.arguments import FLAG
from mpicomm.verbs import handles
from mpicomm.verbs.handles import Handle, Steps
from mpicomm.verbs.members import Members


@dataclasses.dataclass(frozen=True)
class Mode:
    """Which operations of a verb are asynchronous."""

    early: bool
    """Those that others follow."""

    last: bool
    """Those that nothing follows but what this rank does by itself."""


IN_THE_CALL = Mode(early=False, last=False)
# What follows runs in a callback, on the thread that runs operations: at once is in its turn.
_IN_CALLBACKS = Mode(early=True, last=False)
# Other back ends' callbacks run in no certain place among the operations: what comes first is done in the call.
_ELSEWHERE = Mode(early=False, last=True)


def start(
    steps: Callable[[Mode], Steps], what: str, members: Members, async_op: bool, tensors: Sequence[torch.Tensor] | None
) -> Any:
    """Run a collective verb to its end and return its result, or return its handle.

    Args:
        tensors: The caller's data; None where only others know them.
    """
    if async_op is False:
        return handles.run(steps(IN_THE_CALL))
    FLAG.check(async_op, "async_op", what)
    on_host = tensors is not None and all(tensor.is_cpu for tensor in tensors)
    in_callbacks = members.is_ours and (on_host or not members.has_nccl)
    mode = _IN_CALLBACKS if in_callbacks else _ELSEWHERE
    return Handle(steps(mode), what, in_callbacks=in_callbacks, in_order=in_callbacks)
