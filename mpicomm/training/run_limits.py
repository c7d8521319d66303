"""When a call of `fit` ends before its last epoch, and how often it evaluates."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from mpicomm import arguments
from mpicomm.arguments import POSITIVE
from mpicomm.training.state import Position

T = TypeVar("T")

_SECONDS = arguments.number("a positive number of seconds", lambda value: value > 0).or_none()


@dataclasses.dataclass
class RunLimits:
    """The limits of one call of `fit`, and what this rank has requested within it.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of range, or nothing limits the run.
    """

    epochs: int | None = None
    max_steps: int | None = None
    max_time: float | None = None
    eval_every: int | None = None
    limit_batches: int | None = None
    grad_accum_steps: int = 1
    has_callbacks: bool = False
    keeping: Sequence[str] = ()
    """The names of the callbacks that keep checkpoints."""

    is_evaluated: bool = True
    """Whether the run has eval_data."""

    why: str | None = None
    """Why this rank requests the end of the run."""

    is_save_requested: bool = False
    """Whether a callback has requested a checkpoint."""

    def __post_init__(self) -> None:
        for name in ("epochs", "max_steps", "eval_every", "limit_batches"):
            POSITIVE.or_none().check(getattr(self, name), name, "fit")
        _SECONDS.check(self.max_time, "max_time", "fit")
        if self.epochs is None and self.max_steps is None and self.max_time is None:
            raise ValueError(
                "fit: expected a limit of the run, got epochs=None, max_steps=None and max_time=None.\n"
                "Pass epochs, max_steps or max_time."
            )
        if self.eval_every is not None and not self.is_evaluated:
            raise ValueError(
                f"fit: eval_every={self.eval_every} requires eval_data, got eval_data=None.\n"
                f"Pass eval_data, or omit eval_every."
            )
        self._end_at = math.inf if self.max_time is None else time.monotonic() + self.max_time

    @property
    def agreed(self) -> dict[str, object]:
        """The limits that must be equal on all ranks, by name."""
        names = ("epochs", "max_steps", "eval_every", "limit_batches", "grad_accum_steps")
        values = {name: getattr(self, name) for name in names}
        return {
            **values,
            "whether there is eval_data": self.is_evaluated,
            "whether there is max_time": self.max_time is not None,
            "whether there are callbacks": self.has_callbacks,
            "the callbacks that keep checkpoints": ", ".join(self.keeping) or "none",
        }

    @property
    def is_voted(self) -> bool:
        """Whether the end can depend on a rank, so that the ranks have to agree on it."""
        return self.max_time is not None or self.has_callbacks

    @property
    def requests_end(self) -> bool:
        """Whether this rank requests the end of the run."""
        if self.why is None and time.monotonic() >= self._end_at:
            self.why = f"max_time of {self.max_time:g} s"
        return self.why is not None

    def is_complete(self, position: Position) -> bool:
        """Return whether the run has all of its epochs or steps."""
        return position.epoch >= (math.inf if self.epochs is None else self.epochs) or self.has_all_steps(position)

    def has_all_steps(self, position: Position) -> bool:
        """Return whether the run has `max_steps` steps."""
        return self.max_steps is not None and position.step >= self.max_steps

    def is_evaluation_due(self, position: Position) -> bool:
        """Return whether an evaluation within the epoch follows this step."""
        every = self.eval_every
        return every is not None and position.step % every == 0 and position.evaluated_step < position.step

    def is_epoch_complete(self, position: Position, total: int | None) -> bool:
        """Return whether the last step has completed the epoch, as far as this is known before its data end.

        Args:
            position: The position in the run.
            total: The number of samples in an epoch, if known.
        """
        limit = self._steps
        return position.consumed == total or (limit is not None and position.steps_of_epoch >= limit)

    def remaining(self, steps: Iterator[T], position: Position) -> Iterator[T]:
        """Limit the remaining steps of an epoch to those of `limit_batches`; loads no step beyond the limit."""
        return steps if self._steps is None else itertools.islice(steps, max(0, self._steps - position.steps_of_epoch))

    @property
    def _steps(self) -> int | None:
        return None if self.limit_batches is None else -(-self.limit_batches // self.grad_accum_steps)
