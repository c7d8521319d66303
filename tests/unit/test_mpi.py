"""The access to mpi4py."""

from __future__ import annotations

import contextlib
import os
import sys
from types import SimpleNamespace

import pytest

from mpicomm import mpi
from mpicomm.errors import LaunchError


def test_a_module_that_another_thread_is_importing_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = mpi.api()
    partial = SimpleNamespace(__spec__=SimpleNamespace(_initializing=True))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", partial)
    assert mpi.api() is complete


@pytest.mark.parametrize(
    ("vendor", "variables", "inherited"),
    [
        ("Open MPI", {"_MPICOMM_RANK_PROCESS": "1 PMIX_NAMESPACE=job@1"}, "PMIX_NAMESPACE=job@1"),
        ("Open MPI", {"_MPICOMM_RANK_PROCESS": f"{os.getpid()} PMIX_NAMESPACE=job@1"}, ""),
        ("Open MPI", {"_MPICOMM_RANK_PROCESS": "1 PMIX_NAMESPACE=job@1", "PMIX_NAMESPACE": "job@2"}, ""),
        ("Open MPI", {"PMIX_NAMESPACE": "job@1", "PMI_FD": "77777"}, ""),
        ("MPICH", {"PMI_FD": "77777"}, "PMI_FD=77777"),
        ("MPICH", {"_MPICOMM_RANK_PROCESS": "1 PMI_FD=7"}, "PMI_FD=7"),
        ("MPICH", {"PMI_FD": "0", "_MPICOMM_RANK_PROCESS": "1 PMI_FD=7"}, ""),
        ("MPICH", {}, ""),
    ],
)
def test_a_program_that_a_rank_starts_does_not_use_the_connection_of_the_rank(
    vendor: str, variables: dict[str, str], inherited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "api", lambda: SimpleNamespace(get_vendor=lambda: (vendor, (5, 0, 0))))
    for name in ("PMIX_NAMESPACE", "PMI_FD", "_MPICOMM_RANK_PROCESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    message = f"^a rank has started this process: {inherited}, the connection"
    with pytest.raises(LaunchError, match=message) if inherited else contextlib.nullcontext():
        mpi._check_connection_to_launcher(is_single=False)
    mpi._check_connection_to_launcher(is_single=True)
    assert (inherited.startswith("PMI_FD") and "PMI_FD" in os.environ, os.environ["MASTER_PORT"]) == (False, "1234")


def test_a_rank_does_not_pass_its_connection_to_the_processes_that_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "api", lambda: SimpleNamespace(get_vendor=lambda: ("MPICH", (5, 0, 0))))
    monkeypatch.setattr(mpi, "_pid", 12)
    monkeypatch.setenv("PMI_FD", "7")
    monkeypatch.setenv("_MPICOMM_RANK_PROCESS", "of the process that started this one")
    for _ in range(2):
        mpi._hide_launcher_connection()
        assert ("PMI_FD" in os.environ, os.environ["_MPICOMM_RANK_PROCESS"]) == (False, "12 PMI_FD=7")
