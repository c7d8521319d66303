"""Functions of the examples whose results their output does not show."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
import torch.distributed as dist

from mpicomm.examples import model_parallel, overlap, scaling, spawn


@pytest.mark.parametrize("rank", [0, 6])
def test_too_many_ranks_for_the_layers_are_reported_once(rank, monkeypatch, capsys):
    world = types.SimpleNamespace(rank=rank, size=7)
    monkeypatch.setattr("mpicomm.bootstrap", lambda device: world, raising=False)
    monkeypatch.setattr("sys.argv", ["model_parallel"])
    model_parallel.main()
    expected = "expected at most 6 ranks, got 7; start with `mpirun -n 6`\n"
    assert capsys.readouterr().out == ("" if rank else expected)


@pytest.mark.parametrize(("together", "part"), [(10, 1), (12.5, 0.75), (20, 0), (25, 0)])
def test_the_overlapped_part_of_the_communication(together, part):
    assert overlap.hidden(communication=10, computation=10, together=together) == part


def test_the_computation_is_between_the_start_and_the_wait(monkeypatch):
    calls = []
    work = types.SimpleNamespace(wait=lambda: calls.append("wait"))
    monkeypatch.setattr(dist, "all_reduce", lambda _tensor, async_op: calls.append(f"start {async_op}") or work)
    monkeypatch.setattr(overlap, "compute", lambda _matrix, products: calls.append(f"compute {products}"))
    overlap.compute_while_communicating(torch.ones(1), torch.ones(1, 1), 3)
    assert calls == ["start True", "compute 3", "wait"]


@pytest.mark.parametrize("variable", spawn.RANKS)
@pytest.mark.parametrize("rank", [0, 3])
def test_spawn_starts_none_under_any_launcher(variable, rank, monkeypatch):
    for name in spawn.RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(rank))
    monkeypatch.setattr("sys.argv", ["spawn"])
    refusal = pytest.raises(SystemExit, match=rf"\({variable} is set\)")
    with refusal if rank == 0 else contextlib.nullcontext():
        spawn.main()


@pytest.mark.parametrize(("kind", "milliseconds"), [("strong", 25), ("weak", 100)])
def test_ideal_scaling_has_an_efficiency_of_one(kind, milliseconds):
    one, four = scaling.compare(kind, {1: 100, 4: milliseconds}, 8)
    assert one == (1, 100, 80, 1, 1)
    assert four == (4, milliseconds, 320, 4, 1)
