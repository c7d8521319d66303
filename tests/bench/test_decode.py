"""`mpicomm bench decode`: the split model gives the tokens of the whole one, and wrong tokens are counted."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.bench import compared_backends, decode
from mpicomm.bench.decode import Decoder, Reducer, Shape
from mpicomm.bench.timing import Bench
from mpicomm.errors import LaunchError

CPU = torch.device("cpu")
TINY = Shape(width=96, layers=2, heads=24, kv_heads=12, hidden=144, vocabulary=64)


def short() -> Bench:
    return Bench(mpicomm.all_gather_object, dist.barrier, lambda: None, rounds=1, seconds=1e-4)


@pytest.fixture(scope="module", name="reducers")
def _reducers(world: mpicomm.World) -> dict[str, Reducer]:
    groups = {name: compared_backends.group(name, world) for name in ("mpi", "gloo")}
    return {name: functools.partial(dist.all_reduce, group=group) for name, group in groups.items()}


@pytest.fixture(name="tiny")
def _tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(decode.SHAPES, "tiny", TINY)
    monkeypatch.setattr(decode, "TOKENS", 6)  # Gloo is slow when ranks share cores
    return "tiny"


@pytest.mark.mpi
def test_every_backend_gives_the_tokens_of_one_process(
    world: mpicomm.World, reducers: dict[str, Reducer], tiny: str
) -> None:
    rows = decode.measure(tiny, reducers, world, short(), CPU)
    assert [(row.backend, row.wrong, row.all_reduces, row.nbytes) for row in rows] == [
        (decode.ALONE, 0, 0, 0),
        ("mpi", 0, 4, 4 * 96),
        ("gloo", 0, 4, 4 * 96),
    ]
    for row in rows:
        assert row.tokens_per_s == pytest.approx(1e6 / row.us_per_token, rel=0.01)


@pytest.mark.mpi(min_size=2)
def test_without_sums_tokens_are_wrong(world: mpicomm.World, tiny: str) -> None:
    rows = decode.measure(tiny, {"idle": lambda _: None, "none": lambda _: None}, world, short(), CPU)
    wrong = {row.backend: row.wrong for row in rows}
    assert wrong[decode.ALONE] == 0
    assert wrong["idle"], "each rank has only its part of the sums"
    assert wrong["none"] is None


def test_generated_tokens_are_those_of_passes_over_all_tokens() -> None:
    """Without the caches of keys and values, and without positions of single tokens."""
    layers = decode.make_layers(TINY, 0, 1, CPU)
    found = Decoder(TINY, layers, lambda _: None).generate()
    assert len(found) == decode.TOKENS
    assert len(set(found)) > decode.TOKENS // 4, "the tokens repeat, so that they show few mistakes"
    whole = torch.tensor([*range(decode.PROMPT), *found])
    other = Decoder(TINY, layers, lambda _: None)
    with torch.inference_mode():
        expected = [int(other._next(whole[: decode.PROMPT + count], 0)) for count in range(decode.TOKENS)]
    assert found == expected


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_parts_of_all_ranks_are_the_whole_model(size: int) -> None:
    whole = decode.make_layers(TINY, 0, 1, CPU)
    parts = [decode.make_layers(TINY, rank, size, CPU) for rank in range(size)]
    assert all(torch.equal(each.head, whole.head) for each in parts)
    for index, layer in enumerate(whole.layers):
        of_ranks = [each.layers[index] for each in parts]
        assert torch.equal(torch.cat([each.query for each in of_ranks]), layer.query)
        assert torch.equal(torch.cat([each.down for each in of_ranks], 1), layer.down)
    elements = sum(tensor.numel() for layer in whole.layers for tensor in vars(layer).values())
    assert decode.number_of_parameters(TINY) == elements + whole.embedding.numel() + whole.head.numel()


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_an_error(tiny: str) -> None:
    world = type("World", (), {"rank": 0, "size": 5})()
    with pytest.raises(LaunchError, match=r"must divide the 12 heads of the model, got 5 ranks.\nStart 1, 2, 3, 4,"):
        decode.measure(tiny, {}, world, short(), CPU)
