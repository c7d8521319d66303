"""The backend that "auto" selects, the requirements of each backend, and the device types of mpicomm's own backend."""

from __future__ import annotations

import itertools
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from mpicomm.backend import registration
from mpicomm.devices import vendor_backends
from mpicomm.job import plan

CONCRETE = ["mpi", "gloo", *(name for name in plan.known_backends() if "ccl" in name)]
VENDORS = ["", "cuda:nccl", "xpu:xccl"]
all_launches = pytest.mark.parametrize(
    ("has_mpi", "gpu_each", "vendor"), list(itertools.product([False, True], [False, True], VENDORS))
)


@pytest.mark.parametrize("backend", ["", "MPI", "ucc", "cpu:mpi", "cuda:nccl,cpu:mpi", "cpu:mpi,xpu:nccl", "mpicomm"])
def test_another_is_refused_with_those_that_exist(backend: str) -> None:
    with pytest.raises(ValueError, match=r"^backend must be ") as caught:
        plan.check_backend(backend)
    assert repr(backend) in str(caught.value)
    assert all(repr(name) in str(caught.value) for name in plan.known_backends())


@pytest.mark.parametrize("backend", ["auto", "mpi", "gloo", None])
def test_backends_without_a_vendor(backend: str | None) -> None:
    plan.check_backend(backend)
    assert not plan.vendor_part(backend)


@pytest.mark.parametrize("vendor", ["cuda:nccl", "xpu:xccl"])
def test_the_backends_of_each_vendor_that_torch_knows(vendor: str) -> None:
    name = vendor.partition(":")[2]
    for backend in (name, f"cpu:mpi,{vendor}", f"cpu:gloo,{vendor}"):
        plan.check_backend(backend)
        assert plan.vendor_part(backend) == name


@all_launches
def test_auto(has_mpi: bool, gpu_each: bool, vendor: str) -> None:
    chosen = plan.choose_backend("auto", has_mpi=has_mpi, gpu_each=gpu_each, vendor=vendor)
    assert ("mpi" in str(chosen)) == has_mpi
    assert ("gloo" in str(chosen)) == (not has_mpi)
    assert plan.needs_mpi(chosen) == has_mpi
    has_vendor = bool(gpu_each and vendor)
    assert bool(plan.vendor_part(chosen)) == has_vendor
    assert str(chosen).endswith(f",{vendor}") == has_vendor


@pytest.mark.parametrize("backend", [*CONCRETE, None], ids=repr)
@all_launches
def test_any_other_means_itself(backend: str | None, has_mpi: bool, gpu_each: bool, vendor: str) -> None:
    assert plan.choose_backend(backend, has_mpi=has_mpi, gpu_each=gpu_each, vendor=vendor) == backend
    assert plan.needs_mpi(backend) == ("mpi" in (backend or ""))
    assert bool(plan.vendor_part(backend)) == ("ccl" in (backend or ""))


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


@pytest.mark.parametrize(
    ("backend", "vendor", "takes"),
    [
        ("auto", "", True),
        ("auto", "xpu:xccl", False),
        ("mpi", "cuda:nccl", True),
        ("gloo", "cuda:nccl", True),
        (None, "cuda:nccl", True),
        ("cpu:mpi,xpu:xccl", "", False),
        ("nccl", "", False),
    ],
)
def test_mpi_takes_no_gpu_tensors_beside_a_vendors_library(backend: str | None, vendor: str, takes: bool) -> None:
    assert plan.mpi_takes_gpu_tensors(backend, vendor, "auto") == takes
    assert plan.mpi_takes_gpu_tensors(backend, vendor, "1")
    assert not plan.mpi_takes_gpu_tensors(backend, vendor, "0")


# -- the vendor's backend of this torch --------------------------------------------------------------------------------


@pytest.fixture
def tables() -> Iterator[None]:
    """Restore torch's tables of backends, and ours, after a test that registers some."""
    tables = [dist.Backend.default_device_backend_map, dist.Backend.backend_capability, dist.Backend._plugins]
    copies = [dict(table) for table in tables]
    backends, names = list(dist.Backend.backend_list), list(registration._names)
    yield
    for table, copy in zip(tables, copies, strict=True):
        table.clear()
        table.update(copy)
    dist.Backend.backend_list[:], registration._names[:] = backends, names


def simulate(monkeypatch: pytest.MonkeyPatch, device_type: str | None, *, is_available: bool = True) -> None:
    """Make torch report an accelerator of this type; None for a torch without one."""
    device = None if device_type is None else types.SimpleNamespace(type=device_type)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: is_available)


@pytest.mark.parametrize(
    ("device_type", "libraries", "vendor"),
    [
        (None, ["nccl", "xccl"], ""),
        ("cuda", ["nccl"], "cuda:nccl"),
        ("cuda", [], ""),
        ("xpu", ["xccl"], "xpu:xccl"),
        ("xpu", ["nccl"], ""),
        ("mps", ["gloo"], ""),  # Gloo is not the library of a vendor
        ("hpu", ["nccl"], ""),  # an extension that has registered no backend
    ],
)
def test_the_vendors_backend_of_this_torch(
    device_type: str | None, libraries: list[str], vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, device_type)
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend in libraries)
    assert vendor_backends.of_this_torch() == vendor


@pytest.mark.usefixtures("tables")
def test_the_backend_of_an_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension registers its backend after this package: it is then the default of its device."""
    simulate(monkeypatch, "privateuseone")
    registration.update_device_types()
    assert vendor_backends.of_this_torch() == ""
    dist.Backend.register_backend("fancyccl", lambda *_: None, devices=["privateuseone"])
    assert dist.get_default_backend_for_device("privateuseone") == "fancyccl"
    assert vendor_backends.of_this_torch() == "privateuseone:fancyccl"
    plan.check_backend("cpu:mpi,privateuseone:fancyccl")
    for _ in range(2):
        assert registration.register_beside("privateuseone:fancyccl") == "mpicomm_fancyccl"
    assert dist.is_backend_available("mpicomm_fancyccl")
    assert registration._names.count("mpicomm_fancyccl") == 1


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(("device_type", "is_available"), [(None, False), ("cuda", False), ("xpu", True)])
def test_the_device_types_of_the_backends(
    device_type: str | None, is_available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, device_type, is_available=is_available)
    registration.update_device_types()
    for name in ("mpicomm", "mpicomm_nccl", "mpicomm_xccl"):
        assert dist.Backend.backend_capability[name] == ["cpu", *([device_type] if is_available else [])]


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(("built_for", "device_types"), [("xpu", ["cpu", "xpu"]), (None, ["cpu"])])
def test_the_device_types_of_a_build(
    built_for: str | None, device_types: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are listed during the import of torch, when it is too early to call the driver."""
    simulate(monkeypatch, built_for)
    monkeypatch.setattr(torch.accelerator, "is_available", None)
    monkeypatch.setattr(registration, "_names", [])
    registration.register()
    assert dist.Backend.backend_capability["mpicomm"] == device_types


def test_torch_is_imported_first_by_a_module_that_its_import_needs() -> None:
    """torch.distributed, in the middle of torch's own import, makes mpicomm register its backends."""
    subprocess.run([sys.executable, "-c", "import mpicomm.devices.accelerator"], check=True, timeout=120)
