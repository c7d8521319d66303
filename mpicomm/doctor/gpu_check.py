"""Checks of the GPUs: whether the driver and torch see them, and whether they can access each other."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping

from mpicomm.devices import counting
from mpicomm.doctor.findings import Finding, ok, problem, warning
from mpicomm.launch import allocation, queries, visible_devices

_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_LISTED = re.compile(r".+, [\d.]+")  # nvidia-smi prints errors on standard output, too


@dataclasses.dataclass(frozen=True)
class GPUFacts:
    """The GPUs of this host."""

    devices: int
    """The number of GPUs whose driver is loaded, as the kernel's files show it."""

    listed: tuple[str, ...]
    """The lines of nvidia-smi, one for each GPU; empty without it."""

    assigned: str | None
    """The variable that assigns GPUs to this process."""

    hidden_by: str | None
    """The variable that hides the GPUs from this process, with its value."""

    build: str
    """The version of CUDA or ROCm for which torch was built; empty for a torch without GPU support."""

    names: tuple[str, ...] = ()
    """The names of the GPUs that torch sees."""

    without_peer_access: tuple[tuple[int, int], ...] = ()
    """The pairs of GPUs that cannot access each other's memory."""


def collect(environ: Mapping[str, str]) -> GPUFacts:
    """Return the facts about this host; runs nvidia-smi."""
    listed = [line for line in queries.output_of(_QUERY).splitlines() if _LISTED.fullmatch(line)]
    build, names, pairs = "", [], []
    with contextlib.suppress(ImportError, OSError, RuntimeError):  # software_check reports it
        import torch

        build = torch.version.cuda or torch.version.hip or ""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_name(index) for index in range(count)]
        pairs = [
            (first, second)
            for first in range(count)
            for second in range(first + 1, count)
            if not torch.cuda.can_device_access_peer(first, second)
        ]
    return GPUFacts(
        counting.count({}).count,
        tuple(listed),
        allocation.assigned_gpus(environ),
        visible_devices.hiding(environ),
        build,
        tuple(names),
        tuple(pairs),
    )


def check(facts: GPUFacts) -> list[Finding]:
    """Return the findings about the GPUs."""
    if facts.names:
        return [ok("GPUs", _format_gpus(facts)), *_check_peers(facts)]
    if not (facts.devices or facts.listed or facts.assigned):
        return [ok("GPUs", "none: tensors are on the CPU")]
    if facts.hidden_by:
        message = f"{facts.hidden_by} hides the GPUs of this host"
        return [warning("GPUs", message, "Unset it, or ask the scheduler for GPUs, to use them.")]
    reason = f"{facts.assigned} assigns GPUs" if facts.assigned else f"this host has {_count(facts)}"
    if not facts.build:
        remedy = "Install a torch with CUDA: https://pytorch.org/get-started shows the command for this driver."
        return [problem("GPUs", f"{reason}, but torch was built without CUDA", remedy)]
    remedy = "Run `nvidia-smi` here"
    if facts.listed:
        remedy = f"Install a torch for an older CUDA, or a newer driver (`nvidia-smi` shows {facts.listed[0]})"
    return [problem("GPUs", f"{reason}, but torch (CUDA {facts.build}) finds no working driver", f"{remedy}.")]


def _check_peers(facts: GPUFacts) -> list[Finding]:
    if not facts.without_peer_access:
        return []
    pairs = ", ".join(f"{first}-{second}" for first, second in facts.without_peer_access[:8])
    return [
        warning(
            "GPU topology",
            f"GPUs {pairs} cannot access each other's memory: NCCL copies through host memory",
            "Compare with `nvidia-smi topo -m`. In a virtual machine, or with the IOMMU on, ask about PCIe ACS.",
        )
    ]


def _format_gpus(facts: GPUFacts) -> str:
    models = {name: facts.names.count(name) for name in facts.names}
    driver = f", driver {facts.listed[0].rpartition(',')[2].strip()}" if facts.listed else ""
    return f"{', '.join(f'{count} x {name}' for name, count in models.items())}, CUDA {facts.build}{driver}"


def _count(facts: GPUFacts) -> str:
    count = facts.devices or len(facts.listed)
    return f"{count} GPU{'s' if count > 1 else ''}"
