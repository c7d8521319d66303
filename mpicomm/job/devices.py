"""Assigns a device to each rank.

GPUs are compared by UUID: `cuda:0` is a different GPU in each task of `srun --gpus-per-task=1`, and the same GPU where
every task sees all GPUs of the node.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

import torch

from mpicomm import agreement
from mpicomm.arguments import Expected
from mpicomm.errors import DeviceError


def visible_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, in the order of `cuda:0`, `cuda:1`, ..."""
    if not torch.cuda.is_available():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def why_unusable(assigned: str | None) -> str | None:
    """Return why this process cannot use the GPUs that it was assigned; None if it can, or if it has none.

    Args:
        assigned: The variable that assigns GPUs to this process, or None.
    """
    if assigned is None or torch.cuda.is_available():
        return None
    is_built = torch.version.cuda or torch.version.hip
    reason = "finds no working driver" if is_built else "was built without CUDA"
    remedy = "Run `nvidia-smi` in the job" if is_built else "Install a torch with CUDA"
    return f"{assigned} assigns GPUs, but torch {torch.__version__} {reason}. {remedy}."


def usable_gpus(device: str | torch.device | int | None) -> dict[str, int]:
    """Return the UUIDs of the GPUs that this rank may use, and the indices under which it sees them; none for "cpu".

    Args:
        device: The device that the user requested, or None.

    Raises:
        TypeError: If it is not a str, an integer or a torch.device.
        DeviceError: If this process has no such device, or its type is neither cpu nor cuda.
    """
    wanted = None if device is None else parse(device)
    if wanted is not None and wanted.type == "cpu":
        return {}
    return {uuid: index for index, uuid in enumerate(visible_gpus()) if wanted is None or index == wanted.index}


def select(index: int | None) -> torch.device:
    """Return a rank's device, after making it the current one if it is a GPU.

    Args:
        index: The index of the GPU, or None for the CPU.
    """
    if index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def assign_on_nodes(usable: Sequence[Collection[str]], nodes: Sequence[int]) -> list[str | None]:
    """Assign a GPU to every rank of the job, on each node by itself.

    Args:
        usable: For every rank the UUIDs of the GPUs that it may use.
        nodes: For every rank its node.

    Returns:
        For every rank the UUID of its GPU, or None if it can use none.
    """
    chosen: list[str | None] = [None] * len(nodes)
    for ranks in agreement.ranks_by_value(nodes, range(len(nodes))).values():
        for rank, uuid in zip(ranks, assign([list(usable[rank]) for rank in ranks]), strict=True):
            chosen[rank] = uuid
    return chosen


def assign(visible: Sequence[Sequence[str]]) -> list[str | None]:
    """Assign a GPU to every rank of a node, each a different one if possible.

    Computes a maximum matching of ranks to GPUs (Kuhn, 1955: augmenting paths), so that ranks that see only some of the
    node's GPUs do not lose them to ranks that see more. Unmatched ranks share a GPU.

    Args:
        visible: For every local rank, the UUIDs of the GPUs that it sees.

    Returns:
        For every local rank the UUID of its GPU, or None if it sees none.
    """
    owner: dict[str, int] = {}
    for rank in range(len(visible)):
        _find_gpu(rank, visible, owner, tried=set())
    chosen = {rank: uuid for uuid, rank in owner.items()}
    for rank, uuids in enumerate(visible):
        if uuids and rank not in chosen:
            chosen[rank] = uuids[rank % len(uuids)]
    return [chosen.get(rank) for rank in range(len(visible))]


def _find_gpu(rank: int, visible: Sequence[Sequence[str]], owner: dict[str, int], tried: set[str]) -> bool:
    # Try free GPUs first: no rank has to move, and if all ranks see all GPUs, rank i gets cuda:i.
    for uuid in sorted(visible[rank], key=lambda uuid: uuid in owner):
        if uuid in tried:
            continue
        tried.add(uuid)
        if uuid not in owner or _find_gpu(owner[uuid], visible, owner, tried):
            owner[uuid] = rank
            return True
    return False


EXPECTED = Expected(
    "a device ('cpu', 'cuda:N', a torch.device or the index of a GPU)",
    lambda value: isinstance(value, (str, int, torch.device)) and not isinstance(value, bool),
    remedy="Pass one of these, or omit device for the GPU that mpicomm chooses.",
)


def parse(device: str | torch.device | int) -> torch.device:
    """Return the device that the user requested, after checking that it exists.

    Raises:
        TypeError: If it is not a str, an integer or a torch.device.
        DeviceError: If this process has no such device, or its type is neither cpu nor cuda.
    """
    EXPECTED.check(device, "device")
    try:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise DeviceError(
            f"device must name a torch device, got {device!r}: {error}\nPass 'cpu', 'cuda' or 'cuda:N'."
        ) from None
    if wanted.type not in ("cpu", "cuda"):
        raise DeviceError(f"device must be on cpu or cuda, got {device!r}.\nPass 'cpu', 'cuda' or 'cuda:N'.")
    if wanted.type != "cuda":
        return wanted
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = wanted.index or 0
    if index >= count:
        raise DeviceError(
            f"device={device!r} does not exist: this process sees {count} GPU{'' if count == 1 else 's'}.\n"
            f"Pass one of cuda:0 to cuda:{count - 1}, or omit `device`."
            if count
            else f"device={device!r} does not exist: this process sees no GPU.\nPass 'cpu', or omit `device`."
        )
    return torch.device("cuda", index)


def refuse_shared(uuids: Sequence[str | None], hosts: Sequence[str], why: Sequence[str | None] = ()) -> None:
    """Raise an error if ranks share a GPU, before NCCL fails with a less specific one.

    Args:
        uuids: For every rank the UUID of its GPU, or None.
        hosts: For every rank its host.
        why: For every rank why it cannot use the GPUs that it was assigned, or None.

    Raises:
        DeviceError: If ranks share a GPU, or a rank has no GPU; the message lists these ranks.
    """
    without = [rank for rank, uuid in enumerate(uuids) if uuid is None]
    if without:
        rank = without[0]
        remedy = (why[rank] if why else None) or "Ask the scheduler for one GPU per task."
        raise DeviceError(
            f"NCCL needs one GPU per rank, but {len(without)} of {len(uuids)} ranks have no GPU (first: rank {rank} on "
            f"{hosts[rank]}).\n"
            f"{remedy} Or use backend='mpi'."
        )
    users = collections.defaultdict(list)
    for rank, uuid in enumerate(uuids):
        users[hosts[rank], uuid].append(rank)
    for (host, uuid), ranks in users.items():
        if len(ranks) > 1:
            raise DeviceError(
                f"ranks {', '.join(map(str, ranks))} on {host} share one GPU ({uuid}), which NCCL does not allow.\n"
                f"Start one rank per GPU, or use backend='mpi'."
            )
