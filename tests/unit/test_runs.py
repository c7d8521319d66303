"""Runs read from their metrics files: the entries that count, the figures, the table and the plot."""

from __future__ import annotations

import builtins
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from rich.console import Console

from mpicomm import metrics_file
from mpicomm.cli.main import main
from mpicomm.reports import plots, run_metrics, runs
from mpicomm.reports.runs import Run

Line = dict[str, Any]


def entry(event: str, step: int, epoch: int = 0, consumed: int = 0, **values: Any) -> Line:
    return {"event": event, "time": 0.0, "step": step, "epoch": epoch, "consumed": consumed, **values}


def start(ranks: int = 2) -> Line:
    return entry("start", 0, ranks=ranks, device="cpu")


def resume(step: int, epoch: int = 0, consumed: int = 0, ranks: int = 2) -> Line:
    return entry("resume", step, epoch, consumed, ranks=ranks, device="cpu")


def recovery(step: int, epoch: int = 0, consumed: int = 0, ranks: int = 2, failed: Sequence[int] = (1,)) -> Line:
    failures = [{"ranks": list(failed), "hosts": ["alpha"] * len(failed), "reason": "killed", "detected_at": 1.0}]
    return entry("recovery", step, epoch, consumed, ranks=ranks, joined=[], failures=failures)


def a_step(step: int, epoch: int, consumed: int, loss: float | None = 1.0, rate: float = 100.0, **values: Any) -> Line:
    parts = {"data_s": 0.1, "compute_s": 0.6, "communication_s": 0.3}
    about = {"loss": loss, "lr": 0.1, "samples_per_s": rate, **parts, "memory_mib": 200.0}
    return entry("step", step, epoch, consumed, **{**about, **values})


def an_epoch(step: int, epoch: int, samples: int = 100) -> Line:
    return entry("epoch", step, epoch, loss=1.0, samples=samples)


def evaluated(step: int, epoch: int, **means: float) -> Line:
    return entry("eval", step, epoch, **means, eval_samples=50)


def end(step: int, epoch: int) -> Line:
    memory = [{"host": "alpha", "device": "cpu", "memory": mib * 2**20, "utilization": None} for mib in (150, 300)]
    return entry("end", step, epoch, seconds=9.0, samples_per_s=90.0, ranks=memory)


# Two epochs of 100 samples in ten steps each, with an entry every five steps.
FIRST = [start(), a_step(5, 0, 50, loss=4.0), a_step(10, 0, 100, loss=2.0), an_epoch(10, 1)]
SECOND = [a_step(15, 1, 50, rate=50.0), a_step(20, 1, 100, loss=0.5, rate=50.0), an_epoch(20, 2)]
WHOLE = [
    *FIRST,
    evaluated(10, 1, eval_loss=2.5, accuracy=0.9),
    *SECOND,
    evaluated(20, 2, eval_loss=0.75, accuracy=0.8),
    end(20, 2),
]


def text_of(lines: Sequence[Line | str]) -> str:
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = tmp_path / "digits"
    found.mkdir()
    return found


def read(directory: Path, lines: Sequence[Line | str], cut: str = "") -> Run:
    """Write a file and read it.

    Args:
        cut: Text after the last complete line.
    """
    (directory / metrics_file.NAME).write_text(text_of(lines) + cut)
    return runs.read(directory, directory.name)


def seen(run: Run) -> list[tuple[str, int]]:
    return [(each.event, each.step) for each in run.entries]


# -- broken lines ----------------------------------------------------------------------------------------------------


def test_a_line_that_a_crash_has_cut_off_is_left_out(directory: Path) -> None:
    whole = text_of([WHOLE[2]])
    for length in range(1, len(whole) - 1):
        run = read(directory, WHOLE[:2], cut=whole[:length])
        assert (len(run.entries), run.warnings) == (2, ())


def test_a_last_line_that_lacks_its_end_alone_counts(directory: Path) -> None:
    assert len(read(directory, WHOLE[:2], cut=json.dumps(WHOLE[2])).entries) == 3


@pytest.mark.parametrize("beginning", [resume(5, 0, 50), start(), recovery(5, 0, 50)])
def test_a_line_that_was_cut_off_before_the_run_went_on_is_left_out(directory: Path, beginning: Line) -> None:
    run = read(directory, [*WHOLE[:2], '{"event": "st', beginning, WHOLE[2]])
    assert run.warnings == ()
    assert seen(run)[-1] == ("step", 10)


@pytest.mark.parametrize("broken", ['{"event": "st', "[1, 2]", "7", '{"step": 3}', '{"event": 3}', "\0\0"])
def test_any_other_broken_line_is_reported(directory: Path, broken: str) -> None:
    run = read(directory, [*WHOLE[:2], broken, *WHOLE[2:]])
    (warning,) = run.warnings
    assert warning.startswith(f"line 3 of {directory / metrics_file.NAME} is not a valid entry and is skipped")
    assert len(run.entries) == len(WHOLE)


def test_of_two_broken_lines_before_a_resume_one_is_reported(directory: Path) -> None:
    run = read(directory, [*WHOLE[:2], "{", "{", resume(5, 0, 50)])
    assert [warning[:7] for warning in run.warnings] == ["line 3 "]


def test_invalid_text_is_a_broken_line(directory: Path) -> None:
    (directory / metrics_file.NAME).write_bytes(text_of(FIRST).encode() + b"\xff\xfe{\n" + text_of(SECOND).encode())
    assert len(runs.read(directory, "digits").warnings) == 1


def test_empty_lines_are_ignored(directory: Path) -> None:
    run = read(directory, ["", *WHOLE, "", ""])
    assert (len(run.entries), run.warnings) == (len(WHOLE), ())


@pytest.mark.parametrize("cut", ["", '{"event": "sta'])
def test_a_file_without_entries(directory: Path, cut: str) -> None:
    run = read(directory, [], cut)
    (warning,) = run.warnings
    assert "has no entries" in warning
    found = run_metrics.compute(run)
    assert (found.state, found.ranks, found.steps, found.samples_per_s) == ("interrupted", None, 0, None)


# -- entries that count ----------------------------------------------------------------------------------------------


def test_entries_after_the_checkpoint_of_a_resume_do_not_count(directory: Path) -> None:
    run = read(directory, [*WHOLE[:7], resume(12, 1, 20), *SECOND])
    assert seen(run)[4:] == [("eval", 10), ("resume", 12), ("step", 15), ("step", 20), ("epoch", 20)]
    assert [each.samples for each in run.select("step")] == [50, 50, 30, 50]
    assert run_metrics.compute(run).samples == 200


def test_other_entries_do_not_move_where_samples_are_counted_from(directory: Path) -> None:
    run = read(directory, [start(), entry("checkpoint", 2, 0, 20), entry("skipped", 3, 0, 30), a_step(5, 0, 50)])
    assert run.entries[-1].samples == 50


def test_a_second_start_drops_all_before_it(directory: Path) -> None:
    run = read(directory, [*WHOLE, resume(20, 2), start(ranks=4), *FIRST[1:2]])
    assert seen(run) == [("start", 0), ("step", 5)]
    found = run_metrics.compute(run)
    assert (found.resumes, found.ranks, found.ranks_before) == (0, 4, ())


def test_of_an_epoch_that_ended_twice_the_last_counts(directory: Path) -> None:
    first = evaluated(10, 1, eval_loss=3.0)
    again = [an_epoch(10, 1, samples=99), evaluated(10, 1, eval_loss=2.0)]
    run = read(directory, [*FIRST, first, resume(10, 0, 100), *again])
    assert seen(run)[-3:] == [("resume", 10), ("epoch", 10), ("eval", 10)]
    assert [event for event, _ in seen(run)].count("epoch") == 1
    assert run_metrics.compute(run).last_evaluation == {"eval_loss": 2.0}
    assert run_metrics.compute(run).samples == 99


def test_an_epoch_that_was_not_repeated_counts(directory: Path) -> None:
    run = read(directory, [*WHOLE[:5], resume(10, 1), *SECOND])
    assert ("epoch", 10) in seen(run)
    assert ("eval", 10) in seen(run)


def test_unknown_events_and_values_change_no_figure(directory: Path) -> None:
    odd = [{"event": "weather", "sky": "blue"}, entry("step", 20, 2, loss="low", samples_per_s=None, memory_mib=True)]
    expected = run_metrics.compute(read(directory, WHOLE))
    changed = [*WHOLE[:-1], *odd, WHOLE[-1], {"event": "moon"}]
    assert run_metrics.compute(read(directory, changed)) == expected


def test_runs_are_named_by_their_directories(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a/run", "b/run", "c/other")]
    for path in paths:
        path.mkdir(parents=True)
        (path / metrics_file.NAME).write_text(text_of(WHOLE))
    assert [run.name for run in runs.read_all(paths)] == [str(paths[0]), str(paths[1]), "other"]


def test_a_file_in_place_of_its_directory(directory: Path) -> None:
    read(directory, WHOLE)
    with pytest.raises(NotADirectoryError, match=f"Pass the directory that contains it: {directory}"):
        runs.read_all([directory / metrics_file.NAME])


# -- figures ---------------------------------------------------------------------------------------------------------


def test_figures_of_a_run(directory: Path) -> None:
    found = run_metrics.compute(read(directory, WHOLE))
    assert (found.run, found.state, found.why) == ("digits", "complete", None)
    assert (found.ranks, found.ranks_before, found.resumes) == (2, (), 0)
    assert (found.epochs, found.steps, found.samples) == (2, 20, 200)
    assert found.training_seconds == pytest.approx(3.0)
    assert found.samples_per_s == pytest.approx(200 / 3)
    assert found.last_loss == 0.5
    assert found.last_evaluation == {"eval_loss": 0.75, "accuracy": 0.8}
    assert found.best_evaluation == {
        "eval_loss": run_metrics.Best(0.75, 2, 20, "lowest"),
        "accuracy": run_metrics.Best(0.9, 1, 10, "highest"),
    }
    within = entry("step_eval", 15, 1, eval_loss=0.7, accuracy=0.7)
    found = run_metrics.compute(read(directory, [*WHOLE[:-2], within]))
    assert found.last_evaluation == {"eval_loss": 0.7, "accuracy": 0.7}
    assert found.best_evaluation["eval_loss"] == run_metrics.Best(0.7, 1, 15, "lowest")
    found = run_metrics.compute(read(directory, WHOLE))
    assert found.time_percent == pytest.approx({"data": 10, "compute": 60, "communication": 30})
    assert found.peak_memory_mib == 300


@pytest.mark.parametrize(
    ("last", "state", "why"),
    [
        ([], "interrupted", None),
        ([end(20, 2)], "complete", None),
        ([end(20, 2), resume(20, 2)], "interrupted", None),
        ([entry("preempted", 20, 2, why="SIGTERM on rank 1")], "preempted", "SIGTERM on rank 1"),
        ([entry("preempted", 20, 2, why="SIGTERM on rank 1"), resume(20, 2), end(20, 2)], "complete", None),
    ],
)
def test_how_a_run_ended(directory: Path, last: list[Line], state: str, why: str | None) -> None:
    found = run_metrics.compute(read(directory, [*WHOLE[:-1], *last]))
    assert (found.state, found.why) == (state, why)


def test_resumes_on_other_ranks(directory: Path) -> None:
    lines = [*WHOLE, resume(18, 1, 80), resume(15, 1, 50, ranks=4), resume(10, 1, ranks=3)]
    found = run_metrics.compute(read(directory, lines))
    assert (found.resumes, found.ranks, found.ranks_before) == (3, 3, (2, 4))


def test_a_recovery_drops_the_steps_that_only_the_failed_rank_had_completed(directory: Path) -> None:
    lines = [*FIRST[:2], a_step(7, 0, 70), recovery(6, 0, 60), a_step(10, 0, 100), an_epoch(10, 1)]
    run = read(directory, lines, cut='{"event": "st')
    assert seen(run) == [("start", 0), ("step", 5), ("recovery", 6), ("step", 10), ("epoch", 10)]
    assert [each.samples for each in run.select("step")] == [50, 40]
    assert run.warnings == ()


def test_recoveries_are_figures_with_the_failed_ranks_and_the_gap(directory: Path) -> None:
    lines = [start(4), recovery(5, ranks=3), entry("recovered", 6, gap_s=0.25), recovery(4, ranks=1, failed=(0, 2))]
    found = run_metrics.compute(read(directory, lines))
    assert found.recoveries == (
        run_metrics.RecoveryMetrics(5, (1,), ("alpha",), 0.25),
        run_metrics.RecoveryMetrics(4, (0, 2), ("alpha", "alpha"), None),
    )
    assert (found.ranks, found.ranks_before, found.resumes, found.state) == (1, (4, 3), 0, "interrupted")
    assert printed(read(directory, lines))["recoveries"] == ["rank 1 on alpha after step 5: 0.25 s"]


def test_an_entry_of_no_samples_takes_the_time_of_its_parts(directory: Path) -> None:
    found = run_metrics.compute(read(directory, [*FIRST[:3], a_step(10, 0, 100, loss=None, rate=0.0)]))
    assert found.training_seconds == pytest.approx(2.0)
    assert found.last_loss == 2.0


@pytest.mark.parametrize(
    ("metric", "which"),
    [
        ("eval_loss", "lowest"),
        ("accuracy", "highest"),
        ("word_error_rate", "lowest"),
        ("top1Err", "lowest"),
        ("RMSE", "lowest"),
        ("f1", "highest"),
        ("valLoss", "lowest"),
        ("MSELoss", "lowest"),
        ("cross_entropy", "lowest"),
        ("bits_per_byte", "lowest"),
        ("mAP", "highest"),
        ("lossless", None),
    ],
)
def test_which_value_is_better_follows_from_the_name(directory: Path, metric: str, which: str | None) -> None:
    run = read(directory, [start(), *[evaluated(step, step, **{metric: value}) for step, value in ((1, 1), (2, 2))]])
    best = run_metrics.compute(run).best_evaluation.get(metric)
    assert (best and (best.value, best.which)) == (which and ({"lowest": 1, "highest": 2}[which], which))


def test_non_finite_values_are_neither_best_nor_in_json(directory: Path) -> None:
    lines = [start(), *[evaluated(step, step, eval_loss=value) for step, value in ((1, 2.0), (2, float("nan")))]]
    found = run_metrics.compute(read(directory, [*lines, a_step(3, 2, 10, loss=float("inf"))]))
    assert found.best_evaluation["eval_loss"].value == 2.0
    written = run_metrics.as_json(found)
    assert (written["last_evaluation"], written["last_loss"]) == ({"eval_loss": None}, None)
    json.dumps(written, allow_nan=False)


# -- the table -------------------------------------------------------------------------------------------------------


def printed(*found: Run) -> dict[str, list[str]]:
    """Return the cells of each row by its title."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(run_metrics.table([run_metrics.compute(run) for run in found]))
    rows = [
        [cell.strip() for cell in row.strip("│┃").replace("┃", "│").split("│")] for row in capture.get().split("\n")
    ]
    return {row[0]: row[1:] for row in rows if len(row) > 1}


def test_runs_are_columns_of_one_table(directory: Path) -> None:
    first = read(directory, WHOLE)
    lines = [start(4), *FIRST[1:], evaluated(10, 1, f1=0.5), entry("preempted", 10, 1, why="SIGTERM on rank 1")]
    second = Run("[bold]", read(directory, lines).entries)
    rows = printed(first, second)
    assert rows[""] == ["digits", "[bold]"]
    assert rows["state"] == ["complete", "preempted: SIGTERM on rank 1"]
    assert rows["ranks"] == ["2", "4"]
    assert rows["samples"] == ["200", "100"]
    assert rows["training time"] == ["3.0 s", "1.0 s"]
    assert rows["samples/s"] == ["67", "100"]
    assert rows["accuracy, best"] == ["0.9 (highest, step 10)", "-"]
    assert rows["f1, last"] == ["-", "0.5"]
    assert rows["time in communication"] == ["30 %", "30 %"]
    assert rows["peak memory"] == ["300 MiB", "200 MiB"]


def test_a_run_without_entries_has_a_column(directory: Path) -> None:
    rows = printed(read(directory, []))
    assert rows["state"] == ["interrupted or running"]
    assert rows["samples/s"] == rows["loss, last"] == rows["ranks"] == rows["peak memory"] == ["-"]


def test_ranks_that_a_resume_has_changed_are_shown(directory: Path) -> None:
    assert printed(read(directory, [*WHOLE, resume(20, 2, ranks=4)]))["ranks"] == ["4 (previously 2)"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (59.9, "59.9 s"), (61.2, "1:01 min"), (3600, "1:00:00 h"), (9e4, "25:00:00 h")],
)
def test_durations_have_units(seconds: float, text: str) -> None:
    assert run_metrics.format_duration_with_unit(seconds) == text


# -- the plot --------------------------------------------------------------------------------------------------------


def legends(drawn: plots.Figure) -> list[list[str]]:
    return [[text.get_text() for text in axes.get_legend().get_texts()] for axes in drawn.axes]


def test_the_plot_of_a_run(directory: Path) -> None:
    drawn = plots.draw([read(directory, WHOLE)])
    losses, accuracy, throughput, times = drawn.axes
    assert drawn.get_suptitle() == "digits"
    parts = ["data", "compute", "communication"]
    assert legends(drawn) == [["training", "evaluation"], ["evaluation"], ["throughput"], parts]
    titles = ["loss", "accuracy", "throughput (samples/s)", "rank 0's time (%)"]
    assert [axes.get_ylabel() for axes in drawn.axes] == titles
    assert accuracy.lines[0].get_xydata().tolist() == [[10, 0.9], [20, 0.8]]
    assert times.get_xlabel() == "optimizer step"
    assert losses.get_yscale() == "log"
    training, evaluation = losses.lines
    assert training.get_xydata().tolist() == [[5, 4], [10, 2], [15, 1], [20, 0.5]]
    assert evaluation.get_xydata().tolist() == [[10, 2.5], [20, 0.75]]
    assert throughput.lines[0].get_ydata().tolist() == [100, 100, 50, 50]
    assert losses.get_xlim() == throughput.get_xlim() == times.get_xlim()
    assert times.get_ylim() == (0, 100)


def test_the_plot_of_several_runs(directory: Path) -> None:
    run = read(directory, WHOLE)
    drawn = plots.draw([run, Run("_$a$", run.entries)])
    assert drawn.get_suptitle() == "digits, _$a$"
    assert legends(drawn)[3] == ["communication, digits", r"communication, _\$a\$"]
    assert [len(axes.lines) for axes in drawn.axes] == [4, 2, 2, 2]
    assert drawn.axes[3].lines[0].get_ydata().tolist() == pytest.approx([30] * 4)


def test_the_plot_shows_logged_values_a_schedule_and_continuations(directory: Path) -> None:
    steps = [a_step(5, 0, 50, lr=0.1, grad_norm=3.0), resume(5, 0, 50), a_step(10, 0, 100, lr=0.2, grad_norm=2.0)]
    drawn = plots.draw([read(directory, [start(), *steps, recovery(10, 0, 100), a_step(15, 1, 50, lr=0.2)])])
    assert [axes.get_ylabel() for axes in drawn.axes][1:3] == ["grad_norm", "lr"]
    _, norm, rate, *_ = drawn.axes
    assert norm.lines[0].get_xydata().tolist() == [[5, 3], [10, 2]]
    assert rate.lines[0].get_ydata().tolist() == [0.1, 0.2, 0.2]
    for axes, legend in zip(drawn.axes, legends(drawn), strict=True):
        assert legend[-2:] == ["resume", "recovery"] or set(legend) == {"resume", "recovery", *metrics_file.PARTS}
        assert {5.0, 10.0} <= {line.get_xdata()[0] for line in axes.lines}


def test_throughput_is_averaged_over_windows_of_equal_time(directory: Path) -> None:
    """Ten entries of 0.1 s and of 1.9 s by turns, in five windows; a resume begins a window."""
    rates = [100, 5.0 / 0.95] * 5
    lines = [a_step(step, 0, 10 * step, rate=rate) for step, rate in enumerate(rates, 1)]
    run = read(directory, [start(), *lines])
    assert [(window.step, window.samples) for window in runs.windows(run, 5)] == [(2 * n, 20) for n in range(1, 6)]
    assert [window.seconds for window in runs.windows(run, 5)] == pytest.approx([2.0] * 5)
    resumed = read(directory, [start(), *lines[:3], resume(3, 0, 30), *lines[3:]])
    assert [window.step for window in runs.windows(resumed, 5)] == [3, 5, 7, 9, 10]
    assert runs.windows(read(directory, []), 5) == []


def test_losses_that_are_not_positive_are_drawn_linearly(directory: Path) -> None:
    assert plots.draw([read(directory, [*FIRST, a_step(15, 1, 50, loss=-1.0)])]).axes[0].get_yscale() == "linear"


@pytest.mark.parametrize("lines", [[], [start()], FIRST[:2]])
def test_the_plot_of_few_entries(directory: Path, tmp_path: Path, lines: list[Line]) -> None:
    run = read(directory, lines)
    for shown in ([run], [run, run]):
        plots.save(plots.draw(shown), tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size


def test_the_page_of_runs_has_their_metrics_and_plot(directory: Path, tmp_path: Path) -> None:
    read(directory, WHOLE)
    other = tmp_path / "<b>other"
    other.mkdir()
    (other / metrics_file.NAME).write_text(text_of([*FIRST, "{", *SECOND]))
    path = tmp_path / "page.html"
    assert main(["report", str(directory), str(other), "--html", str(path)]) == 0
    page = path.read_text()
    name = "&lt;b&gt;other"
    assert f"<h1>Report of digits, {name}</h1>" in page
    assert f'<tr><th></th><th class="number">digits</th><th class="number">{name}</th></tr>' in page
    assert '<td>accuracy, last</td><td class="number">0.8</td><td class="number">-</td>' in page
    assert "<b>" not in page
    assert re.search(f"<p>line 5 of .*{name}/{metrics_file.NAME} is not a valid entry", page)
    assert not re.search(r"https?:|href=|@[A-Z]", page)
    assert "<img " in page


def test_the_plot_is_a_png_and_changes_nothing_else(directory: Path, tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    plots.save(plots.draw([read(directory, WHOLE)]), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert dict(mpl.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums(), "pyplot keeps its figures"


def test_a_plot_that_cannot_be_written(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot write .*plot\.png: No such file or directory\.\nPass a file"):
        plots.save(plots.draw([read(directory, WHOLE)]), tmp_path / "gone" / "plot.png")


def test_without_matplotlib_the_error_has_the_install_command(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return genuine(name, *rest)

    run = read(directory, WHOLE)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        plots.draw([run])
