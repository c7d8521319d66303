"""Lets programs that do not call `bootstrap()` run unchanged as ranks.

At the end of `import torch`, torch calls `watch`, by the entry point `torch.backends` for extensions. It changes
nothing in a process that no launcher of ranks has started.

- Under `mpicomm run`, `init_process_group("env://")` connects to the store of `mpicomm run`. With `--backend`, it calls
  `bootstrap()` in place of starting the program's backend.
- After an unhandled exception whose cause is the launch, the remedy follows the traceback (`mpicomm.remedies`).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from mpicomm.errors import LaunchError
from mpicomm.launch.known_launchers import MPI_LAUNCHERS, SLURM
from mpicomm.settings import PARENT_VARIABLE, REPLACED_BACKEND, STORE_OF_RANK

_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # with 1, torch's store on rank 0 ignores that it cannot bind a port
_METHOD = "env://"
_IN_A_CHILD = (
    "init_process_group() was called in {}, a process that rank {} has started by multiprocessing. Every rank would "
    "start a job at the same address.\n"
    "If these processes are the ranks: call their function in the program itself, without torch.multiprocessing, or "
    "start the program by python.\n"
    'For a group of its own in each rank, pass another address: init_method="tcp://127.0.0.1:PORT".'
)


def watch() -> None:
    """Watch this process if it is a rank."""
    if os.environ.get(STORE_OF_RANK) or os.environ.get(REPLACED_BACKEND):
        _wrap_init_process_group()
    if any(os.environ.get(launcher.rank) for launcher in (*MPI_LAUNCHERS, SLURM)):
        from mpicomm import remedies

        sys.excepthook = remedies.Hook(sys.excepthook)


def _wrap_init_process_group() -> None:
    """Replace init_process_group() in the modules of torch that have imported it."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    original, numbers = dist.init_process_group, itertools.count()

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, init_method: str | None = None, **others: Any) -> None:
        has_own_address = others.get("store") is not None or init_method not in (None, _METHOD)
        is_client = not has_own_address and _is_address_of_store(os.environ)
        is_child = multiprocessing.parent_process() is not None
        if is_client and is_child and PARENT_VARIABLE in os.environ:
            raise LaunchError(_IN_A_CHILD.format(multiprocessing.current_process().name, os.environ.get("RANK")))
        if (replacement := os.environ.get(REPLACED_BACKEND)) and not is_child:
            _bootstrap(replacement, has_own_address=has_own_address, **others)
            return
        if is_client:
            original(backend, **{**others, **_at_store(next(numbers), **others)})
        else:
            with _without_agent_store(os.environ):
                original(backend, init_method, **others)

    for module in [*sys.modules.values()]:
        if vars(module).get("init_process_group") is original:
            vars(module)["init_process_group"] = init_process_group


def _bootstrap(
    backend: str,
    *,
    has_own_address: bool,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    device_id: Any = None,
    **_others: Any,
) -> None:
    """Call `bootstrap()` in place of init_process_group() with these arguments."""
    import torch.distributed as dist

    from mpicomm.job import session
    from mpicomm.job.bootstrap import bootstrap
    from mpicomm.job.shutdown import shutdown

    if has_own_address:
        raise LaunchError(
            f"--backend {backend} replaces init_process_group() with the method env://, and the program passes a store "
            f"or another method.\nRemove --backend, or call mpicomm.bootstrap({backend!r}) in the program."
        )
    if (last := session.current()) is not None and last.is_open and not dist.is_initialized():
        shutdown()
    world = bootstrap(backend, timeout=timeout, device=device_id)
    if rank not in (-1, world.rank) or world_size not in (-1, world.size):
        raise LaunchError(
            f"init_process_group() got rank={rank} and world_size={world_size} on rank {world.rank} of {world.size}.\n"
            f"With --backend, all ranks form one group: omit these arguments, or remove --backend."
        )


def _is_address_of_store(environ: Mapping[str, str]) -> bool:
    return environ.get(STORE_OF_RANK) == f"{environ.get('MASTER_ADDR')} {environ.get('MASTER_PORT')}"


def _at_store(
    number: int, *, rank: int = -1, world_size: int = -1, timeout: datetime.timedelta | None = None, **_others: Any
) -> dict[str, Any]:
    """Return the arguments with which torch starts the group of this number at the store of `mpicomm run`.

    Each has keys of its own: a group that is started anew must not find the addresses of the first one.
    """
    import torch.distributed as dist

    rank = int(os.environ["RANK"]) if rank == -1 else rank
    size = int(os.environ["WORLD_SIZE"]) if world_size == -1 else world_size
    limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False, **limit)
    return {"store": dist.PrefixStore(str(number), store), "rank": rank, "world_size": size}


@contextlib.contextmanager
def _without_agent_store(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let rank 0 start a store at an address of the program, or report that it cannot."""
    before = environ.pop(_USE_AGENT_STORE, None)
    try:
        yield
    finally:
        if before is not None:
            environ[_USE_AGENT_STORE] = before
