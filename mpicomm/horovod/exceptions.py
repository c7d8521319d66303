"""The exceptions of `mpicomm.horovod`, under the names that Horovod's users catch."""

from __future__ import annotations

from mpicomm.errors import MpicommError


class HorovodInternalError(MpicommError):
    """A collective operation failed: its arguments differ between ranks, or the ranks can no longer communicate."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  Horovod's name
    """A program raises it in `hvd.elastic.run` to form the job anew.

    Attributes:
        skip_sync: Whether the state is not sent to all ranks again.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
SHUT_DOWN = "Horovod has been shut down on this rank or another one, before the operation completed."
