"""Reads and validates the `HOROVOD_*` environment variables that this package uses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

_MIB = 2**20
_LONGEST_HEARTBEAT, _SHORTEST_HEARTBEAT = 5.0, 0.1  # seconds
_HEARTBEATS_PER_CHECK = 10  # so that a report is late by a tenth of the time of a check
DYNAMIC_TIMELINE = "DYNAMIC"
"""The value of HOROVOD_TIMELINE with which the program starts the timeline itself."""


def is_set(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a variable has a value other than 0."""
    return environ.get(name, "") not in ("", "0")


@dataclasses.dataclass(frozen=True)
class Variables:
    """The settings of a process set."""

    fusion_threshold: int = 128 * _MIB
    """HOROVOD_FUSION_THRESHOLD: bytes up to which tensors are reduced together; 0 reduces each tensor alone."""

    cycle_seconds: float = 1e-3
    """HOROVOD_CYCLE_TIME, in milliseconds: the time in which tensors are collected."""

    cache_capacity: int = 1024
    """HOROVOD_CACHE_CAPACITY: the number of names for which the ranks remember the arguments; 0 disables the cache."""

    stall_check_seconds: float = 60.0
    """HOROVOD_STALL_CHECK_TIME_SECONDS: the wait for other ranks after which a tensor is reported; 0 disables it."""

    stall_shutdown_seconds: float = 0.0
    """HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: the wait after which all operations fail; 0 disables it."""

    timeline: str = ""
    """HOROVOD_TIMELINE: the file of the timeline."""

    marks_cycles: bool = False
    """HOROVOD_TIMELINE_MARK_CYCLES: whether the timeline shows the cycles."""

    @property
    def heartbeat_seconds(self) -> float:
        """The period in which a rank without pending tensors takes part in a negotiation."""
        if not self.stall_check_seconds:
            return _LONGEST_HEARTBEAT
        return min(_LONGEST_HEARTBEAT, max(_SHORTEST_HEARTBEAT, self.stall_check_seconds / _HEARTBEATS_PER_CHECK))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Variables:
        """Read and validate the settings; an empty variable counts as unset.

        Raises:
            ValueError: If a value is not a finite number of at least 0.
        """

        def number(name: str, default: float) -> float:
            text = environ.get(name, "")
            try:
                value = float(text) if text else default
            except ValueError:
                value = -1.0
            if not 0 <= value < math.inf:  # also false for NaN
                raise ValueError(f"{name} must be a finite number of at least 0, got {text}.\nCorrect it, or unset it.")
            return value

        checks = not is_set(environ, "HOROVOD_STALL_CHECK_DISABLE")
        timeline = environ.get("HOROVOD_TIMELINE", "")
        return cls(
            fusion_threshold=int(number("HOROVOD_FUSION_THRESHOLD", cls.fusion_threshold)),
            cycle_seconds=number("HOROVOD_CYCLE_TIME", 1e3 * cls.cycle_seconds) / 1e3,
            cache_capacity=int(number("HOROVOD_CACHE_CAPACITY", cls.cache_capacity)),
            stall_check_seconds=number("HOROVOD_STALL_CHECK_TIME_SECONDS", cls.stall_check_seconds) if checks else 0.0,
            stall_shutdown_seconds=number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) if checks else 0.0,
            timeline="" if timeline == DYNAMIC_TIMELINE else timeline,
            marks_cycles=is_set(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
        )
