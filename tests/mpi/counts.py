"""Small limits in place of MPI's 2^31: larger transfers are split, or sent as one element of a long datatype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpicomm.backend.transfer import dense_collectives, mpi_calls
from tests.worlds import Group


class FewCounts:
    """A communicator that rejects calls with more than a few elements."""

    def __init__(self, comm: Any, largest: int) -> None:
        """Wrap a communicator.

        Args:
            largest: Maximum number of elements in a buffer of a call.
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
    """Limit the counts of the MPI calls of a group to `largest`."""
    executor = group.handle._executor  # type: ignore[attr-defined]
    monkeypatch.setattr(mpi_calls, "largest_count", lambda: largest)
    monkeypatch.setattr(dense_collectives, "_LIST_BUFFER_BYTES", 0)  # such lists are below the limit
    few = FewCounts(executor.comm, largest)
    monkeypatch.setattr(executor.messages, "_comm", few)
    monkeypatch.setattr(executor.dense, "comm", few)
