"""Ranks and their operations as text, in messages and in the messages of the out-of-band channel: pure functions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

from mpicomm import host_info
from mpicomm.recorder.status import OperationInfo

_MAX_RANGES = 16  # in one message: a line of it stays readable with thousands of ranks
_MAX_HOSTS = 4  # in one message, since names of hosts are long


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks as `0-3, 7`; runs of two are listed."""
    texts: list[str] = []
    # Within a range, rank and index differ by the same number.
    for _, pairs in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        part = [rank for _, rank in pairs]
        texts += [f"{part[0]}-{part[-1]}"] if len(part) > 2 else map(str, part)
    return ", ".join(texts)


def parse_ranges(text: str) -> list[int]:
    """Return the ranks in a text that `ranges` returned: the kernel writes its lists of CPUs in the same way."""
    return host_info.cpu_list(text)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 2` or `ranks 0, 1, 3`."""
    text = ranges(ranks)
    if text.count(",") >= _MAX_RANGES:
        text = ", ".join(text.split(", ")[:_MAX_RANGES]) + f", ... ({len(ranks)} in all)"
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def ranks_by_host(hosts: Sequence[str]) -> dict[str, str]:
    """Return the ranks of each host as text.

    Args:
        hosts: The host of every rank.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    return {host: ranges(ranks) for host, ranks in by_host.items()}


def full_name(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return `rank 2 of 4 on node0`.

    Args:
        hosts: The host of every rank.
    """
    names = sorted({hosts[rank] for rank in ranks})
    more = " ..." if len(names) > _MAX_HOSTS else ""
    return f"{name_ranks(ranks)} of {len(hosts)} on {', '.join(names[:_MAX_HOSTS])}{more}"


def describe_operation(info: OperationInfo) -> str:
    """Return `all_reduce #42, float32[1024]`."""
    text = info.name
    if info.sequence is not None:
        text += f" #{info.sequence}"
    elif not info.is_message:
        text += " (queued)"
    if info.peer is not None:
        direction = {"send": " to", "recv": " from"}.get(info.name, ", root")
        text += f"{direction} rank {info.peer}"
    elif info.name == "recv":
        text += " from any rank"
    if info.dtype:
        text += f", {info.dtype}[{info.count}]"
    if info.members:
        text += f", in the group of {_members(info.members)}"
    return text


@functools.lru_cache(maxsize=1024)  # each of a group's thousands of ranks shows the same text
def _members(text: str) -> str:
    return name_ranks(parse_ranges(text))
