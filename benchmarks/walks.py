"""The walk of a call through the modules of the package: `mpirun -n 2 python -m benchmarks.walks`.

For each walk it prints the modules in the order in which they are entered, from a trace of all threads of rank 0. A
stay begins where the running function belongs to another module than the one before it on its thread, by a call or by
a return. Calls of C and of other packages do not end a stay.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import mpicomm

_PACKAGE = str(Path(mpicomm.__file__).parent) + "/"
_COUNT = 5  # calls before the trace, so that it has none of the work of a first call
_LARGE = 2**14  # elements of an all_reduce through slots


class Trace:
    """The stays in modules of the package, by thread."""

    def __init__(self) -> None:
        """Trace this thread and all threads that start later."""
        self.is_on = False
        self._stays: dict[str, list[str]] = {}
        self._entries: dict[str, int] = {}
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def __enter__(self) -> None:
        self._stays.clear()
        self._entries.clear()
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False

    def _note(self, frame: types.FrameType, event: str, _argument: object) -> None:
        if not self.is_on or event not in ("call", "return"):
            return
        current = _module_of(frame) if event == "call" else _calling_module(frame)
        if current is None:
            return
        thread = threading.current_thread().name
        stays = self._stays.setdefault(thread, [])
        if not stays or stays[-1] != current:
            stays.append(current)
            self._entries[thread] = self._entries.get(thread, 0) + (event == "call")

    def report(self, name: str) -> None:
        """Print the walk."""
        modules = {module for stays in self._stays.values() for module in stays}
        entries, stays = sum(self._entries.values()), sum(map(len, self._stays.values()))
        print(f"{name}: {entries} entries, {stays} stays, {len(modules)} modules")
        for thread, names in self._stays.items():
            print(f"    {thread}: {' > '.join(names)}")


def _module_of(frame: types.FrameType | None) -> str | None:
    """Return the module of a function of the package."""
    if frame is None or not frame.f_code.co_filename.startswith(_PACKAGE):
        return None
    return frame.f_code.co_filename.removeprefix(_PACKAGE).removesuffix(".py")


def _calling_module(frame: types.FrameType) -> str | None:
    """Return the module of the nearest calling function of the package."""
    caller = frame.f_back
    while caller is not None and _module_of(caller) is None:
        caller = caller.f_back
    return _module_of(caller)


def all_reduce(count: int) -> Callable[[], None]:
    """Return a call of a synchronous all_reduce."""
    tensor = torch.zeros(count)
    return lambda: dist.all_reduce(tensor)


def queued_all_reduce(count: int) -> Callable[[], None]:
    """Return a call of an asynchronous all_reduce, and the wait for it."""
    tensor = torch.zeros(count)

    def run() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    return run


def strided_all_reduce(count: int) -> Callable[[], None]:
    """Return a call of an all_reduce of a tensor that is not contiguous."""
    tensor = torch.zeros(count, 2)[:, 0]
    return lambda: dist.all_reduce(tensor)


WALKS: dict[str, Callable[[], None]] = {}


def main() -> None:
    """Print the walks of rank 0."""
    trace = Trace()
    with mpicomm.bootstrap(backend="mpi") as world:
        WALKS["a synchronous all_reduce"] = all_reduce(1)
        WALKS["a queued all_reduce"] = queued_all_reduce(1)
        WALKS["an all_reduce through slots"] = all_reduce(_LARGE)
        WALKS["an all_reduce of a strided tensor"] = strided_all_reduce(_LARGE)
        for name, run in WALKS.items():
            for _ in range(_COUNT):
                run()
            mpicomm.barrier()
            if world.rank == 0:
                with trace:
                    run()
                trace.report(name)
                sys.stdout.flush()
            else:
                run()
            mpicomm.barrier()


if __name__ == "__main__":
    main()
