"""The exceptions of mpicomm.

MpicommError
|-- LaunchError        the launcher, the environment or an earlier init_process_group() prevents one job
|-- MPINotFoundError   mpi4py or the MPI library that it loads is missing
|-- DeviceError        the requested device does not exist, or, with NCCL or the like, a rank has no GPU or shares one
|-- RendezvousError    the rendezvous timed out, or ranks cannot reach rank 0
|-- RankFailedError    ranks of the job have failed; recover() continues without them
|-- CheckpointError    a checkpoint cannot be written or read, or belongs to another model
|-- TrainingError      a loss is not finite, or the parameters differ between ranks
`-- MismatchError      ranks called different collectives, or one collective with different arguments

Invalid arguments raise `ValueError`, `TypeError` or `NotImplementedError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar


class MpicommError(RuntimeError):
    """Base class of the exceptions of mpicomm."""

    is_on_all_ranks = False
    """Whether every rank raises the same error, so that one rank's report is enough."""


class LaunchError(MpicommError):
    """The launcher, the environment (with MPICOMM_* variables) or an earlier init_process_group() prevents one job.

    The first line of the message states the problem; the message ends with the next step, usually a command. A command
    is the last indented line.
    """

    @property
    def brief(self) -> str:
        """The problem and the next step in one line, for ranks that need not print the full message."""
        problem, *lines = str(self).splitlines()
        commands = [f"Start with: {line.strip()}" for line in lines if line.startswith("  ")]
        return " ".join([problem, *(commands or lines)[-1:]])


class MPINotFoundError(MpicommError, ImportError):
    """mpi4py is missing or too old, or the MPI library that it loads is missing."""


class DeviceError(MpicommError):
    """The requested device does not exist, or, with NCCL or the like, a rank has no GPU or shares one with another."""


class RendezvousError(MpicommError, TimeoutError):
    """The rendezvous timed out, or rank 0 has no address that all ranks can reach."""


class MismatchError(MpicommError):
    """Ranks of a group called different collectives, or one collective with different arguments; none was started.

    all_reduce, reduce, reduce_scatter, gather, all_gather, scatter, their `_object` forms, and broadcast with `out`
    always compare the ranks' calls. The other operations, and those of torch.distributed, do with MPICOMM_DEBUG=1 only.
    """


class RankFailedError(MpicommError):
    """Ranks of the job have failed, and the program has called `bootstrap(on_failure="recover")`.

    Every operation on every group raises it until the surviving ranks have called `recover()`. Its attributes can
    differ between ranks, if several ranks fail.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), hosts: Sequence[str] = (), reason: str = "") -> None:
        """Create the error; the package raises it.

        Args:
            message: The message.
            ranks: The failed ranks.
            hosts: The host of each failed rank.
            reason: Why they failed.
        """
        super().__init__(message)
        self.ranks = tuple(ranks)
        """The ranks that this rank knows to have failed, in ascending order; further ranks may have failed."""

        self.hosts = tuple(hosts)
        """The host of each of these ranks."""

        self.reason = reason
        """Why they failed, as far as it is known."""


class CheckpointError(MpicommError):
    """A checkpoint cannot be written or read, or belongs to another model."""


class TrainingError(MpicommError):
    """Training cannot continue: a loss is not finite, or the parameters differ between ranks."""


E = TypeVar("E", bound=MpicommError)


def raised_on_all_ranks(error: E) -> E:
    """Return the error, marked as one that every rank raises."""
    error.is_on_all_ranks = True
    return error
