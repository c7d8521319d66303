"""The trainer's metrics file, throughput and progress lines, with a clock that the test sets."""

from __future__ import annotations

import json
import math
import resource
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from mpicomm import rank_log
from mpicomm.metrics_file import MetricsFile
from mpicomm.training import reporting
from mpicomm.training.newest_state import Failure, Recovery
from mpicomm.training.reporting import Display, Reporter
from mpicomm.training.state import Position


class Clock:
    """Replaces the module `time`; the test advances it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


def test_samples_per_second_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(reporting, "time", clock)
    entries: list[dict[str, Any]] = []
    world: Any = types.SimpleNamespace(size=4, device=torch.device("cpu"))
    reporter = Reporter(world, [entries.append], Display("none", 1, None, prints=False))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    position = Position()
    for steps in (3, 1):  # a step has 64 samples over all ranks, and takes 2 s
        for _ in range(steps):
            clock.now += 2.0
            position.step += 1
            reporter.step(position, 64)
        with reporter.excluded():  # the time of an evaluation does not count
            clock.now += 7.0
        reporter.log(position, 0.25, optimizer)
    reporter.log(position, None, optimizer)  # at the end of an epoch, whose last step is logged already
    assert [(entry["event"], entry["samples_per_s"], entry["lr"]) for entry in entries] == [("step", 32.0, 0.5)] * 2
    reporter.log(position, None, optimizer, {"spread": 3.0})
    assert (entries[-1]["samples_per_s"], entries[-1]["spread"]) == (None, 3.0)


@pytest.mark.parametrize("reports_use", [True, False])
def test_the_memory_and_use_of_a_gpu_of_any_vendor(reports_use: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a function for the peak of the allocated memory for each vendor, but not for the utilization."""
    monkeypatch.setattr(torch.xpu, "max_memory_allocated", lambda device: 3 * 2**20)
    if reports_use:
        monkeypatch.setattr(torch.xpu, "utilization", lambda device: 60 + device.index, raising=False)
    entries: list[dict[str, Any]] = []
    world: Any = types.SimpleNamespace(size=1, device=torch.device("xpu", 1))
    reporter = Reporter(world, [entries.append], Display("none", 1, None, prints=False))
    reporter.log(Position(), 0.25, torch.optim.SGD([torch.zeros(1)], lr=0.5))
    assert entries[0]["memory_mib"] == 3.0
    assert reporter._gpu_utilization == ([61] if reports_use else [])


def test_a_recovery_is_reported_with_the_time_without_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(reporting, "time", clock)
    entries: list[dict[str, Any]] = []
    world: Any = types.SimpleNamespace(size=3, device=torch.device("cpu"))
    reporter = Reporter(world, [entries.append], Display("lines", 1, None, prints=True))
    failure = Failure((2, 3), ("alpha", "beta"), "killed by signal 9", 99.5)
    reporter.begin_after(Recovery((failure,), (), 3, Position(step=5), last_step_at=99.0))
    assert capsys.readouterr().out == ""
    clock.now += 0.5
    for step in (6, 7):
        reporter.end_recovery(Position(step=step))
    assert capsys.readouterr().out == (
        "ranks 2, 3 on alpha, beta failed: killed by signal 9; continued from step 5 on 3 ranks, after 1.50 s "
        "without a step\n"
    )
    assert [(each["event"], each["step"], each.get("gap_s")) for each in entries] == [
        ("recovery", 5, None),
        ("recovered", 6, 1.5),
    ]
    assert json.loads(json.dumps(entries[0]["failures"]))[0]["ranks"] == [2, 3]


@pytest.mark.parametrize("before", ["", '{"event": "start"}\n', '{"event": "start"}\n{"event": "st'])
def test_an_entry_is_a_line_also_after_a_crash(tmp_path: Path, before: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(before)
    file = MetricsFile(path)
    file.write({"event": "resume", "step": 3})
    file.close()
    assert path.read_text().startswith(before)
    assert json.loads(path.read_text().splitlines()[-1]) == {"event": "resume", "step": 3}


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    """JSON has neither NaN nor Infinity."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    nested = {"a": [float("inf"), (-float("inf"), 1.5)]}
    file.write({"event": "eval", "loss": float("nan"), "nested": nested, "text": "NaN", "whole": 3})
    file.close()
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "event": "eval",
        "loss": None,
        "nested": {"a": [None, [None, 1.5]]},
        "text": "NaN",
        "whole": 3,
    }


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null/rank_000.log"])
def test_a_rank_log_that_cannot_be_written_is_a_warning(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    warned = pytest.warns(RuntimeWarning, match=f"output is not copied to '{path}': ")
    with warned as warnings, rank_log.copy_output(Path(path)):
        print("first")
        print("second", file=sys.stderr)
    assert len(warnings) == 1
    assert capsys.readouterr() == ("first\n", "second\n")


def test_a_full_disk_leaves_no_part_of_an_entry(tmp_path: Path) -> None:
    """RLIMIT_FSIZE simulates a full disk: a write that reaches the limit is partial, and the next write fails."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"event": "step", "step": 1})
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match="metrics are no longer written to .*: .*File too large"):
            file.write({"event": "step", "step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.write({"event": "step", "step": 3})  # the closed file receives no entry, and raises no error
    file.close()
    assert path.read_bytes() == before


def test_each_sink_gets_each_entry_also_after_the_file_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    world: Any = types.SimpleNamespace(size=1, device=torch.device("cpu"))
    reporter = Reporter(world, [file.write, first.append, second.append], Display("none", 1, None, prints=False))
    reporter.write("mine", Position(step=1), value=float("nan"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match="metrics are no longer written to"):
            reporter.write("mine", Position(step=2), value=2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reporter.write("mine", Position(step=3), value=3.0)
    file.close()
    for entries in (first, second):
        assert [entry["step"] for entry in entries] == [1, 2, 3]
        assert math.isnan(entries[0]["value"])
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(entry["event"], entry["step"], entry["value"]) for entry in written] == [("mine", 1, None)]


@pytest.mark.parametrize(
    ("total", "text"),
    [
        (100, "epoch 2/3  step 5  loss 0.5000  10 samples/s   50%  0:15 left"),
        (None, "epoch 2/3  step 5  loss 0.5000  10 samples/s"),
    ],
)
def test_a_progress_line_has_the_time_left_in_the_run(
    capsys: pytest.CaptureFixture[str], total: int | None, text: str
) -> None:
    Display("lines", 3, total, prints=True).show(1, 5, 50, 0.5, 10.0)
    assert capsys.readouterr().out == f"{text}\n"
