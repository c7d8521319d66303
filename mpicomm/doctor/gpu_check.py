"""Checks of the GPUs: whether the driver and torch see them, and whether they can access each other."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

from mpicomm.devices import counting
from mpicomm.doctor.findings import Finding, ok, problem, warning
from mpicomm.launch import allocation, queries, visible_devices
from mpicomm.launch.visible_devices import AMD, DRIVER_TOOLS, INTEL, NVIDIA

CUDA, ROCM, XPU = "CUDA", "ROCm", "XPU"
"""The platforms for which there are builds of torch."""

_PLATFORMS = {NVIDIA: CUDA, AMD: ROCM, INTEL: XPU}
"""The platform of each vendor."""


class _Tool(NamedTuple):
    """A command that lists the GPUs of a vendor; it comes with the driver."""

    platform: str
    command: tuple[str, ...]
    line: re.Pattern[str]
    """The line about a GPU: its name and, if the tool has it, the version of the driver. Other lines may be errors."""


_TOOLS = (
    _Tool(
        CUDA,
        (DRIVER_TOOLS[NVIDIA], "--query-gpu=name,driver_version", "--format=csv,noheader"),
        re.compile(r"(.+), ([\d.]+)"),
    ),
    _Tool(ROCM, (DRIVER_TOOLS[AMD], "--showproductname"), re.compile(r"GPU\[\d+\]\s*: Card [Ss]eries:\s*(.+)")),
    _Tool(ROCM, ("amd-smi", "static", "--asic"), re.compile(r"\s*MARKET_NAME: (.+)")),  # in the place of rocm-smi
    _Tool(XPU, (DRIVER_TOOLS[INTEL], "discovery", "--dump", "1,2,8"), re.compile(r'\d+,"([^"]+)","([^"]+)"')),
)
_COMMANDS = {_PLATFORMS[vendor]: command for vendor, command in DRIVER_TOOLS.items()}
_TOPOLOGY = {
    CUDA: ("NCCL", f"{DRIVER_TOOLS[NVIDIA]} topo -m"),
    ROCM: ("RCCL", f"{DRIVER_TOOLS[AMD]} --showtopo"),
    XPU: ("oneCCL", f"{DRIVER_TOOLS[INTEL]} topology -m"),
}
"""For each platform the vendor's library, and the command that shows the links between GPUs."""


@dataclasses.dataclass(frozen=True)
class GPUFacts:
    """The GPUs of this host."""

    devices: int
    """The number of GPUs whose driver is loaded, as the kernel's files show it."""

    listed: tuple[str, ...]
    """The name of each GPU, and the version of the driver, from the vendor's tool; empty without it."""

    assigned: str | None
    """The variable that assigns GPUs to this process."""

    hidden_by: str | None
    """The variable that hides the GPUs from this process, with its value."""

    build: str
    """The platform for which torch was built, and its version; empty for a torch without GPU support."""

    names: tuple[str, ...] = ()
    """The names of the GPUs that torch sees."""

    without_peer_access: tuple[tuple[int, int], ...] = ()
    """The pairs of GPUs that cannot access each other's memory."""

    platform: str = CUDA
    """The platform of the GPUs of this host."""


def collect(environ: Mapping[str, str]) -> GPUFacts:
    """Return the facts about this host; runs the tools of the drivers."""
    platform, listed = _list_gpus()
    accelerators = counting.count({})
    vendor = next((name for name in _PLATFORMS if _PLATFORMS[name] == platform), accelerators.vendor or "")
    build, names, pairs = "", [], []
    with contextlib.suppress(ImportError, OSError, RuntimeError):  # software_check reports it
        import torch

        from mpicomm.devices import accelerator, vendors

        build = " ".join(next(iter(vendors.vendor().versions().items()), ()))
        indices = range(accelerator.count())
        names = [accelerator.device_name(accelerator.device_at(index)) for index in indices]
        can_access = getattr(torch.get_device_module(), "can_device_access_peer", lambda *_: True)
        pairs = [pair for pair in itertools.combinations(indices, 2) if not can_access(*pair)]
    return GPUFacts(
        accelerators.count,
        tuple(listed),
        allocation.assigned_gpus(environ),
        visible_devices.hiding(visible_devices.VARIABLES.get(vendor, ()), environ),
        build,
        tuple(names),
        tuple(pairs),
        _PLATFORMS.get(vendor) or build.partition(" ")[0] or CUDA,
    )


def _list_gpus() -> tuple[str, list[str]]:
    """Return the platform of the GPUs that a tool lists, and a line for each of them; empty without such a tool."""
    for tool in _TOOLS:
        if listed := listed_by(tool.command[0], queries.output_of(tool.command)):
            return tool.platform, listed
    return "", []


def listed_by(command: str, output: str) -> list[str]:
    """Return a line for each GPU in the output of a tool: its name and, if the tool has it, the driver's version."""
    pattern = next(tool.line for tool in _TOOLS if tool.command[0] == command)
    matches = [match for line in output.splitlines() if (match := pattern.fullmatch(line)) is not None]
    return [", ".join(match.groups()) for match in matches]


def check(facts: GPUFacts) -> list[Finding]:
    """Return the findings about the GPUs."""
    if facts.names:
        return [ok("GPUs", _format_gpus(facts)), *_check_peers(facts)]
    if not (facts.devices or facts.listed or facts.assigned):
        return [ok("GPUs", "none: tensors are on the CPU")]
    if facts.hidden_by:
        message = f"{facts.hidden_by} hides the GPUs of this host"
        return [warning("GPUs", message, "Unset it, or ask the scheduler for GPUs, to use them.")]
    count = facts.devices or len(facts.listed)
    reason = f"{facts.assigned} assigns GPUs" if facts.assigned else f"this host has {count} GPU{'s' * (count > 1)}"
    platform = facts.platform
    if not facts.build.startswith(platform):
        remedy = f"Install a torch with {platform}: https://pytorch.org/get-started shows the command for this driver."
        return [problem("GPUs", f"{reason}, but torch was built without {platform}", remedy)]
    tool = _COMMANDS.get(platform, "the driver's tool")
    remedy = f"Run `{tool}` here"
    if facts.listed:
        remedy = f"Install a torch for an older {platform}, or a newer driver (`{tool}` shows {facts.listed[0]})"
    return [problem("GPUs", f"{reason}, but torch ({facts.build}) finds no working driver", f"{remedy}.")]


def _check_peers(facts: GPUFacts) -> list[Finding]:
    if not facts.without_peer_access:
        return []
    pairs = ", ".join(f"{first}-{second}" for first, second in facts.without_peer_access[:8])
    library, command = _TOPOLOGY.get(facts.platform, _TOPOLOGY[CUDA])
    return [
        warning(
            "GPU topology",
            f"GPUs {pairs} cannot access each other's memory: {library} copies through host memory",
            f"Compare with `{command}`. In a virtual machine, or with the IOMMU on, ask about PCIe ACS.",
        )
    ]


def _format_gpus(facts: GPUFacts) -> str:
    models = {name: facts.names.count(name) for name in facts.names}
    version = facts.listed[0].rpartition(", ")[::2] if facts.listed else ("", "")
    parts = [f"{count} x {name}" for name, count in models.items()]
    return ", ".join([*parts, *filter(None, [facts.build, f"driver {version[1]}" if version[0] else ""])])
