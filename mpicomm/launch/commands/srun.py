"""Starts by Slurm's srun, within an allocation."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpicomm.launch import environment
from mpicomm.launch.allocation import Slurm
from mpicomm.launch.detect import Library
from mpicomm.launch.request import Machine, Request, Start


def mpi_type(library: Library, listed: str, environ: Mapping[str, str]) -> str | None:
    """Return the value of `--mpi=` by which this Slurm can start the library; None if it has none.

    Args:
        listed: What `srun --mpi=list` says.
    """
    has = set(re.findall(r"[\w-]+", listed))
    if library.vendor == "Intel MPI" and not environ.get("I_MPI_PMI_LIBRARY"):
        return None  # it speaks PMI through the library of Slurm's that this names
    if "CRAY" in library.description.upper() and "cray_shasta" in has:
        return "cray_shasta"
    return library.srun_type if library.srun_type in has else None


def start(request: Request, machine: Machine, job: Slurm, kind: str, environ: Mapping[str, str]) -> Start:
    """Return the start of ranks as tasks of a new step, by default in the whole allocation."""
    ranks = request.ranks or job.ranks
    cpus = job.cpus_per_task or _share(job, ranks)
    # With 1 the first rank to leave with a status has the others killed, and srun reports 143 for them: a Trainer's 85
    # would be lost. When a rank dies, mpicomm ends the job.
    options = [f"--mpi={kind}", "--kill-on-bad-exit=0", f"--ntasks={ranks}"]
    if cpus:  # srun does not take it from the allocation since Slurm 22.05
        options.append(f"--cpus-per-task={cpus}")
    if sum(job.cpus) and ranks * (cpus or 1) > sum(job.cpus):
        options.append("--overcommit")
    if request.tag_output:
        options.append("--label")
    return Start(
        ("srun", *options, *request.of_rank(machine.python)),
        environment.of_ranks(environ, threads=cpus or 1),
    )


def _share(job: Slurm, ranks: int) -> int:
    """Return how many CPUs each rank can have on the node with the fewest; 0 if they are not enough, or unknown."""
    return min(job.cpus, default=0) // -(-ranks // job.nodes)
