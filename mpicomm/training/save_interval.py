"""The time between checkpoints that minimises the time lost to saves and to failures (`save_every="auto"`)."""

from __future__ import annotations

import collections
import math
import statistics
import time

_SAVES = 8  # whose delays are averaged: a single slow save must not change the interval much


def optimal_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of training from the end of a save to the next one.

    The first order is that of Young, sqrt(2 * save time * mean time between failures):
    https://doi.org/10.1145/361147.361115 (1974). The terms beyond it, and the limit, are those of Daly, equation 37:
    https://doi.org/10.1016/j.future.2004.11.016 (2006).

    Args:
        save_seconds: The seconds by which a save delays training.
        mtbf_seconds: The mean time between failures of the job, not of one node.
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


class SaveInterval:
    """The interval of a run, chosen anew at each save from the delays that the last saves caused.

    Rank 0 alone measures and decides: its vote in a step makes all ranks save after this step. Before the first save
    nothing is measured, so that the first step is followed by a save.
    """

    def __init__(self, node_mtbf_hours: float, num_nodes: int) -> None:
        """Start without an interval.

        Args:
            node_mtbf_hours: The mean time between failures of one node.
            num_nodes: The number of nodes; a failure of any of them ends the job.
        """
        self.mtbf_seconds = 3600 * node_mtbf_hours / num_nodes
        self.save_seconds = 0.0
        """The mean seconds by which the last saves delayed training. The time to write in the background does not count
        (N. H. Vaidya, Impact of checkpoint latency on overhead ratio of a checkpointing scheme, 1997)."""

        self.seconds = 0.0
        self._delays = collections.deque[float](maxlen=_SAVES)
        self._saved_at = -math.inf

    @property
    def is_due(self) -> bool:
        """Whether the interval has passed since the last save."""
        return time.monotonic() >= self._saved_at + self.seconds

    def choose(self, delay_seconds: float) -> None:
        """Choose the interval after a save that delayed training by these seconds."""
        self._delays.append(delay_seconds)
        self.save_seconds, self._saved_at = statistics.fmean(self._delays), time.monotonic()
        self.seconds = optimal_seconds(self.save_seconds, self.mtbf_seconds)
