"""The agreement of ranks on the transport of GPU tensors. No GPU is needed: torch's and MPI's answers are simulated."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm import mpi
from mpicomm.backend.gpu import probe
from mpicomm.backend.gpu.staging import StagingTransport
from mpicomm.backend.gpu.transport import GPUDirect, Transport
from mpicomm.backend.transfer import mpi_calls
from mpicomm.devices import accelerator, vendors
from mpicomm.launch.mpi_library import Library
from mpicomm.settings import Settings
from tests.movers import stage
from tests.torches import all_gather_single, reduce_scatter_single

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the record that the library has passed the test."""
    monkeypatch.setattr(probe, "_has_passed", False)


def pretend(monkeypatch: pytest.MonkeyPatch, *, has_gpu: bool, is_claimed: bool, failures: list[str]) -> list[int]:
    """Simulate a GPU, the report of the library and the failures of a test; return a list with one element per test."""
    tests: list[int] = []

    def test(*_args: object) -> list[str]:
        tests.append(1)
        return failures

    monkeypatch.setattr(accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setattr(accelerator, "is_initialized", lambda: has_gpu)
    monkeypatch.setattr(accelerator, "current_device", lambda: HOST)
    monkeypatch.setattr(probe, "is_claimed", lambda _environ: is_claimed)
    monkeypatch.setattr(probe, "failures", test)
    return tests


def test_the_choice_of_all_ranks(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU addresses are passed to MPI if no rank objects, after one test of the library."""
    is_first, is_last = world.rank == 0, world.rank == world.size - 1
    for has_gpu, is_claimed, setting, transport, number in (
        (False, True, "auto", Transport, 0),
        (is_last, False, "auto", StagingTransport, 0),
        (True, True, "auto", GPUDirect, 1),
        (True, False, "1", GPUDirect, 1),
        (True, True, "0" if is_first else "auto", StagingTransport, 0),
    ):
        monkeypatch.setattr(probe, "_has_passed", False)
        tests = pretend(monkeypatch, has_gpu=has_gpu, is_claimed=is_claimed, failures=[])
        for _ in range(2):
            assert type(probe.choose_transport(world.comm, Settings(gpu_aware=setting))) is transport
        assert len(tests) == number


def test_a_group_tests_again_if_one_of_its_ranks_has_not(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = pretend(monkeypatch, has_gpu=True, is_claimed=True, failures=[])
    monkeypatch.setattr(probe, "_has_passed", world.rank != 0)
    assert isinstance(probe.choose_transport(world.comm, Settings()), GPUDirect)
    assert tests == [1]


def test_one_rank_that_fails_stages_on_all(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = ["all_reduce of 1 elements"] if world.rank == 0 else []
    pretend(monkeypatch, has_gpu=True, is_claimed=True, failures=failures)
    warns = pytest.warns(UserWarning, match=r"failed its test: all_reduce of 1 elements\. GPU tensors are staged")
    with warns if failures else contextlib.nullcontext():
        assert isinstance(probe.choose_transport(world.comm, Settings()), StagingTransport)


def test_all_ranks_use_the_shortest_chunk(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, has_gpu=True, is_claimed=False, failures=[])
    transport = probe.choose_transport(world.comm, Settings(gpu_chunk_kib=1 + world.rank))
    assert isinstance(transport, StagingTransport)
    assert transport._chunk_bytes == 1024


@pytest.mark.parametrize(
    ("name", "setting"),
    [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")],
)
def test_memory_that_is_not_exported_is_warned_of(
    world: mpicomm.World, monkeypatch: pytest.MonkeyPatch, name: str, setting: str
) -> None:
    pretend(monkeypatch, has_gpu=True, is_claimed=True, failures=[])
    monkeypatch.setattr(vendors, "vendor", vendors.CUDA)
    monkeypatch.setenv(name, f"max_split_size_mb:64, {setting}")
    with pytest.warns(UserWarning, match=rf"{name} has {setting}: CUDA IPC cannot export such memory"):
        probe.choose_transport(world.comm, Settings())


@pytest.mark.each_mpi
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("report", ["staged", "direct"])
def test_tensors_on_the_host_go_as_if_there_were_no_gpu(
    world: mpicomm.World, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    pretend(monkeypatch, has_gpu=True, is_claimed=report == "direct", failures=[])
    handle = dist.new_group()
    executor = handle._executor
    assert isinstance(executor.transport, StagingTransport if report == "staged" else GPUDirect)
    cut: list[torch.Tensor] = []
    monkeypatch.setattr(StagingTransport, "_in_chunks", lambda *args: cut.append(args[0]))
    call, general = handle._call, []
    monkeypatch.setattr(handle, "_call", lambda *args: general.append(args[1][0][0].numel()) or call(*args))
    expected = [] if report == "direct" else [4 << 20]
    if executor.algorithms.slots is None:
        expected.insert(0, 3)  # the first call opens the shared memory
    small, large = torch.full((3,), 1.0 + world.rank), torch.full((4 << 20,), 1.0 + world.rank)
    total = world.size * (world.size + 1) / 2
    for each in (small, large):
        dist.all_reduce(each, group=handle)
        assert torch.equal(each, torch.full_like(each, total))
    assert not cut
    assert general == expected  # larger tensors are staged in chunks
    assert executor.algorithms._comms
    dist.destroy_process_group(handle)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [1, 6, 7, 1000])
def test_ranks_with_tensors_on_gpus_and_on_the_host_take_part_together(world: mpicomm.World, count: int) -> None:
    """Rank 0's tensors are treated as GPU tensors; chunks have 24 bytes."""
    handle = dist.new_group()
    stage(handle, is_on_gpu=world.rank == 0)
    size, total = world.size, world.size * (world.size + 1) / 2
    mine = torch.full((count,), 1.0 + world.rank)
    for is_async in (False, True):
        summed, shared, of_ranks = mine.clone(), mine.clone(), torch.empty(size * count)
        spread, swapped = torch.arange(float(size * count)) * (1 + world.rank), torch.empty(size * count)
        block = torch.empty(count)
        works = [
            dist.all_reduce(summed, group=handle, async_op=is_async),
            dist.broadcast(shared, size - 1, group=handle, async_op=is_async),
            all_gather_single(of_ranks, mine, group=handle, async_op=is_async),
            reduce_scatter_single(block, spread, group=handle, async_op=is_async),
            dist.all_to_all_single(swapped, spread, group=handle, async_op=is_async),
        ]
        for work in filter(None, works):
            work.wait()
        own = torch.arange(float(size * count)).view(size, count)[world.rank]
        assert torch.equal(summed, torch.full((count,), total))
        assert torch.equal(shared, torch.full((count,), float(size)))
        assert torch.equal(of_ranks, torch.arange(1.0, size + 1).repeat_interleave(count))
        assert torch.equal(block, total * own)
        assert torch.equal(swapped, torch.cat([own * (1 + rank) for rank in range(size)]))
    dist.destroy_process_group(handle)


# -- the test of the library, with addresses on the host ---------------------------------------------------------------


def test_memory_that_mpi_can_access_passes_the_probe(world: mpicomm.World) -> None:
    assert probe.failures(world.comm, HOST) == []


OPERATIONS = [name for name in probe._TESTS if not name.startswith("uneven")]


def found_by_any(world: mpicomm.World) -> set[str]:
    """Return the operations that fail on any rank."""
    found = world.comm.allgather(probe.failures(world.comm, HOST))
    return {failure.split(" of ")[0] for failures in found for failure in failures}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("writes", ["something wrong", "nothing"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wrong_result_is_found_and_named(
    world: mpicomm.World, monkeypatch: pytest.MonkeyPatch, name: str, writes: str
) -> None:
    function = {"message": "receive" if writes == "nothing" else "send"}.get(name, name)
    right = getattr(mpi_calls, function)
    kept = []  # memory of messages in flight

    def wrong(comm: object, *args: object) -> object:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if writes == "nothing":
            args = tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in args)
            kept.append(args)
        elif tensors:
            tensors[0] += 1
        return right(comm, *args)

    monkeypatch.setattr(mpi_calls, function, wrong)
    monkeypatch.setattr(probe, "_COUNTS", (3,))
    assert found_by_any(world) == {each for each in probe._TESTS if each.removeprefix("uneven ") == name}


def test_an_error_of_mpi_is_a_failure(world: mpicomm.World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise mpi.api().Exception(mpi.api().ERR_BUFFER)

    monkeypatch.setattr(mpi_calls, "gather", refuse)
    assert {failure.split(" of ")[0] for failure in probe.failures(world.comm, HOST)} == {"gather"}


def pretend_library(monkeypatch: pytest.MonkeyPatch, description: str, kinds: str | None) -> None:
    """Simulate a library without query functions that reports these kinds of memory."""
    info = SimpleNamespace(Get=lambda _key: kinds)
    comm = SimpleNamespace(Get_info=lambda: info)
    library = Library("MPICH", "5.0", description=description)
    made_up = SimpleNamespace(api=lambda: SimpleNamespace(COMM_WORLD=comm), library=lambda: library)
    monkeypatch.setattr(probe, "mpi", made_up)
    monkeypatch.setattr(vendors, "vendor", vendors.CUDA)


@pytest.mark.parametrize(
    ("vendor", "kinds", "is_claimed"),
    [
        (vendors.CUDA, None, False),
        (vendors.CUDA, "system,mpi", False),
        (vendors.CUDA, "system,rocm", False),
        (vendors.CUDA, "system,cuda", True),
        (vendors.CUDA, "system,cuda:device", True),
        (vendors.CUDA, "cuda:host:device,system", True),
        (vendors.ROCm, "system,rocm", True),
        (vendors.ROCm, "system,cuda", False),
        (vendors.XPU, "system,level_zero:device", True),
        (vendors.Vendor, "", False),
    ],
)
def test_a_library_that_names_kinds_of_memory(
    monkeypatch: pytest.MonkeyPatch, vendor: type[vendors.Vendor], kinds: str | None, is_claimed: bool
) -> None:
    pretend_library(monkeypatch, "MPICH", kinds)
    monkeypatch.setattr(vendors, "vendor", vendor)
    assert probe.is_claimed({}) == is_claimed


@pytest.mark.parametrize("vendor", [vendors.CUDA, vendors.ROCm, vendors.XPU])
def test_a_library_that_answers_queries(monkeypatch: pytest.MonkeyPatch, vendor: type[vendors.Vendor]) -> None:
    """MPI libraries have a function for each vendor, which returns 1 if they support its addresses."""
    pretend_library(monkeypatch, "Open MPI", None)
    monkeypatch.setattr(vendors, "vendor", vendor)
    for answers in ({}, dict.fromkeys(vendor.mpi_queries, 0), {vendor.mpi_queries[-1]: 1}):
        functions = SimpleNamespace(**{query: (lambda answer=answer: answer) for query, answer in answers.items()})
        monkeypatch.setattr(probe.mpi, "library", lambda: Library("Open MPI", "5.0", path="libmpi.so"))
        monkeypatch.setattr(probe.ctypes, "CDLL", lambda _path, functions=functions: functions)
        assert probe.is_claimed({}) == (1 in answers.values())


@pytest.mark.parametrize("enabled", ["", "0", "1"])
def test_crays_library_is_believed_where_it_is_enabled(monkeypatch: pytest.MonkeyPatch, enabled: str) -> None:
    pretend_library(monkeypatch, "CRAY MPICH version 8.1", "system,cuda")
    assert probe.is_claimed({"MPICH_GPU_SUPPORT_ENABLED": enabled} if enabled else {}) == (enabled == "1")


def test_a_library_without_support_for_gpus_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its test would pass an address that MPI cannot access."""
    pretend_library(monkeypatch, "MPICH", "system,cuda")
    assert not probe.is_claimed({"MPIR_CVAR_ENABLE_GPU": "0"})


def test_the_mpis_of_the_package_index_claim_nothing(world: mpicomm.World) -> None:
    if not mpi.library().path.startswith(sys.prefix):
        pytest.skip("this MPI was installed otherwise")
    assert not probe.is_claimed({"MPICH_GPU_SUPPORT_ENABLED": "1"})
