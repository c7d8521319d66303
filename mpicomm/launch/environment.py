"""Environment of launched ranks: removes leftovers, sets defaults, and selects the variables for other hosts."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence

from mpicomm.errors import LaunchError
from mpicomm.launch import detect
from mpicomm.launch.detect import Library

_OF_RANKS = (
    "OMPI_COMM_WORLD_*",
    "OMPI_WORLD_*",
    "OMPI_UNIVERSE_SIZE",
    "PMIX_*",
    "PRTE_LAUNCHED",
    "PMI_*",
    "HYDI_*",
    "PALS_*",
    "MV2_COMM_WORLD_*",
    "TORCHELASTIC_*",
    "ROLE_*",
)
_OF_USERS = ("PMIX_MCA_*",)
_WITH_RANKS = ("MASTER_ADDR", "MASTER_PORT")  # without rank variables the user set them, and bootstrap() uses them

# Open MPI forwards only its own variables to other hosts. Variables that differ between hosts must not be forwarded.
_TRAVEL = (
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "OMP_*", "KMP_*", "MKL_*",
    "THP_MEM_ALLOC_ENABLE", "MASTER_ADDR", "MASTER_PORT", "MPICOMM_*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "TORCH_*",
    "TORCHINDUCTOR_*", "PYTORCH_*", "CUDA_*", "HF_*", "TOKENIZERS_PARALLELISM", "WANDB_*",
)  # fmt: skip
_STAY = ("CUDA_VISIBLE_DEVICES",)

_DAEMONS = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "prted", "orterun", "orted", "hydra_pmi_proxy"})
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
    if claims and not _DAEMONS.isdisjoint(ancestors):
        raise LaunchError(
            f"this process is a rank that {claims[0].title} started ({claims[0].shown}): each rank would start a job.\n"
            f"Use one of the two: `mpirun python train.py`, or `mpicomm run train.py`."
        )


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of another job."""
    tables = (*detect.MPI_LAUNCHERS, dataclasses.replace(detect.TORCHRUN, master_addr=None, master_port=None))
    names = {value for each in tables for key, value in vars(each).items() if key != "title" and value}
    is_of_ranks = not names.isdisjoint(environ)
    left = {
        name: value
        for name, value in environ.items()
        if name not in names and (not _matches(name, _OF_RANKS) or _matches(name, _OF_USERS))
    }
    if is_of_ranks:
        for name in _WITH_RANKS:
            left.pop(name, None)
    return left


def of_ranks(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the environment for ranks with this number of threads and with huge pages; the user's values are kept."""
    wanted = {"OMP_NUM_THREADS": str(max(1, threads)), "THP_MEM_ALLOC_ENABLE": "1"}
    return {**wanted, **clean(environ)}


def of_gpus(library: Library, loaded: str) -> dict[str, str]:
    """Return the variables that enable GPU buffers in an MPI library; Open MPI and UCX detect GPUs themselves.

    Args:
        loaded: The files in this process's memory map. With the variable set, Cray MPICH aborts programs that are not
            linked with its GPU library.
    """
    if "CRAY" in library.description.upper():
        return {"MPICH_GPU_SUPPORT_ENABLED": "1"} if "libmpi_gtl" in loaded else {}
    return {"MPIR_CVAR_ENABLE_GPU": "1"} if library.vendor == "MPICH" else {}


def travelling(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables to forward to ranks on other hosts."""
    return sorted(name for name in environ if _matches(name, _TRAVEL) and not _matches(name, _STAY))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
