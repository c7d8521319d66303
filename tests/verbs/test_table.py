"""Every verb with data of every kind, in the call and in the background, in every kind of group, by the formula."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

import mpicomm
from tests.verbs.kinds import KINDS, make, nested, same

Among = tuple[Any, int, int]
EVERY = pytest.mark.parametrize("kind", KINDS)
CUTTABLE = [kind for kind in KINDS if kind not in ("scalar tensor", "array scalar", "int", "float", "nested")]


def finished(result: Any, is_async: bool) -> Any:
    return result.wait() if is_async else result


@EVERY
@pytest.mark.parametrize("op", ["sum", "max", "min", "product", "mean"])
def test_all_reduce(among: Among, is_async: bool, kind: str, op: str) -> None:
    group, rank, size = among
    values = {
        "sum": sum(range(1, size + 1)),
        "max": size,
        "min": 1,
        "product": math.factorial(size),
        "mean": (size + 1) / 2,
    }
    data = make(kind, rank + 1)
    before = copy.deepcopy(data)
    got = finished(mpicomm.all_reduce(data, op, group=group, async_op=is_async), is_async)
    expected = make(kind, values[op])
    if op != "mean":
        assert same(got, expected)
    elif kind in ("int", "float"):
        assert got == values[op]
    elif kind not in ("nested", "int array"):  # in which whole numbers are cut
        assert same(got, expected)
    assert same(data, before)


@EVERY
def test_reduce(among: Among, is_async: bool, kind: str) -> None:
    group, rank, size = among
    got = finished(mpicomm.reduce(make(kind, rank), size - 1, group=group, async_op=is_async), is_async)
    assert same(got, make(kind, sum(range(size))) if rank == size - 1 else None)


@EVERY
def test_broadcast_to_ranks_that_know_nothing(among: Among, is_async: bool, kind: str) -> None:
    group, rank, size = among
    data = make(kind, 7) if rank == size - 1 else None
    got = finished(mpicomm.broadcast(data, size - 1, group=group, async_op=is_async), is_async)
    assert same(got, make(kind, 7))


@pytest.mark.parametrize("kind", ["tensor", "strided", "array", "many", "empty tensor", "bfloat16"])
def test_broadcast_into_memory(among: Among, is_async: bool, kind: str) -> None:
    group, rank, size = among
    out = make(kind, rank)
    data = make(kind, size) if rank == 0 else None
    got = finished(mpicomm.broadcast(data, 0, group=group, out=out, async_op=is_async), is_async)
    assert got is out
    assert same(out, make(kind, size))


@EVERY
def test_gather_and_all_gather(among: Among, is_async: bool, kind: str) -> None:
    group, rank, size = among
    of_all = [make(kind, each) for each in range(size)]
    got = finished(mpicomm.gather(make(kind, rank), size - 1, group=group, async_op=is_async), is_async)
    assert same(got, of_all if rank == size - 1 else None)
    got = finished(mpicomm.all_gather(make(kind, rank), group=group, async_op=is_async), is_async)
    assert same(got, of_all)


def test_gathering_of_any_lengths(among: Among, is_async: bool) -> None:
    group, rank, size = among

    def of(each: int) -> dict[str, Any]:
        return {"rows": torch.full((each, 3), float(each)), "array": np.full(2 * each + 1, each), "one": each} | {
            f"p{index}": torch.full(((each + index) % 3,), index) for index in range(20)
        }

    of_all = [of(each) for each in range(size)]
    got = finished(mpicomm.gather(of(rank), 0, group=group, async_op=is_async), is_async)
    assert same(got, of_all if rank == 0 else None)
    assert same(finished(mpicomm.all_gather(of(rank), group=group, async_op=is_async), is_async), of_all)


@EVERY
def test_scatter(among: Among, is_async: bool, kind: str) -> None:
    group, rank, size = among
    items = [make(kind, each) for each in range(size)] if rank == size - 1 else None
    got = finished(mpicomm.scatter(items, size - 1, group=group, async_op=is_async), is_async)
    assert same(got, make(kind, rank))


@EVERY
def test_all_to_all(among: Among, is_async: bool, kind: str) -> None:
    group, rank, size = among
    items = [make(kind, 10 * rank + each) for each in range(size)]
    got = finished(mpicomm.all_to_all(items, group=group, async_op=is_async), is_async)
    assert same(got, [make(kind, 10 * each + rank) for each in range(size)])


def test_all_to_all_of_any_lengths_and_structures(among: Among, is_async: bool) -> None:
    group, rank, size = among

    def of(src: int, dst: int) -> Any:
        if (src + dst) % 3 == 0:
            return nested(float(src))
        return torch.full((src + 2 * dst,), float(src)) if (src + dst) % 3 == 1 else [src, dst]

    items = [of(rank, each) for each in range(size)]
    got = finished(mpicomm.all_to_all(items, group=group, async_op=is_async), is_async)
    assert same(got, [of(each, rank) for each in range(size)])


@pytest.mark.parametrize("kind", CUTTABLE)
def test_reduce_scatter(among: Among, is_async: bool, kind: str) -> None:
    group, rank, size = among
    got = finished(mpicomm.reduce_scatter(make(kind, rank), group=group, async_op=is_async), is_async)
    whole = make(kind, sum(range(size)))

    def cut(each: Any) -> Any:
        if isinstance(each, np.ndarray):
            return np.array_split(each, size)[rank]
        return each.tensor_split(size)[rank]

    expected = {key: cut(each) for key, each in whole.items()} if isinstance(whole, dict) else cut(whole)
    assert same(got, expected)


@EVERY
def test_messages(among: Among, is_async: bool, kind: str) -> None:
    group, rank, size = among
    after, before = (rank + 1) % size, (rank - 1) % size
    got = finished(mpicomm.sendrecv(make(kind, rank), after, before, group=group, async_op=is_async), is_async)
    assert same(got, make(kind, before))
    sending = mpicomm.isend(make(kind, rank), after, tag=5, group=group)
    got = finished(mpicomm.recv(before, tag=5, group=group, async_op=is_async), is_async)
    assert same(got, make(kind, before))
    sending.wait()


def test_objects(among: Among, is_async: bool) -> None:
    group, rank, size = among

    def of(each: int) -> Any:
        return {"set": {each, "text"}, "bytes": b"x" * each}

    assert finished(mpicomm.all_gather_object(of(rank), group=group, async_op=is_async), is_async) == [
        of(each) for each in range(size)
    ]
    got = finished(mpicomm.gather_object(of(rank), 0, group=group, async_op=is_async), is_async)
    assert got == ([of(each) for each in range(size)] if rank == 0 else None)
    got = finished(mpicomm.broadcast_object(of(9) if rank == 0 else None, group=group, async_op=is_async), is_async)
    assert got == of(9)
    items = [of(each) for each in range(size)]
    got = finished(mpicomm.scatter_object(items if rank == 0 else None, group=group, async_op=is_async), is_async)
    assert got == of(rank)
    items = [of(10 * rank + each) for each in range(size)]
    got = finished(mpicomm.all_to_all_object(items, group=group, async_op=is_async), is_async)
    assert got == [of(10 * each + rank) for each in range(size)]
    if size > 1:
        sending = mpicomm.send_object(of(rank), (rank + 1) % size, group=group, async_op=True)
        got = finished(mpicomm.recv_object((rank - 1) % size, group=group, async_op=is_async), is_async)
        assert got == of((rank - 1) % size)
        sending.wait()


@pytest.mark.parametrize("kind", ["tensor", "strided", "array", "many", "bfloat16"])
def test_inplace(among: Among, is_async: bool, kind: str) -> None:
    group, rank, size = among
    data = make(kind, rank)
    got = finished(mpicomm.all_reduce(data, group=group, inplace=True, async_op=is_async), is_async)
    assert same(data, make(kind, sum(range(size))))
    assert same(got, data)


def test_a_megabyte_in_one_leaf_among_small_ones(among: Among, is_async: bool) -> None:
    group, rank, size = among

    def of(value: float) -> list[torch.Tensor]:
        return [torch.full((300_000,), value), torch.full((3,), value), torch.full((5,), int(value))]

    total = of(sum(range(size)))
    assert same(finished(mpicomm.all_reduce(of(rank), group=group, async_op=is_async), is_async), total)
    got = finished(mpicomm.all_gather(of(rank), group=group, async_op=is_async), is_async)
    assert same(got, [of(each) for each in range(size)])
