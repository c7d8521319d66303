"""Collective verbs."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from mpicomm.backend import process_group


def barrier(group: dist.ProcessGroup | None = None, *, timeout: float | datetime.timedelta | None = None) -> None:
    """Wait until every rank of the group has come here (collective).

    Args:
        group: The group; all ranks if left out.
        timeout: How long to wait, in seconds or as a timedelta; the group's timeout if left out.

    Raises:
        TimeoutError: If a rank has not come in time. It names the ranks that have not, and says where they are. The
            group cannot be used any more then.
    """
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    process_group.barrier_within(group or dist.group.WORLD, timeout)
