"""The GPU and the streams that the threads of a group use; torch and the CUDA driver are simulated."""

from __future__ import annotations

import collections
import gc
import uuid
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from mpicomm.backend.execution.poller import Poller
from mpicomm.backend.execution.worker_thread import Worker
from mpicomm.backend.gpu.thread_device import ThreadDevice
from mpicomm.devices import accelerator, vendors

CREATED = 0xABC0


class Driver:
    """Records the functions that are called on it."""

    def __init__(self, fails: str = "") -> None:
        self.called: list[str] = []
        self._fails = fails

    def __getattr__(self, name: str) -> object:
        def call(*args: object) -> int:
            self.called.append(name)
            if name == "cuDeviceGet":
                args[0]._obj.value = 10 + args[1]  # type: ignore[attr-defined, operator]
            if name.startswith("cuDeviceGetUuid"):  # of the GPU, and in version 2 of its MIG device
                args[0].raw = uuid.UUID(int=name.endswith("_v2") or args[1].value).bytes  # type: ignore[attr-defined]
            if name == "cuStreamCreate":
                args[0]._obj.value = CREATED  # type: ignore[attr-defined]
                assert args[1] == 1
            return int(name == self._fails)

        return call


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulate a process that uses its second GPU after the initialisation of CUDA."""
    state = SimpleNamespace(is_started=False, entered=[], driver=Driver())
    monkeypatch.setattr(accelerator, "is_initialized", lambda: state.is_started)
    monkeypatch.setattr(accelerator, "current_device", lambda: GPU)
    monkeypatch.setattr(accelerator, "select", state.entered.append)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda _stream: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(None, device))
    monkeypatch.setattr(vendors, "vendor", vendors.CUDA)
    monkeypatch.setattr(vendors, "_driver", lambda: state.driver)
    monkeypatch.setattr(vendors, "_idle_streams", collections.defaultdict(list))
    return state


class Stream:
    def __init__(self, handle: int | None, device: torch.device) -> None:
        self.handle, self.device = handle, device

    def synchronize(self) -> None:
        """Do nothing: no work is queued."""


GPU = torch.device("cuda", 1)


def test_a_worker_that_is_older_than_cuda_works_on_the_gpu_of_its_callers(cuda: SimpleNamespace) -> None:
    """Otherwise it would create a context on GPU 0, which belongs to another rank."""
    worker, entered = Worker("test", collections.deque()), []
    worker.submit(lambda: entered.append(list(cuda.entered)), mock.Mock(has_begun=False))
    worker.wait_until_idle()
    cuda.is_started = True
    for _ in range(2):
        worker.submit(lambda: entered.append(list(cuda.entered)), mock.Mock(has_begun=False))
    worker.wait_until_idle()
    worker.stop()
    assert entered == [[], [GPU], [GPU]]
    assert cuda.entered == [GPU]


def test_a_poller_that_is_older_than_cuda_works_on_the_gpu_of_its_callers(cuda: SimpleNamespace) -> None:
    looks: list[list[torch.device]] = []
    poller = Poller("test", lambda: looks.append(list(cuda.entered)) or len(looks) < 3)
    while not poller.is_idle:
        pass
    assert not any(looks)
    cuda.is_started = True
    count = len(looks)
    poller.rouse()
    while len(looks) <= count:
        pass
    poller.stop()
    assert looks[count] == [GPU]


def test_a_thread_begins_on_the_gpu_of_its_creator(cuda: SimpleNamespace) -> None:
    cuda.is_started = True
    gpu = ThreadDevice()
    gpu.enter()
    gpu.enter()
    assert cuda.entered == [GPU]


class Owner:
    """Keeps a stream."""


def test_the_stream_of_a_thread_is_its_own_as_long_as_the_thread_lasts(cuda: SimpleNamespace) -> None:
    cuda.is_started = True
    gpu = ThreadDevice()
    gpu.enter()
    gc.collect()
    vendors.CUDA().own_stream(GPU, Owner())
    assert cuda.driver.called.count("cuStreamCreate") == 2


def test_a_stream_is_not_one_of_torchs_pool(cuda: SimpleNamespace) -> None:
    stream = vendors.CUDA().own_stream(GPU, Owner())
    assert (stream.handle, stream.device) == (CREATED, GPU)
    assert cuda.driver.called[-1] == "cuCtxPopCurrent_v2"


def test_a_stream_is_used_again_and_never_destroyed(cuda: SimpleNamespace) -> None:
    """A tensor that has used it can be freed at any later time, and records an event on it then."""
    owner = Owner()
    vendors.CUDA().own_stream(GPU, owner)
    del owner
    gc.collect()
    for device in (GPU, torch.device("cuda", 0)):
        assert vendors.CUDA().own_stream(device, Owner()).handle == CREATED
    assert cuda.driver.called.count("cuStreamCreate") == 2  # one for each GPU
    assert "cuStreamDestroy_v2" not in cuda.driver.called


@pytest.mark.parametrize("fails", ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuStreamCreate"])
def test_where_cuda_refuses_a_stream_torchs_pool_has_one(cuda: SimpleNamespace, fails: str) -> None:
    cuda.driver = Driver(fails)
    assert vendors.CUDA().own_stream(GPU, Owner()).handle is None
    assert cuda.driver.called.count("cuCtxPushCurrent_v2") >= cuda.driver.called.count("cuCtxPopCurrent_v2")


def test_a_mig_device_belongs_to_the_gpu_that_nccl_compares(cuda: SimpleNamespace) -> None:
    assert vendors.CUDA().gpu_uuid(1) == str(uuid.UUID(int=11))
    assert vendors.ROCm().gpu_uuid(1) == ""
    cuda.driver = Driver("cuDeviceGetUuid")
    assert vendors.CUDA().gpu_uuid(1) == ""


def test_a_host_without_a_driver_captures_no_graph() -> None:
    """torch is built for CUDA on a host whose driver is missing, or too old."""
    error = RuntimeError("CUDA driver version is insufficient for CUDA runtime version")
    with mock.patch.multiple(
        torch.cuda,
        is_initialized=mock.Mock(side_effect=[False, True, True]),
        is_current_stream_capturing=mock.Mock(side_effect=[False, True, error]),
    ):
        assert [vendors.CUDA().is_capturing() for _ in range(3)] == [False, False, True]


def test_rocm_takes_torchs_streams(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    vendors.ROCm().allow_events_during_capture()  # without the runtime of HIP
    runtime = Driver()
    monkeypatch.setattr(vendors, "_hip_runtime", lambda: runtime)
    vendors.ROCm().allow_events_during_capture()
    assert runtime.called == ["hipThreadExchangeStreamCaptureMode"]
    assert vendors.ROCm().own_stream(GPU, Owner()).handle is None
    assert cuda.driver.called == []


@pytest.mark.parametrize(
    ("device_type", "hip", "vendor"),
    [
        ("cuda", None, vendors.CUDA),
        ("cuda", "6.4", vendors.ROCm),
        ("xpu", None, vendors.XPU),
        ("npu", None, vendors.Vendor),
        (None, None, vendors.Vendor),
    ],
)
def test_the_vendor_of_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, device_type: str | None, hip: str | None, vendor: type[vendors.Vendor]
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert type(vendors._vendor_of.__wrapped__(device_type)) is vendor
