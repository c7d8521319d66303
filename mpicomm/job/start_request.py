"""The arguments of `bootstrap()`, and their checks before the job is formed."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import linecache
import re
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpicomm import arguments
from mpicomm.arguments import FLAG, POSITIVE, Expected, in_seconds
from mpicomm.devices import assignment
from mpicomm.errors import LaunchError
from mpicomm.job import plan

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # torch's default
_SHORTEST_TIMEOUT = 1  # seconds; processes need some time to start
_DEFAULT_WAIT_LIMIT = 600.0  # seconds that bootstrap waits for ranks by default

_INIT_CALL = re.compile(r"[^#]*\binit_process_group\s*\(")
_PACKAGE = Path(__file__).resolve().parents[1]

_DEVICE = assignment.EXPECTED.or_none()
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
        plan.check_backend(self.backend)
        in_seconds(self.timeout, _SHORTEST_TIMEOUT, "30 minutes (operations) and 10 minutes (waiting for ranks)")
        _COMM.check(self.comm, "comm")
        _DEVICE.check(self.device, "device")
        FLAG.check(self.abort_on_error, "abort_on_error")
        _ON_FAILURE.check(self.on_failure, "on_failure")
        POSITIVE.check(self.min_ranks, "min_ranks")

    @functools.cached_property
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
        if self.timeout is not None and self.operation_timeout == first.operation_timeout:
            same["timeout"] = (self.timeout,)
        for field in dataclasses.fields(self):
            name, given = field.name, getattr(self, field.name)
            before = getattr(first, name)
            if given not in (field.default, before, *same.get(name, ())):
                raise ValueError(
                    f"bootstrap() was called before with {name}={before!r}, got {name}={given!r}.\n"
                    f"Omit {name} to get the existing World, or call mpicomm.shutdown() first."
                )

    def refuse_other_group(self) -> None:
        """Raise an error if the program initialized torch.distributed before `bootstrap()`.

        Raises:
            LaunchError: If it is initialized; the message lists the source lines that may have done so.
        """
        if not dist.is_initialized():
            return
        group = f"backend {dist.get_backend()}, {dist.get_world_size()} ranks"
        calls = _init_calls_on_the_stack()
        call = "bootstrap()" if self.backend in (None, "auto") else f"bootstrap({self.backend!r})"
        origin = f", by init_process_group() at {' or '.join(calls)}" if calls else ""
        raise LaunchError(
            f"torch.distributed is already initialized ({group}){origin}, before mpicomm.bootstrap().\n"
            f"Delete that call of init_process_group(): mpicomm.{call} initializes torch.distributed itself.\n"
            f"Or, to keep the call, put mpicomm.bootstrap(backend=None) before it."
        )

    @functools.cached_property
    def operation_timeout(self) -> datetime.timedelta:
        """The timeout of operations."""
        if self.timeout is None:
            return _DEFAULT_TIMEOUT
        return datetime.timedelta(seconds=float(arguments.seconds_of(self.timeout)))

    @functools.cached_property
    def join_timeout_seconds(self) -> float:
        """The seconds to wait for ranks."""
        return _DEFAULT_WAIT_LIMIT if self.timeout is None else self.operation_timeout.total_seconds()


def this_command() -> str:
    """Return this process's command line, for the command in a LaunchError."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def _init_calls_on_the_stack() -> list[str]:
    """Return the lines that call init_process_group, as file:line, in the files on the call stack."""
    files = dict.fromkeys(frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    return [
        f"{file}:{number}"
        for file in files
        if _PACKAGE not in Path(file).parents
        for number, line in enumerate(linecache.getlines(file), start=1)
        if _INIT_CALL.match(line)
    ]
