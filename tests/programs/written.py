"""Handwritten programs, each for one interleaving of operations; all are legal on Gloo.

A program is a function of rank, size and groups that returns tensors by name. `PROGRAMS` contains all of them by name.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.programs.sets import GroupSet, Program, Results
from tests.worlds import Group

PROGRAMS: dict[str, Program] = {}

BIG = 1 << 21  # floats, 8 MiB: more than any backend sends before the receive is posted


def program(run: Program) -> Program:
    """Add a program to `PROGRAMS`."""
    PROGRAMS[run.__name__] = run
    return run


def full(count: int, value: float) -> torch.Tensor:
    return torch.full((count,), float(value))


def start(tensor: torch.Tensor, group: Group) -> dist.Work:
    """Start an all_reduce."""
    return dist.all_reduce(tensor, group=group.handle, async_op=True)


def numbered(tensors: list[torch.Tensor]) -> Results:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


# -- collectives and messages ------------------------------------------------------------------------------------------


@program
def message_inside_an_all_reduce(rank: int, size: int, groups: GroupSet) -> Results:
    """Rank 0 starts an all_reduce, receives, then waits; rank 1 sends, then calls all_reduce."""
    group, total, message = groups["world"].handle, full(1000, rank), full(BIG, -1)
    work = dist.all_reduce(total, group=group, async_op=True) if rank == 0 else None
    if rank == 0:
        dist.recv(message, group_src=1, group=group)
    elif rank == 1:
        dist.send(full(BIG, 5), group_dst=0, group=group)
    if work is None:
        dist.all_reduce(total, group=group)
    else:
        work.wait()
    return {"total": total, "message": message}


@program
def large_messages_cross_collectives(rank: int, size: int, groups: GroupSet) -> Results:
    world, copy, received = groups["world"], groups["copy"], full(BIG, -1)
    send = dist.isend(full(BIG, rank), group_dst=(rank + 1) % size, group=world.handle)
    first, second = full(BIG // 2, rank), full(BIG // 4, 2 * rank)
    works = [start(first, world), start(second, copy)]
    receive = dist.irecv(received, group_src=(rank - 1) % size, group=world.handle)
    third = full(BIG // 8, rank + 1)
    dist.broadcast(third, group_src=size - 1, group=world.handle)
    for work in [receive, *works, send]:
        work.wait()
    return numbered([first, second, third, received])


@program
def any_source_beside_a_collective(rank: int, size: int, groups: GroupSet) -> Results:
    """Rank 0 answers requests from any source while an all_reduce is in progress."""
    group, total, rounds = groups["world"], full(10, rank), 5
    answers = full(rounds, -1)
    work = start(total, group)
    if rank == 0:
        for _ in range(rounds * (size - 1)):
            request = full(1, 0)
            client = dist.recv(request, group=group.handle, tag=1)
            dist.send(request * 10 + client, group_dst=client, group=group.handle, tag=2)
    else:
        for number in range(rounds):
            dist.send(full(1, number + 1), group_dst=0, group=group.handle, tag=1)
            dist.recv(answers[number : number + 1], group_src=0, group=group.handle, tag=2)
    work.wait()
    return {"total": total, "answers": answers}


@program
def tags_out_of_order(rank: int, size: int, groups: GroupSet) -> Results:
    group, after, before = groups["world"], (rank + 1) % size, (rank - 1) % size
    total = full(1000, rank)
    sends = [dist.isend(full(3, tag), group_dst=after, group=group.handle, tag=tag) for tag in (7, 1, 5)]
    work = start(total, group)
    received = [full(3, -1) for _ in range(3)]
    for tensor, tag in zip(received, (5, 7, 1), strict=True):
        dist.recv(tensor, group_src=before, group=group.handle, tag=tag)
    for each in [work, *sends]:
        each.wait()
    return numbered([*received, total])


# -- several groups ----------------------------------------------------------------------------------------------------


@program
def synchronous_on_one_group_inside_another(rank: int, size: int, groups: GroupSet) -> Results:
    outer = full(200_000, rank)
    work = start(outer, groups["world"])
    inner = full(10, 1 + rank)
    for kind in ("copy", "parity", "left", "right"):
        if kind in groups.named:
            dist.all_reduce(inner, group=groups[kind].handle)
    work.wait()
    return {"outer": outer, "inner": inner}


@program
def short_lived_group(rank: int, size: int, groups: GroupSet) -> Results:
    """The works of the group are complete, but neither waited for nor dropped when the group is destroyed."""
    outer, inner = full(10, rank), []
    work = start(outer, groups["world"])
    for _ in range(2):
        group = groups.make(range(size))
        tensors = [full(1000, rank + number) for number in range(5)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        dist.barrier(group=group)
        dist.destroy_process_group(group)
        inner += tensors
        del works
    work.wait()
    return numbered([outer, *inner])


# -- work objects ------------------------------------------------------------------------------------------------------


@program
def a_callback_starts_operations(rank: int, size: int, groups: GroupSet) -> Results:
    """The callback calls operations on the same group and on another group; its own callback calls a third one."""
    tensor, other, last = full(1000, rank), full(10, rank), full(3, rank)

    def further(future: torch.futures.Future) -> torch.Tensor:
        dist.all_reduce(future.value()[0], group=groups["world"].handle)
        start(other, groups["copy"]).wait()
        return other

    def furthest(_future: torch.futures.Future) -> torch.Tensor:
        dist.broadcast(last, group_src=size - 1, group=groups["world"].handle)
        return last

    work = start(tensor, groups["world"])
    work.get_future().then(further).then(furthest).wait()
    return {"tensor": tensor, "other": other, "last": last}


@program
def a_callback_sends_messages(rank: int, size: int, groups: GroupSet) -> Results:
    group, tensor, received = groups["world"], full(1000, rank), full(BIG, -1)

    def exchange(_future: torch.futures.Future) -> None:
        send = dist.isend(full(BIG, rank), group_dst=(rank + 1) % size, group=group.handle)
        dist.recv(received, group_src=(rank - 1) % size, group=group.handle)
        send.wait()

    start(tensor, group).get_future().then(exchange).wait()
    return {"tensor": tensor, "received": received}
