"""Several optimizers as one, for a model whose parts need different ones."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mpicomm import arguments

_OPTIMIZERS = arguments.Expected(
    "a non-empty list of optimizers",
    lambda each: isinstance(each, list) and bool(each) and all(isinstance(one, torch.optim.Optimizer) for one in each),
    remedy="Pass for example [torch.optim.AdamW(model.a.parameters()), torch.optim.SGD(model.b.parameters())].",
)


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers of disjoint parameters together, for example in `Trainer`.

    Its parameter groups are those of the optimizers, one after the other. A scheduler belongs to the combined
    optimizer, and changes the learning rates of all groups.

    Example::

        optimizer = mpicomm.CombinedOptimizer([
            torch.optim.AdamW(model.generator.parameters(), lr=1e-4),
            torch.optim.SGD(model.discriminator.parameters(), lr=1e-2),
        ])
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Combine optimizers, which have taken no step yet.

        Args:
            optimizers: The optimizers.

        Raises:
            TypeError: If it is not a list of optimizers.
            ValueError: If two of them have a parameter in common.
        """
        _OPTIMIZERS.check(optimizers, "optimizers", "CombinedOptimizer")
        self._optimizers = list(optimizers)
        super().__init__([group for each in self._optimizers for group in each.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the optimizers use the parameter groups and the state of this one."""
        groups = iter(self.param_groups)
        for each in self._optimizers:
            each.param_groups = [next(groups) for _ in each.param_groups]
            each.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers.

        Args:
            closure: Not supported.
        """
        if closure is not None:
            raise TypeError("CombinedOptimizer.step() takes no closure, got one.\nCompute the loss before step().")
        for each in self._optimizers:
            each.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state.

        Args:
            state_dict: The state, from `state_dict()`.
        """
        super().load_state_dict(state_dict)
        self.state = collections.defaultdict(dict, self.state)
        self._share()
