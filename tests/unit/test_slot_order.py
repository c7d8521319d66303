"""The order of the memory accesses of the slots: by ThreadSanitizer on the C code, and by a model of its steps.

Both compute which accesses happen before which others by the rules of C11, which hold for every processor. A rank waits
for one store only, so that this relation does not depend on the schedule: one execution of a sequence of calls shows
the order for all schedules of it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import shutil
import subprocess
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from tests.time_limits import scaled

NATIVE = Path(__file__).parents[2] / "mpicomm" / "native"
SOURCES = [Path(__file__).with_name("ranks_as_threads.c"), NATIVE / "slots.c"]
NUM_CALLS = 500
SECONDS = 60.0

# -- ThreadSanitizer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program in which threads are the ranks."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("threads") / "ranks_as_threads"
    command = [compiler, "-std=c11", "-O1", "-g", "-fsanitize=thread", f"-I{NATIVE}", *map(str, SOURCES), "-lpthread"]
    done = _run([*command, "-o", str(path)])
    if "libtsan" in done.stderr or "fsanitize" in done.stderr:
        pytest.skip(f"{compiler} has no ThreadSanitizer")
    assert not done.returncode, done.stderr
    return path


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_rank_accesses_a_slot_while_another_one_writes_to_it(size: int, program: Path) -> None:
    """The addresses are not random: with those of some kernels, ThreadSanitizer of GCC 12 does not start."""
    command = ["setarch", "--addr-no-randomize", str(program), str(size), str(NUM_CALLS), "1"]
    done = _run(command)
    assert done.returncode == 0, done.stderr


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run(command, check=False, env=environ, capture_output=True, text=True, timeout=scaled(SECONDS))


# -- a model of the steps ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation: the number of its steps, and how it uses the slots."""

    steps: int
    is_split: bool = False
    """Whether each rank reduces a part, and then copies the other parts."""

    readers: str = "all"
    """The ranks that read slots: "all", "root" or "none"."""


OPERATIONS = [
    Operation(1),
    Operation(2),
    Operation(1, is_split=True),
    Operation(3, is_split=True),
    Operation(1, readers="root"),
    Operation(1, readers="none"),
]
READ, WRITE, STORE, LOAD = "read", "write", "store with release", "load with acquire"
Access = tuple[str, tuple, int]
"""What is done, the location, and the number of the step that a write leaves there, or that a read must find."""


def steps_of(rank: int, size: int, operations: Sequence[Operation]) -> Iterator[Access]:
    """Yield the accesses of a rank in their order, as slots.c makes them; the comments name its functions."""
    number, others = 0, [other for other in range(size) if other != rank]
    for operation in operations:
        reads = operation.readers == "all" or (operation.readers == "root" and rank == 0)
        own_parts = others if operation.is_split else range(size)
        has_next = False
        for step in range(operation.steps):
            number += 1  # start_step
            if not has_next:
                yield from ((WRITE, ("slot", number % 2, rank, part), number) for part in own_parts)  # bring
            yield WRITE, ("line", number % 2, rank), number
            yield STORE, ("arrived", number % 2, rank), number
            yield from ((LOAD, ("arrived", number % 2, other), number) for other in range(size))  # all_have
            yield from ((READ, ("line", number % 2, other), number) for other in range(size))  # compare
            has_next = operation.is_split and step + 1 < operation.steps
            if not operation.is_split:
                slots = itertools.product(others, range(size)) if reads else ()
                yield from ((READ, ("slot", number % 2, *slot), number) for slot in slots)  # fetch
                continue
            yield from ((READ, ("slot", number % 2, other, rank), number) for other in others)  # fetch
            yield WRITE, ("slot", number % 2, rank, rank), number
            yield STORE, ("reduced", number % 2, rank), number
            if has_next:  # bring_next
                yield from ((WRITE, ("slot", (number + 1) % 2, rank, part), number + 1) for part in others)
            yield from ((LOAD, ("reduced", number % 2, other), number) for other in range(size))
            yield from ((READ, ("slot", number % 2, other, other), number) for other in others)  # fetch_parts


def find_faults(size: int, operations: Sequence[Operation], *, is_relaxed: bool = False) -> list[str]:
    """Run the ranks in turn, and return the accesses that are not ordered, or find another number than theirs.

    A load waits for its number; it, too, must happen before the next store, which would hide the number.

    Args:
        is_relaxed: Whether stores have no release, or loads no acquire: either orders nothing without the other.
    """
    clocks = [[0] * size for _ in range(size)]  # of each rank, the accesses of all ranks that happen before its next
    released: dict[tuple, list[int]] = {}  # the clock of the last store
    values: dict[tuple, int] = {}
    seen: dict[tuple, list[tuple[int, int, str]]] = collections.defaultdict(list)
    faults: list[str] = []

    def run(rank: int) -> Generator[None]:
        for kind, place, number in steps_of(rank, size, operations):
            while kind == LOAD and values.get(place) != number:
                yield
            if kind == LOAD and not is_relaxed:
                clocks[rank] = list(map(max, clocks[rank], released[place]))
            clocks[rank][rank] += 1
            is_write = kind in (WRITE, STORE)
            for other, time, earlier in seen[place]:
                if (is_write or earlier in (WRITE, STORE)) and clocks[rank][other] < time:
                    faults.append(f"rank {rank}: {kind} of {place} #{number} is not ordered with a {earlier}")
            seen[place].append((rank, clocks[rank][rank], kind))
            if is_write:
                values[place] = number
            elif values.get(place) != number:
                faults.append(f"rank {rank}: {kind} of {place} finds {values.get(place)} instead of {number}")
            if kind == STORE:
                released[place] = list(clocks[rank])

    running = [run(rank) for rank in range(size)]
    for _ in range(10_000):
        running = [each for each in running if next(each, "over") != "over"]
        if not running:
            return faults
    return [*faults, "a rank waits forever"]


@pytest.mark.parametrize(("size", "length"), [(2, 4), (3, 3)])
def test_all_accesses_of_every_sequence_of_operations_are_ordered(size: int, length: int) -> None:
    for operations in itertools.product(OPERATIONS, repeat=length):
        assert find_faults(size, operations) == [], operations


def test_the_model_finds_accesses_without_release_and_acquire() -> None:
    assert find_faults(2, [Operation(1)], is_relaxed=True)
