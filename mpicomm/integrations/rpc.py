"""torch.distributed.rpc on the job's store and network."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

from torch.distributed import rpc

from mpicomm.integrations import serving
from mpicomm.session import World
from mpicomm.startup import interfaces

_INTERFACE = "TP_SOCKET_IFNAME"
# init_rpc() itself makes a group of the class ProcessGroupGloo, and calls all_gather_object on it.
_OWN_WARNING = "You are using a Backend .*ProcessGroupGloo.* as a ProcessGroup"


@contextlib.contextmanager
def workers(world: World, *, options: rpc.TensorPipeRpcBackendOptions | None = None) -> Iterator[list[str]]:
    """Let every rank serve remote procedure calls during the block (collective).

    Calls `init_rpc` with the job's store, and `rpc.shutdown()` at the end of the block, which waits until no rank has
    pending calls. If the block raises an exception, it propagates without waiting.

    Args:
        world: The World that `bootstrap` returned.
        options: The options of `init_rpc`: timeout, number of threads, device maps.

    Yields:
        The names of the ranks, by rank: `rank0`, `rank1` and so on.

    Raises:
        TypeError: If `world` is not a World.
    """
    serving.WORLD.check(world, "world")
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
    rpc.shutdown()


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
