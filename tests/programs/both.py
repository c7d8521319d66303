"""Runs a program on groups of Gloo and of this backend, and compares the results."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.programs.limit import Limit
from tests.programs.sets import GLOO, OURS, GroupSet, make_set

Results = dict[str, torch.Tensor]
Program = Callable[[int, int, GroupSet], Results]


class Both:
    """The two backends in one process, with a time limit for each program."""

    def __init__(self, seconds: float) -> None:
        """Create the groups of both backends (collective)."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.gloo, self.ours = make_set(GLOO), make_set(OURS)
        self.limit = Limit(self.rank, seconds)

    def differences(self, title: str, program: Program) -> list[str]:
        """Return the differences between this rank's results over MPI and over Gloo."""
        expected, found = (self._run(title, program, groups) for groups in (self.gloo, self.ours))
        if list(expected) != list(found):
            return [f"the results are {list(found)} instead of {list(expected)}"]
        return [
            f"{name}: {_shown(found[name])} instead of {_shown(each)}"
            for name, each in expected.items()
            if each.dtype != found[name].dtype or not torch.equal(each, found[name])
        ]

    def _run(self, title: str, program: Program, groups: GroupSet) -> Results:
        where = getattr(program, "where", str)
        with self.limit.over(f"{title}, over {groups.backend},", where):
            return program(self.rank, self.size, groups)


def _shown(tensor: torch.Tensor) -> str:
    flat = tensor.flatten()
    return f"{flat[:6].tolist()}{'...' if flat.numel() > 6 else ''} ({str(tensor.dtype).removeprefix('torch.')})"
