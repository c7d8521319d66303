"""Loggers of a run: no row is lost or repeated when a run that was killed resumes, and lists of loggers."""

from __future__ import annotations

import contextlib
import csv
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpicomm.training import loggers

Entry = dict[str, Any]


def entry(event: str, step: int, **values: Any) -> Entry:
    return {"event": event, "time": 100.0 + step, "step": step, "epoch": (step - 1) // 4, "consumed": 8, **values}


def run(log: Callable[[Entry], None], begin: int, end: int, *, resumes_at_evaluation: bool = False) -> None:
    """Log a run of steps, with a checkpoint event at each and an evaluation after each fourth step."""
    if resumes_at_evaluation:
        log(entry("eval", begin, accuracy=float(begin)))
    for step in range(begin + 1, end + 1):
        log(entry("step", step, loss=1 / step, lr=None, **({"late": 2.0 * step} if step > 6 else {})))
        log(entry("checkpoint", step))
        if step % 4 == 0:
            log(entry("eval", step, accuracy=float(step)))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_file_has_each_row_once_after_a_kill(tmp_path: Path) -> None:
    """The first process is killed in step 10, the second at once; they resume from steps 8 and 4."""
    path = tmp_path / "metrics.csv"
    with loggers.opened("csv", tmp_path, 0) as (log,):
        run(log, 0, 10)
    with path.open("a") as file:
        file.write("step,1")  # the row of step 11, which the crash truncated
    with loggers.opened(["csv"], tmp_path, 8) as opened:
        assert len(opened) == 1
    with loggers.opened("csv", tmp_path, 4) as (log,):
        run(log, 4, 12, resumes_at_evaluation=True)
    rows = rows_of(path)
    events = [("step", step) for step in range(1, 13)]
    events += [("eval", step) for step in (4, 8, 12)]
    assert [(row["event"], int(row["step"])) for row in rows] == sorted(
        events, key=lambda each: (each[1], each[0] != "step")
    )
    assert [float(row["loss"]) for row in rows if row["event"] == "step"] == [1 / step for step in range(1, 13)]
    assert [float(row["late"]) for row in rows if row["late"]] == [2.0 * step for step in range(7, 13)]
    assert [float(row["accuracy"]) for row in rows if row["accuracy"]] == [4.0, 8.0, 12.0]


def test_tensorboard_shows_each_point_once_after_a_kill(tmp_path: Path) -> None:
    """Three processes resume before an evaluation: from step 4, from step 8, and from step 8 again.

    The first process has logged the evaluation of step 8, too. The second one resumes from an earlier step and ends
    before that evaluation, so the third one must log it, and the fourth one must not.
    """
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, end, is_before_evaluation in ((0, 10, False), (4, 7, True), (8, 10, True), (8, 12, True)):
        with loggers.opened("tensorboard", tmp_path, begin) as (log,):
            log(entry("resume" if begin else "start", begin, ranks=4, batch_size=32, pin_memory=True, device="cpu"))
            run(log, begin, end, resumes_at_evaluation=is_before_evaluation)
            if end == 7:
                log(entry("step", 8, loss=1 / 8))
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    points = [(each.step, each.value) for each in board.Scalars("step/loss")]
    assert points == [(step, pytest.approx(1 / step)) for step in range(1, 13)]
    assert [each.step for each in board.Scalars("eval/accuracy")] == [4, 8, 12]
    assert sorted(board.Tags()["scalars"]) == ["eval/accuracy", "step/late", "step/loss"], "metrics only"
    (start,) = board.Tensors("start/text_summary")
    assert {"| ranks | 4 |", "| pin_memory | true |", '| device | "cpu" |'} <= set(
        start.tensor_proto.string_val[0].decode().splitlines()
    )


class FakeWandb(types.ModuleType):
    """Records the calls of W&B's interface, of which it has only the parts with these signatures."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")  # type: ignore[assignment]
        self.calls: list[tuple[str, Any]] = []
        self.config = types.SimpleNamespace(update=self._update)

    def init(self, *, dir: str | None = None, id: str | None = None, resume: str | None = None) -> FakeWandb:  # noqa: A002
        self.calls.append(("init", (dir, id, resume)))
        return self

    def log(self, data: dict[str, Any], step: int) -> None:
        self.calls.append(("log", (step, data)))

    def _update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        self.calls.append(("config", (values["batch_size"], allow_val_change)))

    def __enter__(self) -> FakeWandb:
        return self

    def __exit__(self, *_: Any) -> None:
        self.calls.append(("finish", ()))


def test_a_resumed_run_continues_its_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    loggers.check("wandb", None)
    for begin in (0, 4):
        with loggers.opened("wandb", tmp_path, begin) as (log,):
            log(entry("resume" if begin else "start", begin, batch_size=32))
            log(entry("step", begin + 1, loss=0.5, lr=None))
    (_, (directory, identity, resume)), *_ = fake.calls
    values = {"step/loss": 0.5, "step/epoch": 0, "step/consumed": 8}
    assert (directory, resume) == (str(tmp_path), "allow")
    assert fake.calls == [
        ("init", (directory, identity, resume)),
        ("config", (32, True)),
        ("log", (1, values)),
        ("finish", ()),
        ("init", (directory, identity, resume)),
        ("config", (32, True)),
        ("log", (5, {**values, "step/epoch": 1})),
        ("finish", ()),
    ]
    with loggers.opened("wandb", tmp_path, 0):
        pass
    assert fake.calls[-2][1][1] != identity, "a run that starts again is another run"


class FakeMLflow(types.ModuleType):
    """The parts of MLflow's interface that the logger uses, with runs in memory; MLflow keeps repeated points."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = types.SimpleNamespace(name="mlflow")  # type: ignore[assignment]
        self.points: dict[str, list[tuple[str, int, float]]] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.active: list[str] = []
        self.MlflowClient = lambda: types.SimpleNamespace(get_metric_history=self._history)

    @contextlib.contextmanager
    def start_run(self, run_id: str | None = None) -> Iterator[Any]:
        assert not self.active, "MLflow refuses a second active run"
        self.active.append(run_id or f"{len(self.points):032x}")
        self.points.setdefault(self.active[-1], [])
        yield self.active_run()
        self.active.pop()

    def active_run(self) -> Any:
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=self.active[-1])) if self.active else None

    def log_params(self, params: dict[str, Any]) -> None:
        assert self.active[-1] not in self.params, "MLflow refuses other values"
        self.params[self.active[-1]] = params

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.points[self.active[-1]] += [(name, step, value) for name, value in metrics.items()]

    def _history(self, run_id: str, key: str) -> list[Any]:
        return [types.SimpleNamespace(step=step) for name, step, _ in self.points[run_id] if name == key]


def test_mlflow_has_each_point_once_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process is killed in step 10; the second resumes from step 8, with a metric that begins at step 7."""
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    loggers.check("mlflow", None)
    for begin, end in ((0, 10), (8, 12)):
        with loggers.opened("mlflow", tmp_path, begin) as (log,):
            log(entry("resume" if begin else "start", begin, batch_size=32 + begin))
            run(log, begin, end, resumes_at_evaluation=begin > 0)
    (identity,) = fake.points
    assert fake.params[identity]["batch_size"] == 32
    shown = [(step, value) for name, step, value in fake.points[identity] if name == "step/loss"]
    assert shown == [(step, 1 / step) for step in range(1, 13)]
    shown = [(step, value) for name, step, value in fake.points[identity] if name == "step/late"]
    assert shown == [(step, 2.0 * step) for step in range(7, 13)]
    assert [step for name, step, _ in fake.points[identity] if name == "eval/accuracy"] == [4, 8, 12]
    with loggers.opened("mlflow", tmp_path, 0):
        assert fake.active != [identity], "a run that starts again is another run"
    with fake.start_run() as own, loggers.opened("mlflow", tmp_path, 0) as (log,):
        log(entry("step", 1, loss=0.5))
        assert [name for name, *_ in fake.points[own.info.run_id]] == ["step/epoch", "step/consumed", "step/loss"]
        assert fake.active == [own.info.run_id], "the run of the program is used"


@pytest.mark.parametrize(
    ("logger", "name", "content"),
    [
        ("csv", "metrics.csv", "step,loss\n1,0.5\n"),
        ("csv", "metrics.csv", "event,step,epoch,consumed,timestamp\n"),
        ("wandb", "wandb-id", "the name of a run"),
        ("mlflow", "mlflow-id", "the name of a run"),
    ],
)
def test_a_file_of_another_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: str, name: str, content: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow())
    (tmp_path / name).write_text(content)
    with (
        pytest.raises(FileExistsError, match=f"mpicomm did not write this file.*{name}"),
        loggers.opened(logger, tmp_path, 0),
    ):
        pass
    assert (tmp_path / name).read_text() == content


def test_an_empty_csv_file_is_used(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").touch()
    with loggers.opened("csv", tmp_path, 0) as (log,):
        run(log, 0, 1)
    assert len(rows_of(tmp_path / "metrics.csv")) == 1


def test_each_logger_of_a_list_is_opened(tmp_path: Path) -> None:
    first: list[Entry] = []
    second: list[Entry] = []
    with loggers.opened([first.append, "csv", second.append], tmp_path, 0) as opened:

        def log(entry: Entry) -> None:
            for logger in opened:
                logger(entry)

        run(log, 0, 4)
    assert first == second
    assert len(first) == 9
    assert len(rows_of(tmp_path / "metrics.csv")) == 5
    for none in (None, []):
        with loggers.opened(none, tmp_path, 0) as opened:
            assert opened == []


@pytest.mark.parametrize(
    ("logger", "kind", "message"),
    [
        (
            "comet",
            ValueError,
            "logger must be a function, 'tensorboard', 'csv', 'wandb', 'mlflow' or a list of them, got 'comet'",
        ),
        (["csv", 3], TypeError, r"logger must be .*, got 3 \(int\)"),
        (["csv", "csv"], ValueError, "logger must contain each name once, got 'csv' twice"),
        ("csv", ValueError, "logger='csv' requires a checkpoint_dir"),
        ("wandb", ImportError, r'logger="wandb" requires Weights & Biases.\nInstall it: pip install wandb'),
        ("mlflow", ImportError, r'logger="mlflow" requires MLflow.\nInstall it: pip install mlflow'),
        (
            ["tensorboard"],
            ImportError,
            r'logger="tensorboard" requires TensorBoard.\nInstall it: pip install tensorboard',
        ),
    ],
)
def test_loggers_that_cannot_be_used(
    logger: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "tensorboard", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(kind, match=message):
        loggers.check(logger, "run" if isinstance(logger, list) else None)
