"""The accelerators of this host, counted in the files of the kernel: loading torch and a driver takes seconds.

Integrated GPUs, those of a processor, are not counted: on such a machine ranks compute on the cores.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mpicomm import host_info
from mpicomm.launch import visible_devices
from mpicomm.launch.visible_devices import AMD, ASCEND, GAUDI, INTEL, NVIDIA

_HABANA_VENDOR, _INTEL_VENDOR = "0x1da3", "0x8086"  # PCI vendor IDs
_INTEGRATED_INTEL = "0000:00:02.0"  # the PCI address of the GPU in every Intel processor
_MOST_INTEGRATED_SIMDS = 80  # in the largest GPU of an AMD processor (Ryzen AI Max, 40 compute units)
_MOST_DEVICES = 64  # that torch counts in a process


@dataclasses.dataclass(frozen=True)
class Accelerators:
    """The accelerators that a process sees."""

    vendor: str | None
    """One of the vendors of `visible_devices`; None without accelerators."""

    count: int
    """Their number."""


def count(environ: Mapping[str, str], root: Path = Path("/")) -> Accelerators:
    """Return the accelerators that a process of this host sees, of the first vendor that has some.

    In a container these are the devices of its /dev.

    Args:
        environ: The environment of the process, whose variables restrict the devices.
        root: The root of the file tree.
    """
    partitions = {vendor: read(root) for vendor, read in _READERS.items()}
    if not any(partitions.values()) and visible_devices.VARIABLES[NVIDIA][0] in environ:
        # Windows Subsystem for Linux has no device files of GPUs: the variable is the only source.
        partitions[NVIDIA] = [0] * _MOST_DEVICES
    counts = {vendor: visible_devices.count(vendor, environ, partitions[vendor]) for vendor in partitions}
    return next((Accelerators(vendor, number) for vendor, number in counts.items() if number), Accelerators(None, 0))


# Each reader returns, for every device, the number of its partitions (MIG devices, tiles); 0 for an undivided one.


def _read_nvidia(root: Path) -> list[int]:
    minors = _numbers(root / "dev", "nvidia")
    if not minors:
        return [0] * len(_children(root / "proc/driver/nvidia/gpus", "*"))
    # The compute instances of MIG; the directories are named by the minor number of the GPU's device file.
    capabilities = root / "proc/driver/nvidia/capabilities"
    return [len(_children(capabilities / f"gpu{minor}", "mig/gi*/ci*")) for minor in minors]


def _read_amd(root: Path) -> list[int]:
    """Return a 0 for each node of the topology of amdkfd that is a GPU: a GCD of an MI250X is a node."""
    nodes = _children(root / "sys/class/kfd/kfd/topology/nodes", "[0-9]*")
    return [0 for node in nodes if _is_amd_gpu(root, _properties(node / "properties"))]


def _is_amd_gpu(root: Path, properties: Mapping[str, int]) -> bool:
    simds, minor = properties.get("simd_count", 0), properties.get("drm_render_minor", 0)
    # The cores of a processor make a node without SIMD units, or one with those of its GPU. The GPUs of newer
    # processors are nodes of their own. They have no unique ID, as ROCm's UUID `GPU-XX` shows; a large GPU without one,
    # perhaps in a virtual machine, is a GPU nevertheless.
    is_small = properties.get("unique_id") == 0 and simds <= _MOST_INTEGRATED_SIMDS
    is_integrated = properties.get("cpu_cores_count", 0) > 0 or is_small
    return simds > 0 and not is_integrated and (minor == 0 or _may_open(root, minor))


def _properties(path: Path) -> dict[str, int]:
    """Return the properties of a node; none if the container may not use its device: the kernel refuses to read."""
    words = [line.split() for line in host_info.read(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _read_intel(root: Path) -> list[int]:
    drm = root / "sys/class/drm"
    cards = [drm / f"card{number}" for number in _numbers(drm, "card")]
    return [_tiles(card) for card in cards if _is_discrete_intel_gpu(root, card / "device")]


def _is_discrete_intel_gpu(root: Path, device: Path) -> bool:
    if host_info.read(device / "vendor") != _INTEL_VENDOR:
        return False
    minors = _numbers(device / "drm", "renderD")
    may_open = not minors or _may_open(root, minors[0])
    return may_open and f"PCI_SLOT_NAME={_INTEGRATED_INTEL}" not in host_info.read(device / "uevent").splitlines()


def _tiles(card: Path) -> int:
    # The driver xe names the tiles. With i915 the tiles are the GTs: only integrated GPUs have a GT for media as well.
    return len(_numbers(card / "device", "tile")) or len(_numbers(card / "gt", "gt"))


def _read_ascend(root: Path) -> list[int]:
    return [0 for _ in _numbers(root / "dev", "davinci")]


def _read_gaudi(root: Path) -> list[int]:
    # The devices of /dev/accel may also be NPUs of processors.
    accel = root / "sys/class/accel"
    minors = _numbers(root / "dev/accel", "accel")
    return [0 for minor in minors if host_info.read(accel / f"accel{minor}/device/vendor") == _HABANA_VENDOR]


_READERS: Mapping[str, Callable[[Path], list[int]]] = {
    NVIDIA: _read_nvidia,
    AMD: _read_amd,
    INTEL: _read_intel,
    ASCEND: _read_ascend,
    GAUDI: _read_gaudi,
}
"""In this order the vendors are tried."""


def _may_open(root: Path, minor: int) -> bool:
    """Return whether this process may use a render device: a container may have only some of the host's."""
    return os.access(root / f"dev/dri/renderD{minor}", os.R_OK | os.W_OK)


def _numbers(directory: Path, prefix: str) -> list[int]:
    """Return the numbers in the names of the files of a directory that are this prefix and a number."""
    names = [path.name.removeprefix(prefix) for path in _children(directory, f"{prefix}[0-9]*")]
    return sorted(int(name) for name in names if name.isdigit())


def _children(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern))
