"""Reads and validates all `MPICOMM_*` environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

from mpicomm.arguments import Variable, whole_number
from mpicomm.errors import LaunchError

PREFIX = "MPICOMM_"
LAUNCHERS = ("single", "mpi", "torchrun", "slurm")
PARENT_VARIABLE = "MPICOMM_PARENT"
"""The variable in which `mpicomm run` passes its address to the ranks."""

STORE_OF_RANK = "_MPICOMM_RANK_STORE"
"""Set in a rank: the address and the port of its store, which is also that of its children."""

REPLACED_BACKEND = "_MPICOMM_REPLACED_BACKEND"
"""Set by `mpicomm run --backend`: the backend that init_process_group() starts in place of that of the program."""

ORIGINAL = "mpicomm_original"
"""The attribute with torch's own function, of the init_process_group() that replaces it in unconverted programs."""

DEBUG = "MPICOMM_DEBUG"
"""The variable with which the ranks compare their calls."""

SPARES = "MPICOMM_SPARES"
"""The variable in which `mpicomm run` passes the number of spares."""

STOPPED_STATUS = 85
"""Exit status of ranks that have saved a checkpoint and stopped, because of a signal or the time limit.

`mpicomm run` and the job scripts distinguish it from failures; Python, shells (126 and above) and sysexits.h (64 to 78)
do not use it.
"""

HOST_TIMEOUT = 30
"""Seconds without a reply from a host, after which its ranks count as dead: longer than most outages of a network."""

_LONGEST_HOST_TIMEOUT = 86_400  # seconds
# Large enough for a copy to reach its full bandwidth, small enough for three chunks to stay in the cache.
_GPU_CHUNK_KIB = 4096


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings in the environment; each field is the variable `MPICOMM_<FIELD>`."""

    launcher: str | None = None
    """The launcher to assume instead of detecting it: single, mpi, torchrun or slurm."""

    interface: str | None = None
    """The network interface, by name or address, on which rank 0 listens, such as ib0 or 10.1.0.7."""

    on_timeout: str = "abort"
    """The action when an operation times out. abort (the default): abort the job and print a table of all ranks'
    positions. raise: raise TimeoutError, at the cost of a barrier before each synchronous operation."""

    hang_seconds: float = 60.0
    """Seconds in an operation after which a table of all ranks' positions is printed; default 60, or half the timeout
    if that is less. In bootstrap(), a notice names absent ranks after the least of 30 s, this value and half the
    timeout."""

    host_timeout: int = HOST_TIMEOUT
    """Seconds without a reply from a host on the out-of-band channel after which its ranks are considered dead;
    default 30."""

    debug: bool = False
    """1: the ranks compare the operation, dtype, shape, root and sequence number of each collective before they start
    it; default 0."""

    dump_dir: str | None = None
    """The directory to which the ranks write their flight recorders and stacks when the job fails; none: no
    files; default mpicomm-dumps."""

    gpu_aware: str = "auto"
    """Whether MPI receives the addresses of tensors on GPUs (GPU-aware MPI). 1: even if the library does not report
    support; auto (the default): only if it does. Both require a test at the creation of a group to pass. 0: tensors
    are staged through host memory. Vendors' libraries, such as NCCL, are not affected."""

    gpu_chunk_kib: int = _GPU_CHUNK_KIB
    """Size in KiB of the chunks in which tensors are staged: MPI sends one chunk while the next is copied from the GPU;
    default 4096."""

    shared_memory: bool = True
    """0: tensors are sent by MPI only, not through shared memory of the ranks of a node; default 1."""

    native: bool = True
    """0: tensors do not use the package's C library, nor shared memory, which requires it; default 1."""

    spares: int = 0
    """The number of processes that wait to replace failed ranks, with `bootstrap(on_failure="recover")`; `mpicomm run
    --spares` sets it; default 0."""

    parent: str | None = None
    """The addresses of `mpicomm run`, to which rank 0 connects; `mpicomm run` sets it."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read and validate the settings; an empty variable counts as unset.

        Raises:
            LaunchError: If a variable is unknown or its value is invalid.
        """
        # 1. the names
        names = {PREFIX + field.name.upper(): field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value}
        if unknown := sorted(set(given) - set(names)):
            raise LaunchError(
                f"unknown environment variable {', '.join(unknown)}.\n"
                f"Expected one of {', '.join(sorted(names))}.\n"
                f"Correct the name, or unset it."
            )
        # 2. the values
        values = {names[name]: _VALUES.get(names[name], _ANY).read(text, name) for name, text in given.items()}
        return cls(**values)


def _one_of(*words: str) -> Variable:
    return Variable(" or ".join(words), lambda text: text in words)


def _is_positive_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return float(text) > 0
    return False


_ANY = Variable("a text", lambda _: True)
_FLAG = dataclasses.replace(_one_of("0", "1"), parse=lambda text: text == "1")
_VALUES = {
    "launcher": Variable(
        f"one of {', '.join(LAUNCHERS)}", LAUNCHERS.__contains__, " to detect the launcher automatically"
    ),
    "on_timeout": _one_of("abort", "raise"),
    "hang_seconds": Variable("a positive number of seconds", _is_positive_number, parse=float),
    "host_timeout": Variable(
        f"a whole number of seconds from 1 to {_LONGEST_HOST_TIMEOUT}",
        whole_number(1, _LONGEST_HOST_TIMEOUT),
        f" for {HOST_TIMEOUT}",
        parse=int,
    ),
    "debug": _FLAG,
    "gpu_aware": _one_of("0", "1", "auto"),
    "gpu_chunk_kib": Variable("a positive whole number of KiB", whole_number(1), f" for {_GPU_CHUNK_KIB}", int),
    "spares": Variable("a whole number of processes", whole_number(0), " for 0", int),
    "shared_memory": _FLAG,
    "native": _FLAG,
}
