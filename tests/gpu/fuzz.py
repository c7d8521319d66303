"""Random operations on GPU tensors, whose results are compared with values computed on the CPU.

    mpirun -n 2 python -m tests.gpu.fuzz --seeds 0:20 --operations 500

All ranks draw the same operations from the seed: dtypes, layouts, sizes around the length of a chunk, streams, devices
(also the CPU on some ranks), synchronous and asynchronous, tensors that are dropped, overwritten or read around a call.
Without a GPU, the emulated accelerator is used, with an order of its streams from the same seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import mpicomm
from mpicomm.devices import accelerator, vendor_backends
from tests import accelerator as emulated
from tests.torches import all_gather_single, reduce_scatter_single

CHUNK_BYTES = 1024 * int(os.environ.setdefault("MPICOMM_GPU_CHUNK_KIB", "1"))  # read when a group is made
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
SUMMED = [dtype for dtype in DTYPES if dtype is not torch.bool]
LAYOUTS = ["dense", "offset", "strided", "transposed"]
MOST_PENDING = 6
POISON = 77  # a value that no tensor holds
RING = 2**14  # the tag of the messages to the next rank; smaller ones are the numbers of cases


@dataclasses.dataclass
class Case:
    """What all ranks know of one operation."""

    number: int
    kind: str
    dtype: torch.dtype
    count: int
    layout: str
    is_async: bool
    root: int
    host_ranks: frozenset[int]
    """The ranks whose tensors are on the CPU."""

    device: int
    stream: int
    is_dropped: bool
    """Whether the caller drops its inputs after an asynchronous call, or overwrites them after a synchronous one."""

    waits_on: int
    """The stream that is the current one when an asynchronous operation is awaited."""


Check = Callable[[], bool]
"""Returns whether the results of an operation are correct, after it has completed."""


class Fuzz:
    """The operations of one seed on one rank."""

    def __init__(self, world: mpicomm.World, seed: int) -> None:
        self.rank, self.size = world.rank, world.size
        self.draws = random.Random(seed)
        self.kind = accelerator.current_device().type
        self.num_devices = accelerator.count()
        self.streams = [self._streams_of(index) for index in range(self.num_devices)]
        self.pending: list[tuple[Case, list[Any], Check]] = []
        self.wrong: list[Case] = []

    def _streams_of(self, index: int) -> list[torch.Stream]:
        device = torch.device(self.kind, index)
        return [accelerator.current_stream(device), torch.Stream(device), torch.Stream(device)]

    def draw(self, number: int) -> Case:
        draws = self.draws
        kind = draws.choice(sorted(OPERATIONS))
        dtype = draws.choice(SUMMED if "reduce" in kind else DTYPES)
        chunk = CHUNK_BYTES // dtype.itemsize
        count = draws.choice([0, 1, 2, 7, chunk // 2, chunk - 1, chunk, chunk + 1, 2 * chunk + 1, 5 * chunk + 3])
        hosts = frozenset(rank for rank in range(self.size) if draws.random() < 0.5) if draws.random() < 0.2 else ()
        return Case(
            number, kind, dtype, count, draws.choice(LAYOUTS), draws.random() < 0.6, draws.randrange(self.size),
            frozenset(hosts), draws.randrange(self.num_devices) if draws.random() < 0.2 else 0, draws.randrange(3),
            draws.random() < 0.5, draws.randrange(3),
        )  # fmt: skip

    # -- tensors ---------------------------------------------------------------------------------------------------

    def expected(self, case: Case, rank: int, count: int | None = None) -> torch.Tensor:
        """Return the content of a rank's input, on the CPU: numbers whose sums are exact in every dtype."""
        count = case.count if count is None else count
        return ((torch.arange(count) + 3 * rank + case.number) % 5).to(case.dtype)

    def place(self, case: Case, content: torch.Tensor) -> torch.Tensor:
        """Return a tensor with this content in the case's layout, which the device receives late."""
        if self.rank in case.host_ranks:
            return laid_out(content, case.layout)
        device = torch.device(self.kind, case.device)
        if self.kind == "cpu":
            return laid_out(content, case.layout)
        memory = content.pin_memory() if content.numel() else content
        return laid_out(memory.to(device, non_blocking=True), case.layout)

    def blank(self, case: Case, count: int) -> torch.Tensor:
        return self.place(case, torch.full((count,), 1).to(case.dtype))

    def on(self, case: Case, stream: int) -> Any:
        return accelerator.on_stream(self.streams[case.device][stream])

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, count: int) -> None:
        for number in range(count):
            case = self.draw(number)
            with self.on(case, case.stream):
                works, check = OPERATIONS[case.kind](self, case)
                self.scribble(case)
            self.pending.append((case, works, check))
            if not case.is_async or len(self.pending) > MOST_PENDING:
                self.finish(0 if self.draws.random() < 0.7 else len(self.pending) // 2)
        self.finish(0)

    def scribble(self, case: Case) -> None:
        """Allocate and overwrite memory that the allocator considers free."""
        if self.rank not in case.host_ranks:
            for _ in range(2):
                device = torch.device(self.kind, case.device)
                torch.empty(max(case.count, 1), dtype=case.dtype, device=device).fill_(POISON)

    def finish(self, remaining: int) -> None:
        """Wait for operations, in the order of the calls; leave some pending."""
        while len(self.pending) > remaining:
            case, works, check = self.pending.pop(0)
            with self.on(case, case.waits_on if case.is_async else case.stream):
                for work in works:
                    if work is not None:
                        work.wait()
                if not check():
                    self.wrong.append(case)


def laid_out(content: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor with this content and another layout of memory, filled on the content's device."""
    count = content.numel()
    if layout == "dense" or not count:
        return content if content.is_cpu or content.is_pinned() else content.clone()
    if layout == "offset":
        whole = content.new_full((count + 3,), 1)
        target = whole[3:]
    elif layout == "strided":
        target = content.new_full((count, 2), 1)[:, 1]
    else:
        rows = next(number for number in (5, 4, 3, 2, 1) if count % number == 0)
        target = content.new_full((count // rows, rows), 1).t()
    target.copy_(content.view(target.shape))
    return target


def is_equal(tensor: torch.Tensor, content: torch.Tensor) -> bool:
    return torch.equal(tensor.cpu().reshape(-1), content)


def total(fuzz: Fuzz, case: Case, count: int | None = None) -> torch.Tensor:
    contents = [fuzz.expected(case, rank, count) for rank in range(fuzz.size)]
    return sum(contents[1:], contents[0].clone())


def dropped(case: Case, tensor: torch.Tensor) -> torch.Tensor | None:
    """Overwrite an input after a synchronous call; return it if it is still needed."""
    if not case.is_async and tensor.numel():
        tensor.fill_(1)
    return None if case.is_dropped else tensor


# -- operations: each returns its works and the check of its results ---------------------------------------------------

Started = tuple[list[Any], Check]
OPERATIONS: dict[str, Callable[[Fuzz, Case], Started]] = {}


def operation(function: Callable[[Fuzz, Case], Started]) -> Callable[[Fuzz, Case], Started]:
    OPERATIONS[function.__name__] = function
    return function


@operation
def all_reduce(fuzz: Fuzz, case: Case) -> Started:
    tensor = fuzz.place(case, fuzz.expected(case, fuzz.rank))
    before = tensor.clone()  # read late, before the result replaces the content
    work = dist.all_reduce(tensor, async_op=case.is_async)
    return [work], lambda: is_equal(tensor, total(fuzz, case)) and is_equal(before, fuzz.expected(case, fuzz.rank))


@operation
def dropped_all_reduce(fuzz: Fuzz, case: Case) -> Started:
    work = dist.all_reduce(fuzz.place(case, fuzz.expected(case, fuzz.rank)), async_op=True)
    return [work], lambda: is_equal(work.result()[0], total(fuzz, case))


@operation
def reduce(fuzz: Fuzz, case: Case) -> Started:
    tensor = fuzz.place(case, fuzz.expected(case, fuzz.rank))
    work = dist.reduce(tensor, case.root, async_op=case.is_async)
    content = total(fuzz, case) if fuzz.rank == case.root else fuzz.expected(case, fuzz.rank)
    return [work], lambda: is_equal(tensor, content)


@operation
def broadcast(fuzz: Fuzz, case: Case) -> Started:
    tensor = fuzz.place(case, fuzz.expected(case, fuzz.rank))
    work = dist.broadcast(tensor, case.root, async_op=case.is_async)
    return [work], lambda: is_equal(tensor, fuzz.expected(case, case.root))


@operation
def reduce_scatter(fuzz: Fuzz, case: Case) -> Started:
    sources = fuzz.place(case, fuzz.expected(case, fuzz.rank, fuzz.size * case.count))
    output = fuzz.blank(case, case.count)
    old = output.clone()
    flat = sources.reshape(-1) if case.layout == "transposed" else sources
    work = reduce_scatter_single(output, flat, async_op=case.is_async)
    block = slice(fuzz.rank * case.count, (fuzz.rank + 1) * case.count)
    content = total(fuzz, case, fuzz.size * case.count)[block]
    kept = dropped(case, flat)
    return [
        work
    ], lambda: is_equal(output, content) and is_equal(old, torch.ones(case.count).to(case.dtype)) and (kept, True)[1]


@operation
def all_gather(fuzz: Fuzz, case: Case) -> Started:
    source = fuzz.place(case, fuzz.expected(case, fuzz.rank))
    output = fuzz.blank(case, fuzz.size * case.count)
    if case.layout == "transposed":
        output = fuzz.blank(dataclasses.replace(case, layout="dense"), fuzz.size * case.count)
        source = source.reshape(-1)
    work = all_gather_single(output, source, async_op=case.is_async)
    dropped(case, source)
    content = torch.cat([fuzz.expected(case, rank) for rank in range(fuzz.size)])
    del source
    return [work], lambda: is_equal(output, content)


@operation
def all_gather_within(fuzz: Fuzz, case: Case) -> Started:
    """The source is a part of the output: this rank's block, as in FSDP, or one that other blocks overwrite."""
    output = fuzz.blank(dataclasses.replace(case, layout="dense"), fuzz.size * case.count)
    start = fuzz.rank * case.count if case.layout == "dense" else (fuzz.size - 1) * case.count // 2
    source = output[start : start + case.count]
    content = fuzz.expected(case, fuzz.rank)
    source.copy_(content if source.is_cpu or not case.count else content.pin_memory(), non_blocking=True)
    work = all_gather_single(output, source, async_op=case.is_async)
    return [work], lambda: is_equal(output, torch.cat([fuzz.expected(case, rank) for rank in range(fuzz.size)]))


@operation
def all_gather_list(fuzz: Fuzz, case: Case) -> Started:
    source = fuzz.place(case, fuzz.expected(case, fuzz.rank))
    outputs = [fuzz.blank(case, case.count) for _ in range(fuzz.size)]
    work = dist.all_gather(outputs, source, async_op=case.is_async)
    dropped(case, source)
    del source
    return [work], lambda: all(is_equal(output, fuzz.expected(case, rank)) for rank, output in enumerate(outputs))


@operation
def gather(fuzz: Fuzz, case: Case) -> Started:
    source = fuzz.place(case, fuzz.expected(case, fuzz.rank))
    outputs = [fuzz.blank(case, case.count) for _ in range(fuzz.size)] if fuzz.rank == case.root else None
    work = dist.gather(source, outputs, case.root, async_op=case.is_async)
    dropped(case, source)
    del source
    return [work], lambda: all(is_equal(output, fuzz.expected(case, rank)) for rank, output in enumerate(outputs or ()))


@operation
def scatter(fuzz: Fuzz, case: Case) -> Started:
    output = fuzz.blank(case, case.count)
    sources = None
    if fuzz.rank == case.root:
        sources = [fuzz.place(case, fuzz.expected(case, rank)) for rank in range(fuzz.size)]
    work = dist.scatter(output, sources, case.root, async_op=case.is_async)
    for source in sources or ():
        dropped(case, source)
    del sources
    return [work], lambda: is_equal(output, fuzz.expected(case, fuzz.rank))


@operation
def all_to_all(fuzz: Fuzz, case: Case) -> Started:
    dense = dataclasses.replace(case, layout="offset" if case.layout == "transposed" else case.layout)
    source = fuzz.place(dense, fuzz.expected(case, fuzz.rank, fuzz.size * case.count))
    output = fuzz.blank(dense, fuzz.size * case.count)
    work = dist.all_to_all_single(output, source, async_op=case.is_async)
    dropped(case, source)
    del source
    block = slice(fuzz.rank * case.count, (fuzz.rank + 1) * case.count)
    content = torch.cat([fuzz.expected(case, rank, fuzz.size * case.count)[block] for rank in range(fuzz.size)])
    return [work], lambda: is_equal(output, content)


@operation
def uneven_all_to_all(fuzz: Fuzz, case: Case) -> Started:
    rank, size = fuzz.rank, fuzz.size
    counts = [case.count + source for source in range(size)]
    source = fuzz.place(
        dataclasses.replace(case, layout="dense"), fuzz.expected(case, rank, size * (case.count + rank))
    )
    output = fuzz.blank(dataclasses.replace(case, layout="dense"), sum(counts))
    work = dist.all_to_all_single(output, source, counts, [case.count + rank] * size, async_op=case.is_async)
    del source
    contents = [
        fuzz.expected(case, other, size * (case.count + other)).split(case.count + other)[rank]
        if case.count + other
        else fuzz.expected(case, other, 0)
        for other in range(size)
    ]
    return [work], lambda: is_equal(output, torch.cat(contents))


@operation
def ring(fuzz: Fuzz, case: Case) -> Started:
    """Two messages to the next rank, of which the second is on the CPU: their order must be that of the calls."""
    before, after = (fuzz.rank - 1) % fuzz.size, (fuzz.rank + 1) % fuzz.size
    source = fuzz.place(case, fuzz.expected(case, fuzz.rank))
    output, second = fuzz.blank(case, case.count), torch.zeros(case.count, dtype=case.dtype)
    old = output.clone()
    receives = [dist.irecv(output, before, tag=RING), dist.irecv(second, before, tag=RING)]
    sends = [dist.isend(content, after, tag=RING) for content in (source, fuzz.expected(case, fuzz.rank + 1))]
    if not case.is_async:
        for work in sends:
            work.wait()  # type: ignore[union-attr]
        dropped(case, source)
    del source
    works = [*receives, *sends] if case.root else [*sends, *receives]
    return (
        works,
        lambda: (
            is_equal(output, fuzz.expected(case, before))
            and is_equal(second, fuzz.expected(case, before + 1))
            and is_equal(old, torch.ones(case.count).to(case.dtype))
        ),
    )


@operation
def any_source(fuzz: Fuzz, case: Case) -> Started:
    """The root receives a message of each other rank, in any order; the tag is not that of other cases."""
    if fuzz.rank != case.root:
        return [dist.isend(fuzz.place(case, fuzz.expected(case, fuzz.rank)), case.root, tag=case.number)], lambda: True
    outputs = [fuzz.blank(case, case.count) for _ in range(fuzz.size - 1)]
    senders = [dist.recv(output, tag=case.number) for output in outputs]
    return (
        [],
        lambda: (
            sorted(senders) == [rank for rank in range(fuzz.size) if rank != case.root]
            and all(
                is_equal(output, fuzz.expected(case, sender)) for output, sender in zip(outputs, senders, strict=True)
            )
        ),
    )


@operation
def api_all_reduce(fuzz: Fuzz, case: Case) -> Started:
    case = dataclasses.replace(case, host_ranks=frozenset())
    data = {
        "a": fuzz.place(case, fuzz.expected(case, fuzz.rank)),
        "b": [fuzz.place(case, fuzz.expected(case, fuzz.rank, 5)), 1.0],
    }
    result = mpicomm.all_reduce(data, async_op=case.is_async)
    return of_api(result, lambda got: (
        is_equal(got["a"], total(fuzz, case))
        and is_equal(got["b"][0], total(fuzz, case, 5))
        and got["b"][1] == fuzz.size
    ))  # fmt: skip


@operation
def api_all_gather(fuzz: Fuzz, case: Case) -> Started:
    case = dataclasses.replace(case, host_ranks=frozenset())
    result = mpicomm.all_gather((fuzz.place(case, fuzz.expected(case, fuzz.rank)), fuzz.rank), async_op=case.is_async)
    return of_api(result, lambda got: all(
        is_equal(tensor, fuzz.expected(case, rank)) and number == rank for rank, (tensor, number) in enumerate(got)
    ))  # fmt: skip


@operation
def api_broadcast(fuzz: Fuzz, case: Case) -> Started:
    case = dataclasses.replace(case, host_ranks=frozenset())
    data = fuzz.place(case, fuzz.expected(case, fuzz.rank)) if fuzz.rank == case.root else None
    result = mpicomm.broadcast(data, case.root, async_op=case.is_async)
    return of_api(result, lambda got: is_equal(got, fuzz.expected(case, case.root)))


class HandleWork:
    """A handle of the collectives API as a work."""

    def __init__(self, handle: Any) -> None:
        self.handle, self.result = handle, None

    def wait(self) -> None:
        self.result = self.handle.wait()


def of_api(result: Any, check: Callable[[Any], bool]) -> Started:
    if not isinstance(result, mpicomm.Handle):
        return [], lambda: check(result)
    work = HandleWork(result)
    return [work], lambda: check(work.result)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", default="0:1", help="the first seed and the end of the range, as in 0:20")
    parser.add_argument("--operations", type=int, default=500, help="number of operations of each seed")
    options = parser.parse_args(arguments)
    if not torch.accelerator.is_available():
        emulated.register()
    num_wrong = 0
    with mpicomm.bootstrap("mpi") as world:
        first, end = map(int, options.seeds.split(":"))
        for seed in range(first, end):
            num_wrong += run_seed(world, seed, options.operations)
    return 1 if num_wrong else 0


def run_seed(world: mpicomm.World, seed: int, count: int) -> int:
    """Run the operations of a seed; return how many were wrong on any rank (collective)."""
    if vendor_backends.device_type() == emulated.NAME:
        emulated.configure(seed * world.size + world.rank)
    fuzz = Fuzz(world, seed)
    fuzz.run(count)
    for case in fuzz.wrong:
        print(f"seed {seed}, rank {world.rank}: wrong result of {case}", flush=True)
    num_wrong = mpicomm.all_reduce(len(fuzz.wrong))
    if world.rank == 0:
        print(f"seed {seed}: {count} operations on {world.size} ranks, {num_wrong} wrong", flush=True)
    return num_wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
