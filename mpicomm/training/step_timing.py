"""Where the time of a step goes: to data, computing and, where that is seen, communication that this did not hide."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.watchdog import flight_recorder


class Clock:
    """Adds up the parts of steps, in seconds, since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        # A GPU's work goes on after its call, and other back ends' operations are not recorded.
        self._sees_communication = device.type == "cpu" and isinstance(dist.group.WORLD, MPIProcessGroup)
        self.parts = ("data", "compute", "communication") if self._sees_communication else ("data", "compute")
        self._seconds = dict.fromkeys(self.parts, 0.0)
        self._last = time.monotonic()

    def start(self) -> None:
        """Begin to count from now."""
        self._last = time.monotonic()

    def add(self, part: str) -> None:
        """Count what has passed since the last call as one part."""
        now = time.monotonic()
        self._seconds[part if part in self._seconds else "compute"] += now - self._last
        self._last = now

    def add_backward(self, *, is_synchronized: bool) -> None:
        """Count a backward pass that has ended: what it waited after its last operation was called is communication."""
        now = time.monotonic()
        last = flight_recorder.last() if is_synchronized and self._sees_communication else None
        exposed = 0.0
        if last is not None and last.called > self._last:
            exposed = now - last.called
        if exposed:
            self._seconds["communication"] += exposed
        self._seconds["compute"] += now - self._last - exposed
        self._last = now

    def take(self) -> dict[str, float]:
        """Return the parts, and begin again."""
        found, self._seconds = self._seconds, dict.fromkeys(self.parts, 0.0)
        return found
