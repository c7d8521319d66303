"""The metrics of steps: losses, values that the user logs with `Trainer.log`, and the time of each part of a step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpicomm import metrics_file
from mpicomm.arguments import TEXT, shown
from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.collective_ops import collectives
from mpicomm.errors import TrainingError
from mpicomm.metrics_file import ENTRY_FIELDS, PARTS
from mpicomm.recorder import flight_recorder
from mpicomm.training import rank_sync
from mpicomm.training.data import Batch

STEP_FIELDS = ENTRY_FIELDS | {"loss", "lr", "samples_per_s", "memory_mib", *(f"{part}_s" for part in PARTS)}
"""The names of a step entry, which logged values must not have."""

LOSS = "loss"
"""The name of the losses among the sums; `log` refuses it."""

Sums = dict[str, tuple[float, float]]
"""The weighted sum and the sum of the weights of each value, by name."""


class StepMetrics:
    """Sums of the losses and the logged values: of this rank, and of all ranks since the last step entry.

    A value has the number of samples of its batch as its weight, so that its mean is over samples. The ranks add up
    their sums in one all-reduce, whose length must be equal on all ranks: it has the names that the ranks have agreed
    on, and the number of other names. If there are any, the ranks gather and reduce these in two more operations, once
    for each new name.
    """

    def __init__(self, *, stops: bool) -> None:
        """Start with empty sums.

        Args:
            stops: Whether a loss that is not finite ends the run.
        """
        self._stops = stops
        self._is_read_late = False
        self._weight = 0  # the number of samples of the current batch; with 0, logged values are ignored
        self._of_batch: list[tuple[str, Any, int]] = []
        self._own: dict[str, tuple[Any, int]] = {}  # since the last reduction
        self._taken: Sums = {}  # those in the reduction in progress
        self._agreed = [LOSS]  # names, equal on all ranks
        self._reduced: Sums = {}  # of all ranks, since the last step entry
        self._unchecked: list[tuple[int, Sequence[int] | None, torch.Tensor]] = []  # step, samples, loss

    def enter_world(self, device: torch.device) -> None:
        """Discard the sums of this rank since the last reduction: they are of a step that is run again in this world.

        The names that the ranks have agreed on are discarded too, because ranks that join do not have them.
        """
        self._is_read_late = device.type != "cpu"  # reading a number would wait for the GPU
        self._of_batch.clear()
        self._own.clear()
        self._unchecked.clear()
        self._agreed = [LOSS]

    # -- the values of this rank -------------------------------------------------------------------------------------

    def log(self, values: Mapping[str, Any], call: str = "log") -> None:
        """Add a value for each name.

        Args:
            values: Numbers, or tensors of one element.
            call: The function of the values, for errors.

        Raises:
            TypeError: If a name is not a str, or a value is neither a real number nor a tensor of one.
            ValueError: If a tensor has more than one element, or the step entry has a field of that name.
        """
        for name, value in values.items():
            TEXT.check(name, "the name of a value", call)
            metrics_file.check_names([name], call, STEP_FIELDS, "step entry")
            number = _number(f"{call}: {name}", value)
            if self._weight:
                self._of_batch.append((name, number, self._weight))

    def begin_batch(self, count: int) -> None:
        """Start a batch of `count` samples."""
        if self._of_batch:  # logged after the last batch
            self._keep()
        self._weight = count

    def end_batch(self, step: int, batch: Batch, loss: torch.Tensor) -> bool:
        """Add the loss and the logged values of a batch, unless its loss is not finite; return whether it is finite.

        Raises:
            TrainingError: If it is not finite and `stops` is set; on GPUs, `check` raises this error later.
        """
        if not batch.count:
            return self._stops or bool(torch.isfinite(loss))
        if self._is_read_late and self._stops:
            self._unchecked.append((step, batch.indices, loss.detach()))  # without the inputs, which can be large
            self._add(LOSS, loss.detach().double() * batch.count, batch.count)
        else:
            value = loss.item()
            if not math.isfinite(value):
                if self._stops:
                    raise _not_finite(step, batch.indices, value)
                self._of_batch.clear()
                return False
            self._add(LOSS, value * batch.count, batch.count)
        if self._of_batch:
            self._keep()
        return True

    def check(self) -> None:
        """Check the losses that `end_batch` has not checked yet.

        Raises:
            TrainingError: If one of them is not finite.
        """
        if self._unchecked:
            values = torch.stack([loss for _, _, loss in self._unchecked]).tolist()
            unchecked, self._unchecked = self._unchecked, []
            for (step, indices, _), value in zip(unchecked, values, strict=True):
                if not math.isfinite(value):
                    raise _not_finite(step, indices, value)

    @property
    def sums(self) -> Sums:
        """The sums of this rank since the last reduction."""
        return {name: (float(total), weight) for name, (total, weight) in self._own.items()}

    def restore(self, sums: Sequence[Sums]) -> None:
        """Continue with the sum of these sums."""
        self._of_batch.clear()
        self._own = {}
        for rank_sums in sums:
            for name, (total, weight) in rank_sums.items():
                self._add(name, total, int(weight))

    def _keep(self) -> None:
        for name, value, weight in self._of_batch:
            self._add(name, value * weight, weight)
        self._of_batch.clear()

    def _add(self, name: str, total: Any, weight: int) -> None:
        before, weight_before = self._own.get(name, (0.0, 0))
        self._own[name] = before + total, weight_before + weight

    # -- the sums of all ranks ---------------------------------------------------------------------------------------

    def take(self) -> list[float]:
        """Return the numbers of this rank whose sums over all ranks `add_reduced` needs, and start new sums.

        Raises:
            TrainingError: If a loss is not finite that has not been checked.
        """
        self.check()
        self._keep()
        self._taken, self._own = self.sums, {}
        return [*_flat(self._taken, self._agreed), len(self._taken.keys() - set(self._agreed))]

    def add_reduced(self, numbers: Sequence[float]) -> tuple[float, int]:
        """Add the sums over all ranks of the numbers from `take`; reduce new names (collective if there are any).

        Returns:
            The sum of the losses, and the number of their samples.
        """
        *sums, new_names = numbers
        if new_names:
            gathered = collectives.all_gather_object(sorted(self._taken.keys() - set(self._agreed)))
            added = sorted({name for names in gathered for name in names})
            sums += rank_sync.sum_over_ranks(_flat(self._taken, added))
            self._agreed += added
        # After the last operation: a failure of a rank in one of them repeats the step, and with it this reduction.
        for name, total, weight in zip(self._agreed, sums[::2], sums[1::2], strict=True):
            before, weight_before = self._reduced.get(name, (0.0, 0.0))
            self._reduced[name] = before + total, weight_before + weight
        return sums[0], int(sums[1])

    @property
    def reduced(self) -> Sums:
        """The sums of all ranks since the last step entry; the same on all ranks."""
        return dict(self._reduced)

    def restore_reduced(self, sums: Sums) -> None:
        """Continue with these sums of all ranks."""
        self._reduced = dict(sums)

    def take_means(self) -> dict[str, float]:
        """Return the means over all ranks since the last call, by name."""
        sums, self._reduced = self._reduced, {}
        return {name: total / weight for name, (total, weight) in sums.items() if weight}


def _flat(sums: Sums, names: Sequence[str]) -> list[float]:
    return [number for name in names for number in sums.get(name, (0.0, 0.0))]


def _number(label: str, value: Any) -> Any:
    """Return the value as a number; on a GPU as a tensor, because reading it would wait for the GPU."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{label} must be a number or a tensor of one element, got a tensor of shape {list(value.shape)}.\n"
                f"Pass a statistic of it, such as its mean()."
            )
        if not value.is_complex():
            return value.item() if value.device.type == "cpu" else value.detach().double().reshape(())
    elif not isinstance(value, (str, bytes)):  # float("0.5") is a number
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    raise TypeError(
        f"{label} must be a number or a tensor of one element, got {shown(value)} ({type(value).__name__}).\n"
        f"Pass a number."
    )


def _not_finite(step: int, indices: Sequence[int] | None, value: float) -> TrainingError:
    samples = "(unknown indices)" if indices is None else ", ".join(map(str, indices))
    return TrainingError(
        f"the loss of step {step} is {value} on rank {dist.get_rank()}, for the samples {samples}.\n"
        f"Check these samples, set max_grad_norm, or skip such steps with on_nonfinite='skip'. To lower the learning "
        f"rate, use a new checkpoint_dir: a resumed run uses the learning rate of its checkpoint."
    )


class StepTimer:
    """Accumulates the seconds spent in each part of the steps since the last `reset`."""

    def __init__(self, device: torch.device) -> None:
        # GPU work continues after its call returns, and operations of other backends are not in the flight recorder.
        self._sees_communication = device.type == "cpu" and isinstance(dist.group.WORLD, MPIProcessGroup)
        self.parts = PARTS if self._sees_communication else PARTS[:2]
        self._seconds = dict.fromkeys(self.parts, 0.0)
        self._last = time.monotonic()

    def start(self) -> None:
        """Start the time of the next part now."""
        self._last = time.monotonic()

    def add(self, part: str) -> None:
        """Add the time since the previous call to a part."""
        now = time.monotonic()
        self._seconds[part if part in self._seconds else "compute"] += now - self._last
        self._last = now

    def add_backward(self, *, is_synchronized: bool) -> None:
        """Add a completed backward pass.

        Its time after the call of its last collective operation counts as communication, the rest as compute.
        """
        now = time.monotonic()
        last = flight_recorder.last() if is_synchronized and self._sees_communication else None
        exposed = now - last.called_at if last is not None and last.called_at > self._last else 0.0
        if exposed:
            self._seconds["communication"] += exposed
        self._seconds["compute"] += now - self._last - exposed
        self._last = now

    def reset(self) -> dict[str, float]:
        """Reset the seconds of each part, and return their values before."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self.parts, 0.0)
        return seconds
