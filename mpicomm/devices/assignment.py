"""Assigns a device to each rank.

Devices are compared by UUID: device 0 is a different one in each task of `srun --gpus-per-task=1`, and the same one
where every task sees all devices of the node.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Collection, Mapping, Sequence

import torch

from mpicomm.arguments import Expected
from mpicomm.devices import accelerator, counting, vendor_backends, vendors
from mpicomm.errors import DeviceError
from mpicomm.launch.visible_devices import VARIABLES, hiding


def visible_devices() -> list[str]:
    """Return the identities of the devices that this process sees, in the order of their indices.

    Identities are UUIDs. Devices without UUIDs of their own are identified by their entries in the variable that makes
    them visible, if it is set, or by their indices: two processes of a node see the same devices in the same order.
    """
    count = accelerator.count()
    vendor = vendors.vendor()
    uuids = [vendor.uuid(index) for index in range(count)]
    if all(uuids) and len(set(uuids)) == count:
        return uuids
    return identities(count, vendor.visible_variables, os.environ)


def identities(count: int, variables: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the identities of devices without UUIDs that a process sees.

    Args:
        count: The number of devices.
        variables: The variables that select devices.
        environ: The environment of the process.
    """
    settings = [f"{name}={environ[name]}" for name in variables if environ.get(name)]
    if not settings:
        return [f"device {index}" for index in range(count)]
    name, _, value = settings[0].partition("=")
    entries = [entry.strip() for entry in value.split(",")]
    if len(settings) == 1 and len(entries) == count:
        return [f"{name}={entry}" for entry in entries]
    return [f"device {index} of {' '.join(settings)}" for index in range(count)]


def why_unusable(assigned: str | None) -> str | None:
    """Return why this process cannot use the GPUs that it was assigned; None if it can, or if it has none.

    Args:
        assigned: The variable that assigns GPUs to this process, with its value, or None.
    """
    if assigned is None or accelerator.is_available():
        return None
    is_built = vendor_backends.device_type() is not None
    vendor = vendors.vendor() if is_built else _vendor_of_assigned(assigned)
    if hiding(vendor.visible_variables, os.environ):  # `assigned` may be another vendor's variable
        return None
    reason = "finds no working driver" if is_built else f"was built without {vendor.name}"
    remedy = f"Run `{vendor.driver_check}` in the job" if is_built else f"Install a torch with {vendor.name}"
    return f"{assigned} assigns GPUs, but torch {torch.__version__} {reason}. {remedy}."


def _vendor_of_assigned(variable: str) -> vendors.Vendor:
    """Return the vendor of this host's GPUs: Slurm sets the variables of all vendors."""
    on_host = counting.count({}).vendor
    name = VARIABLES[on_host][0] if on_host else variable.partition("=")[0]
    return vendors.of_variable(name)


def usable_devices(device: str | torch.device | int | None) -> dict[str, int]:
    """Return the identities of the devices that this rank may use, with their indices; none for "cpu".

    Args:
        device: The device that the user requested, or None.

    Raises:
        TypeError: If it is not a str, an integer or a torch.device.
        DeviceError: If this process has no such device, or torch has another type of accelerator.
    """
    requested = None if device is None else parse(device)
    if requested is not None and requested.type == "cpu":
        return {}
    indices = {identity: index for index, identity in enumerate(visible_devices())}
    if requested is None:
        return indices
    return {identity: index for identity, index in indices.items() if index == requested.index}


def gpus_of(devices: Mapping[str, int]) -> dict[str, str]:
    """Return for each device the identity of its GPU, which several MIG devices share.

    Args:
        devices: The identities of devices of this process, with their indices.
    """
    vendor = vendors.vendor()
    return {identity: vendor.gpu_uuid(index) or identity for identity, index in devices.items()}


def assign_on_nodes(usable: Sequence[Collection[str]], nodes: Sequence[int]) -> list[str | None]:
    """Assign a device to every rank of the job, on each node by itself.

    Args:
        usable: For every rank the identities of the devices that it may use.
        nodes: For every rank its node.

    Returns:
        For every rank the identity of its device, or None if it can use none.
    """
    ranks_of_node = collections.defaultdict(list)
    for rank, node in enumerate(nodes):
        ranks_of_node[node].append(rank)
    chosen: list[str | None] = [None] * len(nodes)
    for ranks in ranks_of_node.values():
        for rank, identity in zip(ranks, assign([list(usable[rank]) for rank in ranks]), strict=True):
            chosen[rank] = identity
    return chosen


def assign(visible: Sequence[Sequence[str]]) -> list[str | None]:
    """Assign a device to every rank of a node, each a different one if possible.

    Computes a maximum matching of ranks to devices (Kuhn, 1955: augmenting paths), so that ranks that see only some of
    the node's devices do not lose them to ranks that see more. Unmatched ranks share a device.

    Args:
        visible: For every local rank, the identities of the devices that it sees.

    Returns:
        For every local rank the identity of its device, or None if it sees none.
    """
    owner: dict[str, int] = {}
    for rank in range(len(visible)):
        _find_device(rank, visible, owner, tried=set())
    chosen = {rank: identity for identity, rank in owner.items()}
    for rank, identities_of_rank in enumerate(visible):
        if identities_of_rank and rank not in chosen:
            chosen[rank] = identities_of_rank[rank % len(identities_of_rank)]
    return [chosen.get(rank) for rank in range(len(visible))]


def _find_device(rank: int, visible: Sequence[Sequence[str]], owner: dict[str, int], tried: set[str]) -> bool:
    # Try free devices first: no rank has to move, and if all ranks see all devices, rank i gets device i.
    for identity in sorted(visible[rank], key=lambda identity: identity in owner):
        if identity in tried:
            continue
        tried.add(identity)
        if identity not in owner or _find_device(owner[identity], visible, owner, tried):
            owner[identity] = rank
            return True
    return False


EXPECTED = Expected(
    "a device (a name such as 'cpu', a torch.device or the index of a GPU)",
    lambda value: isinstance(value, (str, int, torch.device)) and not isinstance(value, bool),
    remedy="Pass one of these, or omit device for the GPU that mpicomm chooses.",
)


def parse(device: str | torch.device | int) -> torch.device:
    """Return the device that the user requested, after checking that it exists.

    Raises:
        TypeError: If it is not a str, an integer or a torch.device.
        DeviceError: If this process has no such device, or torch has another type of accelerator.
    """
    EXPECTED.check(device, "device")
    own_type = vendor_backends.device_type()
    try:
        requested = torch.device(own_type or "cpu", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"device must name a torch device, got {device!r}: {error}\n{_accepted(own_type)}") from None
    if requested.type == "cpu" and not isinstance(device, int):
        return torch.device("cpu")
    # Of the index of a GPU, torch without an accelerator makes a device on the CPU, which no process sees.
    expected = ("cpu", own_type) if own_type else ("cpu", *vendors.DEVICE_TYPES)
    if requested.type not in expected:
        accelerator_name = own_type or "an accelerator"
        raise DeviceError(f"device must be on cpu or {accelerator_name}, got {device!r}.\n{_accepted(own_type)}")
    count, index = accelerator.count(), requested.index or 0
    if index >= count:
        raise DeviceError(
            f"device={device!r} does not exist: this process sees {count} GPU{'' if count == 1 else 's'}.\n"
            f"Pass one of {own_type}:0 to {own_type}:{count - 1}, or omit `device`."
            if count
            else f"device={device!r} does not exist: this process sees no GPU.\nPass 'cpu', or omit `device`."
        )
    return torch.device(requested.type, index)


def _accepted(own_type: str | None) -> str:
    return f"Pass 'cpu', '{own_type}' or '{own_type}:N'." if own_type else "Pass 'cpu', or omit `device`."


def may_share(environ: Mapping[str, str]) -> bool:
    """Return whether the user lets the vendor's library use one GPU for several ranks.

    Args:
        environ: The environment of this rank.
    """
    return environ.get(vendors.vendor().sharing_variable) == "1"


def refuse_shared(
    gpus: Sequence[str | None],
    hosts: Sequence[str],
    library: str,
    why: Sequence[str | None] = (),
    *,
    may_share: bool = False,
) -> None:
    """Raise an error if ranks share a GPU, before the vendor's library fails with a less specific one.

    Args:
        gpus: For every rank the identity of its GPU, or None.
        hosts: For every rank its host.
        library: The name of the vendor's library, such as NCCL.
        why: For every rank why it cannot use the GPUs that it was assigned, or None.
        may_share: Whether the user lets the library use one GPU for several ranks.

    Raises:
        DeviceError: If ranks share a GPU, or a rank has none; the message lists these ranks.
    """
    without = [rank for rank, identity in enumerate(gpus) if identity is None]
    if without:
        rank = without[0]
        remedy = (why[rank] if why else None) or "Ask the scheduler for one GPU per task."
        raise DeviceError(
            f"{library} needs one GPU per rank, but {len(without)} of {len(gpus)} ranks have no GPU (first: rank "
            f"{rank} on {hosts[rank]}).\n"
            f"{remedy} Or use backend='mpi'."
        )
    users = collections.defaultdict(list)
    for rank, identity in enumerate(gpus):
        users[hosts[rank], identity].append(rank)
    for (host, identity), ranks in users.items():
        if len(ranks) > 1 and not may_share:
            variable = vendors.vendor().sharing_variable
            permission = f" To let {library} share GPUs (NCCL 2.30 or newer), set {variable}=1." if variable else ""
            raise DeviceError(
                f"ranks {', '.join(map(str, ranks))} on {host} share one GPU ({identity}), which {library} does not "
                f"allow.\n"
                f"Start one rank per GPU, or use backend='mpi'.{permission}"
            )
