"""Horovod's API on GPU tensors: its engine's thread, and threads that wait, use the streams of the GPU in turn."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import mpicomm
import mpicomm.horovod as hvd
from mpicomm import torch_internals
from mpicomm.backend import registration
from mpicomm.devices import accelerator
from tests import accelerator as emulated
from tests.accelerator import recording

COUNT = 1000


@pytest.fixture
def started(world: mpicomm.World, device: torch.device, alone: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Start Horovod, whose tensors on the device go to MPI, or to a vendor's backend that returns before the device."""
    with pytest.MonkeyPatch.context() as patch:
        if (library := getattr(request, "param", "MPI")) != "MPI":
            backend = _backend_with(library, device)
            patch.setattr(
                torch_internals, "make_group", lambda ranks, _name, timeout: dist.new_group(ranks, timeout, backend)
            )
        hvd.init()
    yield
    hvd.shutdown()


def _backend_with(library: str, device: torch.device) -> str:
    """Return the name of a backend with NCCL or the recording one."""
    if library == "vendor":
        recording.register(device.type)
        return registration.register_beside(f"{device.type}:{recording.NAME}")
    if device.type != "cuda" or not dist.is_nccl_available():
        pytest.skip("needs a GPU and NCCL")
    return "mpicomm_nccl"


@pytest.mark.parametrize("started", ["MPI", "vendor", "NCCL"], indirect=True)
def test_fused_tensors_of_several_streams(world: mpicomm.World, started: None, device: torch.device) -> None:
    """The threads run cycles in turn, which use the same fusion buffer; tensors and results are dropped early."""
    draws, streams = random.Random(world.rank), [torch.Stream(device) for _ in range(3)]
    contents = [torch.arange(float(COUNT)).pin_memory() + number for number in range(4)]
    results: list[list[torch.Tensor]] = []
    for step in range(40):
        with accelerator.on_stream(streams[step % 3]):
            handles = [
                hvd.allreduce_async(
                    content.to(device, non_blocking=True) * (world.rank + 1), name=str(number), op=hvd.Sum
                )
                for number, content in enumerate(contents)
            ]
            torch.full((COUNT,), -1.0, device=device)
            if draws.random() < 0.5:
                time.sleep(0.005)  # several cycles: the engine's thread runs the operations
        # Not the stream of the next step, which would order the steps.
        with accelerator.on_stream(streams[(step + 2) % 3]):
            results.append([hvd.synchronize(handle) + 0 for handle in handles])
            del handles
            torch.full((COUNT,), -1.0, device=device)
    torch.accelerator.synchronize()  # only now: the device is behind the host until here
    factor = world.size * (world.size + 1) / 2
    for of_step in results:
        for result, content in zip(of_step, contents, strict=True):
            assert torch.equal(result.cpu(), factor * content)


@pytest.fixture
def slow(device: torch.device) -> Iterator[None]:
    """Let each kernel of the device take 20 ms."""
    if device.type != emulated.NAME:
        pytest.skip("needs the emulated device")
    torch.accelerator.synchronize()
    emulated.configure(kernel_seconds=0.02)
    yield
    torch.accelerator.synchronize()
    emulated.configure()


def test_received_splits_on_the_device_of_tensors_on_the_host(
    world: mpicomm.World, started: None, device: torch.device, slow: None
) -> None:
    """They are dropped before the stream of the caller has read them; the engine's thread allocates the next ones."""
    submitting, reading, busy = torch.Stream(device), torch.Stream(device), torch.zeros(100, device=device)
    rows, read = torch.zeros(4 * world.size), []
    torch.accelerator.synchronize()
    for number in range(4):
        with accelerator.on_stream(submitting):
            splits = torch.full((world.size,), number, dtype=torch.int32, device=device)
            handle = hvd.alltoall_async(rows, splits, name="splits")
        while not hvd.poll(handle):
            time.sleep(0.001)
        with accelerator.on_stream(reading):
            _, received = hvd.synchronize(handle)
            for _ in range(10):
                busy.add_(1)
            read.append(received + 0)
            del received, handle
    torch.accelerator.synchronize()
    assert [counts.tolist() for counts in read] == [[number] * world.size for number in range(4)]


def test_a_cycle_on_another_stream_fuses_after_the_results_before_it_are_read(
    world: mpicomm.World, started: None, device: torch.device, slow: None
) -> None:
    """One copy of the second cycle replaces the fusion buffer, from which sixteen copies of the first read."""
    first = [torch.full((100,), float(number), device=device) for number in range(16)]
    second = [torch.full((count,), 99.0, device=device) for count in (1590, 10)]
    torch.accelerator.synchronize()
    for cycle, tensors in enumerate((first, second)):
        with accelerator.on_stream(torch.Stream(device)):
            handles = [
                hvd.allreduce_async_(tensor, name=f"{cycle}.{number}", op=hvd.Sum)
                for number, tensor in enumerate(tensors)
            ]
            for handle in handles:
                hvd.synchronize(handle)
    torch.accelerator.synchronize()
    for number, tensor in enumerate(first):
        assert tensor.cpu().eq(world.size * number).all()
