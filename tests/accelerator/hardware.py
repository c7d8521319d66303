"""The emulated devices of this node, which the environment describes, and those that this process sees."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from pathlib import Path
from typing import NamedTuple

_DEVICES = 2
_MEMORY_BYTES = 8 << 30


class Hardware(NamedTuple):
    number: int
    """On the node."""

    uuid: str


def memory_bytes() -> int:
    """The memory of each device."""
    return int(os.environ.get("EMULATED_MEMORY", _MEMORY_BYTES))


@functools.cache
def visible_devices() -> list[Hardware]:
    """The devices that $EMULATED_VISIBLE_DEVICES selects by number or UUID, in this order.

    As with CUDA_VISIBLE_DEVICES, the first entry that is not a device ends the list.
    """
    devices = [Hardware(number, _uuid(number)) for number in range(int(os.environ.get("EMULATED_DEVICES", _DEVICES)))]
    entries = os.environ.get("EMULATED_VISIBLE_DEVICES")
    if entries is None:
        return devices
    by_name = {name: device for device in devices for name in (str(device.number), device.uuid)}
    visible = []
    for entry in entries.split(","):
        if entry.strip() not in by_name:
            break
        visible.append(by_name[entry.strip()])
    return visible


def _uuid(number: int) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{boot} {socket.gethostname()} {number}"))
