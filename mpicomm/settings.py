"""Every `MPICOMM_*` environment variable, read in one place."""

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
"""Seconds without an answer of a host, after which its ranks count as dead."""

_HANG_SECONDS = 60.0
_LONGEST_HOST_TIMEOUT = 86_400  # seconds
# Long enough for a copy to reach its full speed, short enough for three to stay in the cache.
_GPU_CHUNK_KIB = 4096


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the environment asks of mpicomm; each field is the variable `MPICOMM_<FIELD>`."""

    launcher: str | None = None
    """Who says the ranks, when the environment is ambiguous: single, mpi, torchrun or slurm."""

    interface: str | None = None
    """The network interface, by name or address, on which rank 0 listens: ib0, 10.1.0.7."""

    on_timeout: str | None = None
    """What an operation does whose timeout passes: end the job with a table of who is where (abort, the default), or
    raise TimeoutError (raise), at the price of a barrier before each synchronous operation."""

    hang_seconds: str | None = None
    """After so many seconds in an operation a table says where every rank is; 60, or half the timeout if less. In
    bootstrap() a notice names absent ranks after so many seconds; 30, or half the timeout if less."""

    host_timeout: str | None = None
    """After so many seconds in which a host answers nothing on the side channel, its ranks count as dead; 30."""

    debug: str | None = None
    """1: the ranks compare each collective's operation, dtype, shape, root and number before they start it."""

    dump_dir: str | None = None
    """Where the ranks write their last operations and stacks when the job ends badly; none: nowhere."""

    gpu_aware: str | None = None
    """Whether MPI receives the addresses of tensors on GPUs (CUDA-aware MPI): 1, always; 0, never, tensors are staged
    through host memory; auto (the default), if a test at startup shows that MPI supports it. NCCL is not affected."""

    gpu_chunk_kib: str | None = None
    """How much of a tensor is with MPI while the next is copied from the GPU, in KiB; 4096."""

    shared_memory: str | None = None
    """0: large tensors go by MPI alone, not through memory that the ranks of a node share."""

    @property
    def raises_timeouts(self) -> bool:
        """Whether a timeout is an exception."""
        return self.on_timeout == "raise"

    @property
    def compares_calls(self) -> bool:
        """Whether the ranks compare their calls."""
        return self.debug == "1"

    @property
    def shares_memory(self) -> bool:
        """Whether large tensors may go through memory that the ranks of a node share."""
        return self.shared_memory != "0"

    @property
    def seconds_to_report(self) -> float:
        """How long an operation may take before the ranks are asked where they are."""
        return _HANG_SECONDS if self.hang_seconds is None else float(self.hang_seconds)

    @property
    def seconds_to_lose_host(self) -> int:
        """How long a host may answer nothing before its ranks count as dead."""
        return HOST_TIMEOUT if self.host_timeout is None else int(self.host_timeout)

    @property
    def gpu_chunk_bytes(self) -> int:
        """How much of a tensor is with MPI while the next is copied from the GPU."""
        return 1024 * (_GPU_CHUNK_KIB if self.gpu_chunk_kib is None else int(self.gpu_chunk_kib))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings; an empty variable counts as unset.

        Raises:
            LaunchError: If a variable is unknown or its value is.
        """
        names = {PREFIX + field.name.upper(): field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value}
        if unknown := sorted(set(given) - set(names)):
            raise LaunchError(
                f"{', '.join(unknown)} is set, but mpicomm knows no such variable.\n"
                f"It knows {', '.join(sorted(names))}. Correct the name, or unset it."
            )
        settings = cls(**{names[name]: value for name, value in given.items()})
        if settings.launcher not in (None, *LAUNCHERS):
            raise LaunchError(
                f"MPICOMM_LAUNCHER={settings.launcher} is not a launcher.\n"
                f"Set it to one of {', '.join(LAUNCHERS)}, or unset it to let mpicomm find out."
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
            raise LaunchError(f"{name}={value} means nothing.\nSet it to {' or '.join(values)}, or unset it.")

    def _check_seconds(self) -> None:
        try:
            is_good = self.seconds_to_report > 0
        except ValueError:
            is_good = False
        if not is_good:
            raise LaunchError(
                f"MPICOMM_HANG_SECONDS={self.hang_seconds} is no time.\nSet it to a number of seconds, or unset it."
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
                f"MPICOMM_GPU_CHUNK_KIB={given} is no size.\nSet it to a whole number of KiB, or unset it."
            )
