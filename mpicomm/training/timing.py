"""Where the time of a step goes: waiting for data, computing, and communication that computing did not hide."""

from __future__ import annotations

import time

import torch

from mpicomm.faults import recorder


class Clock:
    """Adds up the parts of steps, in seconds, since the last `take`."""

    PARTS = ("data", "compute", "communication")

    def __init__(self, device: torch.device) -> None:
        self._sees_communication = device.type == "cpu"  # a GPU's work goes on after its call
        self._parts = dict.fromkeys(self.PARTS, 0.0)
        self._last = time.monotonic()

    def start(self) -> None:
        """Begin to count from now."""
        self._last = time.monotonic()

    def add(self, part: str) -> None:
        """Count what has passed since the last call as one part."""
        now = time.monotonic()
        self._parts[part] += now - self._last
        self._last = now

    def add_backward(self, *, is_synchronized: bool) -> None:
        """Count a backward pass that has ended: what it waited after its last operation was called is communication."""
        now = time.monotonic()
        last = recorder.last() if is_synchronized and self._sees_communication else None
        exposed = 0.0
        if last is not None and last.called > self._last:
            exposed = now - last.called
        self._parts["communication"] += exposed
        self._parts["compute"] += now - self._last - exposed
        self._last = now

    def take(self) -> dict[str, float]:
        """Return the parts, and begin again."""
        found, self._parts = self._parts, dict.fromkeys(self.PARTS, 0.0)
        return found
