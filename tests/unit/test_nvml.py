"""Readings of a GPU by NVML, with a library that the tests simulate."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from mpicomm.watchdog import nvml
from mpicomm.watchdog.nvml import GPUReader, GPUReading
from tests.time_limits import scaled

UUID = "11111111-2222-3333-4444-555555555555"
HANDLE = 4711
NOT_FOUND, NOT_SUPPORTED = 6, 3  # NVML_ERROR_NOT_FOUND, NVML_ERROR_NOT_SUPPORTED


class Driver:
    """A driver with one GPU, as `ctypes.CDLL` shows it."""

    def __init__(self) -> None:
        self.is_ready = threading.Event()
        self.is_ready.set()
        self.starts = 0
        self.utilization_result = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.starts += 1
        self.is_ready.wait(scaled(30))
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:  # noqa: N802
        device._obj.value = HANDLE
        return 0 if uuid == f"GPU-{UUID}".encode() else NOT_FOUND

    def nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, memory: Any) -> int:  # noqa: N802
        assert device.value == HANDLE
        memory._obj.total, memory._obj.free, memory._obj.used = 80, 50, 30
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, rates: Any) -> int:  # noqa: N802
        assert device.value == HANDLE
        rates._obj.gpu, rates._obj.memory = 97, 40
        return self.utilization_result


@pytest.fixture(name="driver")
def _driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return driver


@pytest.mark.parametrize("uuid", [UUID, f"GPU-{UUID}"])
def test_memory_and_utilization(driver: Driver, uuid: str) -> None:
    reader = GPUReader(uuid)
    assert [reader.read(), reader.read()] == [GPUReading(30, 80, 97)] * 2
    assert driver.starts == 1


def test_a_slice_of_a_gpu_has_no_utilization(driver: Driver) -> None:
    driver.utilization_result = NOT_SUPPORTED
    assert GPUReader(UUID).read() == GPUReading(30, 80, None)


def test_a_gpu_that_the_driver_does_not_know(driver: Driver) -> None:
    assert GPUReader("other").read() == GPUReading()


def test_a_rank_without_a_gpu_does_not_load_the_driver(driver: Driver) -> None:
    assert GPUReader("").read() == GPUReading()
    assert driver.starts == 0


def test_a_machine_without_a_driver() -> None:
    assert GPUReader(UUID, "libthat-does-not-exist.so.1").read() == GPUReading()


def test_a_driver_that_hangs_does_not_block_the_caller(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_READ_SECONDS", 0.01)
    driver.is_ready.clear()
    reader = GPUReader(UUID)
    assert [reader.read(), reader.read()] == [GPUReading()] * 2
    assert driver.starts == 1  # no thread per reading
    driver.is_ready.set()
    reader._thread.join(scaled(30))
    monkeypatch.setattr(nvml, "_READ_SECONDS", scaled(30))
    assert reader.read() == GPUReading(30, 80, 97)
