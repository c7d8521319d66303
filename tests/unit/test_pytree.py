"""Containers and their encoded descriptions, without communication: round trips, and invalid input."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomm.collective_ops import messages, pytree, wire_format
from mpicomm.devices import accelerator
from mpicomm.errors import MpicommError
from tests.collective_ops.kinds import KINDS, Batch, Pair, Shifted, make, same

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.uint16, torch.float8_e5m2]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    return st.builds(
        lambda shape, dtype, is_turned: (torch.ones(shape).to(dtype).t() if is_turned and len(shape) == 2
                                         else torch.ones(shape).to(dtype)),
        SHAPES, st.sampled_from(DTYPES), st.booleans(),
    )  # fmt: skip


LEAVES = st.one_of(
    tensors(),
    st.builds(np.zeros, st.tuples(st.integers(0, 3), st.integers(0, 3))),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.complex_numbers(allow_nan=False),
    st.none(),
)
KEYS = st.one_of(st.text(max_size=5), st.integers(), st.none())
CONTAINERS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Batch, inner, st.integers(0, 9), inner),
    ),
    max_leaves=12,
)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(TypeError, match="got a nested one"):
        pytree.take({"a": nested}, "all_reduce")


def sent(data: pytree.Data) -> Any:
    """Return the data that a receiver gets."""
    got = wire_format.decode(wire_format.encode(data))
    assert got == data.description
    packed = wire_format.pack(data)
    assert {device: content.numel() for device, content in packed.items()} == wire_format.nbytes(got)
    return got.rebuilt(wire_format.unpack(got, {device: content.clone() for device, content in packed.items()}))


@settings(max_examples=300)
@given(CONTAINERS)
def test_received_data_equal_the_sent_data(data: Any) -> None:
    assert same(sent(pytree.take(data, "send")), data)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str) -> None:
    assert same(sent(pytree.take(make(kind, 3), "send")), make(kind, 3))


def test_the_constructor_of_a_dataclass_does_not_run_again() -> None:
    assert same(sent(pytree.take([Shifted(5)], "send")), [Shifted(5)])


@pytest.mark.parametrize("thing", [{1, 2}, "text", b"", object, [lambda: 3, None][1:]])
def test_objects(thing: object) -> None:
    assert sent(pytree.pickled(thing, "send_object")) == thing


def test_conjugated_and_negated_tensors() -> None:
    """Their memory does not contain their values."""
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    data = [tensor.conj(), tensor.conj().imag]
    assert data[0].is_conj()
    assert data[1].is_neg()
    assert same(sent(pytree.take(data, "send")), data)
    assert same(sent(pytree.take(data[:1], "send")), data[:1])


def test_a_column_of_one_row() -> None:
    """It is contiguous, but its stride is that of the matrix."""
    column = torch.ones(1, 2)[:, 1]
    assert column.is_contiguous()
    assert same(sent(pytree.take([column], "send")), [column])


@settings(max_examples=200)
@given(CONTAINERS)
def test_every_leaf_has_a_place(data: Any) -> None:
    taken = pytree.take(data, "send")
    assert len(list(pytree.paths(taken.description.structure))) == len(taken.tensors)


def test_places_are_written_as_in_python() -> None:
    data = {"a": [1, Pair(2, Batch(3, 4))], 5: collections.OrderedDict(b=6)}
    taken = pytree.take(data, "send")
    assert list(pytree.paths(taken.description.structure)) == [
        "['a'][0]", "['a'][1][0]", "['a'][1][1].inputs", "['a'][1][1].count", "[5]['b']",
    ]  # fmt: skip


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_garbage_is_no_description(raw: bytes) -> None:
    with pytest.raises(MpicommError, match="was not sent by an operation of mpicomm"):
        wire_format.decode(raw)


WORDS = ["leaf", "none", "list", "tuple", "dict", "ordered", "namedtuple", "dataclass", "tensor", "float32", "cpu"]
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=6), st.sampled_from([*WORDS, "save"])),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=12,
)


@settings(max_examples=300)
@given(JSON, JSON)
def test_halves_that_look_like_a_description(structure: Any, of_leaves: Any) -> None:
    try:
        found = wire_format.decode(json.dumps([structure, of_leaves]).encode())
    except MpicommError:
        return
    assert all(math.prod(shape) * dtype.itemsize < 2**62 for _, dtype, shape, *_ in found.leaves)


@settings(max_examples=200)
@given(CONTAINERS, st.data())
def test_a_description_with_a_change_is_one_or_an_error(data: Any, draws: st.DataObject) -> None:
    plain = json.loads(wire_format.encode(pytree.take(data, "send")))
    try:
        found = wire_format.decode(json.dumps(with_a_change(plain, draws)).encode())
    except MpicommError:
        return
    assert len(list(pytree.paths(found.structure))) == len(found.kinds)
    assert all(math.prod(shape) * dtype.itemsize < 2**62 for _, dtype, shape, *_ in found.leaves)


def with_a_change(plain: Any, draws: st.DataObject) -> Any:
    """Return the JSON value with one element replaced."""
    if not isinstance(plain, list) or not plain or draws.draw(st.integers(0, 9)) == 0:
        return draws.draw(JSON | st.integers(2**60, 2**64))
    index = draws.draw(st.integers(0, len(plain) - 1))
    return [*plain[:index], with_a_change(plain[index], draws), *plain[index + 1 :]]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_description_with_another_number_of_leaves_is_refused(count: int) -> None:
    structure, leaves = json.loads(wire_format.encode(pytree.take([1, 2], "send")))
    with pytest.raises(MpicommError, match=r"its description cannot be read \(leaves are missing\)"):
        wire_format.decode(json.dumps([structure, (2 * leaves)[:count]]).encode())


def test_data_on_a_gpu_are_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "is_available", lambda: False)
    description = wire_format.decode(json.dumps(["leaf", [["tensor", "float32", [3], "GPU", False]]]).encode())
    with pytest.raises(MpicommError, match=r"the data of rank 3 are on a GPU, but this rank has no GPU\.\nSend CPU"):
        wire_format.output_buffers(description, "rank 3")


NEAR = st.integers(-2, 2)


@given(
    st.one_of(NEAR.map(lambda by: max(messages._first_tag() + by, 0)), NEAR.map(lambda by: messages._last_tag() + by)),
    st.one_of(st.integers(0, 2), NEAR.map(lambda by: 2**40 + by), st.just(2**64 - 1)),
)
def test_the_numbers_of_a_head_are_within_their_bounds(number: int, length: int) -> None:
    raw = wire_format.MAGIC + number.to_bytes(8, "little") + length.to_bytes(8, "little")
    head = torch.frombuffer(bytearray(raw.ljust(512, b"\0")), dtype=torch.uint8)
    if messages._first_tag() <= number <= messages._last_tag() and length < 2**40:
        assert messages._read(head)[:2] == (number, length)
    else:
        with pytest.raises(MpicommError, match="its header is corrupted"):
            messages._read(head)


@given(st.binary(min_size=512, max_size=512))
def test_a_header_without_the_magic_number_is_refused(raw: bytes) -> None:
    with pytest.raises(MpicommError, match=r"mpicomm: its header has no magic number\.\n"):
        messages._read(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def test_a_header_is_read_back() -> None:
    assert wire_format.head(b"ab", 258) == b"mpicomm1\2\1\0\0\0\0\0\0\2\0\0\0\0\0\0\0ab".ljust(512, b"\0")
    for raw in (b"", b"abc", bytes(range(256)) * 2):
        head = wire_format.to_tensor(wire_format.head(raw, 2**40 + 7), torch.device("cpu"))
        assert head.numel() == 512
        assert wire_format.read_head(head) == (2**40 + 7, len(raw), raw[:488].ljust(488, b"\0"))


def test_the_error_of_the_sender_is_raised() -> None:
    raw = wire_format.encode(ValueError("too large"))
    with pytest.raises(MpicommError, match=r"^rank 3 could not send its data: too large$"):
        wire_format.decode(raw, "rank 3")


def test_every_leaf_starts_at_a_multiple_of_16_bytes() -> None:
    assert [wire_format.aligned(size) for size in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]
    description = pytree.take([torch.ones(3), torch.ones(2, dtype=torch.int64)], "send").description
    (content,) = wire_format.output_buffers(description, "rank 3").values()
    assert (content.numel(), content.dtype, content.device.type) == (32, torch.uint8, "cpu")


def test_a_class_that_is_none_is_not_made() -> None:
    plain = [["namedtuple", "os:system", [], ["leaf"]], [["number", "int64", [], "cpu", False]]]
    found = wire_format.decode(json.dumps(plain).encode())
    with pytest.raises(MpicommError, match="os:system, which is not a namedtuple or dataclass"):
        found.rebuilt([torch.tensor(1)])
