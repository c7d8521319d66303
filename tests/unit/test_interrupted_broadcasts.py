"""Broadcasts on a device that end without an error, and with other values, since a rank has failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from mpicomm import mpi
from mpicomm.collective_ops import collectives
from mpicomm.errors import RankFailedError
from mpicomm.training import checkpoint, newest_state, parallel
from mpicomm.training.newest_state import NewestState, RankState
from mpicomm.watchdog import rank_failures
from mpicomm.watchdog.rank_failures import RankFailures


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each broadcast of this rank, 0 of 2, be interrupted."""
    monkeypatch.setattr(mpi, "record_lost_processes", lambda: None)
    monkeypatch.setattr(mpi, "revoke_all", lambda: None)
    failures = RankFailures(None, ["alpha", "beta"], 2)

    def broadcast(tensor: torch.Tensor, *_: object, **__: object) -> None:
        tensor.fill_(7)
        failures.record({1: "it was killed"})

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    rank_failures.set_current(failures)
    yield
    rank_failures.set_current(None)


def test_the_buffers_keep_their_values(interrupted: None) -> None:
    model = torch.nn.BatchNorm1d(4)
    with pytest.raises(RankFailedError):
        parallel.share_buffers(model)
    assert torch.equal(model.running_mean, torch.zeros(4))  # type: ignore[arg-type]
    assert torch.equal(model.running_var, torch.ones(4))  # type: ignore[arg-type]


def test_the_state_is_not_loaded(interrupted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, tensors = checkpoint.pack({"weight": torch.ones(3)})
    kinds = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors]
    monkeypatch.setattr(collectives, "broadcast_object", lambda *_, **__: (packed, kinds))
    loaded: list[object] = []
    states = [RankState(0, progress, None, (), has_joined=False) for progress in (None, (True, 1, 0))]
    newest = NewestState(states, source=1)
    with pytest.raises(RankFailedError):
        newest_state.send(newest, dict, loaded.append, torch.device("cpu"))
    assert not loaded
