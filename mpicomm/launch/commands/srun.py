"""Launch commands for Slurm's srun, inside an allocation."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpicomm.launch import environment
from mpicomm.launch.allocation import Slurm
from mpicomm.launch.detect import Library
from mpicomm.launch.request import Machine, Request, Start


def mpi_type(library: Library, listed: str, environ: Mapping[str, str]) -> str | None:
    """Return the value of `--mpi=` with which this Slurm can start the library; None if it has no suitable plugin.

    Args:
        listed: The output of `srun --mpi=list`.
    """
    has = set(re.findall(r"[\w-]+", listed))
    if library.vendor == "Intel MPI" and not environ.get("I_MPI_PMI_LIBRARY"):
        return None  # Intel MPI uses PMI through Slurm's library, whose path this variable holds
    if "CRAY" in library.description.upper() and "cray_shasta" in has:
        return "cray_shasta"
    return library.srun_type if library.srun_type in has else None


def start(request: Request, machine: Machine, job: Slurm, kind: str, environ: Mapping[str, str]) -> Start:
    """Return the launch of ranks as tasks of a new step, by default in the whole allocation."""
    ranks = request.ranks or job.ranks
    cpus = job.cpus_per_task or _share(job, ranks)
    # With 1, srun kills the other ranks when the first one exits with a non-zero status, and reports 143 for them: the
    # status 85 of a Trainer would be lost. If a rank dies, mpicomm aborts the job.
    options = [f"--mpi={kind}", "--kill-on-bad-exit=0", f"--ntasks={ranks}"]
    if cpus:  # since Slurm 22.05 srun does not inherit it from the allocation
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
    """Return the CPUs per rank on the node with the fewest CPUs; 0 if there are fewer CPUs than ranks, or unknown."""
    return min(job.cpus, default=0) // -(-ranks // job.nodes)
