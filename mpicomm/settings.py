"""Reads and validates all `MPICOMM_*` environment variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpicomm.errors import LaunchError

PREFIX = "MPICOMM_"
LAUNCHERS = ("single", "mpi", "torchrun", "slurm")
TIMEOUT_ACTIONS = ("abort", "raise")
DEBUGS = ("0", "1")
SHARED_MEMORIES = ("0", "1")
GPU_AWARE = ("0", "1", "auto")
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
    """The source of the ranks, if the environment is ambiguous: single, mpi, torchrun or slurm."""

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
    it."""

    dump_dir: str | None = None
    """The directory to which the ranks write their flight recorders and stacks when the job fails; none: no files."""

    gpu_aware: str | None = None
    """Whether MPI receives the addresses of tensors on GPUs (CUDA-aware MPI). 1: even if the library does not report
    support; auto (the default): only if it does. Both require a test at the creation of a group to pass. 0: tensors
    are staged through host memory. NCCL is not affected."""

    gpu_chunk_kib: str | None = None
    """Size in KiB of the chunks in which tensors are staged: MPI sends one chunk while the next is copied from the GPU;
    default 4096."""

    shared_memory: str | None = None
    """0: large tensors are sent by MPI only, not through shared memory of the ranks of a node."""

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
        """Whether large tensors may be sent through shared memory of the ranks of a node."""
        return self.shared_memory != "0"

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
        settings = cls(**{names[name]: value for name, value in given.items()})
        if settings.launcher not in (None, *LAUNCHERS):
            raise LaunchError(
                f"MPICOMM_LAUNCHER must be one of {', '.join(LAUNCHERS)}, got {settings.launcher}.\n"
                f"Correct it, or unset it to detect the launcher automatically."
            )
        settings._check_one_of("on_timeout", TIMEOUT_ACTIONS)
        settings._check_one_of("debug", DEBUGS)
        settings._check_one_of("gpu_aware", GPU_AWARE)
        settings._check_one_of("shared_memory", SHARED_MEMORIES)
        settings._check_seconds()
        settings._check_host_timeout()
        settings._check_chunk()
        return settings

    def _check_one_of(self, field: str, values: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if value not in (None, *values):
            name = PREFIX + field.upper()
            raise LaunchError(f"{name} must be {' or '.join(values)}, got {value}.\nCorrect it, or unset it.")

    def _check_seconds(self) -> None:
        try:
            is_good = self.seconds_to_report > 0
        except ValueError:
            is_good = False
        if not is_good:
            raise LaunchError(
                f"MPICOMM_HANG_SECONDS must be a positive number of seconds, got {self.hang_seconds}.\n"
                f"Correct it, or unset it."
            )

    def _check_host_timeout(self) -> None:
        given = self.host_timeout
        if given is not None and not (given.isdecimal() and 1 <= int(given) <= _LONGEST_HOST_TIMEOUT):
            raise LaunchError(
                f"MPICOMM_HOST_TIMEOUT must be a whole number of seconds from 1 to {_LONGEST_HOST_TIMEOUT}, "
                f"got {given}.\nCorrect it, or unset it for {HOST_TIMEOUT}."
            )

    def _check_chunk(self) -> None:
        given = self.gpu_chunk_kib
        if given is not None and not (given.isdecimal() and int(given) > 0):
            raise LaunchError(
                f"MPICOMM_GPU_CHUNK_KIB must be a positive whole number of KiB, got {given}.\n"
                f"Correct it, or unset it for {_GPU_CHUNK_KIB}."
            )
