"""The errors of operations in backward passes, which raise them when they end.

DDP reduces gradients in the backward pass. Its C++ code gets the tensors of an operation that failed, as of one that
succeeded (`torch_internals.set_error`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from mpicomm import torch_internals
from mpicomm.watchdog import rank_failures

_errors: dict[int, list[Exception]] = {}
"""The errors of operations that the running backward passes started, by the thread that called the pass."""


def watch_backward() -> None:
    """Check every later backward pass."""
    torch_internals.check_backward(_checked)


def running_passes() -> Sequence[list[Exception]]:
    """Return the lists of errors of the backward passes to which an operation that starts now may belong.

    On CPUs, the thread that called a pass also runs it. For each GPU there is one thread of torch for the passes of all
    threads: each of them raises the error.
    """
    own = _errors.get(threading.get_ident())
    return list(_errors.values()) if own is None else [own]


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    thread = threading.get_ident()
    errors = _errors[thread] = []
    try:
        yield
    except Exception as error:
        _check(errors, error)
        raise
    else:
        _check(errors, None)
    finally:
        del _errors[thread]


def _check(errors: Sequence[Exception], error: Exception | None) -> None:
    """Raise the first error of a pass: later operations fail because the group is broken by then."""
    rank_failures.raise_if_failed(error)
    if errors and errors[0] is not error:
        raise errors[0] from error
