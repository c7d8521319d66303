"""The exceptions of `mpicomm.horovod`, under the names that Horovod's users catch."""

from __future__ import annotations

from mpicomm.errors import MpicommError


class HorovodInternalError(MpicommError):
    """A collective operation failed: its arguments differ between ranks, or the ranks can no longer communicate."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """An exception by which a function in `hvd.elastic.run` requests that it is called again; raise it on all ranks.

    Attributes:
        skip_sync: Whether to omit the synchronization of the state before the next call.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
SHUT_DOWN = (
    "Horovod has been shut down on this rank or another one, before the operation completed.\n"
    "Complete all operations on all ranks before hvd.shutdown(); hvd.init() starts Horovod again."
)
