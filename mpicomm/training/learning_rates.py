"""A callback that logs the learning rate of each parameter group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicomm.arguments import POSITIVE
from mpicomm.training.callbacks import Callback

if TYPE_CHECKING:
    from mpicomm.training.trainer import Trainer


class LearningRateLogger(Callback):
    """Logs the learning rates of all parameter groups, as entries "learning_rate" of the metrics file.

    Step entries of the metrics file contain only the rate of the first group. An entry has `lr_0`, `lr_1` and so on, or
    `lr_<name>` for a group with a "name".
    """

    def __init__(self, every: int = 1) -> None:
        """Log after each `every`-th step.

        Args:
            every: The number of steps from one entry to the next.
        """
        POSITIVE.check(every, "every", "LearningRateLogger")
        self._every = every

    def on_step_end(self, trainer: Trainer) -> None:
        """Log the rates of the next step."""
        if trainer.position.step % self._every == 0:
            groups = enumerate(trainer.optimizer.param_groups)
            rates = {f"lr_{group.get('name', number)}": float(group["lr"]) for number, group in groups if "lr" in group}
            trainer.write_metrics("learning_rate", **rates)
