"""Values that the user logs from inside a step with `Trainer.log`, and losses: the next step entry has their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpicomm.arguments import shown
from mpicomm.collective_ops import collectives
from mpicomm.metrics_file import PARTS
from mpicomm.training import rank_sync

STEP_FIELDS = frozenset(
    {"event", "time", "step", "epoch", "consumed", "loss", "lr", "samples_per_s", "memory_mib"}
    | {f"{part}_s" for part in PARTS}
)
"""The names of a step entry, which logged values must not have."""

Sums = dict[str, tuple[float, float]]
"""The weighted sum and the sum of the weights of each value, by name."""


class LoggedValues:
    """The logged values of this rank, and the sums over all ranks since the last step entry.

    A value has the number of samples of its batch as its weight, so that its mean is over samples, like that of the
    loss. The sums travel in the all-reduce of the losses. Its length must be equal on all ranks, so it contains only
    the names that the ranks have agreed on, and the number of other names. If there are any, the ranks gather and
    reduce these in two more operations, once for each new name.
    """

    def __init__(self) -> None:
        self.weight = 0
        """The number of samples of the current batch; with 0, values are ignored."""

        self._of_batch: list[tuple[str, Any, int]] = []
        self._mine: dict[str, tuple[Any, int]] = {}  # sums of this rank since the last reduction
        self._agreed: list[str] = []  # equal on all ranks
        self._reduced: Sums = {}  # of all ranks, since the last step entry

    def add(self, values: Mapping[str, Any]) -> None:
        """Add a value for each name.

        Raises:
            TypeError: If a value is neither a number nor a tensor.
            ValueError: If a tensor has more than one element, or the step entry has a field of that name.
        """
        for name, value in values.items():
            if name in STEP_FIELDS:
                raise ValueError(
                    f"log: {name!r} is the name of a field of each step entry.\nUse another name, such as 'my_{name}'."
                )
            number = _number(name, value)
            if self.weight:
                self._of_batch.append((name, number, self.weight))

    def begin_batch(self, count: int) -> None:
        """Start a batch of `count` samples."""
        if self._of_batch:  # logged after the last batch
            self._keep()
        self.weight = count

    def end_batch(self, *, is_finite: bool) -> None:
        """Keep the values of a batch, or discard them if its loss is not finite."""
        if self._of_batch and is_finite:
            self._keep()
        self._of_batch.clear()

    def discard_step(self) -> None:
        """Discard the values of this rank since the last reduction, of a step that is run again in another world.

        The names that the ranks have agreed on are discarded too, because ranks that join do not have them.
        """
        self._of_batch.clear()
        self._mine.clear()
        self._agreed.clear()

    def reduced_with(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of the numbers over all ranks, and reduce the logged values along with them (collective)."""
        if self._of_batch:
            self._keep()
        mine, self._mine = self.sums, {}
        others = sorted(mine.keys() - set(self._agreed))
        *sums, number = rank_sync.reduced([*_flat(mine, self._agreed), *numbers, len(others)])
        own = 2 * len(self._agreed)
        of_values = sums[:own]
        if number:
            gathered = collectives.all_gather_object(others)
            added = sorted({name for names in gathered for name in names})
            of_values += rank_sync.reduced(_flat(mine, added))
            self._agreed += added
        # After the last operation: a failure of a rank in one of them repeats the step, and with it this reduction.
        self._count(self._agreed, of_values)
        return sums[own:]

    def add_losses(self, total: float, count: int) -> None:
        """Add the sum of the losses of `count` samples of all ranks."""
        self._count(["loss"], [total, count])  # a name that `add` refuses

    def take_means(self) -> dict[str, float]:
        """Return the means over all ranks since the last call, by name; the one of the losses is "loss"."""
        found, self._reduced = self._reduced, {}
        return {name: total / weight for name, (total, weight) in found.items() if weight}

    @property
    def sums(self) -> Sums:
        """The sums of this rank since the last reduction."""
        return {name: (float(total), weight) for name, (total, weight) in self._mine.items()}

    def restore(self, sums: Sequence[Sums]) -> None:
        """Continue with the sum of these sums."""
        self._of_batch.clear()
        self._mine = {}
        for each in sums:
            for name, (total, weight) in each.items():
                self._add(name, total, int(weight))

    def _keep(self) -> None:
        for name, value, weight in self._of_batch:
            self._add(name, value * weight, weight)
        self._of_batch.clear()

    def _add(self, name: str, total: Any, weight: int) -> None:
        before, weight_before = self._mine.get(name, (0.0, 0))
        self._mine[name] = before + total, weight_before + weight

    def _count(self, names: Sequence[str], sums: Sequence[float]) -> None:
        for name, total, weight in zip(names, sums[::2], sums[1::2], strict=True):
            before, weight_before = self._reduced.get(name, (0.0, 0.0))
            self._reduced[name] = before + total, weight_before + weight


def _flat(sums: Sums, names: Sequence[str]) -> list[float]:
    return [number for name in names for number in sums.get(name, (0.0, 0.0))]


def _number(name: str, value: Any) -> Any:
    """Return the value as a number; on a GPU as a tensor, because reading it would wait for the GPU."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"log: {name} must be a number or a tensor of one element, got a tensor of shape "
                f"{list(value.shape)}.\nLog a statistic of it, such as {name}.mean()."
            )
        return value.item() if value.device.type == "cpu" else value.detach().double().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"log: {name} must be a number or a tensor of one element, got {shown(value)} ({type(value).__name__}).\n"
            f"Pass a number."
        ) from None
