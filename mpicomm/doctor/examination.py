"""The examination of this process, and of all ranks of a job together."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpicomm import mpi
from mpicomm.doctor import (
    findings,
    gpu_check,
    launcher_check,
    limit_check,
    memory_check,
    network_check,
    processor_check,
    software_check,
)
from mpicomm.doctor.findings import Finding
from mpicomm.doctor.gpu_check import GPUFacts
from mpicomm.doctor.launcher_check import LauncherFacts
from mpicomm.doctor.limit_check import LimitFacts
from mpicomm.doctor.memory_check import MemoryFacts
from mpicomm.doctor.network_check import NetworkFacts
from mpicomm.doctor.processor_check import ProcessorFacts
from mpicomm.doctor.software_check import SoftwareFacts
from mpicomm.errors import LaunchError
from mpicomm.launch import detect

if TYPE_CHECKING:
    from mpicomm.doctor.links import Link
    from mpicomm.session import World


@dataclasses.dataclass(frozen=True)
class Facts:
    """All facts about this process and its host."""

    software: SoftwareFacts
    launchers: LauncherFacts | None
    """None without an MPI library."""

    memory: MemoryFacts
    limits: LimitFacts
    network: NetworkFacts
    processors: ProcessorFacts
    gpus: GPUFacts


def collect(environ: Mapping[str, str]) -> Facts:
    """Return the facts about this process. Does not initialise MPI, and does not communicate."""
    memory = memory_check.collect()  # before torch starts threads
    software = software_check.collect(environ)
    local_size = 1
    with contextlib.suppress(LaunchError):
        local_size = detect.detect(environ).local_size
    return Facts(
        software,
        None if software.library is None else launcher_check.collect(software.library, environ),
        memory,
        limit_check.collect(),
        network_check.collect(environ),
        processor_check.collect(environ, local_size),
        gpu_check.collect(environ, has_torch=not software.torch_error),
    )


def check(facts: Facts) -> list[Finding]:
    """Return the findings about this process."""
    return [
        *software_check.check(facts.software),
        *(launcher_check.check(facts.launchers) if facts.launchers else []),
        *memory_check.check(facts.memory),
        *limit_check.check(facts.limits),
        *network_check.check(facts.network),
        *processor_check.check(facts.processors),
        *gpu_check.check(facts.gpus),
    ]


def check_job(world: World, facts: Facts) -> tuple[list[Finding], list[Link]]:
    """Return the findings about all ranks, and the links between them; the same on every rank (collective)."""
    from mpicomm.collective_ops import collectives
    from mpicomm.doctor import job_check, links
    from mpicomm.startup import devices, interfaces

    # 1. the findings and the facts of each rank
    own = check(facts)
    if world.comm is not None:
        own += launcher_check.check_threads(has_threads=mpi.serves_threads())
    software = dict(facts.software.versions)
    if facts.software.library is not None:
        software["MPI"] = f"{facts.software.library.vendor} {facts.software.library.version}"
    mine = job_check.RankFacts(
        rank=world.rank,
        host=world.hostname,
        node=world.node_rank,
        software=software,
        processors=dataclasses.replace(facts.processors, local_size=world.local_size),
        interfaces=facts.network.interfaces,
        interface_to_rank_0=interfaces.towards(world.master_addr),
        gpus=tuple(devices.visible_gpus()),
    )
    of_ranks = collectives.all_gather_object((own, mine))
    # 2. the links between hosts, or between the ranks of one host
    members = [world.nodes.index(node) for node in range(world.num_nodes)]
    names = {rank: world.hosts[rank] for rank in members}
    if world.num_nodes == 1:
        members = list(range(world.size))
        names = {rank: f"rank {rank}" for rank in members}
    measured = links.measure(world.rank, members)
    every = sorted((link for each in collectives.all_gather_object(measured) for link in each), key=lambda x: x.ranks)
    # 3. their judgement
    found = findings.merged([each for each, _ in of_ranks])
    found += job_check.check([each for _, each in of_ranks])
    found += job_check.check_links(every, links.outliers(every), names, on_one_host=world.num_nodes == 1)
    return found, every
