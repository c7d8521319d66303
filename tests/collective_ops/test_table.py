"""Every operation with data of every kind, synchronous and asynchronous, in every kind of group, against formulas."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.collective_ops import messages, pytree, wire_format
from mpicomm.collective_ops.group_argument import resolve
from tests.collective_ops.conftest import Among
from tests.collective_ops.kinds import AMONG, KINDS, averaged, make, nested, same

pytestmark = pytest.mark.each_torch("collective_ops")

# All kinds of data in the group of all ranks, some kinds in every group.
SOME = ("strided", "array", "nested", "many")
PAIRS = [("all", kind) for kind in KINDS] + [(each, kind) for each in AMONG[1:] for kind in SOME]
EVERY = pytest.mark.parametrize(("among", "kind"), PAIRS, indirect=["among"])
# sum and mean treat each kind differently; the other reductions depend only on the dtype.
REDUCTIONS = [(pair, op) for pair in PAIRS for op in ("sum", "mean")] + [
    (("all", kind), op) for kind in ("tensor", "int", "nested") for op in ("max", "min", "product")
]
CUTTABLE = [kind for kind in KINDS if kind not in ("scalar tensor", "array scalar", "int", "float", "nested")]


@pytest.mark.parametrize(
    ("among", "kind", "op"), [(among, kind, op) for (among, kind), op in REDUCTIONS], indirect=["among"]
)
def test_all_reduce(among: Among, kind: str, op: str) -> None:
    rank, size = among.rank, among.size
    values = {
        "sum": sum(range(1, size + 1)),
        "max": size,
        "min": 1,
        "product": math.factorial(size),
        "mean": (size + 1) / 2,
    }
    data = make(kind, rank + 1)
    before = copy.deepcopy(data)
    assert same(
        among.call("all_reduce", data, op), averaged(kind, values[op]) if op == "mean" else make(kind, values[op])
    )
    assert same(data, before)


@pytest.mark.parametrize("among", AMONG, indirect=True)
def test_the_average_of_negative_integers(among: Among) -> None:
    rank, size = among.rank, among.size
    data = np.full((4, 2), rank - 2 * size, dtype=np.int32)
    mean = np.full((4, 2), math.trunc((size - 1) / 2 - 2 * size), dtype=np.int32)
    assert same(among.call("all_reduce", data, "mean"), mean)


def test_the_average_of_python_bools(world: mpicomm.World) -> None:
    assert mpicomm.all_reduce({"correct": world.rank == 0}, "mean") == {"correct": 1 / world.size}


@EVERY
def test_reduce(among: Among, kind: str) -> None:
    rank, size = among.rank, among.size
    assert same(
        among.call("reduce", make(kind, rank), size - 1), make(kind, sum(range(size))) if rank == size - 1 else None
    )


@EVERY
def test_broadcast_to_ranks_without_a_description(among: Among, kind: str) -> None:
    rank, size = among.rank, among.size
    data = make(kind, 7) if rank == size - 1 else None
    assert same(among.call("broadcast", data, size - 1), make(kind, 7))


@pytest.mark.parametrize("kind", ["tensor", "strided", "array", "many", "empty tensor", "bfloat16"])
def test_broadcast_into_memory(among: Among, kind: str) -> None:
    rank, size = among.rank, among.size
    out = make(kind, rank)
    data = make(kind, size) if rank == 0 else None
    got = among.call("broadcast", data, 0, out=out)
    assert got is out
    assert same(out, make(kind, size))


@EVERY
def test_gather_and_all_gather(among: Among, kind: str) -> None:
    rank, size = among.rank, among.size
    of_all = [make(kind, each) for each in range(size)]
    assert same(among.call("gather", make(kind, rank), size - 1), of_all if rank == size - 1 else None)
    assert same(among.call("all_gather", make(kind, rank)), of_all)


def test_gathering_of_any_lengths(among: Among) -> None:
    rank, size = among.rank, among.size

    def of(each: int) -> dict[str, Any]:
        return {"rows": torch.full((each, 3), float(each)), "array": np.full(2 * each + 1, each), "one": each} | {
            f"p{index}": torch.full(((each + index) % 3,), index) for index in range(20)
        }

    of_all = [of(each) for each in range(size)]
    assert same(among.call("gather", of(rank), 0), of_all if rank == 0 else None)
    assert same(among.call("all_gather", of(rank)), of_all)


@EVERY
def test_scatter(among: Among, kind: str) -> None:
    rank, size = among.rank, among.size
    items = [make(kind, each) for each in range(size)] if rank == size - 1 else None
    assert same(among.call("scatter", items, size - 1), make(kind, rank))


@EVERY
def test_all_to_all(among: Among, kind: str) -> None:
    rank, size = among.rank, among.size
    items = [make(kind, 10 * rank + each) for each in range(size)]
    assert same(among.call("all_to_all", items), [make(kind, 10 * each + rank) for each in range(size)])


def test_all_to_all_of_any_lengths_and_structures(among: Among) -> None:
    rank, size = among.rank, among.size

    def of(src: int, dst: int) -> Any:
        if (src + dst) % 3 == 0:
            return nested(float(src))
        return torch.full((src + 2 * dst,), float(src)) if (src + dst) % 3 == 1 else [src, dst]

    items = [of(rank, each) for each in range(size)]
    assert same(among.call("all_to_all", items), [of(each, rank) for each in range(size)])


@pytest.mark.parametrize("kind", CUTTABLE)
def test_reduce_scatter(among: Among, kind: str) -> None:
    rank, size = among.rank, among.size
    got = among.call("reduce_scatter", make(kind, rank))
    whole = make(kind, sum(range(size)))

    def cut(each: Any) -> Any:
        if isinstance(each, np.ndarray):
            return np.array_split(each, size)[rank]
        return each.tensor_split(size)[rank]

    expected = {key: cut(each) for key, each in whole.items()} if isinstance(whole, dict) else cut(whole)
    assert same(got, expected)


@EVERY
def test_messages(among: Among, kind: str) -> None:
    rank, size = among.rank, among.size
    after, before = (rank + 1) % size, (rank - 1) % size
    assert same(among.call("sendrecv", make(kind, rank), after, before), make(kind, before))
    sending = mpicomm.isend(make(kind, rank), after, tag=5, group=among.group)
    assert same(among.call("recv", before, tag=5), make(kind, before))
    sending.wait()


def test_objects(among: Among) -> None:
    rank, size = among.rank, among.size

    def of(each: int) -> Any:
        return {"set": {each, "text"}, "bytes": b"x" * each}

    assert among.call("all_gather_object", of(rank)) == [of(each) for each in range(size)]
    assert among.call("gather_object", of(rank), 0) == ([of(each) for each in range(size)] if rank == 0 else None)
    assert among.call("broadcast_object", of(9) if rank == 0 else None) == of(9)
    items = [of(each) for each in range(size)]
    assert among.call("scatter_object", items if rank == 0 else None) == of(rank)
    items = [of(10 * rank + each) for each in range(size)]
    assert among.call("all_to_all_object", items) == [of(10 * each + rank) for each in range(size)]
    if size > 1:
        sending = mpicomm.send_object(of(rank), (rank + 1) % size, group=among.group, async_op=True)
        got = among.call("recv_object", (rank - 1) % size)
        assert got == of((rank - 1) % size)
        sending.wait()


@pytest.mark.parametrize("kind", ["tensor", "strided", "array", "many", "bfloat16"])
def test_inplace(among: Among, kind: str) -> None:
    rank, size = among.rank, among.size
    data = make(kind, rank)
    got = among.call("all_reduce", data, inplace=True)
    assert same(data, make(kind, sum(range(size))))
    assert same(got, data)


def test_a_megabyte_in_one_leaf_among_small_ones(among: Among) -> None:
    rank, size = among.rank, among.size

    def of(value: float) -> list[torch.Tensor]:
        return [torch.full((300_000,), value), torch.full((3,), value), torch.full((5,), int(value))]

    total = of(sum(range(size)))
    assert same(among.call("all_reduce", of(rank)), total)
    assert same(among.call("all_gather", of(rank)), [of(each) for each in range(size)])


# -- memory of the results, and messages -------------------------------------------------------------------------------


def test_results_are_the_callers_to_write_into(among: Among) -> None:
    rank, size = among.rank, among.size
    mine = torch.full((3,), float(rank))
    items = [torch.full((3,), float(each)) for each in range(size)]
    results = [
        among.call("scatter", items if rank == 0 else None),
        *(among.call("gather", mine) or []),
        *among.call("all_gather", mine),
        *among.call("all_to_all", items),
        among.call("broadcast", mine),
        among.call("reduce_scatter", torch.cat(items)),
    ]
    for result in results:
        result.fill_(-1.0)
    assert torch.equal(mine, torch.full((3,), float(rank)))
    assert torch.equal(torch.stack(items), torch.arange(float(size)).repeat_interleave(3).view(size, 3))


@pytest.mark.parametrize("by", [-1, 0, 1])
def test_descriptions_that_just_fit_into_the_head(world: mpicomm.World, by: int) -> None:
    length = len(wire_format.encode(pytree.take({"": 1}, "test")))
    data = {"k" * (wire_format.IN_HEAD + by - length): world.rank}
    assert len(wire_format.encode(pytree.take(data, "test"))) == wire_format.IN_HEAD + by
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    assert list(mpicomm.sendrecv(data, after, before).values()) == [before]
    assert list(mpicomm.broadcast(data).values()) == [0]


@pytest.mark.mpi(min_size=2)
def test_scatter_and_messages_keep_apart(world: mpicomm.World) -> None:
    """Rank 1 waits for a message while a scatter item arrives, with the smallest and with the largest tag."""
    items = [10 + rank for rank in range(world.size)] if world.rank == 0 else None
    for tag in (0, messages.largest_tag() - 1):
        pending = mpicomm.irecv(0, tag=tag) if world.rank == 1 else None
        assert mpicomm.scatter(items, 0) == 10 + world.rank
        if world.rank == 0:
            mpicomm.send(7, 1, tag=tag)
        assert pending is None or pending.wait() == 7


# -- values of `group=` ------------------------------------------------------------------------------------------------


def test_the_ranks_of_this_node_and_the_first_rank_of_each(world: mpicomm.World) -> None:
    assert mpicomm.all_gather(world.rank, group="node") == list(range(world.size))  # the tests run on one host
    if world.local_rank == 0:
        assert mpicomm.all_gather(world.rank, group="leaders") == [0]


def test_a_communicator(world: mpicomm.World, comms: dict[str, Any]) -> None:
    members = list(range(world.rank % 2, world.size, 2))
    assert mpicomm.all_gather(world.rank, group=comms["comm"]) == members
    assert mpicomm.broadcast(world.rank, len(members) - 1, group=comms["comm"]) == members[-1]


def test_a_group_that_was_destroyed_is_made_anew(world: mpicomm.World) -> None:
    for _ in range(2):
        assert mpicomm.all_reduce(1, group=world.comm) == world.size
        dist.destroy_process_group(resolve(world.comm, "test").handle)
