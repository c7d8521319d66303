"""How the ranks of a group agree on the way of GPU tensors. There need be no GPU: what torch and MPI say is made up."""

from __future__ import annotations

import sys

import pytest
import torch

import mpicomm
from mpicomm import mpi
from mpicomm.backend import awareness, routes, wire
from mpicomm.backend.routes import ByAddress
from mpicomm.backend.staging import Staged
from mpicomm.settings import Settings

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that the library has stood the test."""
    monkeypatch.setattr(routes, "_has_passed", False)


def pretend(monkeypatch: pytest.MonkeyPatch, *, has_gpu: bool, is_claimed: bool, failures: list[str]) -> list[int]:
    """Make up a GPU, what the library says, and what a test finds; return the list that counts the tests."""
    tests: list[int] = []

    def test(*_args: object) -> list[str]:
        tests.append(1)
        return failures

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    monkeypatch.setattr(awareness, "is_claimed", lambda _environ: is_claimed)
    monkeypatch.setattr(awareness, "failures", test)
    return tests


def test_without_a_gpu_tensors_go_as_they_are(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = pretend(monkeypatch, has_gpu=False, is_claimed=True, failures=[])
    assert routes.choose(world.comm, Settings()) is routes.AS_THEY_ARE
    assert not tests


def test_one_rank_with_a_gpu_is_enough_to_stage_on_all(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, has_gpu=world.rank == world.size - 1, is_claimed=False, failures=[])
    assert isinstance(routes.choose(world.comm, Settings()), Staged)


def test_addresses_go_where_the_library_stands_the_test_once(
    world: mpicomm.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = pretend(monkeypatch, has_gpu=True, is_claimed=True, failures=[])
    for _ in range(2):
        assert isinstance(routes.choose(world.comm, Settings()), ByAddress)
    assert tests == [1]


def test_a_group_tests_again_if_one_of_its_ranks_has_not(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = pretend(monkeypatch, has_gpu=True, is_claimed=True, failures=[])
    monkeypatch.setattr(routes, "_has_passed", world.rank != 0)
    assert isinstance(routes.choose(world.comm, Settings()), ByAddress)
    assert tests == [1]


def test_one_rank_that_fails_stages_on_all(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["all_reduce of 1 elements"] if world.rank == 0 else []
    pretend(monkeypatch, has_gpu=True, is_claimed=True, failures=found)
    if found:
        with pytest.warns(UserWarning, match=r"cannot: all_reduce of 1 elements\. GPU tensors go by way of the host"):
            route = routes.choose(world.comm, Settings())
    else:
        route = routes.choose(world.comm, Settings())
    assert isinstance(route, Staged)


def test_one_rank_that_is_told_to_stage_stages_on_all(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = pretend(monkeypatch, has_gpu=True, is_claimed=True, failures=[])
    settings = Settings(gpu_tensors="staged" if world.rank == 0 else None)
    assert isinstance(routes.choose(world.comm, settings), Staged)
    assert not tests


def test_the_test_is_made_where_the_user_insists(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = pretend(monkeypatch, has_gpu=True, is_claimed=False, failures=[])
    assert isinstance(routes.choose(world.comm, Settings(gpu_tensors="direct")), ByAddress)
    assert tests == [1]


def test_the_shortest_chunk_is_everybodys(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, has_gpu=True, is_claimed=False, failures=[])
    route = routes.choose(world.comm, Settings(gpu_chunk_kib=str(1 + world.rank)))
    assert isinstance(route, Staged)
    assert route._chunk_bytes == 1024


def test_expandable_segments_are_warned_of(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, has_gpu=True, is_claimed=True, failures=[])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.warns(UserWarning, match="UCX cannot map such memory"):
        routes.choose(world.comm, Settings())


# -- the test itself, with addresses on the host -----------------------------------------------------------------------


def test_memory_that_mpi_reaches_stands_the_test(world: mpicomm.World) -> None:
    assert awareness.failures(world.comm, HOST) == []


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all"])
def test_a_wrong_result_is_found_and_named(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = getattr(wire, name)

    def wrong(comm: object, *args: object) -> None:
        right(comm, *args)
        written = [each for each in args if isinstance(each, torch.Tensor)][-1]
        written += 1

    monkeypatch.setattr(wire, name, wrong)
    found = {failure.split(" of ")[0].removeprefix("uneven ") for failure in awareness.failures(world.comm, HOST)}
    assert found == {name}


def test_an_error_of_mpi_is_a_failure(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise mpi.api().Exception(mpi.api().ERR_BUFFER)

    monkeypatch.setattr(wire, "gather", refuse)
    assert {failure.split(" of ")[0] for failure in awareness.failures(world.comm, HOST)} == {"gather"}


def test_the_mpis_of_the_package_index_claim_nothing(world: mpicomm.World) -> None:
    if not mpi.library().path.startswith(sys.prefix):
        pytest.skip("this MPI was installed otherwise")
    assert not awareness.is_claimed({"MPICH_GPU_SUPPORT_ENABLED": "1"})
