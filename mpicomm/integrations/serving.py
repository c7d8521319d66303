"""Helpers for cluster adapters: addresses, the start, and the wait of the other ranks until rank 0 leaves the block.

Rank 0 announces the end in the job's store. An operation would time out, and be reported as a possible hang.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import traceback
from collections.abc import Callable, Iterator

import torch.distributed as dist

from mpicomm import agreement, mpi
from mpicomm.collective_ops.collectives import all_gather_object
from mpicomm.errors import MpicommError
from mpicomm.job import interfaces, session
from mpicomm.job.session import Session, World
from mpicomm.watchdog import rank_failures

_PAUSES = 0.05, 1.0  # the shortest and longest time between two queries of the store, in seconds
_PAUSE_GROWTH = 1.2
_START_SECONDS = 300.0
_START_SHARE = 0.8  # of the timeout of operations: the other ranks wait for the start in one
_REPORT_SECONDS = 10.0  # for rank 0 to print its exception and to abort the job
_READ_SECONDS = 3.0  # for the other ranks to read the exception of rank 0: longer than their time between two queries
_SHOWN = 400  # the most characters of a message
_LEFT = ""  # otherwise rank 0's exception
_ENDED = "its process has ended"
_blocks = itertools.count()  # equal on all ranks, since a cluster is started by all of them


def own_address(world: World) -> str:
    """Return this host's address in the network of the job's store, or its name if the address is unknown."""
    return interfaces.address_towards(world.master_addr) or world.hostname


def start_seconds() -> float:
    """Return how long a part of a cluster may take to start: at most 300 s, and less than the timeout of operations."""
    return min(_START_SECONDS, _START_SHARE * _session().request.operation_timeout.total_seconds())


def start_on_all_ranks(world: World, start: Callable[[], object], remedy: str) -> None:
    """Start a part of a cluster on every rank (collective).

    Args:
        world: The World that `bootstrap` returned.
        start: Starts the part of this rank, if it has one.
        remedy: The next step after an error other than an MpicommError.

    Raises:
        MpicommError: On every rank, if `start` raises an exception on any rank.
    """

    def attempt() -> None:
        try:
            start()
        except MpicommError:
            raise
        except Exception as error:
            raise MpicommError(f"cannot start the cluster: {_with_causes(error)}\n{remedy}") from error

    agreement.run_on_all_ranks(
        all_gather_object,
        attempt,
        MpicommError,
        lambda rank, message: MpicommError(f"rank {rank} on {world.hosts[rank]}: {message}"),
    )


@contextlib.contextmanager
def until_rank_0_leaves(world: World) -> Iterator[None]:
    """Let the other ranks wait at the end of the block until rank 0 has left it (collective).

    Raises:
        MpicommError: On the other ranks, if rank 0 has left the block with an exception, or its process has ended,
            unless the job is aborted because of it.
        RankFailedError: On the other ranks, if a rank has failed, and the job continues after failures.
    """
    current = _session()
    store, key = current.job.store, f"mpicomm/block/{session.recoveries()}/{next(_blocks)}"
    try:
        yield
    except BaseException as error:
        if world.rank == 0:
            store.set(key, _with_causes(error))
            _wait_for_readers(current, key)
        raise
    if world.rank == 0:
        store.set(key, _LEFT)
    elif problem := _wait_for_rank_0(current, key):
        time.sleep(_REPORT_SECONDS)
        rank_failures.raise_if_failed(None)
        raise MpicommError(f"rank 0 has not completed the block of cluster(), see its output: {problem}")


def _wait_for_readers(current: Session, key: str) -> None:
    """Wait until the other ranks have read the exception: torch prints a stack if a query gets no answer."""
    readers = current.world.size - 1
    with contextlib.suppress(dist.DistError):  # must not replace the exception
        mpi.poll(lambda: current.job.store.add(f"{key}/readers", 0) >= readers, _READ_SECONDS, longest_pause=_PAUSES[0])


def _wait_for_rank_0(current: Session, key: str) -> str:
    """Wait until rank 0 leaves the block; return its exception, or an empty text."""
    store, watch = current.job.store, current.watch
    pause, longest = _PAUSES
    try:
        # torch prints a stack if a query gets no answer. So queries are rare, and end when rank 0 is known to be dead.
        while not (watch is not None and watch.has_lost_rank_0):
            rank_failures.raise_if_failed(None)
            if store.check([key]):
                problem = store.get(key).decode()
                store.add(f"{key}/readers", 1)
                return problem
            time.sleep(pause)
            pause = min(longest, pause * _PAUSE_GROWTH)
    except dist.DistError:
        pass
    return _ENDED


def _with_causes(error: BaseException | None) -> str:
    """Return an exception and its causes in one line; a message may contain a whole traceback, as those of Ray do."""
    texts = []
    while error is not None:
        text = " ".join(traceback.format_exception_only(error)[-1].split())
        texts.append(text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}")
        error = error.__cause__
    return "; caused by ".join(texts)


def _session() -> Session:
    current = session.current()
    assert current is not None
    return current
