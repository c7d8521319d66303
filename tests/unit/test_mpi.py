"""The access to mpi4py."""

from __future__ import annotations

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
        ("Open MPI", {"PMIX_NAMESPACE": "job@1", "_MPICOMM_RANK_PROCESS": "1 job@1"}, "PMIX_NAMESPACE"),
        ("Open MPI", {"PMIX_NAMESPACE": "job@1", "_MPICOMM_RANK_PROCESS": f"{os.getpid()} job@1"}, ""),
        ("Open MPI", {"PMIX_NAMESPACE": "job@2", "_MPICOMM_RANK_PROCESS": "1 job@1"}, ""),
        ("Open MPI", {"PMIX_NAMESPACE": "job@1", "PMI_FD": "77777"}, ""),
        ("MPICH", {"PMI_FD": "77777", "_MPICOMM_RANK_PROCESS": "1 job@1"}, "PMI_FD"),
        ("MPICH", {"PMI_FD": "0"}, ""),
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
    if inherited:
        with pytest.raises(LaunchError, match=f"^{inherited}=.*inherited from a rank that started this process"):
            mpi._check_connection_to_launcher(is_single=False)
    mpi._check_connection_to_launcher(is_single=True)
    mpi._check_connection_to_launcher(is_single=False)
    assert (inherited in os.environ, "MASTER_PORT" in os.environ) == (False, not inherited)
