"""The access to mpi4py."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
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
        ("MPICH", {"PMI_FD": "{pipe}"}, ""),
        ("MPICH", {"PMI_FD": "{pipe}", "_MPICOMM_RANK_PROCESS": "1 {name}"}, "PMI_FD"),
        ("MPICH", {"PMI_FD": "{pipe}", "_MPICOMM_RANK_PROCESS": f"{os.getpid()} {{name}}"}, ""),
        ("MPICH", {"PMI_FD": "{pipe}", "_MPICOMM_RANK_PROCESS": "1 socket:[1]"}, ""),
        ("MPICH", {}, ""),
    ],
)
def test_a_program_that_a_rank_starts_does_not_use_the_connection_of_the_rank(
    vendor: str, variables: dict[str, str], inherited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "api", lambda: SimpleNamespace(get_vendor=lambda: (vendor, (5, 0, 0))))
    for name in ("PMIX_NAMESPACE", "PMI_FD", "_MPICOMM_RANK_PROCESS"):
        monkeypatch.delenv(name, raising=False)
    pipe, other_end = os.pipe()
    for name, value in {**variables, "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value.format(pipe=pipe, name=Path(f"/proc/self/fd/{pipe}").readlink()))
    message = f"^{inherited}=.*inherited from a rank that started this process"
    with pytest.raises(LaunchError, match=message) if inherited else contextlib.nullcontext():
        mpi._check_connection_to_launcher(is_single=False)
    mpi._check_connection_to_launcher(is_single=True)
    mpi._check_connection_to_launcher(is_single=False)
    os.close(pipe)
    os.close(other_end)
    assert (inherited in os.environ, os.environ["MASTER_PORT"]) == (False, "1234")
