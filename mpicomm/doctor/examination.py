"""The examination of this process, and of all ranks of a job together."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpicomm import mpi
from mpicomm.doctor import (
    fabric_check,
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

if TYPE_CHECKING:
    from mpicomm.doctor.links import Link
    from mpicomm.job.session import World

CHECKS = (
    software_check,
    launcher_check,
    memory_check,
    limit_check,
    network_check,
    processor_check,
    gpu_check,
)
"""Each has `collect(environ)`, which returns its facts about this process and its host, and `check(facts)`."""

Facts = Mapping[types.ModuleType, Any]
"""The facts of each of `CHECKS`."""


def collect(environ: Mapping[str, str], *, has_fabric: bool = False) -> Facts:
    """Return the facts about this process. Does not initialise MPI, and does not communicate.

    Args:
        has_fabric: Whether the facts include those of `fabric_check`.
    """
    # Before torch starts threads, and then what its import changes.
    facts: dict[types.ModuleType, Any] = {module: module.collect(environ) for module in (memory_check, processor_check)}
    others = [module for module in CHECKS if module not in facts] + [fabric_check] * has_fabric
    return facts | {module: module.collect(environ) for module in others}


def check(facts: Facts) -> list[Finding]:
    """Return the findings about this process."""
    modules = [module for module in (*CHECKS, fabric_check) if module in facts]
    return [finding for module in modules for finding in module.check(facts[module])]


def check_job(world: World, facts: Facts) -> tuple[list[Finding], list[Link]]:
    """Return the findings about all ranks, and the links between them; the same on every rank (collective)."""
    from mpicomm.collective_ops import collectives
    from mpicomm.devices import assignment
    from mpicomm.doctor import job_check, links
    from mpicomm.job import interfaces

    # 1. the findings and the facts of each rank
    own_findings = check(facts)
    if world.comm is not None:
        own_findings += launcher_check.check_threads(has_threads=mpi.has_thread_multiple())
    software = facts[software_check]
    versions = dict(software.versions)
    if software.library is not None:
        versions["MPI"] = f"{software.library.vendor} {software.library.version}"
    rank_facts = job_check.RankFacts(
        rank=world.rank,
        host=world.hostname,
        node=world.node_rank,
        software=versions,
        processors=dataclasses.replace(facts[processor_check], local_size=world.local_size),
        interfaces=facts[network_check].interfaces,
        interface_to_rank_0=interfaces.towards(world.master_addr),
        gpus=tuple(assignment.visible_devices()),
    )
    gathered = collectives.all_gather_object((own_findings, rank_facts))
    findings_by_rank = [rank_findings for rank_findings, _ in gathered]
    facts_by_rank = [rank_facts for _, rank_facts in gathered]
    # 2. the links between hosts, or between the ranks of one host
    members = [world.nodes.index(node) for node in range(world.num_nodes)]
    names = {rank: world.hosts[rank] for rank in members}
    if world.num_nodes == 1:
        members = list(range(world.size))
        names = {rank: f"rank {rank}" for rank in members}
    links_by_rank = collectives.all_gather_object(links.measure(world.rank, members))
    all_links = sorted(itertools.chain.from_iterable(links_by_rank), key=lambda link: link.ranks)
    # 3. their judgement
    return [
        *findings.merged(findings_by_rank),
        *job_check.check(facts_by_rank),
        *job_check.check_links(all_links, links.outliers(all_links), names, on_one_host=world.num_nodes == 1),
    ], all_links
