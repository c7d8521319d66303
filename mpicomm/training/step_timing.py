"""Time of training steps by part: data, compute and, where measurable, exposed (not overlapped) communication."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from mpicomm.backend.process_group import MPIProcessGroup
from mpicomm.metrics_file import PARTS
from mpicomm.watchdog import flight_recorder


class Clock:
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
        exposed = now - last.called if last is not None and last.called > self._last else 0.0
        if exposed:
            self._seconds["communication"] += exposed
        self._seconds["compute"] += now - self._last - exposed
        self._last = now

    def reset(self) -> dict[str, float]:
        """Reset the seconds of each part, and return their values before."""
        found, self._seconds = self._seconds, dict.fromkeys(self.parts, 0.0)
        return found
