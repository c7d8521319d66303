"""Environment of launched ranks: removes leftovers, sets defaults, and selects the variables for other hosts."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpicomm.errors import LaunchError
from mpicomm.launch import detect, known_launchers, visible_devices
from mpicomm.launch.known_launchers import MPI_LAUNCHERS, TORCHRUN
from mpicomm.launch.request import without_value

_CLEARED = (*MPI_LAUNCHERS, TORCHRUN)  # SLURM_* are those of the allocation too
_OF_USERS = "PMIX_MCA_"  # options of PMIx, although they match a pattern of variables of ranks
_ADDRESS = {"MASTER_ADDR", "MASTER_PORT"}

# Open MPI forwards only its own variables to other hosts. Those of proxies are left out: they may contain a password,
# and the proxy of a login node often cannot be reached from a compute node.
FORWARDED: Mapping[str, tuple[str, ...]] = {
    "Python and its libraries": (
        "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX",
    ),
    "threads and memory": ("OMP_*", "KMP_*", "MKL_*", "THP_MEM_ALLOC_ENABLE"),
    "mpicomm and its rendezvous": ("MPICOMM_*", "MASTER_ADDR", "MASTER_PORT"),
    "MPI libraries and networks": ("MPICH_*", "MPIR_*", "I_MPI_*", "UCX_*", "FI_*"),
    "collective libraries": ("NCCL_*", "OFI_NCCL_*", "RCCL_*", "CCL_*", "GLOO_*"),
    "accelerators": ("CUDA_*", "CUBLAS_WORKSPACE_CONFIG", "HIP_*", "HSA_*", "ROCR_*", "MIOPEN_*", "ZE_*"),
    "PyTorch": ("TORCH_*", "TORCHINDUCTOR_*", "PYTORCH_*", "TRITON_*"),
    "models and metrics": ("HF_*", "TOKENIZERS_PARALLELISM", "WANDB_*", "MLFLOW_*"),
    "containers": ("APPTAINER*", "SINGULARITY*"),
    "the job": ("PBS_JOBID", "PBS_ARRAY_*", "LSB_JOBID", "LSB_JOBINDEX", "SLURM_JOB_ID", "SLURM_ARRAY_*"),
}  # fmt: skip
"""Names and patterns of the variables that ranks on other hosts get, by subject."""

_FORWARDED = tuple(pattern for patterns in FORWARDED.values() for pattern in patterns)
# Variables that differ between hosts must not be forwarded.
_LOCAL = (*visible_devices.NAMES, "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_")
_OF_MPI = ("OMPI_*", "PRTE_*", "PMIX_*")  # Open MPI forwards them itself
_OF_LAUNCHERS = ("PATH", "SLURM_*", "PBS_*", "LSB_*", "FLUX_*")  # without them a launcher does not know its job

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


def without(environ: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the environment without the variables that `--no-env` excludes.

    Args:
        patterns: Names, in which `*` and `?` stand for other characters.

    Raises:
        LaunchError: If a pattern is not valid, or the launcher needs one of the variables.
    """
    for pattern in patterns:
        if not re.fullmatch(r"[A-Za-z_*?][\w*?]*", pattern):
            shown = without_value(pattern)
            raise LaunchError(f"--no-env {shown}: expected the name of a variable, or a pattern such as 'NCCL_*'.")
        needed = [name for name in environ if _matches(name, [pattern]) and _matches(name, _OF_LAUNCHERS)]
        if needed:
            shown = f"{', '.join(sorted(needed)[:3])}{', ...' if len(needed) > 3 else ''}"
            raise LaunchError(
                f"--no-env {pattern} would remove {shown}, which the launcher of the ranks needs.\n"
                f"Exclude only variables of your program and its libraries, for example --no-env 'NCCL_*'."
            )
    return {name: value for name, value in environ.items() if not _matches(name, patterns)}


def refuse_contradiction(names: Sequence[str], patterns: Sequence[str]) -> None:
    """Refuse variables of `--env` that `--no-env` excludes.

    Raises:
        LaunchError: If there is one.
    """
    for name in names:
        if _matches(name, patterns):
            raise LaunchError(
                f"--env {name} and --no-env contradict each other for this variable.\nRemove one of the two."
            )


def for_ranks(environ: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """Return the environment for ranks with huge pages; the user's values are kept.

    Args:
        threads: The number of threads of a rank; None if the rank sets it itself.
    """
    defaults = {} if threads is None else {"OMP_NUM_THREADS": str(max(1, threads))}
    return {**defaults, "THP_MEM_ALLOC_ENABLE": "1", **with_home(without_job(environ))}


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
