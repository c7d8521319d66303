"""Every exception that mpicomm raises for its users.

MpicommError
|-- LaunchError        the job was started in a way that cannot work; fix the command
|-- MPINotFoundError   mpi4py or the MPI library behind it is missing; install one
|-- DeviceError        the choice of GPU cannot work
|-- RendezvousError    ranks did not come together in time, or could not reach each other
|-- CheckpointError    a checkpoint cannot be written or read, or is of another model
|-- TrainingError      a loss is not finite, or the ranks' parameters have come to differ
`-- MismatchError      ranks called different collectives; found where MPICOMM_DEBUG=1

Bad arguments to an operation are `ValueError`, `TypeError` or `NotImplementedError`, as everywhere in Python.
"""

from __future__ import annotations

from typing import TypeVar


class MpicommError(RuntimeError):
    """Base class of all errors that are mpicomm's own."""

    is_everywhere = False
    """Whether every rank raises the same, so that one can speak for all."""


class LaunchError(MpicommError):
    """The processes were started in a way that cannot become one job; the message holds the command that can.

    The first line says what is wrong, the last indented line is the command.
    """

    @property
    def brief(self) -> str:
        """What is wrong and the command, in one line, for ranks that need not say it all."""
        lines = str(self).splitlines()
        commands = [line.strip() for line in lines if line.startswith("  ")]
        return lines[0] + (f" Start with: {commands[-1]}" if commands else "")


class MPINotFoundError(MpicommError, ImportError):
    """mpi4py, or the MPI library that it loads, is missing."""


class DeviceError(MpicommError):
    """The requested device does not exist, or NCCL was asked to put two ranks on one GPU."""


class RendezvousError(MpicommError, TimeoutError):
    """Ranks did not come together in time, or have no address at which all can reach rank 0."""


class MismatchError(MpicommError):
    """Ranks of a group called different collectives, or one with different arguments. No rank has started it."""


class CheckpointError(MpicommError):
    """A checkpoint cannot be written or read, or belongs to another model."""


class TrainingError(MpicommError):
    """Training cannot go on: a loss is not finite, or the parameters of the ranks differ."""


E = TypeVar("E", bound=MpicommError)


def raised_on_all_ranks(error: E) -> E:
    """Return the error, marked as one that every rank raises."""
    error.is_everywhere = True
    return error
