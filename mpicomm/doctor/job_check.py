"""Checks of the ranks of a job together: versions, processors and networks of its hosts, and links between them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from mpicomm import agreement
from mpicomm.doctor import network_check
from mpicomm.doctor.findings import Finding, ok, problem, warning
from mpicomm.doctor.links import Link, Outlier
from mpicomm.doctor.processor_check import OMP, ProcessorFacts
from mpicomm.recorder import rank_text

_MAY_DIFFER = ("Python", "numpy")
"""Software whose version may differ between hosts, although that is rarely intended."""


_OWN_CORES = (
    "Give each rank its own cores: `mpicomm run --bind auto`, `mpirun --bind-to core`, "
    "`srun --cpus-per-task=N --cpu-bind=cores`."
)


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """The facts about one rank that are compared with those of other ranks."""

    rank: int
    host: str
    node: int
    software: Mapping[str, str]
    """The version of each software."""

    processors: ProcessorFacts
    interfaces: tuple[tuple[str, str], ...]
    """The name and the address of every interface that is up."""

    interface_to_rank_0: str | None
    """The interface on the route to rank 0's address; None if it is not known."""

    gpus: tuple[str, ...]
    """The UUIDs of the GPUs that the rank sees."""


def check(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Return the findings about the ranks of a job."""
    by_node = agreement.ranks_by_value([facts.node for facts in ranks], [facts.rank for facts in ranks])
    nodes = [[ranks[rank] for rank in members] for members in by_node.values()]
    results = [*_check_versions(ranks), *_check_networks([members[0] for members in nodes])]
    for members in nodes:
        results += [*_check_binding(members), *_check_threads(members), *_check_gpus(members)]
    return results


def check_links(
    links: Sequence[Link], outliers: Sequence[Outlier], names: Mapping[int, str], *, on_one_host: bool
) -> list[Finding]:
    """Return the findings about the links between ranks.

    Args:
        names: The host of each measured rank, or its number in a job on one host.
        on_one_host: Whether the job is on one host.
    """
    if not links:
        return []
    if outliers:
        remedies = (
            ["Examine the binding of the ranks (`mpicomm info`), and other processes on this host."] * 2
            if on_one_host
            else [
                "Examine this host's network (link speed, cable, switch port) and other jobs on it, or exclude it.",
                "Examine the path between the two hosts (switches, routing), and other jobs on them.",
            ]
        )
        return [
            warning(
                "links",
                f"{outlier.quantity} between {' and '.join(names[rank] for rank in outlier.ranks)}"
                f"{' and any other' if len(outlier.ranks) == 1 else ''} is {outlier.value:.3g} {outlier.unit}, "
                f"the median is {outlier.median:.3g} {outlier.unit}",
                remedies[len(outlier.ranks) - 1],
            )
            for outlier in outliers
        ]
    latencies, bandwidths = [link.microseconds for link in links], [link.gigabytes for link in links]
    count = f"{len(links)} pair{'s' if len(links) > 1 else ''}"
    message = (
        f"{count}: latency {min(latencies):.1f} to {max(latencies):.1f} us, "
        f"bandwidth {min(bandwidths):.2f} to {max(bandwidths):.2f} GB/s"
    )
    return [ok("links", message)]


def _check_versions(ranks: Sequence[RankFacts]) -> list[Finding]:
    results = []
    for name in dict.fromkeys(name for facts in ranks for name in facts.software):
        versions = [facts.software.get(name, "absent") for facts in ranks]
        by_version = agreement.ranks_by_value(versions, range(len(ranks)))
        if len(by_version) == 1:
            continue
        shown = "; ".join(f"{version} on {_name_hosts(ranks, members)}" for version, members in by_version.items())
        report = warning if name in _MAY_DIFFER else problem
        remedy = "Install the same version on all hosts, or start all ranks in the same environment or container."
        results.append(report("versions of hosts", f"{name} differs: {shown}", remedy))
    return results or [ok("versions of hosts", "the same on all ranks")]


def _name_hosts(ranks: Sequence[RankFacts], members: Sequence[int]) -> str:
    """Return the hosts of ranks; the ranks themselves if another rank on the same host is not among them."""
    hosts = {ranks[rank].host for rank in members}
    is_exact = all(facts.rank in members for facts in ranks if facts.host in hosts)
    return ", ".join(sorted(hosts)) if is_exact else rank_text.name_ranks(members)


def _check_binding(members: Sequence[RankFacts]) -> list[Finding]:
    """Check that no ranks of a node share cores, unless all are free to use enough of them."""
    host, processors = members[0].host, {facts.rank: facts.processors for facts in members}
    by_cpus = agreement.ranks_by_value([cores.cpus for cores in processors.values()], list(processors))
    results = _check_overlaps(host, {ranks[0]: ranks for ranks in by_cpus.values()}, processors)
    for cpus, ranks in by_cpus.items():
        cores, of_job = processors[ranks[0]].cores, processors[ranks[0]].job_cores
        # The same part of the job's cores for all ranks, such as that of a task in which torchrun was started
        is_part = len(by_cpus) == 1 < len(ranks) and cores < of_job
        if len(ranks) <= cores and not is_part:
            continue
        host_cpus = members[0].processors.cpus_of_host
        if len(cpus) < host_cpus:
            message = f"{rank_text.name_ranks(ranks)} on {host} are bound to the same CPUs, {rank_text.ranges(cpus)} "
            message += f"of {host_cpus}" + (f", although the job may use {of_job} cores there" if is_part else "")
            message += ", and wait for each other" if len(ranks) > cores else ""
            remedy = _OWN_CORES
        else:
            message = f"{len(ranks)} ranks on {host} share {host_cpus} CPUs (oversubscription), and wait for each other"
            remedy = f"Start at most {host_cpus} ranks per host, except for tests."
        results.append(warning("binding", message, remedy))
    return results or [ok("binding", f"{host}: a CPU for each of {len(members)} ranks")]


def _check_overlaps(
    host: str, groups: Mapping[int, Sequence[int]], processors: Mapping[int, ProcessorFacts]
) -> list[Finding]:
    """Check that ranks that are bound to different CPUs have no core in common.

    Args:
        groups: The ranks that are bound to the same CPUs, by the first of them.
        processors: The processors of each rank.
    """
    firsts: dict[int, list[int]] = collections.defaultdict(list)
    for first in groups:
        for core in processors[first].core_numbers:
            firsts[core].append(first)
    shared = sorted(core for core, users in firsts.items() if len(users) > 1)
    if not shared:
        return []
    ranks = sorted(rank for first in {user for core in shared for user in firsts[core]} for rank in groups[first])
    message = (
        f"{rank_text.name_ranks(ranks)} on {host} are bound to different CPUs, but share core"
        f"{'s' if len(shared) > 1 else ''} {rank_text.ranges(shared)}, and wait for each other"
    )
    return [warning("binding", message, _OWN_CORES)]


def _check_threads(members: Sequence[RankFacts]) -> list[Finding]:
    """Check that the threads of all ranks of a node together fit its CPUs."""
    threads = [facts.processors.threads for facts in members]
    cpus = {cpu for facts in members for cpu in facts.processors.cpus}
    total = sum(number or 0 for number in threads)
    if None in threads or total <= len(cpus) or total <= len(members):  # with one each, it is the number of ranks
        return []
    share = max(1, len(cpus) // len(members))
    message = f"the {len(members)} ranks on {members[0].host} start {total} threads ({OMP}) on {len(cpus)} CPUs"
    return [warning("threads", message, f"Start with `mpicomm run`, or: export {OMP}={share}")]


def _check_gpus(members: Sequence[RankFacts]) -> list[Finding]:
    gpus = len({uuid for facts in members for uuid in facts.gpus})
    if not gpus or len(members) <= gpus:
        return []
    shared = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    message = (
        f"{len(members)} ranks on {members[0].host} share {shared}: a vendor's library, such as NCCL, needs one GPU "
        f"for each rank"
    )
    return [warning("GPUs of ranks", message, f"Start {gpus} ranks per host, one for each GPU.")]


def _check_networks(hosts: Sequence[RankFacts]) -> list[Finding]:
    """Check the interfaces of the hosts of a job, given one rank of each."""
    if len(hosts) == 1:
        return []
    # 1. addresses that belong to several hosts: bridges of containers
    owners: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for facts in hosts:
        for name, address in facts.interfaces:
            if not network_check.is_local(address):
                owners[name, address].append(facts.host)
    results = []
    used = {facts.interface_to_rank_0 for facts in hosts} - {None, "lo"}
    chosen = ",".join(sorted(map(str, used))) or "NAME"
    variables = f"  export GLOO_SOCKET_IFNAME={chosen} NCCL_SOCKET_IFNAME={chosen}"
    for (name, address), names in owners.items():
        if len(names) > 1:
            message = f"{', '.join(names)} have the same address, {address} on {name}: ranks connect to themselves"
            exclude = f"or exclude it from Open MPI: export OMPI_MCA_btl_tcp_if_exclude=lo,{name}"
            remedy = f"Select the network between the hosts:\n{variables}\n{exclude}"
            results.append(warning("networks", message, remedy))
    # 2. hosts whose first interface is another one than that on the route to rank 0
    for facts in hosts:
        first, route = network_check.first_interface(facts.interfaces), facts.interface_to_rank_0
        if route not in (None, "lo", first):
            message = (
                f"{facts.host} reaches rank 0 by {route}, but its first interface is {first}: programs that use the "
                f"first one hang"
            )
            results.append(warning("networks", message, f"Select the network between the hosts:\n{variables}"))
    return results or [ok("networks", f"the hosts reach rank 0 by {chosen}")]
