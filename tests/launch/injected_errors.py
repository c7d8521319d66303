"""Lets each call of Python's C API in a plain call fail: `mpirun -n 2 python tests/launch/injected_errors.py CASE...`.

The extension module must have been compiled with injected_errors.h. After an error a group is usable on both ranks, or
broken on both. The program prints the number of calls that failed in each case.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import mpicomm
from mpicomm import torch_internals
from mpicomm.native import extension
from tests.time_limits import wait_until

LATE_SECONDS = 0.003  # of rank 1: rank 0 waits for it
RANKS = 2


def options(name: str, *, is_async: bool = False) -> Any:
    opts = getattr(torch_internals, name)()
    opts.asyncOp = is_async
    return opts


def cases(rank: int) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return a method of PlainCalls, and its arguments, for each case."""
    one, other, both = torch.ones(4), torch.ones(4), torch.ones(4 * RANKS)
    parts = list(both.view(RANKS, 4))
    lists = [parts] if rank == 0 else []
    return {
        "all_reduce": ("allreduce", ([one], options("AllreduceOptions"))),
        "asynchronous": ("allreduce", ([one], options("AllreduceOptions", is_async=True))),
        "queued": ("allreduce", ([torch.ones(2**14)], options("AllreduceOptions", is_async=True))),
        "reduce": ("reduce", ([one], options("ReduceOptions"))),
        "reduce_scatter": ("reduce_scatter_single", (one, both, options("ReduceScatterOptions"))),
        "broadcast": ("broadcast", ([one], options("BroadcastOptions"))),
        "all_gather": ("allgather", ([parts], [one], options("AllgatherOptions"))),
        "all_gather_single": ("all_gather_single", (both, one, options("AllgatherOptions"))),
        "gather": ("gather", (lists, [one], options("GatherOptions"))),
        "scatter": ("scatter", ([one], lists, options("ScatterOptions"))),
        "all_to_all": ("all_to_all_single", (one, other, [], [], options("AllToAllOptions"))),
        "barrier": ("barrier", (options("BarrierOptions"),)),
    }


def call(method: Callable[..., Any], arguments: tuple[Any, ...], number: int) -> bool:
    """Call a method, let its call of the C API with this number fail, and wait for its work.

    Returns:
        Whether it has made that call.
    """
    work = None
    arm(number)
    try:
        work = method(*arguments)
    except (MemoryError, mpicomm.MpicommError) as error:  # the latter if the other rank has broken the group
        assert any(text in str(error) for text in ("injected in", "cannot be used any more"))  # noqa: PT017
    left = arm(0)
    if work is not None:
        with contextlib.suppress(mpicomm.MpicommError):
            work.wait()
    return left == 0


def failed_calls(world: mpicomm.World, name: str) -> int:
    """Let one call after the other fail in a case, and return their number (collective)."""
    method, arguments = cases(world.rank)[name]
    group: Any = None
    number = 0
    while True:
        number += 1
        if group is None:
            group = dist.new_group()
            dist.all_reduce(torch.ones(1), group=group)  # opens the shared memory
        plain = getattr(group._plain, method)
        world.comm.Barrier()
        time.sleep(LATE_SECONDS * world.rank)
        has_failed = call(plain, arguments, number)
        is_broken = functools.partial(getattr, group._executor.record, "broken")
        if any(world.comm.allgather(bool(is_broken()))):
            wait_until(is_broken, "this rank learns that the group is broken")
            dist.destroy_process_group(group)
            group = None
        else:
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [world.size] * 2
        if not any(world.comm.allgather(has_failed)):
            return number - 1


if __name__ == "__main__":
    arm = ctypes.PyDLL(str(extension.LIBRARY)).mpicomm_arm
    with mpicomm.bootstrap() as world:
        for name in sys.argv[1:] or cases(world.rank):
            number = failed_calls(world, name)
            if world.rank == 0:
                print(name, number, flush=True)
