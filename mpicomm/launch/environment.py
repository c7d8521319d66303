"""Environment of launched ranks: removes leftovers, sets defaults, and selects the variables for other hosts."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm.errors import LaunchError
from mpicomm.launch import detect, known_launchers, visible_devices
from mpicomm.launch.known_launchers import MPI_LAUNCHERS, TORCHRUN

_CLEARED = (*MPI_LAUNCHERS, TORCHRUN)  # SLURM_* are those of the allocation too
_OF_USERS = "PMIX_MCA_"  # options of PMIx, although they match a pattern of variables of ranks
_ADDRESS = {"MASTER_ADDR", "MASTER_PORT"}

# Open MPI forwards only its own variables to other hosts. Variables that differ between hosts must not be forwarded.
_FORWARDED = (
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_*", "KMP_*", "MKL_*",
    "THP_MEM_ALLOC_ENABLE", "MASTER_ADDR", "MASTER_PORT", "MPICOMM_*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "TORCH_*",
    "TORCHINDUCTOR_*", "PYTORCH_*", "CUDA_*", "HIP_*", "HSA_*", "RCCL_*", "MIOPEN_*", "ZE_*", "CCL_*", "HF_*",
    "TOKENIZERS_PARALLELISM", "WANDB_*", "APPTAINER*", "SINGULARITY*",
    "PBS_JOBID", "PBS_ARRAY_*", "LSB_JOBID", "LSB_JOBINDEX", "SLURM_JOB_ID", "SLURM_ARRAY_*",
)  # fmt: skip
_LOCAL = (*visible_devices.NAMES, "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_")
_OF_MPI = ("OMPI_*", "PRTE_*", "PMIX_*")  # Open MPI forwards them itself

_SERVICE_STEPS = 0xFFFFFFF0  # IDs of Slurm's own steps, such as the shell of an salloc, start here


def refuse_ranks(environ: Mapping[str, str], ancestors: Sequence[str]) -> None:
    """Refuse to start a job inside each rank of another job.

    Variables of ranks alone are not sufficient: shells inherit them.

    Args:
        ancestors: The names of the ancestor processes of this one.

    Raises:
        LaunchError: If this process is a rank.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < _SERVICE_STEPS:
        raise LaunchError(
            f"this process is a task of srun (SLURM_STEP_ID={step}), which already starts the ranks.\n"
            f"Use one of the two: `srun python train.py`, or `mpicomm run train.py` in the batch script."
        )
    claims = detect.detect({**environ, "TORCHELASTIC_RUN_ID": ""}).claims
    if claims and any(known_launchers.starts_ranks(name, MPI_LAUNCHERS) for name in ancestors):
        raise LaunchError(
            f"this process is a rank that {claims[0].title} started ({claims[0].shown}): each rank would start a job.\n"
            f"Use one of the two: `mpirun python train.py`, or `mpicomm run train.py`."
        )


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of another job."""
    names = {name for launcher in _CLEARED for name in launcher.variables()} - _ADDRESS
    if not names.isdisjoint(environ):  # without rank variables the user set the address, and bootstrap() uses it
        names |= _ADDRESS
    patterns = [pattern for launcher in _CLEARED for pattern in launcher.other_variables]
    return {
        name: value
        for name, value in environ.items()
        if name not in names and (not _matches(name, patterns) or name.startswith(_OF_USERS))
    }


def for_ranks(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the environment for ranks with this number of threads and with huge pages; the user's values are kept."""
    defaults = {"OMP_NUM_THREADS": str(max(1, threads)), "THP_MEM_ALLOC_ENABLE": "1"}
    return {**defaults, **with_home(without_job(environ))}


def with_home(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with HOME, without which Open MPI's launcher fails: some containers do not set it."""
    with contextlib.suppress(RuntimeError):  # the user is unknown
        return {"HOME": str(Path.home()), **environ}
    return {"HOME": "/", **environ}


def forwarded(environ: Mapping[str, str], *, everything: bool = False) -> list[str]:
    """Return the names of the variables to forward to ranks on other hosts.

    Args:
        everything: Whether the hosts share one environment, so that all but the variables of a host are forwarded.
    """
    chosen = [name for name in environ if (everything and not _matches(name, _OF_MPI)) or _matches(name, _FORWARDED)]
    return sorted(name for name in chosen if name not in _LOCAL and name.isidentifier())


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
