"""Latency and bandwidth between each pair of hosts or ranks, and the outliers among them.

The pairs of a round are disjoint and exchange messages at the same time. With n members there are n - 1 rounds (n, if n
is odd), as in a round-robin tournament, so that the time grows with the number of members, not of pairs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

_SMALL_BYTES, _LARGE_BYTES = 8, 2**22
_SMALL_REPEATS, _LARGE_REPEATS = 20, 2  # of one batch: milliseconds, so that hundreds of hosts take a minute
_BATCHES = 5  # the fastest counts: other processes can only slow a batch down
_SCALE = 1.4826  # of the median absolute deviation, so that it estimates the standard deviation of normal samples
_DEVIATIONS = 5.0  # scaled MADs from the median: of normal samples, fewer than one in a million is farther away
_FACTOR = 2.0  # from the median, which excludes differences between sockets and switches
_MESSAGES = ((_SMALL_BYTES, _SMALL_REPEATS), (_LARGE_BYTES, _LARGE_REPEATS))


@dataclasses.dataclass(frozen=True)
class Link:
    """The latency and the bandwidth between two ranks."""

    ranks: tuple[int, int]
    microseconds: float
    """The latency: half of the round trip of 8 bytes."""

    gigabytes: float
    """The bandwidth of messages of 4 MiB, in GB per second."""


@dataclasses.dataclass(frozen=True)
class Outlier:
    """A rank, or a pair of ranks, with a latency or bandwidth that is much worse than that of the others."""

    ranks: tuple[int, ...]
    quantity: str
    """`latency` or `bandwidth`."""

    value: float
    median: float
    unit: str


# -- measurement -----------------------------------------------------------------------------------------------------


def rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs; each pair of members is in one of them.

    The circle method: one member stays in its place, the others rotate. An odd member rests in each round.
    """
    circle: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds_of_pairs = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds_of_pairs.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds_of_pairs


def measure(rank: int, members: Sequence[int]) -> list[Link]:
    """Measure the links of this rank, and return those of which it is the lower one (collective among the members)."""
    links = []
    for pair in itertools.chain.from_iterable(rounds(members)):
        if rank not in pair:
            continue
        other = sum(pair) - rank
        small, large = (_seconds(rank < other, other, *message) for message in _MESSAGES)
        if rank < other:
            links.append(Link(pair, small * 1e6, _LARGE_BYTES / large / 1e9))
    return links


def _seconds(sends_first: bool, other: int, nbytes: int, repeats: int) -> float:
    """Return the seconds of a message in one direction: half of the round trip, of the fastest batch."""
    message = torch.zeros(nbytes, dtype=torch.uint8)
    steps = (dist.send, dist.recv) if sends_first else (dist.recv, dist.send)
    times = []
    for _ in range(_BATCHES + 1):  # the first one opens the connection, and waits for the other rank
        start = time.perf_counter()
        for _ in range(repeats):
            for step in steps:
                step(message, other)
        times.append(time.perf_counter() - start)
    return min(times[1:]) / repeats / 2


# -- outliers --------------------------------------------------------------------------------------------------------


def outliers(links: Sequence[Link]) -> list[Outlier]:
    """Return the members and the pairs whose links are much worse than those of the others.

    A member is one if even the best of its links is bad; the other links of that member are then not listed. The
    rule is robust: worse than the median by more than 5 scaled median absolute deviations (MAD), and by a factor of 2.
    """
    return [
        *_find_outliers("latency", "us", {link.ranks: link.microseconds for link in links}, min),
        *_find_outliers("bandwidth", "GB/s", {link.ranks: link.gigabytes for link in links}, max),
    ]


def _find_outliers(
    quantity: str, unit: str, values: Mapping[tuple[int, int], float], best: Callable[..., float]
) -> list[Outlier]:
    higher_is_better = best is max
    members = sorted(set(itertools.chain.from_iterable(values)))
    best_by_member = {member: best(value for pair, value in values.items() if member in pair) for member in members}
    # 1. members without a good link; with two members, both have only one link
    slow_members = []
    if len(members) > 2:
        bests = [best_by_member[member] for member in members]
        slow_members = [members[index] for index in worse(bests, higher_is_better=higher_is_better)]
    # 2. pairs of the other members
    pairs = [pair for pair in values if not set(pair).intersection(slow_members)]
    slow_pairs = [pairs[index] for index in worse([values[pair] for pair in pairs], higher_is_better=higher_is_better)]
    member_median = statistics.median(best_by_member.values()) if members else 0.0
    pair_median = statistics.median(values[pair] for pair in pairs) if pairs else 0.0
    return [
        *(Outlier((member,), quantity, best_by_member[member], member_median, unit) for member in slow_members),
        *(Outlier(pair, quantity, values[pair], pair_median, unit) for pair in slow_pairs),
    ]


def worse(values: Sequence[float], *, higher_is_better: bool) -> list[int]:
    """Return the indices of the values that are much worse than the others.

    Args:
        values: The values, at least three to find one.
        higher_is_better: Whether low values are the bad ones.
    """
    if len(values) < 3:
        return []
    # On a logarithmic scale, a factor is the same distance for latencies and bandwidths, above and below the median.
    sign = -1 if higher_is_better else 1
    badness = [sign * math.log(value) for value in values]
    median = statistics.median(badness)
    deviation = _SCALE * statistics.median(abs(value - median) for value in badness)
    limit = median + max(_DEVIATIONS * deviation, math.log(_FACTOR))
    return [index for index, value in enumerate(badness) if value > limit]
