"""Trees of files that describe machines, as the documentation and sources of kernels and drivers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Files = dict[str, str]
"""The contents of files by path; a path that ends with `/` is a directory."""


def pci_device(directory: str, near: str) -> Files:
    """Return the files of a GPU's PCI device.

    Args:
        near: The number of its NUMA node and the CPUs near it: `3: 48-63,112-127`.
    """
    node, _, cpus = near.partition(": ")
    return {f"{directory}/numa_node": f"{node}\n", f"{directory}/local_cpulist": f"{cpus}\n"}


def processors(*numa_nodes: str, cores: int, threads: int = 2) -> Files:
    """Return the files of a host's CPUs: the second hardware threads of all cores have the numbers after the first.

    Args:
        numa_nodes: The CPUs of each NUMA node.
        cores: Number of cores of the host.
    """
    files = {f"sys/devices/system/node/node{node}/cpulist": f"{cpus}\n" for node, cpus in enumerate(numa_nodes)}
    for cpu in range(cores * threads):
        siblings = ",".join(str(cpu % cores + cores * thread) for thread in range(threads))
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{siblings}\n"
    return files


def nvidia(gpus: int, mig: Mapping[int, int] | None = None, near: Sequence[str] = ()) -> Files:
    """Return the files of NVIDIA's driver.

    Args:
        mig: For a GPU its number of MIG devices.
        near: For each GPU the CPUs near it, see `pci_device`. The numbers of the device files are in reverse order of
            the PCI addresses.
    """
    files = dict.fromkeys(["dev/nvidiactl", "dev/nvidia-uvm", *(f"dev/nvidia{gpu}" for gpu in range(gpus))], "")
    for gpu, instances in (mig or {}).items():
        capabilities = f"proc/driver/nvidia/capabilities/gpu{gpu}/mig"
        files |= {f"{capabilities}/gi{7 + index}/ci0/access": "DeviceFileMinor: 30\n" for index in range(instances)}
    for gpu, cpus in enumerate(near):
        address = f"0000:{7 + gpu:02x}:00.0"
        information = f"Model: \t\t NVIDIA A100-SXM4-40GB\nDevice Minor: \t {gpus - 1 - gpu}\n"
        files |= pci_device(f"sys/bus/pci/devices/{address}", cpus)
        files[f"proc/driver/nvidia/gpus/{address}/information"] = information
    return files


def kfd_node(number: int, **properties: int) -> Files:
    """Return the files of a node of amdkfd's topology, and its render device."""
    text = "".join(f"{name} {value}\n" for name, value in properties.items())
    node = f"sys/class/kfd/kfd/topology/nodes/{number}"
    files = {f"{node}/gpu_id": f"{51140 * bool(properties['simd_count'])}\n", f"{node}/properties": text}
    minor = properties["drm_render_minor"]
    return files | ({f"dev/dri/renderD{minor}": ""} if minor > 0 else {})


def amd(gpus: int, sockets: int = 1, near: Sequence[str] = ()) -> Files:
    """Return the files of amdkfd: a node per NUMA domain of the processor, then a node per GPU.

    Args:
        near: For each GPU the CPUs near it, see `pci_device`.
    """
    files: Files = {"dev/kfd": ""}
    for node in range(sockets):
        files |= kfd_node(node, cpu_cores_count=64, simd_count=0, drm_render_minor=0, unique_id=0)
    for gpu in range(gpus):
        properties = {"cpu_cores_count": 0, "simd_count": 440, "drm_render_minor": 128 + gpu, "unique_id": 900 + gpu}
        files |= kfd_node(sockets + gpu, **properties)
    for gpu, cpus in enumerate(near):
        files |= pci_device(f"sys/class/drm/renderD{128 + gpu}/device", cpus)
    return files


def intel(
    gpus: int, tiles: int = 0, *, driver: str = "i915", integrated: bool = False, near: Sequence[str] = ()
) -> Files:
    """Return the files of Intel's GPUs, of which an integrated one is the first.

    Args:
        tiles: Number of tiles of each discrete GPU.
        near: For each GPU the CPUs near it, see `pci_device`.
    """
    files: Files = {"sys/class/drm/version": "drm 1.1.0 20060810\n", "sys/class/drm/card0-DP-1/": ""}
    for index in range(gpus):
        card, minor = f"sys/class/drm/card{index}", 128 + index
        address = "0000:00:02.0" if integrated and index == 0 else f"0000:{0x18 + index:02x}:00.0"
        files |= {
            f"{card}/device/vendor": "0x8086\n",
            f"{card}/device/uevent": f"DRIVER={driver}\nPCI_SLOT_NAME={address}\n",
            f"{card}/device/drm/renderD{minor}/": "",
            f"dev/dri/renderD{minor}": "",
        }
        numbers = range(tiles)
        if driver == "xe":  # each tile has a GT for media, too
            files |= {f"{card}/device/tile{tile}/gt{gt}/": "" for tile in numbers for gt in (2 * tile, 2 * tile + 1)}
        else:
            files |= {f"{card}/gt/gt{tile}/": "" for tile in numbers}
    for index, cpus in enumerate(near):
        files |= pci_device(f"sys/class/drm/card{index}/device", cpus)
    return files


def ascend(npus: int) -> Files:
    return dict.fromkeys(["dev/davinci_manager", *(f"dev/davinci{npu}" for npu in range(npus))], "")


def accel(count: int, vendor: str) -> Files:
    """Return the files of the kernel's subsystem of compute accelerators."""
    files = {f"dev/accel/accel{index}": "" for index in range(count)}
    return files | {f"sys/class/accel/accel{index}/device/vendor": f"{vendor}\n" for index in range(count)}


def write(files: Files, root: Path) -> Path:
    """Write the files below a root, and return it."""
    for name, text in files.items():
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text)
    return root
