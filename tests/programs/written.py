"""Handwritten programs, each for one interleaving of operations; all are legal on Gloo.

A program is a function of rank, size and groups that returns tensors by name. `PROGRAMS` contains all of them by name.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.programs.both import Program, Results
from tests.programs.sets import GroupSet
from tests.worlds import Group

PROGRAMS: dict[str, Program] = {}

BIG = 1 << 21  # floats, 8 MiB: more than any backend sends before the receive is posted


def program(run: Program) -> Program:
    """Add a program to `PROGRAMS`."""
    PROGRAMS[run.__name__] = run
    return run


def program_of_ranks(least: int) -> Callable[[Program], Program]:
    """Add a program to `PROGRAMS`, where it does nothing on fewer than `least` ranks."""

    def take(run: Program) -> Program:
        @program
        @functools.wraps(run)
        def run_with_enough(rank: int, size: int, groups: GroupSet) -> Results:
            return run(rank, size, groups) if size >= least else {}

        return run_with_enough

    return take


def full(count: int, value: float) -> torch.Tensor:
    return torch.full((count,), float(value))


def start(tensor: torch.Tensor, group: Group) -> dist.Work:
    """Start an all_reduce."""
    return dist.all_reduce(tensor, group=group.handle, async_op=True)


def numbered(tensors: list[torch.Tensor]) -> Results:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


# -- collectives and messages ------------------------------------------------------------------------------------------


@program_of_ranks(2)
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


@program_of_ranks(2)
def receives_posted_long_before(rank: int, size: int, groups: GroupSet) -> Results:
    group, others = groups["world"], [each for each in range(size) if each != rank]
    received = {(src, tag): full(1 + tag * 20_000, -1) for src in others for tag in range(4)}
    works = [dist.irecv(tensor, group_src=src, group=group.handle, tag=tag) for (src, tag), tensor in received.items()]
    totals = [full(100, rank) for _ in range(3)]
    for total in totals:
        dist.all_reduce(total, group=group.handle)
    sends = []
    for tag in reversed(range(4)):
        sends += [
            dist.isend(full(1 + tag * 20_000, rank * 10 + tag), group_dst=dst, group=group.handle, tag=tag)
            for dst in others
        ]
        works.pop().wait()
        dist.barrier(group=group.handle)
    for work in [*works, *sends]:
        work.wait()
    return numbered([*received.values(), *totals])


@program_of_ranks(2)
def large_sends_before_any_receive(rank: int, size: int, groups: GroupSet) -> Results:
    group, after, before = groups["copy"].handle, (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(full(BIG, rank), group_dst=peer, group=group, tag=peer) for peer in {after, before}]
    dist.barrier(group=group)
    received = {peer: full(BIG, -1) for peer in sorted({after, before})}
    for peer, tensor in received.items():
        dist.recv(tensor, group_src=peer, group=group, tag=rank)
    for work in sends:
        work.wait()
    return numbered(list(received.values()))


@program_of_ranks(2)
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


@program_of_ranks(2)
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


@program_of_ranks(2)
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


@program_of_ranks(2)
def pipeline(rank: int, size: int, groups: GroupSet) -> Results:
    """Micro-batches pass from stage to stage; a second group reduces each of them."""
    group, side = groups["world"], groups["copy"]
    totals, sends, works = [], [], []
    for batch in range(6):
        tensor = full(50_000, batch)
        if rank > 0:
            dist.recv(tensor, group_src=rank - 1, group=group.handle)
        tensor += 1
        if rank < size - 1:
            sends.append(dist.isend(tensor, group_dst=rank + 1, group=group.handle))
        totals.append(tensor.clone())
        works.append(start(totals[-1], side))
    for work in [*works, *sends]:
        work.wait()
    return numbered(totals)


@program_of_ranks(2)
def halo_exchange(rank: int, size: int, groups: GroupSet) -> Results:
    """Each step starts with the borders of the neighbours, while the all_reduce of the previous norm is in progress."""
    group, field = groups["world"].handle, torch.arange(100.0) + rank
    norm, work = full(1, 0), None
    norms = []
    for _ in range(8):
        borders = {peer: full(1, 0) for peer in (rank - 1, rank + 1) if 0 <= peer < size}
        works = [dist.irecv(each, group_src=peer, group=group) for peer, each in borders.items()]
        edges = {rank - 1: field[:1].clone(), rank + 1: field[-1:].clone()}
        works += [dist.isend(edges[peer], group_dst=peer, group=group) for peer in borders]
        for each in works:
            each.wait()
        field += sum(borders.values(), full(1, 0)).fmod(3)
        if work is not None:
            work.wait()
        norm = field.sum().reshape(1).fmod(1000)
        norms.append(norm)
        work = dist.all_reduce(norm, group=group, async_op=True)
    work.wait()
    return numbered([field, *norms])


# -- several groups ----------------------------------------------------------------------------------------------------


@program
def groups_in_different_order(rank: int, size: int, groups: GroupSet) -> Results:
    """Groups are independent: odd and even ranks use them in different orders."""
    kinds = ["world", "copy"] if rank % 2 else ["copy", "world"]
    tensors = {kind: [full(count, rank) for count in (1, 1000, 300_000)] for kind in ("world", "copy")}
    works = [start(tensor, groups[kind]) for kind in kinds for tensor in tensors[kind]]
    for work in works:
        work.wait()
    return numbered([*tensors["world"], *tensors["copy"]])


@program
def overlapping_groups_in_different_order(rank: int, size: int, groups: GroupSet) -> Results:
    kinds = [kind for kind in ("left", "right", "parity", "world") if kind in groups]
    tensors = {kind: full(20_000, 1 + rank) for kind in kinds}
    order = kinds if rank % 2 else kinds[::-1]
    works = [start(tensors[kind], groups[kind]) for kind in order]
    for work in works:
        work.wait()
    return dict(tensors)


@program
def synchronous_on_one_group_inside_another(rank: int, size: int, groups: GroupSet) -> Results:
    outer = full(200_000, rank)
    work = start(outer, groups["world"])
    inner = full(10, 1 + rank)
    for kind in ("copy", "parity", "left", "right"):
        if kind in groups:
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
def waits_in_reverse_order(rank: int, size: int, groups: GroupSet) -> Results:
    kinds = ["world", "copy", "parity"]
    tensors = [full(1 + 500 * number, rank + number) for number in range(30)]
    works = [start(tensor, groups[kinds[number % 3]]) for number, tensor in enumerate(tensors)]
    for work in reversed(works):
        work.wait()
    return numbered(tensors)


@program
def waits_on_other_threads(rank: int, size: int, groups: GroupSet) -> Results:
    tensors = [full(5000, rank + number) for number in range(8)]
    works = [start(tensor, groups["world" if number % 2 else "copy"]) for number, tensor in enumerate(tensors)]
    threads = [threading.Thread(target=work.wait) for work in works]
    for thread in threads:
        thread.start()
    last = full(7, rank)
    dist.all_reduce(last, group=groups["world"].handle)
    for thread in threads:
        thread.join()
    return numbered([*tensors, last])


@program
def synchronous_behind_asynchronous(rank: int, size: int, groups: GroupSet) -> Results:
    group = groups["world"]
    tensors = [full(30_000, rank + number) for number in range(6)]
    works = [start(tensor, group) for tensor in tensors]
    last = full(4, rank)
    dist.all_reduce(last, group=group.handle)
    dist.broadcast(last[:2], group_src=0, group=group.handle)
    gathered = [full(4, -1) for _ in range(size)]
    dist.all_gather(gathered, last, group=group.handle)
    for work in works:
        work.wait()
    return numbered([*tensors, *gathered])


@program
def dropped_works(rank: int, size: int, groups: GroupSet) -> Results:
    group = groups["world"]
    tensors = [full(10_000, rank + number) for number in range(10)]
    for tensor in tensors:
        start(tensor, group)
    dist.barrier(group=group.handle)
    return numbered(tensors)


@program
def asynchronous_barriers(rank: int, size: int, groups: GroupSet) -> Results:
    group, tensors, works = groups["world"], [full(100, rank) for _ in range(4)], []
    for tensor in tensors:
        works += [start(tensor, group), dist.barrier(group=group.handle, async_op=True)]
    for work in reversed(works):
        work.wait()
    return numbered(tensors)


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


@program_of_ranks(2)
def a_callback_sends_messages(rank: int, size: int, groups: GroupSet) -> Results:
    group, tensor, received = groups["world"], full(1000, rank), full(BIG, -1)

    def exchange(_future: torch.futures.Future) -> None:
        send = dist.isend(full(BIG, rank), group_dst=(rank + 1) % size, group=group.handle)
        dist.recv(received, group_src=(rank - 1) % size, group=group.handle)
        send.wait()

    start(tensor, group).get_future().then(exchange).wait()
    return {"tensor": tensor, "received": received}


# -- typical combinations ----------------------------------------------------------------------------------------------


@program
def buckets(rank: int, size: int, groups: GroupSet) -> Results:
    """Data-parallel training: buffer broadcasts, averages of buckets as they complete, a flag on another group."""
    group, control = groups["world"], groups["copy"]
    weights = [full(count, 1) for count in (300_000, 10_000, 70_000, 100)]
    flag = torch.ones(1, dtype=torch.int32)
    for step in range(4):
        buffer = full(16, 10 * rank + step)
        dist.broadcast(buffer, group_src=0, group=group.handle)
        agreed = dist.all_reduce(flag, dist.ReduceOp.MAX, group=control.handle, async_op=True)
        futures = []
        for weight in reversed(weights):
            gradient = (weight + rank + buffer[0]).fmod(8)
            futures.append(start(gradient, group).get_future().then(lambda future: future.value()[0] / size))
        for weight, future in zip(reversed(weights), futures, strict=True):
            weight.sub_(future.wait())
        agreed.wait()
    return numbered(weights)


@program
def objects_between_tensors(rank: int, size: int, groups: GroupSet) -> Results:
    group, tensors = groups["world"], [full(50_000, rank), full(10, 2 * rank)]
    first = start(tensors[0], group)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "data": "x" * 100 * rank}, group=group.handle)
    second = start(tensors[1], group)
    lists: list[object] = [objects] if rank == 0 else [None]
    dist.broadcast_object_list(lists, group_src=0, group=group.handle)
    second.wait()
    first.wait()
    assert lists[0] == [{"rank": each, "data": "x" * 100 * each} for each in range(size)]
    return numbered(tensors)


@program
def every_collective_at_once(rank: int, size: int, groups: GroupSet) -> Results:
    group, mine, many = groups["world"].handle, full(500, rank), torch.arange(500.0 * size) + rank
    gathered = [full(500, -1) for _ in range(size)]
    collected = [full(500, -1) for _ in range(size)] if rank == 0 else None
    dealt = list(many.chunk(size)) if rank == size - 1 else None
    whole, block, share, swapped, total = full(500 * size, -1), full(500, -1), full(500, -1), many * 0, full(500, rank)
    works = [
        dist.all_gather(gathered, mine, group=group, async_op=True),
        dist.gather(mine, collected, group_dst=0, group=group, async_op=True),
        dist.scatter(share, dealt, group_src=size - 1, group=group, async_op=True),
        dist.all_gather_single(whole, mine, group=group, async_op=True),
        dist.reduce_scatter_single(block, many, group=group, async_op=True),
        dist.all_to_all_single(swapped, many, group=group, async_op=True),
        dist.reduce(total, group_dst=0, group=group, async_op=True),
    ]
    for work in reversed(works):
        work.wait()
    results = [*gathered, *(collected or []), share, whole, block, swapped]
    return numbered([*results, total] if rank == 0 else results)


@program_of_ranks(3)
def a_callback_added_late(rank: int, size: int, groups: GroupSet) -> Results:
    """Two operations are queued, then the first gets a callback; on other ranks possibly not."""
    group, first, second, third = groups["world"], full(3, rank), full(1000, rank), full(5, rank)
    if rank == size - 1:
        time.sleep(0.1)
    works = [start(first, group), start(second, group)]
    if rank == 1:
        for work in works:
            work.wait()
    works[0].get_future().then(lambda _future: dist.all_reduce(third, group=group.handle)).wait()
    works[1].wait()
    return numbered([first, second, third])
