"""The arithmetic of `mpicomm bench`: the tests pass known times and compare the figures; they measure nothing."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import gil, ratios, startup, startup_probe
from benchmarks.ratios import Ratio
from benchmarks.startup import Sample
from mpicomm import host_info
from mpicomm.bench import overlap, processor_use, timing, training
from mpicomm.bench.processor_use import HostUse
from mpicomm.bench.timing import Bench, Timed, Times
from mpicomm.errors import LaunchError
from mpicomm.launch.allocation import SlurmAllocation
from mpicomm.launch.request import Start


class Clock:
    """Replaces the module `time`; calls advance it by whole microseconds."""

    def __init__(self) -> None:
        self.us = 0

    def perf_counter(self) -> float:
        return self.us / 1e6

    def perf_counter_ns(self) -> int:
        return self.us * 1000

    def after(self, *us: int) -> Callable[..., None]:
        """Return a callable that takes these times in turn, and then repeats the last one."""
        left = list(us)

        def call(*_: Any, **__: Any) -> None:
            self.us += left.pop(0) if len(left) > 1 else left[0]

        return call


def alone() -> Bench:
    """Return a `Bench` of a single rank."""
    return Bench(lambda mine: [mine], lambda: None, lambda: None, rounds=2, seconds=1e-4)


# -- timing --------------------------------------------------------------------------------------------------------


def test_latency_is_the_fastest_round_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)

    def gather(mine: Any) -> list[Any]:
        if isinstance(mine, float):
            return [mine, 3 * mine]
        return [mine, tuple([3 * each for each in part] for part in mine)]  # the other rank takes three times as long

    bench = Bench(gather, lambda: None, lambda: None, rounds=3, seconds=1e-6)  # short enough for three calls per round
    warm_up = [1] * 6
    found = timing.in_turn(bench, {"call": clock.after(*warm_up, 9, 9, 9, 5, 5, 5, 7, 7, 7)})
    assert found == {"call": Times(rounds=(27.0, 15.0, 21.0), p50=21.0, p99=27.0)}
    assert (found["call"].least, found["call"].median) == (15.0, 21.0)


def test_time_before_calls_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    events: list[str] = []

    def logged(name: str, us: int) -> Callable[[], None]:
        def call() -> None:
            events.append(name)
            clock.us += us

        return call

    bench = Bench(lambda mine: [mine], logged("barrier", 100), logged("settle", 1), rounds=1, seconds=1e-6)
    timed = Timed(logged("call", 10), logged("rewrite", 1000), logged("enter", 1000))
    assert timing.in_turn(bench, {"call": timed})["call"] == Times(rounds=(11.0,), p50=11.0, p99=11.0)
    rounds = 3  # two of the calibration
    assert events == ["enter", *["rewrite", "settle", "barrier", "call", "settle"] * 3] * rounds


def test_without_times_of_single_calls_there_is_no_percentile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    bench = dataclasses.replace(alone(), seconds=1e-6)
    call = clock.after(*[1] * 6, 2, 4, 9)
    assert timing.in_turn(bench, {"call": call}, times_calls=False)["call"] == Times(rounds=(5.0, 9.0))


@pytest.mark.parametrize(
    ("together", "percent"), [(200.0, 0.0), (150.0, 50.0), (125.0, 75.0), (100.0, 100.0), (90.0, 100.0), (250.0, 0.0)]
)
def test_overlap_is_the_part_of_an_operation_that_computing_hides(
    monkeypatch: pytest.MonkeyPatch, together: float, percent: float
) -> None:
    events: list[str] = []
    us = {"operation": 100.0, "computation": 100.0, "together": together}

    def in_turn(_: Bench, calls: dict[str, Callable[[], object]]) -> dict[str, Times]:
        for name, call in calls.items():
            events.append(name)
            call()
        return {name: Times((us[name],), None) for name in calls}

    def start() -> Any:
        events.append("start")
        return types.SimpleNamespace(wait=lambda: events.append("wait"))

    monkeypatch.setattr(overlap.timing, "in_turn", in_turn)
    monkeypatch.setattr(overlap, "amount_for", lambda _, us: us)
    found = overlap.measure(alone(), start, lambda us: events.append(f"compute {us:.0f} us"))
    assert found.percent == percent
    assert " ".join(events) == (
        "operation start wait computation compute 100 us together start compute 100 us wait"
    )  # the operation is in progress during the computation


def test_a_device_completes_its_computation_before_its_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a call returns before its computation is complete."""
    events: list[str] = []
    bench = dataclasses.replace(alone(), settle=lambda: events.append("settle"))
    monkeypatch.setattr(overlap.timing, "in_turn", lambda _, calls: dict.fromkeys(calls, Times((1.0,), None)))
    monkeypatch.setattr(overlap, "amount_for", lambda compute, _: compute(8))
    overlap.measure(bench, lambda: None, lambda amount: events.append(f"compute {amount}"))
    assert events == ["compute 8", "settle"]


def test_work_on_a_device_of_any_vendor_counts_until_it_is_complete() -> None:
    world: Any = types.SimpleNamespace(comm=None)
    assert timing.on_ranks_of(world, 1, device="xpu").settle is torch.accelerator.synchronize
    assert timing.on_ranks_of(world, 1).settle is not torch.accelerator.synchronize


def test_the_computation_takes_as_long_as_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(overlap, "time", clock)

    def compute(amount: int) -> None:
        clock.us += 500 + 10 * amount  # a call itself takes time, too

    assert overlap.amount_for(compute, 1e6) == pytest.approx(1e5, rel=0.05)


def test_the_parts_of_a_step_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data take 1 ms, data and computation 5 ms, the whole step 9 ms with one backend and 4.5 ms with the other."""
    us = {"data": 1000.0, "compute": 5000.0, "mpi": 9000.0, "none": 4500.0}
    monkeypatch.setattr(
        training.timing,
        "in_turn",
        lambda _, calls: {name: Times((us[name], 2 * us[name], 3 * us[name]), None) for name in calls},
    )
    monkeypatch.setattr(training, "_spread", lambda model, *_: model)
    rows = training.measure([("small", "ddp")], {"mpi": None, "none": None}, alone(), torch.device("cpu"))
    assert [(row.backend, row.ms, row.ms_median, row.parameters) for row in rows] == [
        ("mpi", 9.0, 18.0, 2 * (128 * 128 + 128)),
        ("none", 4.5, 9.0, 2 * (128 * 128 + 128)),
    ]
    assert [(row.data_ms, row.compute_ms, row.communication_ms) for row in rows] == [(1.0, 4.0, 4.0), (1.0, 3.5, 0.0)]


# -- the CPUs of the hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "others", "text"),
    [
        (2, 2.1, None),
        (
            2,
            2.5,
            "a is busy: during the measurement, other processes used 2.5 of the 4 CPUs of the ranks, and 2 ranks ",
        ),
        (4, None, None),
        (5, None, "5 ranks share the 4 CPUs of a"),
    ],
)
def test_ranks_that_compete_for_cpus_are_reported(ranks: int, others: float | None, text: str | None) -> None:
    warning = HostUse("a", ranks, 4, others).warning
    assert warning is None if text is None else str(warning).startswith(text)


def test_the_cpus_that_other_processes_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 10 s, all processes use 18 s of CPUs 0 and 1, of which two ranks use 6 s each; other hosts have no figures."""
    idle = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 0 0 9 9 0 0 0 0 0\ncpu1 0 0 50 9 9 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0\nintr 7"
    busy = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 900 0 0 9 9 0 0 0 0 0\ncpu1 800 100 150 9 9 0 0 0 0 0\ncpu2 999 0 0 0 0 0 0"
    stat = iter([idle, busy])
    monkeypatch.setattr(processor_use.host_info, "read", lambda _: next(stat))
    monkeypatch.setattr(processor_use.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(processor_use.time, "monotonic", iter([1.0, 11.0]).__next__)
    monkeypatch.setattr(processor_use.time, "process_time", iter([3.0, 9.0]).__next__)
    monkeypatch.setattr(processor_use.os, "sched_getaffinity", lambda _: {0})
    start, end = processor_use.ProcessorTimes(0.0, {}, 0.0), processor_use.ProcessorTimes(9.0, {}, 9.0)
    other_host = (start, end, set(range(8)))
    bench = dataclasses.replace(alone(), gather=lambda mine: [mine, (*mine[:2], {0, 1}), other_host])
    world: Any = types.SimpleNamespace(nodes=(0, 0, 1), hosts=("a", "a", "b"))
    hosts = processor_use.since(processor_use.times_now(), bench, world)
    assert hosts == [HostUse("a", 2, 2, pytest.approx(0.6)), HostUse("b", 1, 8, None)]


# -- startup times -------------------------------------------------------------------------------------------------


def test_each_step_of_a_start_has_its_own_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(startup_probe, "time", clock)
    monkeypatch.setattr(startup_probe.sys, "argv", ["startup_probe", "gloo"])
    monkeypatch.setattr(dist, "init_process_group", clock.after(2000))
    monkeypatch.setattr(dist, "all_reduce", clock.after(500))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    startup_probe.main()
    found = json.loads(capsys.readouterr().out)
    assert found["size"] == 2
    steps = {"import torch": 0.0, "init_process_group": 2e-3, "first all_reduce": 5e-4}
    assert found["seconds"] == pytest.approx(steps)


def test_of_some_starts_the_fastest_counts_with_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = iter([(1, 4.0), (1, 9.0), (2, 5.0), (2, 9.0), (1, 3.0), (1, 8.0), (2, 6.0), (2, 7.0)])

    def sample_of(start: Start, ranks: int, limit: float) -> Sample:
        expected, seconds = next(samples)
        assert (ranks, start.command[-1], limit) == (expected, str(expected), 20.0)
        return Sample(seconds, {"launch": seconds - 1, "import torch": 1.0})

    def starting(ranks: int) -> Start:
        return Start(("probe", str(ranks)), {})

    monkeypatch.setattr(startup, "sample_of", sample_of)
    launchers = {"mpicomm": starting, "torchrun + Gloo": starting}
    cases = [(ranks, launcher) for ranks in (1, 2) for launcher in launchers]
    rows = startup.measure([*cases, *cases], launchers, limit=20.0)
    assert [(row["ranks"], row["way"], row["seconds"], row["median"]) for row in rows] == [
        (1, "mpicomm", 3.0, 3.5),
        (1, "torchrun + Gloo", 8.0, 8.5),
        (2, "mpicomm", 5.0, 5.5),
        (2, "torchrun + Gloo", 7.0, 8.0),
    ]
    assert rows[0]["steps"] == {"launch": 2.0, "import torch": 1.0}
    assert list(samples) == []


def test_the_table_of_starts_compares_the_fastest_with_the_fastest() -> None:
    steps = {"launch": 1.5, "bootstrap": 0.5}
    rows = [
        {"ranks": ranks, "way": way, "seconds": seconds, "median": 2 * seconds, "steps": steps if way == "mpi" else {}}
        for ranks, way, seconds in ((2, "mpi", 2.0), (2, "torchrun", 5.0), (8, "mpi", 4.0), (8, "torchrun", 8.0))
    ]
    table = startup.table(rows, "mpi", 0.0012)
    assert table.caption == "import mpicomm: 1.2 ms"
    shown = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
    assert shown == {
        "ranks": ["2", "8"],
        "mpi": ["2.00", "4.00"],
        "launch": ["1.500", "1.500"],
        "bootstrap": ["0.500", "0.500"],
        "torchrun": ["5.00 (2.50x)", "8.00 (2.00x)"],
    }


def test_srun_starts_one_agent_on_each_node() -> None:
    home = {"HOME": "/home/u"}
    start = startup.torchrun_by_srun(("python", "train.py"), 4, SlurmAllocation(2, 4, (8, 6)), 29500, home)
    assert shlex.join(start.command[:7]) == "srun --mpi=none --nodes=2 --ntasks=2 --cpus-per-task=6 bash -c"
    assert start.command[7] == (
        "PET_NODE_RANK=$SLURM_NODEID "
        'PET_MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1) exec "$@"'
    )
    assert shlex.join(start.command[8:]) == (
        f"bash {sys.executable} -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --master-port=29500 "
        f"--no-python python train.py"
    )
    assert start.environ == {**home, "THP_MEM_ALLOC_ENABLE": "1", "OMP_NUM_THREADS": "3"}


def test_agents_of_srun_start_equal_numbers_of_ranks() -> None:
    with pytest.raises(LaunchError, match="got 3 ranks and 2 nodes"):
        startup.torchrun_by_srun(("python", "train.py"), 3, SlurmAllocation(2, 4), 29500, {})


# -- machine settings and ratios -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"), ("", "unknown")],
)
def test_the_setting_of_huge_pages_is_the_one_in_brackets(tmp_path: Path, text: str, chosen: str) -> None:
    path = tmp_path / "enabled"
    assert host_info.selected(path) == "unknown"
    path.write_text(text)
    assert host_info.selected(path) == chosen


@pytest.mark.parametrize(
    ("value", "is_least", "is_met"),
    [(1.9, True, False), (2, True, True), (2.1, True, True), (1.9, False, True), (2, False, True), (2.1, False, False)],
)
def test_a_ratio_is_met_on_the_right_side_of_its_target(value: float, is_least: bool, is_met: bool) -> None:
    assert Ratio("a figure", value, 2.0, is_least).is_met is is_met


def test_the_fastest_row_of_all_runs_counts_and_wrong_elements_of_each() -> None:
    runs = [
        {
            "ranks": 2,
            "rows": [{"backend": "mpi", "us": mpi, "wrong": wrong}, {"backend": "gloo", "us": gloo, "wrong": None}],
        }
        for mpi, wrong, gloo in ((5.0, 1, 7.0), (4.0, 0, 8.0))
    ]
    assert ratios.fastest(runs) == {
        "ranks": 2,
        "rows": [{"backend": "mpi", "us": 4.0, "wrong": 1}, {"backend": "gloo", "us": 7.0, "wrong": 0}],
    }
    assert ratios.fastest([{"milliseconds": 3.0}, {"milliseconds": 2.0}]) == {"milliseconds": 3.0}


def test_the_delay_by_a_loop_is_that_of_the_median_round(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {gil.ALONE: (4000.0, 5000.0, 6000.0), gil.WITH_LOOP: (5000.0, 9500.0, 9900.0)}
    monkeypatch.setattr(
        timing, "in_turn", lambda _, calls: {name: Times(us[name.partition(" ")[2]], None) for name in calls}
    )
    monkeypatch.setattr(overlap, "amount_for", lambda *_: 1)
    assert gil.measure({"mpicomm": None}, alone()) == {"mpicomm": {"alone": 5.0, "with the loop": 9.5, "longer": 4.5}}


def test_the_time_of_rank_1_is_taken_though_rank_0_is_slower() -> None:
    everyone = Bench(lambda mine: [3 * mine, mine], lambda: None, lambda: None)  # type: ignore[operator]
    assert gil.of_rank_1(everyone).gather(2.0) == [2.0]
