"""The access to mpi4py."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mpicomm import mpi


def test_a_module_that_another_thread_is_importing_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = mpi.api()
    partial = SimpleNamespace(__spec__=SimpleNamespace(_initializing=True))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", partial)
    assert mpi.api() is complete
