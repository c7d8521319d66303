"""The cores of each rank of a host: near its GPU, or an equal share. The input is the host's topology; all is pure."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from mpicomm.errors import LaunchError

AUTO, CORES, NUMA, GPU, NONE = MODES = ("auto", "cores", "numa", "gpu", "none")
"""The values of `--bind`."""

OWN_GPU_VARIABLES = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND")
"""Variables of Slurm that are set if it gives each task GPUs of its own, srun(1)."""

SLURM_VARIABLE, _SLURM_STEP = "SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE"
_OF_THREADS = "GOMP_CPU_AFFINITY"  # CPU numbers, the same ones on every rank

Core = tuple[int, ...]
"""The CPUs of a core, its hardware threads."""

Share = tuple[Core, ...]
"""The cores of a rank."""


@dataclasses.dataclass(frozen=True)
class Processors:
    """The cores of a host that a process may use, and their distance from its GPUs."""

    cores: Share
    numa_nodes: tuple[tuple[int, ...], ...] = ()
    """The CPUs of each NUMA node; empty if the kernel does not report them."""

    gpus: tuple[tuple[int, ...], ...] = ()
    """For each GPU of the host that the process may use the CPUs near it; empty if the kernel does not report them."""

    visible: tuple[int | None, ...] = ()
    """For each device that the process sees its position in `gpus`; None if only the driver knows it."""


def shares(binding: str, processors: Processors, ranks: int) -> list[Share]:
    """Return the cores of each rank of a host.

    No two ranks have the same core unless `numa` or `auto` must place more ranks than there are cores.

    Args:
        binding: One of `MODES`, but not `none`. `cores` divides all cores evenly; `numa` lets no rank have a part of
            two NUMA nodes; `gpu` divides the cores near a GPU among its ranks, of which rank i has the i-th visible
            one; `auto` is `gpu` if there are cores for all ranks near their GPUs, else `numa`.
        ranks: The number of ranks on the host.

    Raises:
        LaunchError: If the binding does not fit the host.
    """
    if binding == GPU:
        return _near_gpus(processors, ranks)
    if binding == CORES:
        refuse_too_many(ranks, len(processors.cores))
        return _divided(processors.cores, ranks)
    if binding == AUTO and processors.visible:
        with contextlib.suppress(LaunchError):
            return _near_gpus(processors, ranks)
    return _by_numa_node(processors, ranks)


def refuse_too_many(ranks: int, cores: int, place: str = "a host") -> None:
    """Refuse `--bind cores` for more ranks than cores.

    Raises:
        LaunchError: If there are more.
    """
    if ranks > cores:
        raise LaunchError(
            f"--bind cores: {ranks} ranks need as many cores, but {place} has {cores} for them.\n"
            f"Start fewer ranks, or let them share cores: --bind none"
        )


def share_of(binding: str, processors: Processors, rank: int, ranks: int, *, has_own_gpu: bool) -> Share:
    """Return the cores of one rank of a host, as the rank itself sees the host.

    Args:
        rank: The number of the rank on its host.
        ranks: The number of ranks on the host.
        has_own_gpu: Whether the launcher gives each rank GPUs that only this rank sees. Then the rank gets the part of
            its GPU: it does not know which GPUs the others have.

    Raises:
        LaunchError: If the binding does not fit the host.
    """
    own = processors.visible[0] if processors.visible else None
    if has_own_gpu and own is not None and binding in (AUTO, GPU):
        near = _cores_near(processors, own)
        if len(processors.gpus) == 1 < ranks:  # those of the other ranks are hidden, and are near all cores together
            parts = max(1, -(-ranks * len(near) // len(processors.cores)))
            if parts <= len(near):
                return _divided(near, parts)[rank % parts]
        alike = [gpu for gpu in range(len(processors.gpus)) if _cores_near(processors, gpu) == near]
        if len(alike) <= len(near):
            return _divided(near, len(alike))[alike.index(own)]
    return shares(binding, processors, ranks)[rank]


def threads(share: Share, processors: Processors, ranks: int, quota: int | None) -> int:
    """Return the number of threads with which a rank uses its cores.

    Args:
        ranks: The number of ranks on the host.
        quota: The CPU limit of the container, in CPUs; None without one.
    """
    if ranks > len(processors.cores):  # they share cores
        return 1
    return len(share) if quota is None else max(1, min(len(share), quota // ranks))


def _near_gpus(processors: Processors, ranks: int) -> list[Share]:
    if not processors.visible:
        raise LaunchError(
            "--bind gpu: this host has no GPU that the ranks see.\n"
            "Request GPUs from the scheduler (`mpicomm doctor` shows those of a host), or use --bind auto."
        )
    # 1. the ranks that have the same cores near their GPUs
    visible = processors.visible
    ranks_of: dict[Share, list[int]] = {}
    for rank in range(ranks):
        ranks_of.setdefault(_cores_near(processors, visible[rank % len(visible)]), []).append(rank)
    # 2. their parts; where the cores of two GPUs overlap, the GPU with fewer cores comes first
    parts: dict[int, Share] = {}
    taken: set[Core] = set()
    for near, members in sorted(ranks_of.items(), key=lambda item: len(item[0])):
        free = [core for core in near if core not in taken]
        if len(free) < len(members):
            raise LaunchError(
                f"--bind gpu: {len(members)} of the {ranks} ranks of a host need a core each near their GPUs, but "
                f"this job may use {len(free)} there.\n"
                f"Request whole hosts or fewer ranks, or use --bind numa."
            )
        taken.update(free)
        members.sort(key=lambda rank: (visible[rank % len(visible)] or 0, rank))  # ranks of one GPU are neighbours
        parts |= zip(members, _divided(free, len(members)), strict=True)
    return [parts[rank] for rank in range(ranks)]


def _cores_near(processors: Processors, gpu: int | None) -> Share:
    """Return the cores near a GPU; all if the kernel does not know them."""
    near = set() if gpu is None else set(processors.gpus[gpu])
    return tuple(core for core in processors.cores if near.intersection(core)) if near else processors.cores


def _by_numa_node(processors: Processors, ranks: int) -> list[Share]:
    cores = processors.cores
    nodes = [own for node in processors.numa_nodes if (own := [core for core in cores if core[0] in node])]
    if sum(map(len, nodes)) < len(cores):  # the kernel does not report them
        nodes = [list(cores)]
    # 1. whole nodes
    if ranks <= len(nodes):
        bounds = [rank * len(nodes) // ranks for rank in range(ranks + 1)]
        return [tuple(itertools.chain(*nodes[first:end])) for first, end in itertools.pairwise(bounds)]
    # 2. parts of a node: that of the middle of a rank's equal share of all cores, so that a node has no more ranks than
    #    cores, and one with more cores has more ranks
    ends = list(itertools.accumulate(map(len, nodes)))
    homes = [bisect.bisect_right(ends, (2 * rank + 1) * len(cores) // (2 * ranks)) for rank in range(ranks)]
    parts = []
    for index, node in enumerate(nodes):
        members = homes.count(index)
        parts += [tuple(node)] * members if members > len(node) else _divided(node, members)
    return parts


def _divided(cores: Sequence[Core], ranks: int) -> list[Share]:
    """Divide cores evenly into neighbours; the remainder stays idle."""
    size = len(cores) // max(1, ranks)
    return [tuple(cores[rank * size : (rank + 1) * size]) for rank in range(ranks)]


def cpus(share: Share) -> list[int]:
    """Return the CPUs of cores."""
    return sorted(itertools.chain.from_iterable(share))


def masks(of_ranks: Sequence[Share]) -> str:
    """Return the masks of ranks as in `srun --cpu-bind=mask_cpu:`."""
    return ",".join(f"{sum(1 << cpu for cpu in cpus(share)):#x}" for share in of_ranks)


def lists(of_ranks: Sequence[Share]) -> str:
    """Return the lists of ranks as in `mpiexec -bind-to user:` of HYDRA."""
    return ",".join("+".join(map(str, cpus(share))) for share in of_ranks)


def refuse_variables(binding: str, environ: Mapping[str, str], names: Sequence[str]) -> None:
    """Refuse a binding by `--bind` together with one by a variable of the user.

    Args:
        names: The variables with which the launcher binds ranks.

    Raises:
        LaunchError: If a variable is set.
    """
    for name in (*names, _OF_THREADS):
        # Slurm sets both variables for the tasks of a step, such as an interactive shell: then it is not the user's.
        if environ.get(name) and not (name == SLURM_VARIABLE and environ.get(_SLURM_STEP)):
            raise LaunchError(
                f"--bind {binding} and {name}={environ[name]} both bind the ranks.\n"
                f"Use one of the two: unset {name}, or omit --bind."
            )
