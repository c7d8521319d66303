"""Checks of the ranks of a job together: versions, processors and networks of its hosts, and links between them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from mpicomm import agreement
from mpicomm.doctor import network_check
from mpicomm.doctor.findings import Finding, ok, problem, warning
from mpicomm.doctor.links import Link, Outlier
from mpicomm.doctor.processor_check import OMP, ProcessorFacts
from mpicomm.watchdog import hang_report

_MAY_DIFFER = ("Python", "numpy")
"""Software whose version may differ between hosts, although that is rarely intended."""


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
    nodes = [[ranks[rank] for rank in members] for members in _members(ranks).values()]
    found = [*_check_versions(ranks), *_check_networks([members[0] for members in nodes])]
    for members in nodes:
        found += [*_check_binding(members), *_check_threads(members), *_check_gpus(members)]
    return found


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
                f"{each.quantity} {_between([names[rank] for rank in each.ranks])} is {each.shown}, "
                f"the median is {each.shown_median}",
                remedies[len(each.ranks) - 1],
            )
            for each in outliers
        ]
    latencies, bandwidths = ([getattr(each, name) for each in links] for name in ("microseconds", "gigabytes"))
    count = f"{len(links)} pair{'s' if len(links) > 1 else ''}"
    message = (
        f"{count}: latency {min(latencies):.1f} to {max(latencies):.1f} us, "
        f"bandwidth {min(bandwidths):.2f} to {max(bandwidths):.2f} GB/s"
    )
    return [ok("links", message)]


def _members(ranks: Iterable[RankFacts]) -> dict[int, list[int]]:
    found = list(ranks)
    return agreement.ranks_by_value([each.node for each in found], [each.rank for each in found])


def _between(names: Sequence[str]) -> str:
    return f"between {names[0]} and {names[1]}" if len(names) == 2 else f"between {names[0]} and any other"


def _check_versions(ranks: Sequence[RankFacts]) -> list[Finding]:
    found = []
    for name in dict.fromkeys(name for each in ranks for name in each.software):
        having = agreement.ranks_by_value([each.software.get(name, "absent") for each in ranks], range(len(ranks)))
        if len(having) == 1:
            continue
        shown = "; ".join(f"{version} on {_on(ranks, members)}" for version, members in having.items())
        finding_of = warning if name in _MAY_DIFFER else problem
        remedy = "Install the same version on all hosts, or start all ranks in the same environment or container."
        found.append(finding_of("versions of hosts", f"{name} differs: {shown}", remedy))
    return found or [ok("versions of hosts", "the same on all ranks")]


def _on(ranks: Sequence[RankFacts], members: Sequence[int]) -> str:
    """Return the hosts of ranks; the ranks themselves if another rank on the same host is not among them."""
    hosts = {ranks[rank].host for rank in members}
    is_exact = all(each.rank in members for each in ranks if each.host in hosts)
    return ", ".join(sorted(hosts)) if is_exact else hang_report.called(members)


def _check_binding(members: Sequence[RankFacts]) -> list[Finding]:
    """Check that the ranks of a node do not share fewer CPUs than they are."""
    host, by_cpus = members[0].host, agreement.ranks_by_value(
        [each.processors.cpus for each in members], [each.rank for each in members]
    )  # fmt: skip
    found = []
    for cpus, ranks in by_cpus.items():
        if len(ranks) <= len(cpus):
            continue
        of_host = members[0].processors.cpus_of_host
        if len(cpus) < of_host:
            message = (
                f"{hang_report.called(ranks)} on {host} are bound to the same CPUs, {hang_report.ranges(cpus)} "
                f"of {of_host}, and wait for each other"
            )
            remedy = "Give each rank its own cores: `mpirun --bind-to core`, `srun --cpus-per-task=N --cpu-bind=cores`."
        else:
            message = f"{len(ranks)} ranks on {host} share {of_host} CPUs (oversubscription), and wait for each other"
            remedy = f"Start at most {of_host} ranks per host, except for tests."
        found.append(warning("binding", message, remedy))
    return found or [ok("binding", f"{host}: a CPU for each of {len(members)} ranks")]


def _check_threads(members: Sequence[RankFacts]) -> list[Finding]:
    """Check that the threads of all ranks of a node together fit its CPUs."""
    threads = [each.processors.threads for each in members]
    cpus = {cpu for each in members for cpu in each.processors.cpus}
    total = sum(each or 0 for each in threads)
    if None in threads or total <= len(cpus) or total <= len(members):  # with one each, it is the number of ranks
        return []
    share = max(1, len(cpus) // len(members))
    message = f"the {len(members)} ranks on {members[0].host} start {total} threads ({OMP}) on {len(cpus)} CPUs"
    return [warning("threads", message, f"Start with `mpicomm run`, or: export {OMP}={share}")]


def _check_gpus(members: Sequence[RankFacts]) -> list[Finding]:
    gpus = len({uuid for each in members for uuid in each.gpus})
    if not gpus or len(members) <= gpus:
        return []
    shared = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    message = f"{len(members)} ranks on {members[0].host} share {shared}: NCCL needs one GPU for each rank"
    return [warning("GPUs of ranks", message, f"Start {gpus} ranks per host, one for each GPU.")]


def _check_networks(hosts: Sequence[RankFacts]) -> list[Finding]:
    """Check the interfaces of the hosts of a job, given one rank of each."""
    if len(hosts) == 1:
        return []
    # 1. addresses that belong to several hosts: bridges of containers
    owners: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for each in hosts:
        for name, address in each.interfaces:
            if not network_check.is_local(address):
                owners[name, address].append(each.host)
    found = []
    used = {each.interface_to_rank_0 for each in hosts} - {None, "lo"}
    chosen = ",".join(sorted(map(str, used))) or "NAME"
    variables = f"  export GLOO_SOCKET_IFNAME={chosen} NCCL_SOCKET_IFNAME={chosen}"
    for (name, address), having in owners.items():
        if len(having) > 1:
            message = f"{', '.join(having)} have the same address, {address} on {name}: ranks connect to themselves"
            exclude = f"or exclude it from Open MPI: export OMPI_MCA_btl_tcp_if_exclude=lo,{name}"
            found.append(warning("networks", message, f"Select the network between the hosts:\n{variables}\n{exclude}"))
    # 2. hosts whose first interface is another one than that on the route to rank 0
    for each in hosts:
        first, route = network_check.first_interface(each.interfaces), each.interface_to_rank_0
        if route not in (None, "lo", first):
            message = (
                f"{each.host} reaches rank 0 by {route}, but its first interface is {first}: programs that use the "
                f"first one hang"
            )
            found.append(warning("networks", message, f"Select the network between the hosts:\n{variables}"))
    return found or [ok("networks", f"the hosts reach rank 0 by {chosen}")]
