"""Reads and validates all `MPICOMM_*` environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

from mpicomm.arguments import Variable, whole_number
from mpicomm.errors import LaunchError

PREFIX = "MPICOMM_"
LAUNCHERS = ("single", "mpi", "torchrun", "slurm")
PARENT = "MPICOMM_PARENT"
"""The variable in which `mpicomm run` passes its address to rank 0."""

SPARES = "MPICOMM_SPARES"
"""The variable in which `mpicomm run` passes the number of spares."""

STOPPED_STATUS = 85
"""Exit status of ranks that have saved a checkpoint and stopped, because of a signal or the time limit."""

HOST_TIMEOUT = 30
"""Seconds without a reply from a host, after which its ranks are considered dead."""

_HANG_SECONDS = 60.0
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

    on_timeout: str | None = None
    """The action when an operation times out. abort (the default): abort the job and print a table of all ranks'
    positions. raise: raise TimeoutError, at the cost of a barrier before each synchronous operation."""

    hang_seconds: str | None = None
    """Seconds in an operation after which a table of all ranks' positions is printed; default 60, or half the timeout
    if that is less. In bootstrap(), a notice names absent ranks after the least of 30 s, this value and half the
    timeout."""

    host_timeout: str | None = None
    """Seconds without a reply from a host on the out-of-band channel after which its ranks are considered dead;
    default 30."""

    debug: str | None = None
    """1: the ranks compare the operation, dtype, shape, root and sequence number of each collective before they start
    it; default 0."""

    dump_dir: str | None = None
    """The directory to which the ranks write their flight recorders and stacks when the job fails; none: no
    files; default mpicomm-dumps."""

    gpu_aware: str | None = None
    """Whether MPI receives the addresses of tensors on GPUs (CUDA-aware MPI). 1: even if the library does not report
    support; auto (the default): only if it does. Both require a test at the creation of a group to pass. 0: tensors
    are staged through host memory. NCCL is not affected."""

    gpu_chunk_kib: str | None = None
    """Size in KiB of the chunks in which tensors are staged: MPI sends one chunk while the next is copied from the GPU;
    default 4096."""

    shared_memory: str | None = None
    """0: tensors are sent by MPI only, not through shared memory of the ranks of a node; default 1."""

    native: str | None = None
    """0: tensors do not use the package's C library, nor shared memory, which requires it; default 1."""

    spares: str | None = None
    """The number of processes that wait to replace failed ranks, with `bootstrap(on_failure="recover")`; `mpicomm run
    --spares` sets it; default 0."""

    parent: str | None = None
    """The addresses of `mpicomm run`, to which rank 0 connects; `mpicomm run` sets it."""

    @property
    def raises_timeouts(self) -> bool:
        """Whether an operation that times out raises TimeoutError."""
        return self.on_timeout == "raise"

    @property
    def compares_calls(self) -> bool:
        """Whether the ranks compare their calls before they start a collective."""
        return self.debug == "1"

    @property
    def shares_memory(self) -> bool:
        """Whether tensors may be sent through shared memory of the ranks of a node."""
        return self.shared_memory != "0"

    @property
    def uses_native(self) -> bool:
        """Whether the C library may be used."""
        return self.native != "0"

    @property
    def num_spares(self) -> int:
        """The number of processes that wait to replace failed ranks."""
        return 0 if self.spares is None else int(self.spares)

    @property
    def seconds_to_report(self) -> float:
        """Seconds in an operation after which the ranks are asked for their positions."""
        return _HANG_SECONDS if self.hang_seconds is None else float(self.hang_seconds)

    @property
    def seconds_to_lose_host(self) -> int:
        """Seconds without a reply from a host, after which its ranks are considered dead."""
        return HOST_TIMEOUT if self.host_timeout is None else int(self.host_timeout)

    @property
    def gpu_chunk_bytes(self) -> int:
        """The size in bytes of the chunks in which tensors on GPUs are staged."""
        return 1024 * (_GPU_CHUNK_KIB if self.gpu_chunk_kib is None else int(self.gpu_chunk_kib))

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
        for name, text in given.items():
            if names[name] in _VALUES:
                _VALUES[names[name]].check(text, name)
        return cls(**{names[name]: text for name, text in given.items()})


def _one_of(*words: str) -> Variable:
    return Variable(" or ".join(words), lambda text: text in words)


def _is_positive_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return float(text) > 0
    return False


_VALUES = {
    "launcher": Variable(
        f"one of {', '.join(LAUNCHERS)}", LAUNCHERS.__contains__, " to detect the launcher automatically"
    ),
    "on_timeout": _one_of("abort", "raise"),
    "hang_seconds": Variable("a positive number of seconds", _is_positive_number),
    "host_timeout": Variable(
        f"a whole number of seconds from 1 to {_LONGEST_HOST_TIMEOUT}",
        whole_number(1, _LONGEST_HOST_TIMEOUT),
        f" for {HOST_TIMEOUT}",
    ),
    "debug": _one_of("0", "1"),
    "gpu_aware": _one_of("0", "1", "auto"),
    "gpu_chunk_kib": Variable("a positive whole number of KiB", whole_number(1), f" for {_GPU_CHUNK_KIB}"),
    "spares": Variable("a whole number of processes", whole_number(0), " for 0"),
    "shared_memory": _one_of("0", "1"),
    "native": _one_of("0", "1"),
}
