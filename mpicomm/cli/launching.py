"""The launch of a request on this host: finds its cores, its allocation and the launcher, and runs the command."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm import host_info, launch, mpi, terminal
from mpicomm.cli.console import print_message
from mpicomm.cli.supervisor import End, Supervisor
from mpicomm.devices import counting, locality
from mpicomm.errors import LaunchError
from mpicomm.launch import (
    allocation,
    binding,
    commands,
    containers,
    environment,
    mpi_operator,
    node_range,
    queries,
    selection,
)
from mpicomm.launch.allocation import Allocation, FluxAllocation, Host, HostAllocation, SlurmAllocation
from mpicomm.launch.containers import Bind, Container
from mpicomm.launch.mpi_library import Library
from mpicomm.launch.request import Machine, Request, Start, outside_container
from mpicomm.settings import PREFIX

GRACE_SECONDS = 120.0
"""The default time for the ranks to save a checkpoint and exit."""

_BRIEF_SECONDS = 60.0  # for a short program to run on other hosts, which may be busy, or wait for the scheduler
_TERM_SECONDS = 10.0  # for the launcher to end its ranks
_NAME_SECONDS = 120.0  # a pod has a name in DNS when it has an address, which can be after the launcher starts
_NAME_PAUSE_SECONDS = 1.0
_TRIALS = 16  # hosts on which a program is tried at the same time: each trial is a launcher on this host
PROBE = ("sleep", "1")
"""Shows that a host can run programs. Open MPI 5.0's mpirun sometimes hangs if a process on another host exits at once:
6 of 40 runs of `true`."""


def build(request: Request, environ: Mapping[str, str]) -> Start:
    """Return the launch of a request: by the launcher of the scheduler in its jobs, otherwise by that of the MPI.

    Raises:
        LaunchError: If the ranks cannot be started, or if this process is a rank of another job.
        MPINotFoundError: If there is no MPI library.
    """
    variables = request.launcher_variables
    start = _build(request, {**environment.without(environ, request.excluded), **variables})
    hidden = frozenset(name for name in variables if not name.removeprefix(containers.CARRIER).startswith(PREFIX))
    of_container = request.container.runtime.environ if request.container else {}
    environ = {**of_container, **start.environ, **variables}
    return dataclasses.replace(start, environ=environ, hidden=hidden, has_store=request.sets_variables)


def _build(request: Request, environ: Mapping[str, str]) -> Start:
    # 1. torchrun's agent on this node
    machine = _machine(environ)
    if request.node is not None:
        _refuse_fault_tolerance(request, "torchrun")
        return commands.torchrun(request, request.node, _with_processors(machine, request, environ), environ)
    # 2. the MPI library and the allocation
    environment.refuse_ranks(environ, [name for _, name in terminal.processes_above()])
    library, job = mpi.library(), _allocation(request, machine, environ)
    if job is None:
        request, environ = _on_operator_hosts(request, library, environ)
    if not request.hosts and _is_host_of(job, environ):
        machine = _with_processors(machine, request, environ)
    # 3. the scheduler's launcher, or an mpiexec
    srun_type = _srun_type(library, job, environ)
    launcher = _launcher(request, library, job, environ)
    if launcher not in (selection.MPIEXEC, selection.PALS):
        _refuse_fault_tolerance(request, "flux run" if launcher == selection.FLUX else launcher)
    if isinstance(job, FluxAllocation) and launcher == selection.FLUX:
        return commands.flux_run(request, machine, job, library, _flux_plugins(), environ)
    if isinstance(job, SlurmAllocation) and launcher == selection.IBRUN:
        if not shutil.which("ibrun", path=environ.get("PATH")):
            raise LaunchError(
                "--launcher ibrun: ibrun was not found in PATH.\nLoad the site's modules, or remove --launcher."
            )
        return commands.ibrun(request, machine, job, environ)
    if isinstance(job, SlurmAllocation) and launcher == selection.SRUN and srun_type is not None:
        can_bind = request.bind is None or queries.slurm_binds()
        return commands.srun(request, machine, job, srun_type, environ, can_bind=can_bind)
    wanted = library.launchers_of_pals if launcher == selection.PALS else None
    executable, described = queries.mpiexec(library, environ.get("PATH", ""), wanted)
    agent = _agent(job, environ) if isinstance(job, HostAllocation) else None
    if launcher == selection.MPIEXEC:
        _refuse_hosts_from_container(request, job, agent, environ)
    return commands.mpiexec(request, machine, library, executable, environ, job=job, agent=agent, launcher=described)


def _allocation(request: Request, machine: Machine, environ: Mapping[str, str]) -> Allocation | None:
    job = queries.current_allocation(environ)
    return machine.with_default_ranks(job) if request.ranks is None else job


def _refuse_fault_tolerance(request: Request, launcher: str) -> None:
    if request.is_fault_tolerant:
        raise LaunchError(
            f"--fault-tolerant and --spares need Open MPI's mpirun, but {launcher} starts the ranks here.\n"
            f"Restart the ranks from a checkpoint instead: --max-restarts N, or torchrun --max-restarts N."
        )


def hosts(request: Request, environ: Mapping[str, str]) -> tuple[tuple[Host, ...], bool]:
    """Return the hosts that a request may use, with their number of ranks, and whether srun starts the ranks.

    Returns:
        No hosts if all ranks are on this host, or if the scheduler selects the hosts (`host_selecting_scheduler`).
    """
    job = _allocation(request, _machine(environ), environ)
    if job is None:
        request, _ = _on_operator_hosts(request, mpi.library(), environ)
    if request.hosts:
        return allocation.with_slots(request.hosts, request.ranks), False
    if isinstance(job, HostAllocation):
        return job.hosts, False
    if isinstance(job, SlurmAllocation) and not host_selecting_scheduler(request, environ):
        names = _nodes_of_slurm(environ)
        is_step = _launcher(request, mpi.library(), job, environ) == selection.SRUN
        return allocation.distributed(names, job.ranks), is_step
    return (), False


def host_selecting_scheduler(request: Request, environ: Mapping[str, str]) -> str | None:
    """Return the scheduler that alone can select the hosts of ranks in this job, for messages; None in other jobs."""
    job = queries.current_allocation(environ)
    if isinstance(job, FluxAllocation):
        return "a Flux instance"
    if not isinstance(job, SlurmAllocation):
        return None
    if job.groups > 1:
        return "a heterogeneous Slurm job"
    return "a Slurm job of ibrun" if _launcher(request, mpi.library(), job, environ) == selection.IBRUN else None


def on_every_host(request: Request, program: tuple[str, ...], environ: Mapping[str, str]) -> Request:
    """Return a request that starts a program once on every host that ranks of a request may use.

    If the scheduler selects the hosts, it starts the program as often as the ranks.
    """
    allowed, is_step = hosts(request, environ)
    names = request.slurm_nodes or [host.name for host in allowed]
    single = _unlogged(request, program)
    if not names:
        return single if host_selecting_scheduler(request, environ) else dataclasses.replace(single, ranks=1)
    return node_range.place(single, [Host(name) for name in names], is_step=is_step, per_node=1)


def try_on_hosts(
    request: Request,
    hosts: Sequence[Host],
    program: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    is_step: bool,
    in_own_session: bool = False,
) -> dict[Host, str]:
    """Run a short program on each host alone, by the same means as the ranks of a request.

    Args:
        in_own_session: See `run_briefly`.

    Returns:
        Why it has failed, by host; empty if it has not.
    """
    trial = _unlogged(request, program)
    # The user's arguments may fit the ranks only, as masks of CPUs do; at some sites nothing starts without them.
    plain = dataclasses.replace(trial, launcher_arguments=())

    def try_once(host: Host, single: Request) -> str:
        try:
            start = build(node_range.place(single, [Host(host.name, 1)], is_step=is_step), environ)
            status, _ = run_briefly(start, in_own_session=in_own_session)
        except (LaunchError, OSError) as error:
            return str(error)
        if status is None:
            return f"{start.command[0]} timed out after {_BRIEF_SECONDS:.0f} s"
        return f"{start.command[0]} exited with status {status}" if status else ""

    def attempt(host: Host) -> str:
        reason = try_once(host, plain)
        return reason and (reason if plain == trial else try_once(host, trial))

    with concurrent.futures.ThreadPoolExecutor(_TRIALS) as pool:
        return dict(zip(hosts, pool.map(attempt, hosts), strict=True))


def _unlogged(request: Request, program: tuple[str, ...]) -> Request:
    """Return the request with a program of this command in place of the user's, which needs no placement."""
    arguments = commands.without_placement(request.launcher_arguments)
    variables = request.variables if request.container is None else outside_container(request.variables)
    own = dataclasses.replace(request, program=program, launcher_arguments=arguments, variables=variables)
    return dataclasses.replace(own, log_dir=None, tag_output=False, bind=None, container=None, sets_variables=False)


def run_briefly(start: Start, seconds: float | None = None, *, in_own_session: bool = False) -> tuple[int | None, str]:
    """Run a launch of a short program without showing its output.

    Args:
        seconds: The time limit; 60 seconds by default.
        in_own_session: Whether signals to the group of this process, such as Ctrl-C, do not reach it.

    Returns:
        The exit status, and the output of all ranks and of the launcher. The status is None if the launcher has not
        ended at the time limit, when it gets SIGTERM; it is killed 10 seconds later.

    Raises:
        OSError: If the launcher cannot be executed.
    """
    with subprocess.Popen(
        start.command,
        env=dict(start.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=in_own_session,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds or _BRIEF_SECONDS)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:  # also after Ctrl-C, which a launcher may ignore; all of this has no effect on one that has ended
            try:
                process.terminate()  # the launcher ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TERM_SECONDS)
            finally:
                process.kill()
    return process.returncode, output


def execute(start: Start, command: str, grace: float = GRACE_SECONDS, received: list[int] | None = None) -> End:
    """Print the launch command, and run it as a child process until it ends.

    Args:
        command: The subcommand of `mpicomm`, for messages.
        grace: Seconds for the ranks to save a checkpoint and exit when they are asked to stop.
        received: Signals that have arrived before; see `Supervisor`.

    Raises:
        OSError: If the launcher cannot be executed.
    """
    print_message(command, start.shown(os.environ))
    return Supervisor(command, start, grace, received).run()


def container(
    image: str,
    runtime: str | None,
    binds: Sequence[str],
    environ: Mapping[str, str],
    *,
    log_dir: str | None,
    may_use_srun: bool,
) -> Container:
    """Return the container of each rank, with a runtime of this host.

    Args:
        runtime: The runtime that the user requests; None for one that is made for the image.
        binds: Paths of this host in the form of `--container-bind`.
        log_dir: The real path of the directory to which the ranks write their logs.
        may_use_srun: Whether srun starts the ranks if this is a Slurm job.

    Raises:
        LaunchError: If the image or a path does not exist, or if no runtime can start it.
    """
    if not image:
        raise LaunchError("--container: expected an image, got an empty text.\nSet the variable, or pass IMAGE.")
    if containers.is_path(image, runtime, exists=_is_image(Path(image))):
        if not Path(image).exists():
            raise containers.missing_image(image, str(Path.cwd()))
        image = str(Path(image).resolve())
    installed = queries.container_commands(environ.get("PATH", ""))
    by_srun = may_use_srun and bool(environ.get("SLURM_JOB_ID"))
    selected = containers.select(runtime, image, installed, by_srun=by_srun)
    containers.refuse_separation(selected, environ)
    parsed = selected.parse_binds(binds)
    for bind in parsed:
        if not Path(bind.source).exists():
            raise LaunchError(f"--container-bind {bind.joined()}: {bind.source} does not exist.\nCorrect the path.")
    directory = Bind.of_directory(str(Path.cwd()), "working directory").source
    if log_dir is not None and not Path(log_dir).is_relative_to(directory):
        if not selected.has_binds:
            raise LaunchError(
                f"--log-dir {log_dir} is not below the working directory, and {selected.name} takes mounts from "
                f"{image}: the logs could be lost.\nPass a directory below the working directory."
            )
        parsed.append(Bind.of_directory(log_dir, "directory of --log-dir"))
    return Container(
        selected,
        installed[selected.name],
        image,
        directory,
        tuple(parsed),
        gpu_vendor=counting.count(environ).vendor,
        has_other_tmp=containers.has_other_tmp(environ),
    )


def _is_image(path: Path) -> bool:
    """Return whether a path is that of an image: a file, or a sandbox of Apptainer."""
    return path.is_file() or (path / ".singularity.d").exists()


# -- this host ---------------------------------------------------------------------------------------------------------


def _machine(environ: Mapping[str, str]) -> Machine:
    """Return the cores and GPUs that this process may use."""
    cpus = os.sched_getaffinity(0)
    return Machine(
        cores=min(host_info.cores(cpus), host_info.cpu_quota() or len(cpus)),
        is_whole=len(cpus) == os.cpu_count(),
        is_root=os.geteuid() == 0,
        python=sys.executable,
        gpus=counting.count(environ).count,
    )


def _launcher(request: Request, library: Library, job: Allocation | None, environ: Mapping[str, str]) -> str:
    return selection.select(
        request, library, job, srun_type=_srun_type(library, job, environ), is_ibrun_site=_has_ibrun(library, environ)
    )


def _srun_type(library: Library, job: Allocation | None, environ: Mapping[str, str]) -> str | None:
    """Return the type of PMI with which srun starts ranks; None outside of Slurm's jobs, or if it cannot start them."""
    return library.srun_type_in(queries.srun_list(), environ) if isinstance(job, SlurmAllocation) else None


def _has_ibrun(library: Library, environ: Mapping[str, str]) -> bool:
    """Return whether this is a site with ibrun, and mpi4py loads an MPI of the site: ibrun does not know other ones."""
    is_of_site = not Path(library.path or sys.prefix).is_relative_to(sys.prefix)
    return is_of_site and shutil.which("ibrun", path=environ.get("PATH")) is not None


def _refuse_hosts_from_container(
    request: Request, job: Allocation | None, agent: str | None, environ: Mapping[str, str]
) -> None:
    """Refuse to start ranks on other hosts from a container without the command that reaches them."""
    container = containers.running_in(environ)
    nodes, command = len(request.hosts), "ssh"
    if not request.hosts and isinstance(job, HostAllocation):
        nodes = len(job.hosts)
    elif not request.hosts and isinstance(job, SlurmAllocation):
        nodes, command = job.nodes, "srun"  # mpiexec starts its daemons with it
    if container and nodes > 1 and agent is None and not shutil.which(command, path=environ.get("PATH")):
        raise LaunchError(
            f"mpicomm run is in a container ({container}) without {command}, and cannot start ranks on {nodes} hosts.\n"
            f"Start it outside the container, and the ranks inside:\n"
            f"  mpicomm run --container IMAGE train.py"
        )


def _with_processors(machine: Machine, request: Request, environ: Mapping[str, str]) -> Machine:
    """Return the machine with its cores and GPUs one by one, which only a binding needs."""
    if request.bind in (None, binding.NONE):
        return machine
    return dataclasses.replace(machine, processors=locality.processors(environ, os.sched_getaffinity(0)))


def _is_host_of(job: Allocation | None, environ: Mapping[str, str]) -> bool:
    """Return whether the ranks run on this host; the shell of an salloc may be on another one."""
    if isinstance(job, SlurmAllocation):
        return "SLURMD_NODENAME" in environ  # of a batch script, see sbatch(1)
    return not isinstance(job, FluxAllocation)


def _flux_plugins() -> list[str]:
    """Return the names of the plugins of Flux's job shell."""
    places = queries.output_of(["flux", "config", "builtin", "shell_pluginpath"]).strip().split(os.pathsep)
    return [path.stem for place in places if place for path in Path(place).glob("**/*.so")]


def _nodes_of_slurm(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the allocation; none if Slurm cannot list them."""
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    return queries.output_of(["scontrol", "show", "hostnames", listed]).split() if listed else []


def _agent(job: HostAllocation, environ: Mapping[str, str]) -> str | None:
    """Return the program that starts a command on another host of the job in place of ssh; None to use ssh."""
    if job.file is None:  # LSF's blaunch accepts the arguments of ssh
        return shutil.which("blaunch", path=environ.get("PATH"))
    directories = [environ.get("PATH", ""), f"{environ.get('PBS_EXEC', '/opt/pbs')}/bin"]
    if not shutil.which("pbs_tmrsh", path=os.pathsep.join(directories)):
        return None
    return str(Path(launch.__file__).with_name("pbs_agent.sh"))


# -- a job on Kubernetes -----------------------------------------------------------------------------------------------


def _on_operator_hosts(
    request: Request, library: Library, environ: Mapping[str, str]
) -> tuple[Request, Mapping[str, str]]:
    """Return the request with the hosts of a Kubernetes operator's host file, and the environment of its launcher.

    Without a host file both are returned unchanged.

    Raises:
        LaunchError: If the file cannot be read, a host would have no rank, or a name does not resolve in time.
    """
    host_file = mpi_operator.host_file(environ)
    if host_file is None:
        return request, environ
    variable, path = host_file
    if not request.hosts:
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise LaunchError(
                f"cannot read the host file of {variable}: {error}\nPass --hosts, or unset {variable}"
            ) from error
        request = dataclasses.replace(request, hosts=mpi_operator.parse(text, path, request.ranks))
        _wait_for_names([host.name for host in request.hosts])
    return dataclasses.replace(request, forwards_all=True), mpi_operator.for_launcher(environ, library)


def _wait_for_names(names: Sequence[str]) -> None:
    deadline, shown = time.monotonic() + _NAME_SECONDS, False
    while missing := [name for name in names if not _resolves(name)]:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{len(missing)} of {len(names)} hosts had no address after {_NAME_SECONDS:.0f} s: "
                f"{', '.join(missing)}\n"
                f"Check that their pods run: kubectl get pods -o wide"
            )
        if not shown:
            print_message("run", f"waiting for the addresses of {len(missing)} hosts: {', '.join(missing)}")
            shown = True
        time.sleep(_NAME_PAUSE_SECONDS)


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
