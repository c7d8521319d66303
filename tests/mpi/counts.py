"""Small counts in place of 2^31: what MPI cannot count goes to it in parts, or as one element of a long datatype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpicomm.backend import fast_path, mpi_calls
from tests.worlds import Group


class FewCounts:
    """A communicator that refuses more than a few elements in one call."""

    def __init__(self, comm: Any, largest: int) -> None:
        """Stand in for a communicator.

        Args:
            largest: The most elements that a buffer of a call may have.
        """
        self._comm = comm
        self._largest = largest

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the communicator; methods check the buffers in their arguments."""
        attribute = getattr(self._comm, name)
        return self._checked(name, attribute) if callable(attribute) else attribute

    def _checked(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            for _, count, _ in (each for each in args if isinstance(each, tuple)):
                elements = count if isinstance(count, int) else sum(count)
                assert elements <= self._largest, f"{name}: expected at most {self._largest} elements, got {elements}"
            return method(*args)

        return call


def limit(monkeypatch: pytest.MonkeyPatch, group: Group, largest: int) -> None:
    """Let the MPI of a group count to `largest` only."""
    operations = group.handle._operations  # type: ignore[attr-defined]
    monkeypatch.setattr(mpi_calls, "largest_count", lambda: largest)
    # This way makes one call of everything, on the ranks whose queues are empty, while the others make several.
    monkeypatch.setattr(fast_path, "_MOST_BYTES", -1)
    monkeypatch.setattr(operations, "comm", FewCounts(operations.comm, largest))
