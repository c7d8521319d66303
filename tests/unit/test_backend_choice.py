"""The backend that "auto" selects, the requirements of each backend, and the device types of mpicomm's own backend."""

from __future__ import annotations

import itertools

import pytest
from torch import version

from mpicomm.backend import registration
from mpicomm.job import plan

CONCRETE = [name for name in plan.KNOWN_BACKENDS if name != "auto"]


@pytest.mark.parametrize("backend", ["", "MPI", "ucc", "cpu:mpi", "cuda:nccl,cpu:mpi"])
def test_another_is_refused_with_those_that_exist(backend: str) -> None:
    with pytest.raises(ValueError, match=r"^backend must be ") as caught:
        plan.BACKEND.check(backend, "backend")
    assert repr(backend) in str(caught.value)
    assert all(repr(name) in str(caught.value) for name in plan.KNOWN_BACKENDS)


@pytest.mark.parametrize(("has_mpi", "gpu_each", "has_nccl"), list(itertools.product([False, True], repeat=3)))
def test_auto(has_mpi: bool, gpu_each: bool, has_nccl: bool) -> None:
    chosen = plan.choose_backend("auto", has_mpi=has_mpi, gpu_each=gpu_each, has_nccl=has_nccl)
    assert ("mpi" in str(chosen)) == has_mpi
    assert ("gloo" in str(chosen)) == (not has_mpi)
    assert plan.needs_mpi(chosen) == has_mpi
    assert plan.needs_nccl(chosen) == (gpu_each and has_nccl)


@pytest.mark.parametrize("backend", [*CONCRETE, None], ids=repr)
@pytest.mark.parametrize(("has_mpi", "gpu_each", "has_nccl"), list(itertools.product([False, True], repeat=3)))
def test_any_other_means_itself(backend: str | None, has_mpi: bool, gpu_each: bool, has_nccl: bool) -> None:
    assert plan.choose_backend(backend, has_mpi=has_mpi, gpu_each=gpu_each, has_nccl=has_nccl) == backend
    assert plan.needs_mpi(backend) == ("mpi" in (backend or ""))
    assert plan.needs_nccl(backend) == ("nccl" in (backend or ""))


@pytest.mark.parametrize(
    ("uuids", "hosts", "each"),
    [
        (["a", "b", "c"], ["x", "x", "y"], True),
        (["a", "a"], ["x", "y"], True),  # on virtual machines, the GPUs of different hosts may have the same UUID
        (["a", "a"], ["x", "x"], False),
        (["a", None], ["x", "x"], False),
        (["a", None, "a"], ["x", "x", "y"], False),
        ([None], ["x"], False),
        (["a"], ["x"], True),
    ],
)
def test_whether_every_rank_has_a_gpu_of_its_own(uuids: list[str | None], hosts: list[str], each: bool) -> None:
    assert plan.has_gpu_each(uuids, hosts) is each


@pytest.mark.parametrize(("cuda", "hip"), [("12.8", None), (None, "6.4"), (None, None)])
def test_the_devices_of_a_build(cuda: str | None, hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "cuda", cuda)
    monkeypatch.setattr(version, "hip", hip)
    assert registration._devices_of_build() == (["cpu", "cuda"] if cuda or hip else ["cpu"])
