"""`mpicomm bench` compares the results of every backend with known ones, and detects wrong results."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm
from mpicomm.bench import compared_backends, known_inputs, sweep
from mpicomm.bench.measured_operations import OPERATIONS, Case, MeasuredOperation
from mpicomm.bench.sweep import SweepResults
from mpicomm.bench.timing import Bench
from mpicomm.errors import LaunchError

CPU = torch.device("cpu")
WITH_DATA = [name for name in OPERATIONS if name != "barrier"]
ODD_SIZE = 4 * 1025  # a multiple neither of the number of ranks nor of the pattern's length


@pytest.fixture(scope="module", name="compared")
def _compared(world: mpicomm.World) -> dict[str, Any]:
    return compared_backends.make(["mpi", "gloo", "mpi4py"], world)


def loads(size: int) -> dict[str, float]:
    """Return the ratio of bus bandwidth to algorithm bandwidth, as nccl-tests defines it."""
    shared = (size - 1) / size
    return {
        "all_reduce": 2 * shared, "reduce": 1, "broadcast": 1, "all_gather": shared, "reduce_scatter": shared,
        "all_to_all": shared, "gather": shared, "scatter": shared, "sendrecv": 1, "pingpong": 1, "barrier": 1,
        "all_reduce_avg": 2 * shared, "reduce_avg": 1, "reduce_scatter_avg": shared,
    }  # fmt: skip


def measured(
    world: mpicomm.World,
    compared: dict[str, Any],
    name: str,
    sizes: list[int],
    dtype: torch.dtype = torch.float32,
    *,
    asynchronous: bool = False,
    rewrites: bool = True,
) -> SweepResults:
    bench = Bench(mpicomm.all_gather_object, dist.barrier, lambda: None, rounds=2, seconds=1e-4)
    cases = sweep.cases([name], sizes, [dtype], CPU, world)
    return sweep.measure(cases, compared, bench, asynchronous=asynchronous, rewrites=rewrites)


@pytest.mark.mpi
@pytest.mark.filterwarnings("error")  # for example torch's deprecation warnings
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in WITH_DATA for dtype in (torch.float32, torch.bfloat16)]
    # the others only move bytes, and integers have no average
    + [(name, torch.int64) for name, kind in OPERATIONS.items() if kind.reduces and not kind.averages],
    ids=str,
)
def test_no_backend_is_wrong(world: mpicomm.World, compared: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    found = measured(world, compared, name, [4, ODD_SIZE], dtype, rewrites=dtype is torch.float32)
    assert [row.wrong for row in found.rows] == [0] * len(found.rows)
    ours = [row for row in found.rows if row.backend == "mpi"]
    assert len(ours) == 2 * len(OPERATIONS[name].places)
    for row in found.rows:
        assert row.us > 0
        assert row.algbw == pytest.approx(row.nbytes / row.us / 1e3, rel=1e-2)
        assert row.busbw == pytest.approx(row.algbw * loads(world.size)[name], rel=1e-2)
    refusers = {key.rpartition(", ")[2] for key in found.refusals}
    assert "mpi" not in refusers
    is_beyond_mpi = OPERATIONS[name].averages or (dtype is torch.bfloat16 and OPERATIONS[name].reduces)
    assert ("mpi4py" in refusers) == (is_beyond_mpi or name == "reduce_scatter")


@pytest.mark.mpi
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_operations_that_are_started_and_waited_for(world: mpicomm.World, name: str) -> None:
    found = measured(world, compared_backends.make(["mpi-async"], world), name, [ODD_SIZE])
    assert [(row.backend, row.wrong) for row in found.rows] == [("mpi-async", 0)] * len(OPERATIONS[name].places)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", WITH_DATA)
def test_an_operation_that_does_nothing_is_detected(world: mpicomm.World, compared: dict[str, Any], name: str) -> None:
    """The check fails even if the memory still holds the correct result of the previous backend."""

    def idle(operation: MeasuredOperation, starts: bool) -> Any:
        return lambda: None

    found = measured(world, {"mpi": compared["mpi"], "idle": idle}, name, [4096])
    assert [(row.backend, row.wrong > 0) for row in found.rows] == [
        ("mpi", False),
        ("idle", True),
    ] * len(OPERATIONS[name].places)


@pytest.mark.mpi
@pytest.mark.parametrize("rewrites", [True, False])
def test_inputs_are_written_again_before_each_call(world: mpicomm.World, rewrites: bool) -> None:
    seen: list[torch.Tensor] = []

    def overwrites(operation: MeasuredOperation, starts: bool) -> Any:
        def call() -> None:
            seen.append(operation.send.clone())
            operation.send.fill_(9)

        return call

    measured(world, {"overwrites": overwrites}, "all_to_all", [4096], rewrites=rewrites)
    first, *timed, last = seen
    assert torch.equal(first, last), "the checks before and after the timed calls"
    assert len(timed) > 10
    if rewrites:
        assert all(torch.equal(each, first) for each in timed)
    else:
        assert timed[0].eq(0).all()
        assert all(each.eq(9).all() for each in timed[1:])


@pytest.mark.mpi(min_size=2)
def test_a_result_that_is_wrong_after_some_calls_is_wrong(world: mpicomm.World) -> None:
    def stops(operation: MeasuredOperation, starts: bool) -> Any:
        left = [operation.by_torch] * 3
        return lambda: left.pop()(dist.group.WORLD) if left else None

    found = measured(world, {"stops": stops}, "all_reduce", [4096])
    assert [row.wrong > 0 for row in found.rows] == [True]


@pytest.mark.mpi(min_size=2)
def test_collectives_of_the_backend_none_do_nothing(world: mpicomm.World) -> None:
    group = compared_backends.group(compared_backends.NOTHING, world)
    one, whole = torch.full((2,), 3.0), torch.full((2 * world.size,), 5.0)
    dist.all_reduce(one, group=group)
    dist.all_gather_into_tensor(whole, one, group=group)
    assert (one.tolist(), whole.tolist()) == ([3.0] * 2, [5.0] * 2 * world.size)
    dist.reduce_scatter_tensor(one, whole, group=group)
    assert (one.tolist(), whole.tolist()) == ([3.0] * 2, [5.0] * 2 * world.size)
    dist.destroy_process_group(group)


@pytest.mark.mpi
def test_overlap(world: mpicomm.World, compared: dict[str, Any]) -> None:
    of_each = {**compared, **compared_backends.make(["mpi-async"], world)}
    found = measured(world, of_each, "all_reduce", [4096], asynchronous=True)
    assert [row.backend for row in found.rows] == ["mpi", "gloo"]
    assert all(row.overlap is not None for row in found.rows)  # tests/unit/test_benchmarks.py tests the values
    case = "all_reduce, float32, in place"
    assert found.refusals.keys() == {f"{case}, mpi4py", f"{case}, mpi-async"}
    assert found.refusals[f"{case}, mpi-async"] == "mpi-async waits in each call; use mpi with --async"


@pytest.mark.mpi
def test_a_backend_that_refuses_on_one_rank_is_left_out(world: mpicomm.World) -> None:
    def refuses(operation: MeasuredOperation, starts: bool) -> Any:
        if world.rank == world.size - 1:
            raise RuntimeError("not today\nnor tomorrow")
        return lambda: None

    found = measured(world, {"one": refuses}, "broadcast", [4])
    assert found == SweepResults([], {"broadcast, float32, in place, one": "not today"})


KNOWN = ("mpi", "gloo", "nccl", "xccl", "mpi4py", "mpi-async")
XPU = torch.device("xpu", 1)


def world_with(device: torch.device, backend: str, *, has_mpi: bool = True) -> Any:
    return types.SimpleNamespace(
        comm=object() if has_mpi else None, device=device, backend=backend, launcher="torchrun"
    )


@pytest.mark.parametrize(
    ("asked", "kind", "world", "text"),
    [
        (["nccl"], "cpu", world_with(CPU, "mpi"), "nccl needs one GPU per rank"),
        (["nccl"], "xpu", world_with(XPU, "cpu:mpi,xpu:xccl"), "nccl needs one GPU per rank"),
        (["xccl"], "xpu", world_with(XPU, "mpi"), "xccl needs one GPU per rank"),
        (None, "cuda", world_with(CPU, "mpi"), "this rank has no GPU; use --device cpu"),
        (None, "cuda", world_with(XPU, "mpi"), "this rank's device is xpu:1; use --device xpu"),
        (None, "xpu", world_with(XPU, "gloo", has_mpi=False), "no backend of this job transfers tensors on xpu:1"),
    ],
)
def test_backends_that_are_not_available(asked: list[str] | None, kind: str, world: Any, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        compared_backends.select(asked, KNOWN, kind, world)


def test_backends_that_need_more_are_measured_only_if_named() -> None:
    world = world_with(CPU, "mpi")
    assert compared_backends.select(None, KNOWN, "cpu", world) == (["mpi", "gloo", "mpi4py"], CPU)
    assert compared_backends.select(["mpi-async"], KNOWN, "cpu", world) == (["mpi-async"], CPU)


@pytest.mark.parametrize(
    ("backend", "has_mpi", "names"),
    [
        ("cpu:mpi,xpu:xccl", True, ["mpi", "xccl"]),
        ("cpu:gloo,xpu:xccl", False, ["xccl"]),
        ("xccl", False, ["xccl"]),
        ("cpu:mpi,xpu:vendors-own", True, ["mpi", "vendors-own"]),
        ("mpi", True, ["mpi"]),  # the ranks share a GPU
    ],
)
def test_on_gpus_the_backend_of_their_vendor_is_compared(backend: str, has_mpi: bool, names: list[str]) -> None:
    world = world_with(XPU, backend, has_mpi=has_mpi)
    assert compared_backends.select(None, KNOWN, "xpu", world) == (names, XPU)
    assert compared_backends.select(["mpi"] if has_mpi else ["gloo"], KNOWN, "cpu", world)[1] == CPU


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.float32], ids=str)
def test_sums_are_exact_in_any_order(size: int, dtype: torch.dtype) -> None:
    rows = [known_inputs.pattern(rank, 5, size).to(dtype) for rank in range(size)]
    for order in (rows, rows[::-1], rows[::2] + rows[1::2]):
        total = torch.zeros_like(rows[0])
        for row in order:
            total += row
        assert torch.equal(total.long(), known_inputs.summed(5, size))


@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.parametrize("nbytes", [1, 4, 1000, 4096])
def test_sizes_are_those_that_all_ranks_can_share(name: str, nbytes: int) -> None:
    for in_place in OPERATIONS[name].places:
        operation = MeasuredOperation(Case(name, nbytes, torch.float32, CPU, in_place, 2, 3))
        larger = max(operation.send.numel(), operation.receive.numel())
        assert operation.nbytes == 4 * larger
        assert larger % 3 == 0 or not operation.kind.has_parts
        assert operation.send.untyped_storage().data_ptr() != 0 or name == "barrier"
        shares = operation.send.untyped_storage().data_ptr() == operation.receive.untyped_storage().data_ptr()
        assert shares == in_place or name == "barrier"


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "scatter", "gather", "sendrecv"])
def test_the_result_of_another_backend_is_overwritten(name: str) -> None:
    operation = MeasuredOperation(Case(name, 4096, torch.float32, CPU, in_place=False, rank=0, size=2))
    known_inputs.fill(operation.receive, operation._received())
    assert operation.wrong() == 0
    operation.prepare()
    assert operation.wrong() == operation.receive.numel()


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    cases = [Case(name, 4096, torch.float32, CPU, in_place=False, rank=0, size=4) for name in OPERATIONS]
    assert {case.name: MeasuredOperation(case).load for case in cases} == loads(4)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16, 30])
def test_a_write_outside_of_the_output_is_detected(size: int) -> None:
    rows = [known_inputs.pattern(rank, part, size) for rank in range(size) for part in range(min(size, 6))]
    assert all(known_inputs.POISON not in row for row in rows)
    for rank, part in ((0, 0), (size - 1, 1)):
        own = known_inputs.pattern(rank, part, size)
        assert not torch.equal(own, known_inputs.pattern((rank + 1) % size, part, size))
        assert not torch.equal(own, known_inputs.pattern(rank, part + 1, size))
    total = known_inputs.summed(0, size)
    assert not torch.equal(total, known_inputs.summed(1, size))
    assert all(not torch.equal(total, total.roll(shift)) for shift in range(1, len(total)))


@pytest.mark.mpi
def test_each_size_that_fits_into_memory_is_measured_once(world: mpicomm.World, compared: dict[str, Any]) -> None:
    found = measured(world, {"mpi": compared["mpi"]}, "all_gather", [1, 4, 4 * world.size, 2**60])
    assert [row.nbytes for row in found.rows] == [4 * world.size] * 2
    assert list(found.refusals) == [f"all_gather, float32, {2**60} B"]


def test_wrong_elements_are_counted() -> None:
    tensor = torch.zeros(10)
    rows = [known_inputs.pattern(0, 0, 4), known_inputs.pattern(1, 0, 4)]
    known_inputs.fill(tensor, rows)
    assert known_inputs.wrong(tensor, rows) == 0
    tensor[[0, 4, 9]] += 1
    assert known_inputs.wrong(tensor, rows) == 3
