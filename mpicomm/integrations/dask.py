"""A Dask cluster of the ranks: the scheduler and the client on rank 0, a worker on each other rank."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from mpicomm import arguments
from mpicomm.collective_ops.collectives import barrier, broadcast_object
from mpicomm.integrations import serving
from mpicomm.integrations.requirements import installed_by, require_world
from mpicomm.job.session import World

with installed_by("dask"):
    import distributed
    from distributed.utils import silence_logging_cmgr

T = TypeVar("T")

_TASK_SECONDS = 5.0  # the wait for running tasks at the end
_CLOSE_SECONDS = 15.0  # the longest wait for a scheduler or a worker to close
_SECURITY = arguments.instance(
    "True, a distributed.Security or None",
    bool,
    distributed.Security,
    type(None),
    remedy="Pass security=True for a temporary certificate.",
)
# The parameters of Worker that the adapter sets, or that are not arguments.
_OWN = {"self", "scheduler_ip", "scheduler_port", "nthreads", "name", "host", "security", "dashboard_address"}
_OWN |= {"death_timeout", "kwargs"}
_REMEDY = "Correct the arguments of cluster(), or let the hosts connect to all ports of each other (firewall)."


@contextlib.contextmanager
def cluster(
    world: World, *, threads: int = 1, security: distributed.Security | bool | None = None, **options: Any
) -> Iterator[distributed.Client | None]:
    """Run a Dask cluster of the ranks during the block (collective).

    Rank 0 submits tasks. The other ranks run them, each in a process that MPI has started already; they wait at the end
    of the block until rank 0 has left it. A job of one rank has its worker on rank 0.

    At the end, tasks that still run have 5 s to finish. After that they continue on a thread of their rank, until its
    process ends, and their results are lost.

    Args:
        world: The World that `bootstrap` returned.
        threads: The number of threads of each worker, which run tasks in parallel.
        security: True: authenticate and encrypt all connections by a temporary certificate that rank 0 creates (its
            `distributed.Security.temporary()`) and sends to the other ranks. Or a `distributed.Security`; that of rank
            0 is used on all ranks. By default, connections are neither authenticated nor encrypted: others who reach
            this host can run code as your user.
        options: Further arguments of `distributed.Worker`, such as `memory_limit="4GiB"`.

    Yields:
        The client on rank 0, once all workers have connected; None on the other ranks.

    Raises:
        TypeError: If an argument is of a wrong type, or `distributed.Worker` does not have it.
        ValueError: If `threads` is less than 1.
        MpicommError: On every rank, if the scheduler, a worker or the client does not start, or does not connect within
            300 s or 80 % of the timeout of `bootstrap`. Also on the other ranks, if rank 0 leaves the block with an
            exception and handles it; otherwise the exception ends the job.
    """
    _check(world, threads, security, options)
    with silence_logging_cmgr(logging.WARNING), _running_loop() as loop:
        part = _Part(loop)
        try:
            _start(world, part, security, {"nthreads": threads, **options})
            with serving.until_rank_0_leaves(world):
                yield part.client
            part.close_client()
            part.close_worker()
            barrier()  # a worker reports a scheduler that closes during its heartbeat
        finally:
            part.close()


def _check(world: World, threads: int, security: object, options: dict[str, Any]) -> None:
    require_world(world)
    arguments.POSITIVE.check(threads, "threads")
    _SECURITY.check(security, "security")
    accepted = sorted(set(inspect.signature(distributed.Worker.__init__).parameters) - _OWN)
    if unknown := sorted(set(options) - set(accepted)):
        raise TypeError(
            f"cluster() got an unknown argument {unknown[0]!r}, expected threads, security or an argument of "
            f"distributed.Worker.\nCorrect it, or remove it. The arguments of Worker: {', '.join(accepted)}."
        )


def _start(world: World, part: _Part, security: distributed.Security | bool | None, options: dict[str, Any]) -> None:
    """Start the scheduler, then the workers, then the client (collective).

    Raises:
        MpicommError: On every rank, if one of them does not start.
    """
    host = serving.own_address(world)
    place: dict[str, Any] = {"host": host, "dashboard_address": f"{host}:0"}

    def start_scheduler() -> None:  # it binds a free port before the other ranks learn its address
        if world.rank == 0:
            place["security"] = distributed.Security.temporary() if security is True else security or None
            part.start_scheduler(**place)

    def start_worker() -> None:
        if world.rank != 0 or world.size == 1:
            part.start_worker(address, death_timeout=serving.start_seconds(), name=str(world.rank), **place, **options)

    def start_client() -> None:
        if world.rank == 0:
            part.start_client(address, place["security"], workers=max(1, world.size - 1))

    serving.start_on_all_ranks(world, start_scheduler, _REMEDY)
    address, place["security"] = broadcast_object(part.scheduler and (part.scheduler.address, place["security"]))
    serving.start_on_all_ranks(world, start_worker, _REMEDY)
    serving.start_on_all_ranks(world, start_client, _REMEDY)


class _Worker(distributed.Worker):
    """A worker that waits 5 s for running tasks when it closes, instead of 30 s; the scheduler closes it, too."""

    async def close(
        self, timeout: float = _TASK_SECONDS, executor_wait: bool = True, nanny: bool = True, reason: str = "close"
    ) -> str | None:
        return await super().close(timeout, executor_wait, nanny, reason)


_Worker.__name__ = "Worker"  # the key of its settings in Dask's configuration


class _Part:
    """The scheduler, the client and the worker of this rank, as far as it has them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.scheduler: distributed.Scheduler | None = None
        self.client: distributed.Client | None = None
        self._worker: distributed.Worker | None = None

    def start_scheduler(self, **options: Any) -> None:
        self.scheduler = self._wait(_started(distributed.Scheduler, port=0, **options))

    def start_worker(self, address: str, **options: Any) -> None:
        self._worker = self._wait(_started(_Worker, address, **options))

    def start_client(self, address: str, security: distributed.Security | None, workers: int) -> None:
        self.client = distributed.Client(address, security=security)
        self.client.wait_for_workers(workers, timeout=serving.start_seconds())

    def close_client(self) -> None:
        if self.client is not None:
            self.client.close()

    def close_worker(self) -> None:
        self._close(self._worker)

    def close(self) -> None:
        """Close all, also after an error; they may be closed already."""
        self.close_client()
        self._close(self.scheduler)
        self.close_worker()

    def _close(self, server: Any) -> None:
        if server is not None:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._wait(server.close(), _CLOSE_SECONDS)

    def _wait(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)


async def _started(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Create a scheduler or a worker, which takes the running event loop, and start it."""
    return await kind(*args, **kwargs)


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
