"""The errors of operations in which MPI reports MPI_ERR_TRUNCATE, because the ranks pass different sizes."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from mpicomm import mpi
from mpicomm.backend.execution import message_work
from mpicomm.backend.execution.group_state import GroupState


@pytest.mark.parametrize("code", ["ERR_TRUNCATE", "ERR_OTHER"])
def test_a_truncated_collective_names_the_sizes_and_debug_mode(code: str) -> None:
    state: Any = GroupState.__new__(GroupState)
    state.record = types.SimpleNamespace(broken="", name="default")
    info = {"name": "broadcast", "sequence": 3, "peer": 0, "dtype": "float32", "count": 2, "members": ""}
    operation: Any = types.SimpleNamespace(describe=lambda _: types.SimpleNamespace(is_message=False, **info))
    error = mpi.api().Exception(getattr(mpi.api(), code))
    if code == "ERR_OTHER":
        state.fail(operation, error)  # the caller raises the error itself
    else:
        with pytest.raises(RuntimeError, match="different sizes") as caught:
            state.fail(operation, error)
        assert caught.value.__cause__ is error
        assert str(caught.value).startswith("broadcast #3, root rank 0, float32[2] failed: ")
        assert "MPI_ERR_TRUNCATE" in str(caught.value)
        assert "MPICOMM_DEBUG=1" in str(caught.value).splitlines()[-1]
    assert state.record.broken.startswith("broadcast #3")


@pytest.mark.parametrize(
    ("vendor", "direct_copies", "is_named"), [("Open MPI", "1", True), ("Open MPI", "0", False), ("MPICH", "1", False)]
)
def test_the_error_of_a_message_names_what_open_mpi_may_have_done(
    monkeypatch: pytest.MonkeyPatch, vendor: str, direct_copies: str, is_named: bool
) -> None:
    error = mpi.api().Exception(mpi.api().ERR_TRUNCATE)
    monkeypatch.setenv("OMPI_MCA_pml_ob1_max_rdma_per_request", direct_copies)
    monkeypatch.setattr(mpi.api(), "get_vendor", lambda: (vendor, (5, 0, 11)))
    transfer: Any = types.SimpleNamespace(
        is_send=False, tensor=torch.ones(3), operation=types.SimpleNamespace(group=None)
    )
    text = str(message_work.error_of(transfer, error, 0))
    assert ("Open MPI may have written beyond the end of the tensor" in text) is is_named
