"""The errors of operations that the C++ code of a backward pass waits for: the pass raises them when it ends.

DDP reduces gradients in the backward pass. Its C++ code gets the tensors of an operation that failed, as of one that
succeeded (`torch_internals.set_error`).
"""

from __future__ import annotations

import time

from mpicomm.backend import torch_internals
from mpicomm.watchdog import rank_failures

_last: tuple[float, Exception] | None = None
"""The last error of an operation that a backward pass started, and its time on the monotonic clock."""


def watch() -> None:
    """Check every later backward pass."""
    torch_internals.check_backward(_check)


def record(error: Exception) -> None:
    """Record the error of an operation that a backward pass started."""
    global _last  # noqa: PLW0603  any thread may run the operation
    _last = time.monotonic(), error


def _check(start: float, error: Exception | None) -> None:
    global _last
    last, _last = _last, None
    rank_failures.check(error)
    if last is not None and last[0] >= start and last[1] is not error:
        raise last[1] from error
