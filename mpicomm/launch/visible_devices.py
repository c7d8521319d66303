"""The vendors of accelerators, the environment variables that restrict those of a process, and the rules of drivers.

Users and schedulers set the variables. A driver does not report an invalid entry: it hides devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

NVIDIA, AMD, INTEL, ASCEND, GAUDI = "NVIDIA", "AMD", "Intel", "Ascend", "Gaudi"
"""The vendors of accelerators."""

DRIVER_TOOLS: Mapping[str, str] = {NVIDIA: "nvidia-smi", AMD: "rocm-smi", INTEL: "xpu-smi"}
"""For each vendor the command that comes with its driver and shows the devices."""

_CUDA, _HIP, _ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
_LEVEL_ZERO, _ASCEND, _HABANA = "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"

VARIABLES: Mapping[str, tuple[str, ...]] = {
    NVIDIA: (_CUDA,),
    AMD: (_ROCR, _HIP, _CUDA),
    INTEL: (_LEVEL_ZERO,),
    ASCEND: (_ASCEND,),
    GAUDI: (_HABANA,),
}
"""For each vendor the variables, in the order in which its driver applies them."""

# HIP does not read GPU_DEVICE_ORDINAL, which AMD documents for HIP and OpenCL: only the OpenCL runtime does (ROCclr).
NAMES = (*dict.fromkeys(name for names in VARIABLES.values() for name in names), "GPU_DEVICE_ORDINAL")
"""All variables. Their values are those of one host."""

_NO_DEVICES = ("", "-1", "NoDevFiles")  # the last one is Slurm's, in a job without GPUs
_ENTRY = re.compile(r"\s*(?:\+?(?P<index>\d+)|GPU-\S+)")


def assigning(environ: Mapping[str, str]) -> str | None:
    """Return the first variable that selects devices of a vendor, as `name=value`; None if no variable does."""
    shown = [name for names in VARIABLES.values() if not hiding(names, environ) for name in names]
    return next((f"{name}={environ[name]}" for name in shown if environ.get(name, "") not in _NO_DEVICES), None)


def hiding(names: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the variable that hides all devices of a vendor, as `name=value`; None if no variable does.

    Args:
        names: The variables of the vendor.
    """
    # An empty mask of Level Zero selects all devices. HIP reads CUDA's variable only if its own one is not set.
    unread = {_LEVEL_ZERO, _CUDA} if _HIP in names and _HIP in environ else {_LEVEL_ZERO}
    hidden = (f"{name}={environ[name]}" for name in names if name not in unread and environ.get(name) in _NO_DEVICES)
    return next(hidden, None)


def selected(vendor: str, environ: Mapping[str, str], partitions: Sequence[int]) -> list[int | None]:
    """Return the accelerators that a process with this environment sees, a number for each of its devices.

    Args:
        vendor: The vendor of the accelerators.
        partitions: For each accelerator of the host the number of its partitions (MIG devices, tiles); 0 for an
            undivided one.

    Returns:
        For each device the position of its accelerator in `partitions`; None if only the driver knows it, as for a
        UUID.
    """
    return _RULES[vendor](environ, partitions) if partitions else []


def _select_cuda(environ: Mapping[str, str], partitions: Sequence[int]) -> list[int | None]:
    text = environ.get(_CUDA)
    entries = _listed(text, range(len(partitions)))
    # A process sees one MIG device, the first one, and beside it no undivided GPU (NVIDIA's MIG user guide).
    is_mig_named = text is not None and text.lstrip().startswith("MIG-")
    sees_mig = is_mig_named or any(partitions[gpu] for gpu in entries if gpu is not None)
    return (entries or [None])[:1] if sees_mig else entries


def _select_rocm(environ: Mapping[str, str], partitions: Sequence[int]) -> list[int | None]:
    devices: Sequence[int | None] = range(len(partitions))
    if _ROCR in environ:  # HIP's variable selects among the remaining devices
        devices = _listed(environ[_ROCR], devices, repeat_hides_all=False)
    return _listed(environ.get(_HIP, environ.get(_CUDA)), devices)


def _select_level_zero(environ: Mapping[str, str], partitions: Sequence[int]) -> list[int | None]:
    tiles = [max(1, number) for number in partitions]
    # The valid entries, and the device that each of them selects. By default (FLAT) every tile is a device.
    gpu_of_device = list(range(len(tiles)))
    if environ.get("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE":
        device_of = {str(gpu): gpu for gpu in gpu_of_device}
        device_of |= {f"{gpu}.{tile}": gpu for gpu, number in enumerate(tiles) for tile in range(number)}
    else:
        gpu_of_device = [gpu for gpu, number in enumerate(tiles) for _ in range(number)]
        device_of = {str(tile): tile for tile in range(sum(tiles))}
    mask = environ.get(_LEVEL_ZERO, "")
    # Intel's driver skips invalid entries, and takes an empty mask for none.
    entries = [entry.strip() for entry in mask.split(",")] if mask else list(device_of)
    return [gpu_of_device[device] for device in sorted({device_of[entry] for entry in entries if entry in device_of})]


def _listed(text: str | None, devices: Sequence[int | None], *, repeat_hides_all: bool = True) -> list[int | None]:
    """Return the devices that a list of indices and UUIDs selects; all without a list."""
    if text is None:
        return list(devices)
    entries = _valid(text, len(devices), repeat_hides_all=repeat_hides_all)
    return [devices[int(entry)] if entry.isdigit() else None for entry in entries]


def _valid(text: str, devices: int, *, repeat_hides_all: bool = True) -> list[str]:
    """Return the entries of a list of indices and UUIDs: the first invalid entry ends the list.

    Whether a UUID exists is unknown without the driver.

    Args:
        devices: Number of devices.
        repeat_hides_all: Whether an entry that is listed twice hides all devices, as with CUDA and HIP, instead of
            ending the list, as with ROCr.
    """
    entries: list[str] = []
    for entry in text.split(","):
        match = _ENTRY.match(entry)
        if match is None or int(match["index"] or 0) >= devices:
            break
        value = match["index"] or match[0].strip()
        if value in entries:
            return [] if repeat_hides_all else entries
        entries.append(value)
    return entries[:devices]


_RULES: Mapping[str, Callable[[Mapping[str, str], Sequence[int]], list[int | None]]] = {
    NVIDIA: _select_cuda,
    AMD: _select_rocm,
    INTEL: _select_level_zero,
    ASCEND: lambda environ, partitions: _listed(environ.get(_ASCEND), range(len(partitions))),
    GAUDI: lambda environ, partitions: _listed(environ.get(_HABANA), range(len(partitions))),
}
