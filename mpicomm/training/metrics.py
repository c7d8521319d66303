"""Figures of a run: sums over all samples and ranks, and the file in which they are kept."""

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
"""From a batch's outputs and targets to a number for each sample, or to their mean."""

FILE = "metrics.jsonl"
_METRICS = Expected(
    "a mapping of names to functions",
    lambda metrics: isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics),
    "a mapping of names to functions of the outputs and the targets",
    lambda metrics: all(callable(each) for each in metrics.values()),
    'Pass for example {"accuracy": lambda outputs, labels: outputs.argmax(dim=1) == labels}.',
).or_none()


def check_metrics(metrics: object, what: str) -> None:
    """Refuse metrics that cannot be called.

    Raises:
        TypeError: If they are not a mapping of names.
        ValueError: If a value of it is not a function.
    """
    _METRICS.check(metrics, "metrics", what)


class Losses:
    """The losses of this rank's batches since the last reduction."""

    def __init__(self, device: torch.device, stops: bool) -> None:
        """Begin with none.

        Args:
            stops: A loss that is not finite ends the run.
        """
        self._stops = stops
        self._at_once = device.type == "cpu"  # elsewhere, to look at a number is to wait for it
        self.total: Any = 0.0
        self.count = 0
        self._unseen: list[tuple[int, Sequence[int] | None, torch.Tensor]] = []  # step, samples, loss

    def add(self, step: int, batch: Batch, loss: torch.Tensor) -> bool:
        """Add the mean loss of a batch, and tell whether it is finite.

        Raises:
            TrainingError: If it is not, and that ends the run; on GPUs, `look` does.
        """
        if not batch.count:
            return self._stops or bool(torch.isfinite(loss))
        if self._at_once or not self._stops:
            value = loss.item()
            if not math.isfinite(value):
                if self._stops:
                    raise _not_finite(step, batch.indices, value)
                return False
            self.total += value * batch.count
        else:
            self._unseen.append((step, batch.indices, loss.detach()))  # not the inputs, which can be large
            self.total = self.total + loss.detach().double() * batch.count
        self.count += batch.count
        return True

    def look(self) -> None:
        """Look at the losses that have not been looked at.

        Raises:
            TrainingError: If one is not finite.
        """
        if self._unseen:
            values = torch.stack([loss for _, _, loss in self._unseen]).tolist()
            unseen, self._unseen = self._unseen, []
            for (step, indices, _), value in zip(unseen, values, strict=True):
                if not math.isfinite(value):
                    raise _not_finite(step, indices, value)

    def take(self) -> tuple[float, int]:
        """Return the sum over all ranks and the number of samples, and begin again (collective)."""
        self.look()
        total, count = rank_sync.reduced([float(self.total), self.count])
        self.total, self.count = 0.0, 0
        return total, int(count)


def _not_finite(step: int, indices: Sequence[int] | None, value: float) -> TrainingError:
    which = "of unknown place" if indices is None else ", ".join(map(str, indices))
    return TrainingError(
        f"the loss of step {step} is {value} on rank {dist.get_rank()}, for the samples {which}.\n"
        f"Look at these samples, set max_grad_norm, or skip such steps with on_nonfinite='skip'. A lower learning "
        f"rate needs a checkpoint_dir of its own: a run that goes on has that of its checkpoint."
    )


class Averages:
    """Means of metrics over a set of samples, exact whatever the number of ranks."""

    def __init__(self, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._metrics = metrics
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("loss", *metrics)}
        self.count = 0

    def add(self, loss: torch.Tensor, outputs: Any, targets: Any, count: int) -> None:
        """Add a batch of `count` samples.

        Raises:
            ValueError: If a metric is neither one number nor one for each sample.
        """
        self._sums["loss"] += loss.detach().double() * count
        for name, metric in self._metrics.items():
            value = torch.as_tensor(metric(outputs, targets)).detach().double()
            each_sample = value.shape[:1] == (count,)
            if value.numel() != 1 and not each_sample:
                raise ValueError(
                    f"the metric {name!r} has the shape {list(value.shape)} for {count} samples.\n"
                    f"Return a number for each sample, or their mean."
                )
            whole = value.sum() if each_sample else value.reshape(()) * count
            self._sums[name] += whole.to(self._sums[name].device)
        self.count += count

    def take(self) -> tuple[dict[str, float], int]:
        """Return the means and the number of samples, of all ranks (collective)."""
        sums = [each.item() for each in self._sums.values()]
        *totals, count = rank_sync.reduced([*sums, self.count])
        return {name: total / max(count, 1) for name, total in zip(self._sums, totals, strict=True)}, int(count)


class Journal:
    """Lines of JSON in a file. Each is written whole or not at all; a line that a crash has cut off stays alone."""

    def __init__(self, path: Path | None, logger: Callable[[dict[str, Any]], None] | None) -> None:
        """Open the journal.

        Args:
            path: The file; None for none.
            logger: Is given every entry too.
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
        """Write a line; on a full disk the run goes on without, as long as its checkpoints can be written."""
        size = os.fstat(file.fileno()).st_size
        try:
            while line:  # on a nearly full disk a write takes a part of it, and the next one fails
                line = line[file.write(line) :]
        except OSError as error:
            file.truncate(size)
            warnings.warn(f"no more figures are written to {file.name!r}: {error}", RuntimeWarning, stacklevel=2)
            file.close()
            self._file = None

    def close(self) -> None:
        """Close the file, synced."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _is_cut_off(path: Path) -> bool:
    """Tell whether the last line of a file has no end."""
    with path.open("rb") as before:
        size = before.seek(0, os.SEEK_END)
        before.seek(max(0, size - 1))
        return size > 0 and before.read() != b"\n"


@contextlib.contextmanager
def tensorboard(directory: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Use a logger that writes the entries' numbers for TensorBoard."""
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
