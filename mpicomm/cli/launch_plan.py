"""The launch of a request on this host: finds its cores, its allocation and the launcher, and execs the command."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from mpicomm import launch, mpi, terminal
from mpicomm.cli.console import print_message
from mpicomm.errors import LaunchError
from mpicomm.launch import commands, environment
from mpicomm.launch.allocation import PBS_HOSTS, Allocation, PBSAllocation, SlurmAllocation
from mpicomm.launch.mpi_library import Library
from mpicomm.launch.request import Machine, Node, Request, Start

_ANSWER_SECONDS = 20.0  # timeout of each command that is queried


def build(request: Request, environ: Mapping[str, str]) -> Start:
    """Return the launch of a request: with the scheduler's launcher if there is one, else with the MPI's own.

    Raises:
        LaunchError: If the ranks cannot be started, or if this process is a rank of another job.
        MPINotFoundError: If there is no MPI library.
    """
    # 1. torchrun's agent on this node
    machine = _machine(environ)
    if request.node is not None:
        return commands.torchrun(request, request.node, machine, environ)
    # 2. the MPI library and the allocation
    environment.refuse_ranks(environ, [name for _, name in terminal.processes_above()])
    library, job = mpi.library(), _allocation(environ)
    if machine.gpus or (job is not None and job.has_gpus):
        environ = {**library.gpu_environ(Path("/proc/self/maps").read_text()), **environ}
    # 3. srun, or the library's mpiexec
    if isinstance(job, SlurmAllocation) and not request.hosts:
        listed = _output_of(["srun", "--mpi=list"]) if shutil.which("srun") else ""
        if (mpi_type := library.srun_type_in(listed, environ)) is not None:
            return commands.srun(request, machine, job, mpi_type, environ)
    agent = _pbs_agent(environ) if isinstance(job, PBSAllocation) else None
    return commands.mpiexec(request, machine, library, _mpiexec(library, environ), environ, job=job, agent=agent)


def build_torchrun(request: Request, environ: Mapping[str, str]) -> Start:
    """Return the equivalent launch with torchrun: on this host, or on the nodes of a Slurm allocation."""
    machine, job, port = _machine(environ), _allocation(environ), _free_port()
    if isinstance(job, SlurmAllocation):
        return commands.torchrun_by_srun(request, job, port, machine, environ)
    return commands.torchrun(request, Node(0, 1, "127.0.0.1", port), machine, environ)


def execute(start: Start, command: str) -> NoReturn:
    """Print the launch command, and replace this process by it.

    Args:
        command: The subcommand of `mpicomm`, for the line that is printed.

    Raises:
        OSError: If the launcher cannot be executed.
    """
    print_message(command, start.shown(os.environ))
    os.execvpe(start.command[0], start.command, dict(start.environ))


# -- this host ---------------------------------------------------------------------------------------------------------


def _machine(environ: Mapping[str, str]) -> Machine:
    """Return the cores and GPUs that this process may use."""
    cpus = os.sched_getaffinity(0)
    return Machine(
        cores=min(_cores(cpus), _quota() or len(cpus)),
        is_whole=len(cpus) == os.cpu_count(),
        is_root=os.geteuid() == 0,
        python=sys.executable,
        gpus=_gpus(environ),
    )


def _allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the Slurm or PBS allocation of this job; None outside one.

    Raises:
        LaunchError: If PBS's list of hosts cannot be read.
    """
    if slurm := SlurmAllocation.from_environ(environ):
        return slurm
    if not PBSAllocation.is_set(environ):
        return None
    try:
        text = Path(environ[PBS_HOSTS]).read_text()
    except OSError as error:
        raise LaunchError(
            f"cannot read the list of hosts of PBS job {environ['PBS_JOBID']}: {error}\n"
            f"If the variables are left over from another job: unset PBS_JOBID PBS_ENVIRONMENT PBS_NODEFILE"
        ) from error
    return PBSAllocation.from_environ(environ, text)


def _mpiexec(library: Library, environ: Mapping[str, str]) -> str:
    """Return the path of the launcher that belongs to the library.

    Raises:
        LaunchError: If no such launcher is found.
    """
    others = []
    for path in library.mpiexec_candidates(environ.get("PATH", "").split(os.pathsep)):
        if not os.access(path, os.X_OK) or Path(path).is_dir():
            continue
        if library.owns_mpiexec(_output_of([path, "--version"])):
            return path
        others.append(path)
    raise LaunchError(library.mpiexec_not_found(others))


def _pbs_agent(environ: Mapping[str, str]) -> str | None:
    """Return the program that starts a command on another host of a PBS job; None if PBS has no pbs_tmrsh."""
    directories = [environ.get("PATH", ""), f"{environ.get('PBS_EXEC', '/opt/pbs')}/bin"]
    if not shutil.which("pbs_tmrsh", path=os.pathsep.join(directories)):
        return None
    return str(Path(launch.__file__).with_name("pbs_agent.sh"))


def _cores(cpus: set[int]) -> int:
    """Return the number of cores of these CPUs: the hardware threads of one core list the same siblings."""
    return len({_read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def _quota() -> int | None:
    """Return the CPU limit of the container, in CPUs; None without a limit."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    return max(1, -(-int(quota) // int(period))) if quota.isdigit() and period.isdigit() else None


def _gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs without CUDA, which takes seconds; the GPUs of a container are in its /dev."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1", "NoDevFiles")])
    nodes = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit()]
    return len(nodes) or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _output_of(command: list[str]) -> str:
    """Return the output of a command, both streams; empty if the command cannot be run or times out."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
    return port
