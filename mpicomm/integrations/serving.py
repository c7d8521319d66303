"""A block in which rank 0 uses a cluster that the other ranks serve: the addresses of the ranks, and its end.

Rank 0 announces the end in the job's store. An operation would end at its timeout, and be reported as a possible hang.
"""

from __future__ import annotations

import itertools
import time

from mpicomm import session
from mpicomm.session import World
from mpicomm.startup import interfaces

_PAUSE = 0.1  # seconds between two queries of the store
_blocks = itertools.count()  # equal on all ranks, since a cluster is started by all of them


def own_address(world: World) -> str:
    """Return this host's address in the network of the job's store, or its name if the address is unknown."""
    return interfaces.address_towards(world.master_addr) or world.hostname


def new_block() -> str:
    """Return the key of a new block, equal on all ranks (collective)."""
    return f"mpicomm/block/{session.recoveries()}/{next(_blocks)}"


def wait_until_rank_0_leaves(world: World, block: str) -> None:
    """On rank 0, announce that it leaves the block; on the other ranks, wait until it does (collective)."""
    current = session.current()
    assert current is not None
    if world.rank == 0:
        current.job.store.set(block, "left")
    else:
        while not current.job.store.check([block]):
            time.sleep(_PAUSE)
