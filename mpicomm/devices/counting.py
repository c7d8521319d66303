"""The accelerators of this host, counted in the files of the kernel: loading torch and a driver takes seconds.

Integrated GPUs, those of a processor, are not counted: on such a machine ranks compute on the cores.
"""

from __future__ import annotations

import dataclasses
import os
import re
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

    directories: tuple[Path | None, ...] = dataclasses.field(default=(), compare=False)
    """For each accelerator that this process may use its directory in sysfs, as a PCI device; None if not known."""

    visible: tuple[int | None, ...] = dataclasses.field(default=(), compare=False)
    """For each device that the process sees the position of its accelerator in `directories`; None if not known."""


@dataclasses.dataclass(frozen=True)
class _Device:
    """An accelerator in the kernel's files."""

    partitions: int = 0
    """The number of its partitions (MIG devices, tiles); 0 for an undivided one."""

    directory: Path | None = None


def count(environ: Mapping[str, str], root: Path = Path("/")) -> Accelerators:
    """Return the accelerators that a process of this host sees, of the first vendor that has some.

    In a container these are the devices of its /dev.

    Args:
        environ: The environment of the process, whose variables restrict the devices.
        root: The root of the file tree.
    """
    devices_of = {vendor: read(root) for vendor, read in _READERS.items()}
    if not any(devices_of.values()) and visible_devices.VARIABLES[NVIDIA][0] in environ:
        # Windows Subsystem for Linux has no device files of GPUs: the variable is the only source.
        devices_of[NVIDIA] = [_Device()] * _MOST_DEVICES
    for vendor, devices in devices_of.items():
        if visible := visible_devices.selected(vendor, environ, [device.partitions for device in devices]):
            directories = tuple(device.directory for device in devices)
            return Accelerators(vendor, len(visible), directories, tuple(visible))
    return Accelerators(None, 0)


# -- a reader for each vendor ----------------------------------------------------------------------------------------


def _read_nvidia(root: Path) -> list[_Device]:
    driver, pci = root / "proc/driver/nvidia", root / "sys/bus/pci/devices"
    addresses = {_minor(gpu): gpu.name for gpu in _children(driver / "gpus", "*")}
    minors = _numbers(root / "dev", "nvidia")
    if not minors:
        return [_Device(directory=pci / gpu.name) for gpu in _children(driver / "gpus", "*")]
    # CUDA numbers equal GPUs by their PCI addresses. The directories of MIG's compute instances are named by the minor
    # number of the GPU's device file.
    usable = [minor for minor in minors if _may_open(root / f"dev/nvidia{minor}")]
    return [
        _Device(
            len(_children(driver / f"capabilities/gpu{minor}", "mig/gi*/ci*")),
            pci / addresses[minor] if minor in addresses else None,
        )
        for minor in sorted(usable, key=lambda minor: addresses.get(minor, ""))
    ]


def _minor(gpu: Path) -> int | None:
    """Return the number of a GPU's device file, from the driver's description."""
    line = re.search(r"^Device Minor:\s*(\d+)", host_info.read(gpu / "information"), re.MULTILINE)
    return int(line[1]) if line else None


def _read_amd(root: Path) -> list[_Device]:
    """Return each node of the topology of amdkfd that is a GPU: a GCD of an MI250X is a node."""
    # By number: as ROCr, for which node 10 is after node 9.
    numbers = _numbers(root / "sys/class/kfd/kfd/topology/nodes", "")
    nodes = [_properties(root / f"sys/class/kfd/kfd/topology/nodes/{number}/properties") for number in numbers]
    return [_Device(directory=_render_device(root, node)) for node in nodes if _is_amd_gpu(root, node)]


def _render_device(root: Path, properties: Mapping[str, int]) -> Path | None:
    minor = properties.get("drm_render_minor", 0)
    return root / f"sys/class/drm/renderD{minor}/device" if minor else None


def _is_amd_gpu(root: Path, properties: Mapping[str, int]) -> bool:
    simds, minor = properties.get("simd_count", 0), properties.get("drm_render_minor", 0)
    # The cores of a processor make a node without SIMD units, or one with those of its GPU. The GPUs of newer
    # processors are nodes of their own. They have no unique ID, as ROCm's UUID `GPU-XX` shows; a large GPU without one,
    # perhaps in a virtual machine, is a GPU nevertheless.
    is_small = properties.get("unique_id") == 0 and simds <= _MOST_INTEGRATED_SIMDS
    is_integrated = properties.get("cpu_cores_count", 0) > 0 or is_small
    return simds > 0 and not is_integrated and (minor == 0 or _may_open_render(root, minor))


def _properties(path: Path) -> dict[str, int]:
    """Return the properties of a node; none if the container may not use its device: the kernel refuses to read."""
    words = [line.split() for line in host_info.read(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}


def _read_intel(root: Path) -> list[_Device]:
    drm = root / "sys/class/drm"
    cards = [drm / f"card{number}" for number in _numbers(drm, "card")]
    return [_Device(_tiles(card), card / "device") for card in cards if _is_discrete_intel_gpu(root, card / "device")]


def _is_discrete_intel_gpu(root: Path, device: Path) -> bool:
    if host_info.read(device / "vendor") != _INTEL_VENDOR:
        return False
    minors = _numbers(device / "drm", "renderD")
    may_open = not minors or _may_open_render(root, minors[0])
    return may_open and f"PCI_SLOT_NAME={_INTEGRATED_INTEL}" not in host_info.read(device / "uevent").splitlines()


def _tiles(card: Path) -> int:
    # The driver xe names the tiles. With i915 the tiles are the GTs: only integrated GPUs have a GT for media as well.
    return len(_numbers(card / "device", "tile")) or len(_numbers(card / "gt", "gt"))


def _read_ascend(root: Path) -> list[_Device]:
    return [_Device() for _ in _numbers(root / "dev", "davinci")]


def _read_gaudi(root: Path) -> list[_Device]:
    # The devices of /dev/accel may also be NPUs of processors.
    accel = root / "sys/class/accel"
    minors = _numbers(root / "dev/accel", "accel")
    devices = [accel / f"accel{minor}/device" for minor in minors]
    return [_Device(directory=device) for device in devices if host_info.read(device / "vendor") == _HABANA_VENDOR]


_READERS: Mapping[str, Callable[[Path], list[_Device]]] = {
    NVIDIA: _read_nvidia,
    AMD: _read_amd,
    INTEL: _read_intel,
    ASCEND: _read_ascend,
    GAUDI: _read_gaudi,
}
"""In this order the vendors are tried."""


def _may_open_render(root: Path, minor: int) -> bool:
    return _may_open(root / f"dev/dri/renderD{minor}")


def _may_open(device: Path) -> bool:
    """Return whether this process may use a device: a container or a job may have only some of the host's."""
    return os.access(device, os.R_OK | os.W_OK)


def _numbers(directory: Path, prefix: str) -> list[int]:
    """Return the numbers in the names of the files of a directory that are this prefix and a number."""
    names = [path.name.removeprefix(prefix) for path in _children(directory, f"{prefix}[0-9]*")]
    return sorted(int(name) for name in names if name.isdigit())


def _children(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern))
