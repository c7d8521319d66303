"""The arguments of `bootstrap()`, and the job that a rank has joined with them."""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpicomm import arguments
from mpicomm.arguments import FLAG, POSITIVE, Expected, in_seconds
from mpicomm.startup import backend_choice, devices
from mpicomm.startup.topology import Topology

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # torch's default
_SHORTEST_TIMEOUT = 1  # seconds; processes need some time to start
_DEFAULT_WAIT_LIMIT = 600.0  # seconds that bootstrap waits for ranks by default

_ON_FAILURE = arguments.one_of("abort", "recover")
_COMM = Expected(
    "an mpi4py intracommunicator or None",
    # Duck-typed, since MPI is not loaded under torchrun. Intercommunicators have a remote group.
    lambda comm: comm is None or (hasattr(comm, "Split_type") and not hasattr(comm, "Get_remote_group")),
    "a communicator that has this rank",
    lambda comm: comm is None or bool(comm),  # COMM_NULL is false
    "Pass one whose ranks form the job, or omit comm for all ranks.",
)


@dataclasses.dataclass(frozen=True)
class StartRequest:
    """The arguments of `bootstrap`."""

    backend: str | None = "auto"
    timeout: float | datetime.timedelta | None = None
    comm: Intracomm | None = None
    device: str | int | torch.device | None = None
    abort_on_error: bool = True
    on_failure: str = "abort"
    min_ranks: int = 1

    def check(self) -> None:
        """Check the arguments, before the job is formed.

        Raises:
            ValueError: If the backend is unknown, the timeout is out of range, or the communicator is COMM_NULL.
            TypeError: If an argument is of a wrong type.
        """
        backend_choice.check(self.backend)
        in_seconds(self.timeout, _SHORTEST_TIMEOUT, "30 minutes (operations) and 10 minutes (waiting for ranks)")
        _COMM.check(self.comm, "comm")
        devices.EXPECTED.or_none().check(self.device, "device")
        FLAG.check(self.abort_on_error, "abort_on_error")
        _ON_FAILURE.check(self.on_failure, "on_failure")
        POSITIVE.check(self.min_ranks, "min_ranks")

    @property
    def recovers(self) -> bool:
        """Whether the job continues if a rank fails."""
        return self.on_failure == "recover"

    def check_repeats(self, first: StartRequest, backend: str | None, device: torch.device) -> None:
        """Check that the arguments of a second call equal those of the first; default values are ignored.

        Args:
            first: The arguments of the first call.
            backend: The backend that the first call chose.
            device: The device that the first call chose.

        Raises:
            ValueError: If an argument differs from that of the first call.
        """
        same: dict[str, tuple[Any, ...]] = {"backend": (backend,), "device": (device, str(device))}
        if self.timeout is not None and self.limit == first.limit:
            same["timeout"] = (self.timeout,)
        for field in dataclasses.fields(self):
            name, given = field.name, getattr(self, field.name)
            before = getattr(first, name)
            if given not in (field.default, before, *same.get(name, ())):
                raise ValueError(
                    f"bootstrap() was called before with {name}={before!r}, got {name}={given!r}.\n"
                    f"Omit {name} to get the existing World, or call mpicomm.shutdown() first."
                )

    @property
    def limit(self) -> datetime.timedelta:
        """The timeout of operations."""
        return _DEFAULT_TIMEOUT if self.timeout is None else _as_timedelta(self.timeout)

    @property
    def wait_limit(self) -> float:
        """The seconds to wait for ranks."""
        return _DEFAULT_WAIT_LIMIT if self.timeout is None else self.limit.total_seconds()


def _as_timedelta(timeout: float | datetime.timedelta) -> datetime.timedelta:
    if isinstance(timeout, datetime.timedelta):
        return timeout
    return datetime.timedelta(seconds=float(timeout))  # timedelta does not accept numbers of NumPy


@dataclasses.dataclass(frozen=True)
class JoinedJob:
    """The job that a rank has joined."""

    where: Topology
    """The topology of the world; of all processes on a spare."""

    device: torch.device
    backend: str | None
    """The backend of the process group."""

    store: dist.Store
    address: str
    """The address at which the store listens."""

    port: int
    """The port at which the store listens."""

    comm: Intracomm | None = None
    """The communicator of the job; None without MPI."""

    channel_token: bytes = b""
    """With it the ranks authenticate themselves to the hubs of the out-of-band channel."""

    started: str = ""
    """The time of the start, the same on all ranks."""

    base: Intracomm | None = None
    """The communicator of all processes: the ranks of the world, then the spares; None without MPI."""

    size: int = 0
    """The number of ranks of the world."""

    everyone: Topology | None = None
    """The topology of all processes; None without MPI."""

    @property
    def is_spare(self) -> bool:
        """Whether this process is a spare."""
        return self.base is not None and self.comm is None


def this_command() -> str:
    """Return this process's command line, for the command in a LaunchError."""
    return shlex.join(["python", *sys.orig_argv[1:]])
