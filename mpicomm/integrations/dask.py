"""A Dask cluster of the ranks: the scheduler and the client on rank 0, a worker on each other rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from mpicomm.collective_ops.collectives import barrier, broadcast_object
from mpicomm.integrations import serving
from mpicomm.integrations.required_package import installed_by
from mpicomm.session import World

with installed_by("dask"):
    from distributed import Client, Scheduler, Security, Worker
    from distributed.utils import silence_logging_cmgr

T = TypeVar("T")


@contextlib.contextmanager
def cluster(
    world: World, *, threads: int = 1, security: Security | None = None, **options: Any
) -> Iterator[Client | None]:
    """Run a Dask cluster of the ranks during the block (collective).

    Rank 0 submits tasks. The other ranks run them, each in a process that MPI has started already; they wait at the end
    of the block until rank 0 has left it. A job of one rank has its worker on rank 0.

    Args:
        world: The World that `bootstrap` returned.
        threads: The number of threads of each worker, which run tasks in parallel.
        security: Rank 0's `distributed.Security` for all connections, such as `Security.temporary()`, which needs the
            package cryptography. By default connections are neither authenticated nor encrypted: others who reach
            this host can run code as your user.
        options: Further options of `distributed.Worker`, such as `memory_limit="4GiB"`.

    Yields:
        The client on rank 0, once all workers have connected; None on the other ranks.
    """
    block = serving.new_block()
    security = broadcast_object(security)
    host = serving.own_address(world)
    place: dict[str, Any] = {"host": host, "security": security, "dashboard_address": f"{host}:0"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(silence_logging_cmgr(logging.WARNING))
        loop = stack.enter_context(_running_loop())
        scheduler = None
        if world.rank == 0:  # with port 0, the scheduler binds a free port before the others learn its address
            scheduler = _wait(loop, _started(Scheduler, port=0, **place))
        address = broadcast_object(scheduler and scheduler.address)
        worker = None
        if world.rank != 0 or world.size == 1:
            worker = _wait(loop, _started(Worker, address, nthreads=threads, name=str(world.rank), **place, **options))
        client = None
        if world.rank == 0:
            client = Client(address, security=security)
            client.wait_for_workers(max(1, world.size - 1))
        yield client
        serving.wait_until_rank_0_leaves(world, block)
        if client is not None:
            client.close()
        if worker is not None:
            _wait(loop, worker.close())
        barrier()  # the scheduler reports workers that it loses
        if scheduler is not None:
            _wait(loop, scheduler.close())


async def _started(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Create a scheduler or a worker, which takes the running event loop, and start it."""
    return await kind(*args, **kwargs)


def _wait(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


@contextlib.contextmanager
def _running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop on a thread, so that this rank serves while its program continues."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="mpicomm-dask", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
