"""The devices of the ranks after the start, on the emulated accelerator or on real ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.devices import accelerator, assignment, vendor_backends, vendors

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]


@pytest.mark.usefixtures("alone")
def test_each_rank_has_a_device_of_its_own_if_there_are_enough(world: mpicomm.World) -> None:
    assert torch.accelerator.current_device_index() == world.device.index
    assert torch.empty(1, device=world.device.type).device == world.device
    devices: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(devices, (world.hostname, assignment.visible_devices()[world.device.index]))
    if accelerator.count() >= world.local_size:
        assert len(set(devices)) == world.size
    elif world.num_nodes == 1:
        assert len(set(devices)) == accelerator.count()


@pytest.mark.usefixtures("alone")
def test_the_devices_are_those_that_torch_reports(world: mpicomm.World) -> None:
    assert vendor_backends.device_type() == world.device.type
    assert accelerator.device_name(world.device)
    assert accelerator.is_initialized()
    visible = assignment.visible_devices()
    assert len(set(visible)) == accelerator.count()
    assert vendors.vendor().uuid(world.device.index) in ("", visible[world.device.index])
