"""The exceptions of `mpicomm.horovod`, under the names that Horovod's users catch."""

from __future__ import annotations

from mpicomm.errors import MpicommError


class HorovodInternalError(MpicommError):
    """A collective operation failed: its arguments differ between ranks, or the ranks can no longer communicate."""


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
SHUT_DOWN = "Horovod has been shut down on this rank or another one, before the operation completed."
