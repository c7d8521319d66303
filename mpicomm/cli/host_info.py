"""The host of a launch: its cores and GPUs, the scheduler's allocation, and the launcher of the MPI library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mpicomm import launch
from mpicomm.errors import LaunchError
from mpicomm.launch import allocation, mpi_launcher
from mpicomm.launch.allocation import PBS, Slurm
from mpicomm.launch.detect import Library
from mpicomm.launch.request import Machine

_ANSWER_SECONDS = 20.0  # timeout of each command that is queried


def machine(environ: Mapping[str, str]) -> Machine:
    """Return the cores and GPUs that this process may use."""
    cpus = os.sched_getaffinity(0)
    return Machine(
        cores=min(_cores(cpus), _quota() or len(cpus)),
        is_whole=len(cpus) == os.cpu_count(),
        is_root=os.geteuid() == 0,
        python=sys.executable,
        gpus=_gpus(environ),
    )


def current_allocation(environ: Mapping[str, str]) -> Slurm | PBS | None:
    """Return the Slurm or PBS allocation of this job; None outside one.

    Raises:
        LaunchError: If PBS's list of hosts cannot be read.
    """
    if slurm := allocation.of_slurm(environ):
        return slurm
    if not allocation.is_of_pbs(environ):
        return None
    try:
        text = Path(environ["PBS_NODEFILE"]).read_text()
    except OSError as error:
        raise LaunchError(
            f"cannot read the list of hosts of PBS job {environ['PBS_JOBID']}: {error}\n"
            f"If the variables are left over from another job: unset PBS_JOBID PBS_ENVIRONMENT PBS_NODEFILE"
        ) from error
    return allocation.of_pbs(environ, text)


def mpi_types() -> str:
    """Return the output of `srun --mpi=list`; empty without srun."""
    return _answer(["srun", "--mpi=list"]) if shutil.which("srun") else ""


def mpiexec(library: Library, environ: Mapping[str, str]) -> str:
    """Return the path of the launcher that belongs to the library.

    Raises:
        LaunchError: If no such launcher is found.
    """
    others = []
    for path in mpi_launcher.candidates(library, environ.get("PATH", "").split(os.pathsep)):
        if not os.access(path, os.X_OK) or Path(path).is_dir():
            continue
        if mpi_launcher.fits(library, _answer([path, "--version"])):
            return path
        others.append(path)
    raise LaunchError(mpi_launcher.not_found(library, others))


def pbs_agent(environ: Mapping[str, str]) -> str | None:
    """Return the program that starts a command on another host of a PBS job; None if PBS has no pbs_tmrsh."""
    places = [environ.get("PATH", ""), f"{environ.get('PBS_EXEC', '/opt/pbs')}/bin"]
    if not shutil.which("pbs_tmrsh", path=os.pathsep.join(places)):
        return None
    return str(Path(launch.__file__).with_name("pbs_agent.sh"))


def files_in_memory() -> str:
    """Return this process's memory map."""
    return Path("/proc/self/maps").read_text()


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


def _answer(command: list[str]) -> str:
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
