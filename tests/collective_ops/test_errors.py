"""A mismatch between ranks raises on every rank and names the difference; a local error raises before communication."""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.errors import MismatchError, MpicommError

pytestmark = pytest.mark.mpi(min_size=2)


def usual() -> dict[str, Any]:
    return {"a": torch.ones(3), "b": [torch.ones(2), torch.ones(4)]}


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: {"a": torch.ones(3), "b": [torch.ones(2), torch.ones(5)]}, r"\['b'\]\[1\] = tensor float32\[5\]"),
    "dtype": (lambda: {"a": torch.ones(3).half(), "b": [torch.ones(2), torch.ones(4)]}, r"\['a'\] = tensor float16"),
    "key": (lambda: {"c": torch.ones(3), "b": [torch.ones(2), torch.ones(4)]}, r"\['c'\] = tensor float32\[[3*]\]"),
    "missing": (lambda: {"a": torch.ones(3), "b": [torch.ones(2)]}, "missing"),
    "kind": (lambda: {"a": np.ones(3, dtype=np.float32), "b": [torch.ones(2), torch.ones(4)]}, r"\['a'\] = array"),
    "scalar": (lambda: {"a": torch.tensor(1.0), "b": usual()["b"]}, r"\['a'\] = tensor float32\[\] on cpu"),
    "gradient": (lambda: {"a": torch.ones(3, requires_grad=True), "b": usual()["b"]}, "with gradient"),
    "tensor": (lambda: torch.ones(9), r"the data = tensor float32\[[9*]\]"),
    "container": (lambda: {"a": torch.ones(3), "b": (torch.ones(2), torch.ones(4))}, "in different containers"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "reduce_scatter", "gather", "all_gather"])
def test_data_that_differ(world: mpicomm.World, operation: str, other: str) -> None:
    if (other, operation) in [("shape", "gather"), ("shape", "all_gather")]:
        pytest.skip("of any length")
    if (other, operation) == ("scalar", "reduce_scatter"):
        pytest.skip("refused before the ranks compare their data")
    make, named = OTHERS[other]
    last = world.size - 1
    data = make() if world.rank == last else usual()
    for is_async in (False, True):
        with pytest.raises(MismatchError, match=named) as caught:
            getattr(mpicomm, operation)(data, async_op=is_async).wait()
        if other != "container":
            assert f"rank {last}: " in str(caught.value)
    dist.barrier()


def test_different_operations(world: mpicomm.World) -> None:
    with pytest.raises(MismatchError, match=r"rank 0: all_reduce MAX"):
        mpicomm.all_reduce(1.0, "max" if world.rank == 0 else "sum")


def test_data_that_differ_on_another_backend(comms: dict[str, Any], world: mpicomm.World) -> None:
    with pytest.raises(MismatchError):
        mpicomm.all_reduce(torch.ones(2 + world.rank), group=comms["gloo"])


def test_gathering_data_of_another_width(world: mpicomm.World) -> None:
    with pytest.raises(MismatchError, match=r"tensor float32\[\*, 3\]"):
        mpicomm.all_gather(torch.ones(2, 3 if world.rank else 4))


@pytest.mark.parametrize("async_op", [False, True])
def test_scatter_from_different_ranks(world: mpicomm.World, async_op: bool) -> None:
    src = world.rank % 2
    items = list(range(world.size)) if world.rank == src else None

    def scatter() -> None:
        result = mpicomm.scatter(items, src, async_op=async_op)
        result.wait()

    with pytest.raises(MismatchError, match="scatter from rank 1"):
        scatter()
    assert mpicomm.scatter(list(range(world.size))) == world.rank


class Own(dict):
    pass


def in_a_function() -> object:
    Local = collections.namedtuple("Local", "x")
    return Local(1)


def read_only() -> np.ndarray:
    array = np.ones(3)
    array.flags.writeable = False
    return array


HELD: list[Any] = []
HELD.append(HELD)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dtype": (lambda: mpicomm.all_reduce(torch.ones(2), "band"), ValueError, "BAND is not defined for float32"),
    "complex": (lambda: mpicomm.all_reduce(1j, "max"), ValueError, "MAX is not defined for complex128"),
    "text inside": (lambda: mpicomm.all_gather({"a": ["text"]}), TypeError, "got a str"),
    "own dict": (lambda: mpicomm.all_reduce(Own(a=1)), TypeError, "got a Own"),
    "key": (lambda: mpicomm.all_reduce({(1, 2): 1}), TypeError, r"dict keys must be .*, got \(1, 2\)"),
    "bool key": (lambda: mpicomm.all_reduce({True: 1}), TypeError, "dict keys must be .*, got True"),
    "masked": (lambda: mpicomm.all_gather(np.ma.masked_array([1, 2], [0, 1])), TypeError, "expected a plain numpy"),
    "read-only": (lambda: mpicomm.all_reduce(read_only(), inplace=True), ValueError, "is read-only"),
    "local class": (lambda: mpicomm.all_gather(in_a_function()), TypeError, "not within a function"),
    "object array": (lambda: mpicomm.all_reduce(np.array([object()])), TypeError, "cannot be converted"),
    "large number": (lambda: mpicomm.all_reduce(2**70), ValueError, "does not fit into 64 bits"),
    "holds itself": (lambda: mpicomm.all_reduce(HELD), ValueError, "does not contain itself"),
    "in place number": (lambda: mpicomm.all_reduce({"a": 1}, inplace=True), ValueError, r"\['a'\] is a number"),
    "in place scalar": (lambda: mpicomm.all_reduce(np.float32(1), inplace=True), ValueError, "the data is a scalar"),
    "in place gradient": (
        lambda: mpicomm.all_reduce(torch.ones(2, requires_grad=True), inplace=True),
        ValueError,
        "requires a gradient",
    ),
    "to itself": (lambda: mpicomm.send(1, dist.get_rank()), ValueError, "dst must be another rank"),
    "scalar cut": (lambda: mpicomm.reduce_scatter(1.0), ValueError, "at least one dimension"),
}


@pytest.mark.parametrize("what", WRONG)
def test_local_errors_are_raised_before_anything_is_sent(what: str) -> None:
    call, kind, text = WRONG[what]
    with pytest.raises(kind, match=text) as caught:
        call()
    assert "\n" in str(caught.value), "the message has no remedy"
    dist.barrier()


NOT_PICKLED = threading.Lock()
SENDING: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "all_gather_object": (mpicomm.all_gather_object, NOT_PICKLED, "can be pickled, got a lock"),
    "gather_object": (mpicomm.gather_object, NOT_PICKLED, "can be pickled, got a lock"),
    "all_to_all_object": (
        lambda thing: mpicomm.all_to_all_object([thing] * dist.get_world_size()), NOT_PICKLED, "got a lock"
    ),
    "all_to_all": (lambda thing: mpicomm.all_to_all([thing] * dist.get_world_size()), "text", "got a str"),
    "items": (lambda items: mpicomm.all_to_all([items] * dist.get_world_size() if items == 1 else []), 2, "one item"),
    "all_reduce": (mpicomm.all_reduce, "text", "got a str"),
    "an integer": (mpicomm.all_reduce, 2**70, "does not fit into 64 bits"),
    "reduce": (mpicomm.reduce, {(1, 2): 1}, "dict keys must be"),
    "reduce_scatter": (lambda data: mpicomm.reduce_scatter(np.ones(9) if data == 1 else data), 2.0, "got a number"),
    "all_gather": (mpicomm.all_gather, "text", "got a str"),
    "gather": (mpicomm.gather, "text", "got a str"),
    "out": (lambda data: mpicomm.broadcast(np.ones(2), out=np.ones(2) if data == 1 else data), "text", "got a str"),
}  # fmt: skip


@pytest.mark.parametrize("what", SENDING)
def test_data_that_one_rank_cannot_send_are_an_error_on_all(world: mpicomm.World, what: str) -> None:
    call, wrong, text = SENDING[what]
    with pytest.raises((TypeError, ValueError, MpicommError), match=text) as caught:
        call(wrong if world.rank == 1 else 1)
    assert world.rank == 1 or "rank 1 could not send its data" in str(caught.value)
    assert mpicomm.all_reduce(1) == world.size


@pytest.mark.parametrize("op", ["sum", "product"])
def test_python_integers_beyond_64_bits_are_exact(world: mpicomm.World, op: str) -> None:
    values = [2**62 + 7, -(2**63), -3, 2**63 - 1, True]
    data = {"count": values[world.rank % 5], "other": torch.ones(2)}
    expected = {"sum": sum, "product": math.prod}[op](values[rank % 5] for rank in range(world.size))
    on_each, on_last = mpicomm.all_reduce(data, op), mpicomm.reduce(data, world.size - 1, op)
    assert on_each["count"] == expected
    assert type(on_each["count"]) is int
    assert on_each["other"].tolist() == [world.size if op == "sum" else 1] * 2
    assert on_last is None or on_last["count"] == expected


def test_groups_that_this_rank_is_not_in(world: mpicomm.World) -> None:
    part = dist.new_group([0])
    if world.rank:
        with pytest.raises(ValueError, match="not in the group"):
            mpicomm.all_reduce(1, group=part)
        if world.local_rank:
            with pytest.raises(ValueError, match="the first rank of its node is rank"):
                mpicomm.all_reduce(1, group="leaders")
    else:
        assert mpicomm.all_reduce(1, group=part) == 1
        dist.destroy_process_group(part)


def test_a_communicator_in_another_order(world: mpicomm.World) -> None:
    turned = world.comm.Split(0, -world.rank)
    with pytest.raises(ValueError, match="in the order of its ranks"):
        mpicomm.all_reduce(1, group=turned)
    turned.Free()


def test_an_out_that_does_not_fit_the_message(world: mpicomm.World) -> None:
    if world.rank == 0:
        mpicomm.send(torch.ones(3), 1)
    elif world.rank == 1:
        with pytest.raises(ValueError, match=r"out= has float32\[4\], but the message has float32\[3\]"):
            mpicomm.recv(0, out=torch.empty(4))
        # recv raises after it has received the whole message, so no message remains pending.
    dist.barrier()


def test_a_message_of_torch_is_not_a_message_of_mpicomm(world: mpicomm.World) -> None:
    from mpicomm.collective_ops import messages

    tag = messages._head_tag(3)
    if world.rank == 0:
        dist.send(torch.full((512,), 7, dtype=torch.uint8), 1, tag=tag)
    elif world.rank == 1:
        with pytest.raises(MpicommError, match="its header has no magic number"):
            mpicomm.recv(0, tag=3)
    dist.barrier()


def test_a_broadcast_of_nothing(world: mpicomm.World) -> None:
    """Only src can detect these errors, and it reports them to the other ranks."""
    for is_async in (False, True):
        with pytest.raises((ValueError, MpicommError), match="data must not be None on src"):
            mpicomm.broadcast(None, async_op=is_async).wait()
        with pytest.raises((TypeError, MpicommError), match="got a str"):
            mpicomm.broadcast("text" if world.rank == 0 else None, async_op=is_async).wait()
        with pytest.raises((TypeError, MpicommError), match="object that can be pickled, got a function"):
            mpicomm.broadcast_object((lambda: 1) if world.rank == 0 else None, async_op=is_async).wait()
        given = torch.ones(3) if world.rank == 0 else None
        with pytest.raises((ValueError, MpicommError), match=r"data and out= differ|different arguments"):
            mpicomm.broadcast(given, out=torch.ones(2), async_op=is_async).wait()
        with pytest.raises((TypeError, MpicommError), match="got a str"):
            mpicomm.broadcast("text" if world.rank == 0 else None, out=torch.ones(2), async_op=is_async).wait()
        with pytest.raises((ValueError, MpicommError), match="one item for each"):
            mpicomm.scatter([1] * (world.size + 1) if world.rank == 0 else None, async_op=is_async).wait()
    assert mpicomm.broadcast(3 if world.rank == 0 else None) == 3


def test_calls_from_several_threads_on_groups_of_their_own(world: mpicomm.World) -> None:
    groups = [dist.new_group(list(range(world.size))) for _ in range(3)]
    wrong: list[Any] = []

    def work(index: int) -> None:
        for number in range(30):
            got = mpicomm.all_reduce({"a": torch.full((index + 1,), float(number)), "b": index}, group=groups[index])
            if got["b"] != index * world.size or got["a"][0] != number * world.size:
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for group in groups:
        dist.destroy_process_group(group)
