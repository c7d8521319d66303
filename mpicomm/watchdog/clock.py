"""The difference between this rank's clock and that of rank 0, measured by messages of the out-of-band channel.

The clock is `time.monotonic()`. Processes of one kernel usually share it, those of other hosts do not. A rank asks its
hub, and the hub rank 0; halfway between the question and the answer, the other clock showed the time in the answer.
"""

from __future__ import annotations

import collections
import time

from mpicomm.recorder.dump import ClockOffset, clock_identity
from mpicomm.watchdog.protocol import ClockAnswer, ClockProbe

_SAMPLES = 16  # the measurements that are kept: the best counts
_FIRST_SAMPLES = 8  # measurements without a pause in between
_PERIOD_SECONDS = 15.0  # between later measurements: clocks that drift by 1e-5 differ by 0.15 ms then
_DRIFT = 5e-5  # the most seconds by which two clocks diverge in one second


class ClockMonitor:
    """Measures the offset of one rank's clock."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._samples: collections.deque[tuple[float, ClockOffset]] = collections.deque(maxlen=_SAMPLES)
        self._next = 0.0

    def offset(self) -> ClockOffset | None:
        """Return the best measurement; None before the first."""
        if self._rank == 0:
            return ClockOffset(0.0, 0.0)
        now = time.monotonic()
        samples = [
            ClockOffset(sample.seconds, sample.error + (_DRIFT * (now - measured) if sample.error else 0.0))
            for measured, sample in list(self._samples)
        ]
        return min(samples, key=lambda sample: sample.error, default=None)

    def probe(self) -> ClockProbe | None:
        """Return a question for the hub if one is due."""
        now = time.monotonic()
        return None if self._rank == 0 or now < self._next else ClockProbe(self._rank, now)

    def answer(self, probe: ClockProbe) -> ClockAnswer:
        """Answer a rank of which this one is the hub."""
        offset = self.offset()
        seconds, error = (None, 0.0) if offset is None else (offset.seconds, offset.error)
        return ClockAnswer(probe.sent, time.monotonic(), clock_identity(), seconds, error)

    def record(self, answer: ClockAnswer) -> None:
        """Record the answer of the hub."""
        now = time.monotonic()
        if answer.offset is None:  # the hub has no answer yet; the next probe follows within a second
            return
        shares_clock = answer.clock != "" and answer.clock == clock_identity()
        half = (now - answer.sent) / 2
        seconds, error = (0.0, 0.0) if shares_clock else (answer.now - (answer.sent + half), half)
        self._samples.append((now, ClockOffset(seconds + answer.offset, error + answer.error)))
        is_measured = shares_clock or len(self._samples) >= _FIRST_SAMPLES
        self._next = now + _PERIOD_SECONDS if is_measured else 0.0
