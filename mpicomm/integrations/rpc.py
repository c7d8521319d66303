"""torch.distributed.rpc on the job's store and network."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import rpc

from mpicomm.errors import MpicommError
from mpicomm.integrations.requirements import require_world
from mpicomm.job import interfaces
from mpicomm.job.session import World

_INTERFACE = "TP_SOCKET_IFNAME"
# init_rpc() itself makes a group of the class ProcessGroupGloo, and calls all_gather_object on it.
_OWN_WARNING = "You are using a Backend .*ProcessGroupGloo.* as a ProcessGroup"
_blocks = itertools.count(1)


@contextlib.contextmanager
def workers(world: World, *, options: rpc.TensorPipeRpcBackendOptions | None = None) -> Iterator[list[str]]:
    """Let every rank serve remote procedure calls during the block (collective).

    Calls `init_rpc` with the job's store, and `rpc.shutdown()` at the end of the block, which waits until no rank has
    pending calls. If the block raises an exception, it propagates without waiting.

    Create remote references (`rpc.remote`) only in the first block of a process: torch 2.13 does not delete those of
    later blocks.

    Args:
        world: The World that `bootstrap` returned.
        options: The options of `init_rpc`: timeout, number of threads, device maps.

    Yields:
        The names of the ranks, by rank: `rank0`, `rank1` and so on.

    Raises:
        TypeError: If `world` is not a World.
        MpicommError: If RPC is initialised already, as in another block, or if `rpc.shutdown()` times out at the end of
            a block after the first one.
    """
    require_world(world)
    _require_no_agent()
    number = next(_blocks)
    names = [f"rank{rank}" for rank in range(world.size)]
    with _selected_interface(world), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_OWN_WARNING)
        rpc.init_rpc(
            names[world.rank],
            rank=world.rank,
            world_size=world.size,
            rpc_backend_options=options,
        )
    yield names
    _shut_down(number)


def _require_no_agent() -> None:
    try:
        name = rpc.get_worker_info().name
    except RuntimeError:  # RPC is not initialised
        return
    raise MpicommError(
        f"rpc.workers() needs a process without an RPC agent, got one with the agent {name!r}.\n"
        f"Use one block of workers() instead of nested ones, and do not call init_rpc() before it."
    )


def _shut_down(number: int) -> None:
    """End the block with this number, which waits until no rank has pending calls (collective)."""
    try:
        rpc.shutdown()
    except dist.DistStoreError as error:
        if number == 1:
            raise
        # Found by trials with torch 2.13; probably the first rpc.shutdown() of a process ends torch's RRefContext for
        # good, so that users of later references do not release them, and their owners wait.
        raise MpicommError(
            f"rpc.shutdown() timed out at the end of block {number} of rpc.workers(): torch deletes remote references "
            f"(rpc.remote) only in the first block of a process.\n"
            f"Use one block for all calls, or create remote references only in the first block."
        ) from error


@contextlib.contextmanager
def _selected_interface(world: World) -> Iterator[None]:
    """Let TensorPipe listen on the job's network: by default it uses the address to which the host's name resolves.

    That address may be 127.0.1.1, at which other nodes do not reach this one.
    """
    interface = interfaces.towards(world.master_addr)
    if interface is None or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
