"""Loggers, which receive the entries of a run on rank 0: TensorBoard, CSV, W&B, MLflow, and functions of the user."""

from __future__ import annotations

import contextlib
import csv
import errno
import importlib.util
import io
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicomm.arguments import Expected
from mpicomm.training import run_directory

Logger = Callable[[dict[str, Any]], None]
"""A function that receives each entry of a run."""

LoggerArgument = Logger | str | Sequence[Logger | str] | None

CSV_NAME = "metrics.csv"
WANDB_ID_NAME, MLFLOW_ID_NAME = "wandb-id", "mlflow-id"
_PACKAGES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow"}
"""The loggers that need a package of the same name."""

NAMES = ("tensorboard", "csv", "wandb", "mlflow")
_TABLE_EVENTS = ("step", "epoch", "eval", "step_eval")
"""The entries with metrics; others, such as "checkpoint", are no rows of a table."""

_ONCE_EVENTS = ("start", "resume", "recovery", "recovered", "skipped", "preempted", "ended", "end")
"""The entries that a process writes once, with options and results of the run instead of metrics."""

_COUNTS = ("samples", "eval_samples")
"""Values of epochs and evaluations that are the same in most of them, and no metrics."""

_POSITION = ("event", "step", "epoch", "consumed", "time")

_LOGGER = Expected(
    "a function, 'tensorboard', 'csv', 'wandb', 'mlflow' or a list of them",
    lambda logger: isinstance(logger, str) or callable(logger),
    is_within=lambda logger: not isinstance(logger, str) or logger in NAMES,
    remedy="Pass a function that takes an entry (a dict), one of these names, a list of both, or omit logger.",
)


def check(logger: LoggerArgument, checkpoint_dir: str | os.PathLike[str] | None) -> None:
    """Check the argument `logger` of `Trainer`.

    Raises:
        TypeError: If it is of a wrong type.
        ValueError: If a name is unknown, or is used twice, or requires checkpoint_dir.
        ImportError: If the package of a logger is not installed.
    """
    listed = as_list(logger)
    for kind in listed:
        _LOGGER.check(kind, "logger")
        if isinstance(kind, str) and kind in _PACKAGES and importlib.util.find_spec(kind) is None:
            raise ImportError(f'logger="{kind}" requires {_PACKAGES[kind]}.\nInstall it: pip install {kind}')
    for name in NAMES:
        if listed.count(name) > 1:
            raise ValueError(f"logger must contain each name once, got {name!r} twice.\nRemove one of them.")
    if "csv" in listed and checkpoint_dir is None:
        raise ValueError(
            "logger='csv' requires a checkpoint_dir, got checkpoint_dir=None.\n"
            "Pass checkpoint_dir, the directory of the file, or use another logger."
        )


def as_list(logger: LoggerArgument) -> list[Any]:
    """Return the loggers as a list."""
    if logger is None:
        return []
    return list(logger) if isinstance(logger, (list, tuple)) else [logger]


@contextlib.contextmanager
def opened(logger: LoggerArgument, directory: Path | None, step: int) -> Iterator[list[Logger]]:
    """Yield the functions that take the entries, one for each logger.

    Args:
        logger: The loggers.
        directory: The directory of the run, if any.
        step: The step from which the run continues, 0 at its start. A run that was killed may have logged later steps,
            which it repeats.

    Raises:
        OSError: If a file cannot be written, or another program wrote it.
    """
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(_OPENED[kind](directory, step)) if isinstance(kind, str) else kind
            for kind in as_list(logger)
        ]


def _numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an entry that are not part of its position."""
    return {
        name: value for name, value in entry.items() if isinstance(value, (int, float)) and name not in {"step", "time"}
    }


# -- TensorBoard -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _tensorboard(directory: Path | None, step: int) -> Iterator[Logger]:
    """Yield a logger that writes metrics to TensorBoard as scalars, and the options of the run as text."""
    from torch.utils.tensorboard import SummaryWriter

    folder = directory or Path("runs")
    present = _tensorboard_names(folder, step) if step else set()
    # TensorBoard ignores the points of earlier files from purge_step on: the resumed run logs these steps again.
    writer = SummaryWriter(folder, purge_step=step + 1 if step else None)

    def log(entry: dict[str, Any]) -> None:
        if entry["event"] in _ONCE_EVENTS:
            writer.add_text(entry["event"], _markdown_table(entry), entry["step"])
        elif "step" in entry:
            metrics = {name: value for name, value in _numbers(entry).items() if name not in (*_POSITION, *_COUNTS)}
            for name, value in metrics.items():
                tag = f"{entry['event']}/{name}"
                if entry["step"] != step or tag not in present:
                    writer.add_scalar(tag, value, entry["step"])
        writer.flush()

    with writer:
        yield log


def _markdown_table(entry: Mapping[str, Any]) -> str:
    """Return the values of an entry as a table, which TensorBoard shows as such."""
    rows = [f"| {name} | {json.dumps(value)} |" for name, value in entry.items() if name not in ("event", "time")]
    return "\n".join(["| name | value |", "| --- | --- |", *(row.replace("\n", " ") for row in rows)])


def _tensorboard_names(folder: Path, step: int) -> set[str]:
    """Return the names of the points at a step, which a run that resumes from there may log again.

    Such points are those of an evaluation if the run was killed between the evaluation and its checkpoint.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    names: set[str] = set()
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("session_log") and event.step <= step:
                names.clear()  # a process that resumed from an earlier step: event.step is its purge_step
            elif event.step == step:
                names |= {value.tag for value in event.summary.value}
    return names


# -- a CSV file --------------------------------------------------------------------------------------------------------


class CSVTable:
    """A CSV file with a row for each step entry, epoch and evaluation. A resumed run neither loses nor repeats rows."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the file, and remove the rows of steps after `step`, which the run repeats.

        Raises:
            FileExistsError: If another program wrote the file.
        """
        _check_own(path, rf"{','.join(_POSITION)}[,\r\n]")
        self._path = path
        self._columns: list[str] = list(_POSITION)
        self._newest: tuple[int, set[str]] = (0, set())  # the last step of the file, and the events of its rows
        rows = _rows_until(path, step)
        for row in rows:
            self._is_new(row["event"], int(row["step"]))
        if rows:
            self._columns = list(rows[0])
        self._rewrite(rows)

    def write(self, entry: dict[str, Any]) -> None:
        """Append an entry as a row, unless there is a row of this event and step."""
        if entry["event"] not in _TABLE_EVENTS or not self._is_new(entry["event"], entry["step"]):
            return
        row = {name: value for name, value in entry.items() if isinstance(value, (int, float, str))}
        if added := [name for name in row if name not in self._columns]:
            rows = _rows_until(self._path, entry["step"])
            self._columns += added
            self._rewrite(rows)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _is_new(self, event: str, step: int) -> bool:
        newest, events = self._newest
        if step != newest:
            self._newest = newest, events = step, set()
        if event in events:
            return False
        events.add(event)
        return True

    def _rewrite(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Replace the file by one with these rows and the current columns."""
        table = io.StringIO()
        writer = csv.DictWriter(table, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        run_directory.write_whole(self._path, lambda file: file.write(table.getvalue().encode()))


def _rows_until(path: Path, step: int) -> list[dict[str, str]]:
    """Return the rows of a file up to a step. A last line without its end, after a crash, is not a row."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if line.endswith("\n")))
    return [row for row in rows if int(row["step"]) <= step]


@contextlib.contextmanager
def _csv(directory: Path | None, step: int) -> Iterator[Logger]:
    assert directory is not None  # `check` requires it
    yield CSVTable(directory / CSV_NAME, step).write


# -- Weights & Biases --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _wandb(directory: Path | None, step: int) -> Iterator[Logger]:
    """Yield a logger that sends the numbers of each entry to Weights & Biases.

    The directory of the run keeps the ID of the W&B run, so that a resumed run continues it. W&B then ignores the
    steps that it already has.
    """
    import wandb

    identity: dict[str, Any] = {}
    if directory is not None:
        identity = {"dir": str(directory), "id": _wandb_id(directory / WANDB_ID_NAME, step), "resume": "allow"}
    with wandb.init(**identity) as run:

        def log(entry: dict[str, Any]) -> None:
            if entry["event"] in ("start", "resume"):
                run.config.update(entry, allow_val_change=True)
            elif "step" in entry:
                values = {f"{entry['event']}/{name}": value for name, value in _numbers(entry).items()}
                run.log(values, step=entry["step"])

        yield log


def _wandb_id(path: Path, step: int) -> str:
    """Return the ID of the W&B run. A run that starts again from its first step gets a new one."""
    if not step or not path.exists():
        _check_own(path, r"[0-9a-f]{8}\s*\Z")
        path.write_text(secrets.token_hex(4))
    return path.read_text()


# -- MLflow ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _mlflow(directory: Path | None, step: int) -> Iterator[Logger]:
    """Yield a logger that sends the numbers of each entry to MLflow.

    It uses the run that the program has started, if any. Otherwise the directory of the run keeps the ID of the MLflow
    run, so that a resumed run continues it. MLflow would show points twice that a run which was killed logs again.
    """
    import mlflow

    with contextlib.ExitStack() as stack:
        run = mlflow.active_run() or stack.enter_context(_mlflow_run(directory, step))
        newest: dict[str, int] = {}

        def is_new(name: str, at: int) -> bool:
            if name not in newest:
                history = mlflow.MlflowClient().get_metric_history(run.info.run_id, name) if step else []
                newest[name] = max((point.step for point in history), default=-1)
            return at > newest[name]

        def log(entry: dict[str, Any]) -> None:
            if entry["event"] == "start":  # parameters of MLflow cannot change, as those of "resume" do
                mlflow.log_params(entry)
            elif entry["event"] != "resume" and "step" in entry:
                named = {f"{entry['event']}/{name}": value for name, value in _numbers(entry).items()}
                values = {name: value for name, value in named.items() if is_new(name, entry["step"])}
                mlflow.log_metrics(values, step=entry["step"])

        yield log


@contextlib.contextmanager
def _mlflow_run(directory: Path | None, step: int) -> Iterator[Any]:
    """Yield the run of MLflow. A run that starts again from its first step gets a new one."""
    import mlflow

    path = None if directory is None else directory / MLFLOW_ID_NAME
    if path is not None:
        _check_own(path, r"[0-9a-f]{32}\s*\Z")
    known = path.read_text() if step and path is not None and path.exists() else None
    with mlflow.start_run(run_id=known or None) as run:
        if path is not None:
            path.write_text(run.info.run_id)
        yield run


def _check_own(path: Path, content: str) -> None:
    """Raise FileExistsError if there is a file that does not begin with the regular expression `content`."""
    if path.exists() and not re.match(rf"{content}|\Z".encode(), path.read_bytes()):
        raise FileExistsError(errno.EEXIST, "mpicomm did not write this file", str(path))


_OPENED: dict[str, Callable[[Path | None, int], contextlib.AbstractContextManager[Logger]]] = {
    "tensorboard": _tensorboard,
    "csv": _csv,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
