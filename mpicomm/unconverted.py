"""Lets programs that do not call `bootstrap()` run unchanged as ranks.

At the end of `import torch`, torch calls `watch`, by the entry point `torch.backends` for extensions. It changes
nothing in a process that no launcher of ranks has started.

- Under `mpicomm run`, `init_process_group("env://")` connects to the store of `mpicomm run`. With `--backend`, it calls
  `bootstrap()` in place of starting the program's backend.
- After an unhandled exception whose cause is the launch, the remedy follows the traceback (`mpicomm.remedies`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import inspect
import itertools
import multiprocessing
import os
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from mpicomm.errors import LaunchError
from mpicomm.launch.known_launchers import MPI_LAUNCHERS, SLURM
from mpicomm.settings import ORIGINAL, PARENT_VARIABLE, REPLACED_BACKEND, STORE_OF_RANK

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # with 1, torch's store on rank 0 ignores that it cannot bind a port
_TIMEOUT = datetime.timedelta(minutes=30)  # torch's default for a group
_IN_A_CHILD = (
    "init_process_group() was called as rank {rank} of {size} in {child}, a process that rank {own} has started by "
    "multiprocessing. Each rank would start such processes, and all of them would use one address.\n"
    "If these processes are the ranks: call their function in the program itself, without torch.multiprocessing, or "
    "start the program by python.\n"
    'For a group of its own in each rank, pass another address: init_method="tcp://127.0.0.1:PORT".'
)


@functools.cache  # torch calls it for each installation of mpicomm that it finds
def watch() -> None:
    """Watch this process if it is a rank."""
    backend = os.environ.pop(REPLACED_BACKEND, None)  # not of the programs that this rank starts
    if backend or os.environ.get(STORE_OF_RANK):
        _wrap_init_process_group(backend)
    if any(os.environ.get(launcher.rank) for launcher in (*MPI_LAUNCHERS, SLURM)):
        from mpicomm import remedies

        sys.excepthook = remedies.Hook(sys.excepthook)


def _wrap_init_process_group(backend: str | None) -> None:
    """Replace init_process_group() in the modules of torch that have imported it."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    original, numbers = dist.init_process_group, itertools.count()

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        is_child = multiprocessing.parent_process() is not None
        if dist.is_initialized():  # torch's error
            original(*args, **kwargs)
        elif backend is not None and not is_child:
            _bootstrap(backend, given)
        elif (store := _Store.of(given, os.environ)) is None:
            with _without_agent_store(os.environ):
                original(*args, **kwargs)
        else:
            if is_child and PARENT_VARIABLE in os.environ:
                _refuse_spawned_rank(store)
            original(**{**given, "init_method": None, **store.arguments(next(numbers))})

    vars(init_process_group)[ORIGINAL] = original
    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", {})  # some programs put None and other objects there
        if names.get("init_process_group") is original:
            names["init_process_group"] = init_process_group


@dataclasses.dataclass(frozen=True)
class _Store:
    """The store of `mpicomm run`, as a call of init_process_group() uses it."""

    address: str
    port: int
    rank: int
    size: int
    timeout: datetime.timedelta

    @classmethod
    def of(cls, given: Mapping[str, Any], environ: Mapping[str, str]) -> _Store | None:
        """Return the store of a call; None if the program passes another store, method or port.

        Args:
            given: The arguments of the call.
            environ: The environment of this process.
        """
        address, _, port = environ.get(STORE_OF_RANK, "").partition(" ")
        method = urllib.parse.urlparse(given.get("init_method") or "env://")
        query = dict(urllib.parse.parse_qsl(method.query))
        used = {"env": environ.get("MASTER_PORT"), "tcp": str(method.port)}.get(method.scheme)
        if given.get("store") is not None or not port or used != port:
            return None
        rank, size = (
            number if (number := given.get(name, -1)) != -1 else int(query.get(name) or environ[variable])
            for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE"))
        )
        return cls(address, int(port), rank, size, given.get("timeout") or _TIMEOUT)

    def arguments(self, group: int) -> dict[str, Any]:
        """Return the arguments with which torch starts the group of this number at the store.

        Each has keys of its own: a group that is started anew must not find the addresses of the first one.
        """
        import torch.distributed as dist

        store = dist.TCPStore(self.address, self.port, self.size, is_master=False, timeout=self.timeout)
        return {"store": dist.PrefixStore(str(group), store), "rank": self.rank, "world_size": self.size}


def _bootstrap(backend: str, given: Mapping[str, Any]) -> None:
    """Call `bootstrap()` in place of init_process_group() with these arguments."""
    from mpicomm.job import session
    from mpicomm.job.bootstrap import bootstrap
    from mpicomm.job.shutdown import shutdown

    if given.get("store") is not None or (given.get("init_method") or "env://") != "env://":
        raise LaunchError(
            f"--backend {backend} replaces init_process_group() with the method env://, and the program passes a store "
            f"or another method.\nRemove --backend, or call mpicomm.bootstrap({backend!r}) in the program."
        )
    if (last := session.current()) is not None and last.is_open:  # after destroy_process_group()
        shutdown()
    world = bootstrap(backend, timeout=given.get("timeout"), device=given.get("device_id"))
    rank, size = given.get("rank", -1), given.get("world_size", -1)
    if rank not in (-1, world.rank) or size not in (-1, world.size):
        raise LaunchError(
            f"init_process_group() got rank={rank} and world_size={size} on rank {world.rank} of {world.size}.\n"
            f"With --backend, all ranks form one group: omit these arguments, or remove --backend."
        )


def _refuse_spawned_rank(store: _Store) -> None:
    """Raise an error if a process that a rank has spawned takes another rank than that of its parent."""
    from mpicomm import rank_variables

    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    own = rank_variables.of_rank(kept)
    if (str(store.rank), str(store.size)) != (own.get("RANK"), own.get("WORLD_SIZE")):
        child = multiprocessing.current_process().name
        raise LaunchError(_IN_A_CHILD.format(rank=store.rank, size=store.size, child=child, own=own.get("RANK")))


@contextlib.contextmanager
def _without_agent_store(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let rank 0 start a store at an address of the program, or report that it cannot."""
    before = environ.pop(_AGENT_STORE, None)
    try:
        yield
    finally:
        if before is not None:
            environ[_AGENT_STORE] = before
