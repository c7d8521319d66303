"""Metrics of a run: sums over all samples and ranks, and the metrics file."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpicomm.arguments import Expected
from mpicomm.errors import TrainingError
from mpicomm.training import rank_sync
from mpicomm.training.data import Batch

Metric = Callable[[Any, Any], Any]
"""A function of a batch's outputs and targets that returns one number per sample, or their mean."""

FILE = "metrics.jsonl"
_METRICS = Expected(
    "a mapping of names to functions",
    lambda metrics: isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics),
    "a mapping of names to functions of the outputs and the targets",
    lambda metrics: all(callable(each) for each in metrics.values()),
    'Pass for example {"accuracy": lambda outputs, labels: outputs.argmax(dim=1) == labels}.',
).or_none()


def check_metrics(metrics: object, what: str) -> None:
    """Check the metrics of a user.

    Args:
        what: The name of the function whose argument they are, for the message.

    Raises:
        TypeError: If `metrics` is not a mapping from str.
        ValueError: If a value of it is not callable.
    """
    _METRICS.check(metrics, "metrics", what)


class Losses:
    """The losses of this rank's batches since the last reduction."""

    def __init__(self, device: torch.device, stops: bool) -> None:
        """Start with an empty sum.

        Args:
            stops: Whether a loss that is not finite ends the run.
        """
        self._stops = stops
        self._is_immediate = device.type == "cpu"  # on a GPU, reading a number waits for the GPU
        self.total: Any = 0.0
        self.count = 0
        self._unseen: list[tuple[int, Sequence[int] | None, torch.Tensor]] = []  # step, samples, loss

    def add(self, step: int, batch: Batch, loss: torch.Tensor) -> bool:
        """Add the mean loss of a batch, and return whether it is finite.

        Raises:
            TrainingError: If it is not finite and `stops` is set; on GPUs, `look` raises this error later.
        """
        if not batch.count:
            return self._stops or bool(torch.isfinite(loss))
        if self._is_immediate or not self._stops:
            value = loss.item()
            if not math.isfinite(value):
                if self._stops:
                    raise _not_finite(step, batch.indices, value)
                return False
            self.total += value * batch.count
        else:
            self._unseen.append((step, batch.indices, loss.detach()))  # without the inputs, which can be large
            self.total = self.total + loss.detach().double() * batch.count
        self.count += batch.count
        return True

    def look(self) -> None:
        """Check the losses that `add` has not checked yet.

        Raises:
            TrainingError: If one of them is not finite.
        """
        if self._unseen:
            values = torch.stack([loss for _, _, loss in self._unseen]).tolist()
            unseen, self._unseen = self._unseen, []
            for (step, indices, _), value in zip(unseen, values, strict=True):
                if not math.isfinite(value):
                    raise _not_finite(step, indices, value)

    def take(self) -> tuple[float, int]:
        """Return the sum of the losses and the number of samples of all ranks, and reset both (collective)."""
        self.look()
        total, count = rank_sync.reduced([float(self.total), self.count])
        self.total, self.count = 0.0, 0
        return total, int(count)


def _not_finite(step: int, indices: Sequence[int] | None, value: float) -> TrainingError:
    which = "(unknown indices)" if indices is None else ", ".join(map(str, indices))
    return TrainingError(
        f"the loss of step {step} is {value} on rank {dist.get_rank()}, for the samples {which}.\n"
        f"Check these samples, set max_grad_norm, or skip such steps with on_nonfinite='skip'. To lower the learning "
        f"rate, use a new checkpoint_dir: a resumed run uses the learning rate of its checkpoint."
    )


class Averages:
    """Means of metrics over a set of samples, in float64; each sample counts once for any number of ranks."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._metrics = metrics
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("loss", *metrics)}
        self.count = 0

    def add(self, loss: torch.Tensor, outputs: Any, targets: Any, count: int) -> None:
        """Add a batch of `count` samples.

        Raises:
            ValueError: If a metric returns neither one number nor one number per sample.
        """
        self._sums["loss"] += loss.detach().double() * count
        for name, metric in self._metrics.items():
            value = torch.as_tensor(metric(outputs, targets)).detach().double()
            each_sample = value.shape[:1] == (count,)
            if value.numel() != 1 and not each_sample:
                raise ValueError(
                    f"the metric {name!r} must return one number per sample ({count}) or their mean, got a tensor of "
                    f"shape {list(value.shape)}.\n"
                    f"Return a tensor of shape [{count}] or []."
                )
            whole = value.sum() if each_sample else value.reshape(()) * count
            self._sums[name] += whole.to(self._sums[name].device)
        self.count += count

    def take(self) -> tuple[dict[str, float], int]:
        """Return the means over the samples of all ranks, and the number of these samples (collective)."""
        sums = [each.item() for each in self._sums.values()]
        *totals, count = rank_sync.reduced([*sums, self.count])
        return {name: total / max(count, 1) for name, total in zip(self._sums, totals, strict=True)}, int(count)


class Journal:
    """A file of JSON lines. Each line is written completely or not at all.

    After a crash that truncated the last line, the next entry starts on a new line.
    """

    def __init__(self, path: Path | None, logger: Callable[[dict[str, Any]], None] | None) -> None:
        """Open the file for appending.

        Args:
            path: The file; None writes no file.
            logger: A function that is called with each entry.
        """
        self._logger = logger
        self._file: io.FileIO | None = None
        if path is not None:
            self._file = path.open("ab", buffering=0)
            if _is_cut_off(path):
                self._append(self._file, b"\n")

    def write(self, event: str, **values: Any) -> None:
        """Write an entry."""
        entry = {"event": event, **values}
        if self._file is not None:
            self._append(self._file, json.dumps(entry).encode() + b"\n")
        if self._logger is not None:
            self._logger(entry)

    def _append(self, file: io.FileIO, line: bytes) -> None:
        """Write a line. On a full disk, warn and close the file; the run continues while its checkpoints succeed."""
        size = os.fstat(file.fileno()).st_size
        try:
            while line:  # on a nearly full disk, a write is partial and the next one fails
                line = line[file.write(line) :]
        except OSError as error:
            file.truncate(size)
            warnings.warn(f"metrics are no longer written to {file.name!r}: {error}", RuntimeWarning, stacklevel=2)
            file.close()
            self._file = None

    def close(self) -> None:
        """Sync the file to disk and close it."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _is_cut_off(path: Path) -> bool:
    """Return whether the last line of a file lacks its newline."""
    with path.open("rb") as before:
        size = before.seek(0, os.SEEK_END)
        before.seek(max(0, size - 1))
        return size > 0 and before.read() != b"\n"


@contextlib.contextmanager
def tensorboard(directory: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a logger that writes the numbers of each entry to TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(directory)

    def log(entry: dict[str, Any]) -> None:
        if "step" in entry:
            for name, value in entry.items():
                if isinstance(value, (int, float)) and name not in {"step", "time"}:
                    writer.add_scalar(f"{entry['event']}/{name}", value, entry["step"])
            writer.flush()

    with writer:
        yield log
