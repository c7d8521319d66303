"""Launch commands for the mpiexec of the MPI library: Open MPI's, or Hydra (MPICH and its derivatives)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mpicomm.errors import LaunchError
from mpicomm.launch import environment, hosts
from mpicomm.launch.allocation import PBS, Slurm
from mpicomm.launch.detect import Library
from mpicomm.launch.hosts import Host
from mpicomm.launch.request import Machine, Request, Start

_BINDS_ALREADY = (
    "OMPI_MCA_hwloc_base_binding_policy",
    "PRTE_MCA_hwloc_default_binding_policy",
    "HYDRA_BIND_TO",
    "I_MPI_PIN",
    "I_MPI_PIN_DOMAIN",
    "I_MPI_PIN_PROCESSOR_LIST",
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the ranks run."""

    ranks: int
    nodes: int
    per_node: int
    """Number of ranks on the node with the most ranks."""
    cores: int
    """Number of cores of a node."""
    cores_per_rank: int | None = None
    """Number of cores to which each rank is bound; None if other jobs may use the cores, or if there are too few."""
    hosts: tuple[Host, ...] = ()
    """The hosts that the user named; empty if the launcher determines the hosts."""
    file: str | None = None
    """The host file of PBS."""


def start(
    request: Request,
    machine: Machine,
    library: Library,
    mpiexec: str,
    environ: Mapping[str, str],
    *,
    job: Slurm | PBS | None = None,
    agent: str | None = None,
) -> Start:
    """Return the launch of ranks on this machine, on the hosts of the request, or in an allocation.

    Args:
        mpiexec: The launcher that belongs to the library.
        agent: A program that starts a command on another host of a PBS job; None to use ssh.

    Raises:
        LaunchError: If the hosts have different numbers of ranks and the library is Intel MPI.
    """
    plan = _plan(request, machine, job)
    is_bound_by_user = any(environ.get(name) for name in _BINDS_ALREADY)
    if is_bound_by_user:
        plan = dataclasses.replace(plan, cores_per_rank=None)
    child = environment.of_ranks(_without_threads_for_one(environ, plan), threads=plan.cores // plan.per_node)
    if library.vendor == "Open MPI":
        if machine.is_root:
            child.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        options = _open_mpi(plan, agent, child, tag_output=request.tag_output)
    else:
        if library.vendor == "Intel MPI" and plan.cores_per_rank is None and not is_bound_by_user:
            child["I_MPI_PIN"] = "0"  # Intel MPI pins each rank by default, even if ranks outnumber cores
        options = _hydra(plan, agent, library, tag_output=request.tag_output)
    return Start((mpiexec, *options, *request.of_rank(machine.python)), child)


def _plan(request: Request, machine: Machine, job: Slurm | PBS | None) -> Placement:
    if request.hosts:
        given = hosts.with_slots(request.hosts, request.ranks)
        return _on_hosts(given, request.ranks, machine, hosts_given=given)
    if isinstance(job, PBS):
        plan = _on_hosts(job.hosts, request.ranks, machine, file=job.file)
        is_ours = machine.is_whole and job.cpus >= machine.cores
        return dataclasses.replace(plan, cores_per_rank=_cores_per_rank(plan) if is_ours else None)
    if isinstance(job, Slurm):
        ranks = request.ranks or job.ranks
        cores = min(job.cpus, default=1)
        return Placement(ranks, job.nodes, per_node=-(-ranks // job.nodes), cores=cores)
    ranks = request.ranks or machine.capacity
    plan = Placement(ranks, nodes=1, per_node=ranks, cores=machine.cores)
    return dataclasses.replace(plan, cores_per_rank=_cores_per_rank(plan) if machine.is_whole else None)


def _on_hosts(
    given: Sequence[Host],
    wanted: int | None,
    machine: Machine,
    *,
    hosts_given: tuple[Host, ...] = (),
    file: str | None = None,
) -> Placement:
    """Return the placement on hosts, each of which is assumed to have as many cores as this machine."""
    ranks = wanted or hosts.slots(given)
    most = max(host.slots or 1 for host in given)
    if ranks > hosts.slots(given):
        most = max(most, -(-ranks // len(given)))
    return Placement(ranks, len(given), min(most, ranks), machine.cores, hosts=hosts_given, file=file)


def _cores_per_rank(plan: Placement) -> int | None:
    """Return the exclusive cores per rank; None if there are too few, or if the nodes have unequal numbers of ranks."""
    if plan.ranks != plan.nodes * plan.per_node:
        return None
    return plan.cores // plan.per_node or None


def _without_threads_for_one(environ: Mapping[str, str], plan: Placement) -> Mapping[str, str]:
    """Drop PBS's OMP_NUM_THREADS, meant for one rank per node, if the ranks of a node would exceed its cores."""
    threads = environ.get("OMP_NUM_THREADS", "")
    is_of_pbs = plan.file is not None and threads.isdigit() and threads == environ.get("NCPUS")
    if is_of_pbs and int(threads) * plan.per_node > plan.cores:
        return {name: value for name, value in environ.items() if name != "OMP_NUM_THREADS"}
    return environ


def _open_mpi(plan: Placement, agent: str | None, environ: Mapping[str, str], *, tag_output: bool) -> list[str]:
    """Return options that Open MPI 4 and 5 both accept."""
    options = ["-n", str(plan.ranks)]
    if plan.file:
        options += ["--hostfile", plan.file]
    if plan.hosts:
        options += ["--host", ",".join(map(str, plan.hosts))]
    if plan.cores_per_rank:
        options += ["--map-by", f"ppr:{plan.per_node}:node:PE={plan.cores_per_rank}", "--bind-to", "core"]
    else:
        options += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    if tag_output:
        options.append("--tag-output")
    if plan.nodes > 1 or plan.hosts:
        if agent:
            options += ["--mca", "plm_rsh_agent", agent]
        options += [word for name in environment.travelling(environ) for word in ("-x", name)]
    return options


def _hydra(plan: Placement, agent: str | None, library: Library, *, tag_output: bool) -> list[str]:
    options = ["-n", str(plan.ranks)]
    is_intels = library.vendor == "Intel MPI"
    if plan.file:
        options += ["-f", plan.file]
    if plan.hosts:
        options += _hosts_of_intel(plan) if is_intels else ["-hosts", ",".join(map(str, plan.hosts))]
    if plan.cores_per_rank and not is_intels:  # Intel MPI pins the ranks itself
        options += ["-bind-to", f"core:{plan.cores_per_rank}"]
    if tag_output:
        options.append("-prepend-rank")
    if agent and plan.nodes > 1:
        name = "bootstrap" if is_intels else "launcher"
        options += [f"-{name}", "ssh", f"-{name}-exec", agent]
    return options


def _hosts_of_intel(plan: Placement) -> list[str]:
    if len({host.slots for host in plan.hosts}) > 1:
        raise LaunchError(
            f"Intel MPI needs the same number of ranks on every host, got {', '.join(map(str, plan.hosts))}.\n"
            f"Give every host the same number of ranks."
        )
    return ["-hosts", ",".join(host.name for host in plan.hosts), "-ppn", str(plan.hosts[0].slots)]
