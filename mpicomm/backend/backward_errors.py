"""The errors of operations that the C++ code of a backward pass waits for: the pass raises them when it ends.

DDP reduces gradients in the backward pass. Its C++ code gets the tensors of an operation that failed, as of one that
succeeded (`torch_internals.set_error`).
"""

from __future__ import annotations

import time

from mpicomm.backend import torch_internals
from mpicomm.watchdog import rank_failures

_errors: list[tuple[float, Exception]] = []
"""The errors of operations that backward passes started, and their times on the monotonic clock."""


def watch() -> None:
    """Check every later backward pass."""
    torch_internals.check_backward(_check)


def record(error: Exception) -> None:
    """Record the error of an operation that a backward pass started."""
    _errors.append((time.monotonic(), error))


def _check(start: float, error: Exception | None) -> None:
    """Raise the first error since the start: later operations fail because the group is broken by then."""
    of_pass = [each for at, each in _errors if at >= start]
    _errors.clear()
    rank_failures.check(error)
    if of_pass and of_pass[0] is not error:
        raise of_pass[0] from error
