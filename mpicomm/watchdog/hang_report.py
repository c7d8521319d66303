"""The text of hang reports: pure functions that format the status of the ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Status = Mapping[str, Any]
"""The status of one rank, as the rank reports it (`agent.Watchdog._status`), or its hub if it does not respond."""

_NAMED = 16  # the most ranges of ranks in a row
_ROWS = 32  # the most rows of a table


def ranges(ranks: Iterable[int]) -> str:
    """Return ranks as `0-3, 7`; runs of two are listed."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = []
    for part in parts:
        texts += [f"{part[0]}-{part[-1]}"] if len(part) > 2 else [str(rank) for rank in part]
    return ", ".join(texts)


def parse_ranges(text: str) -> list[int]:
    """Return the ranks in a text that `ranges` returned."""
    ranks: list[int] = []
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def called(ranks: Sequence[int]) -> str:
    """Return `rank 2` or `ranks 0, 1, 3`."""
    text = ranges(ranks)
    if text.count(",") >= _NAMED:
        text = ", ".join(text.split(", ")[:_NAMED]) + f", ... ({len(ranks)} in all)"
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def operation(what: Mapping[str, Any]) -> str:
    """Return `all_reduce #42, float32[1024]`, from the fields of `flight_recorder.Operation.describe`."""
    text = str(what["name"])
    if what["sequence"] is not None:
        text += f" #{what['sequence']}"
    elif not what["is_message"]:
        text += " (queued)"
    if what["peer"] is not None:
        direction = {"send": " to", "recv": " from"}.get(what["name"], ", root")
        text += f"{direction} rank {what['peer']}"
    elif what["name"] == "recv":
        text += " from any rank"
    if what["dtype"]:
        text += f", {what['dtype']}[{what['count']}]"
    if what["members"]:
        text += f", in the group of {_members(what['members'])}"
    return text


@functools.lru_cache(maxsize=1024)  # each of a group's thousands of ranks shows the same text
def _members(text: str) -> str:
    return called(parse_ranges(text))


def table(statuses: Mapping[int, Status], hosts: Sequence[str]) -> str:
    """Return one row for all ranks with the same position; rows of more ranks first."""
    rows: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for rank, status in sorted(statuses.items()):
        text, for_seconds = _place(status)
        if "silent" in status or status.get("died"):
            text = text.replace(_ON_HOST, f" on {hosts[rank]}")
        rows.setdefault(text, []).append(rank)
        seconds[text] = max(seconds.get(text, 0.0), for_seconds)
    ordered = sorted(rows, key=lambda text: -len(rows[text]))
    names = [called(rows[text]) for text in ordered]
    width = max((len(name) for name in names), default=0)
    lines = [
        f"  {name:{width}}  {text.replace(_SECONDS, f'{seconds[text]:.0f} s')}"
        for name, text in zip(names[:_ROWS], ordered, strict=False)
    ]
    if len(ordered) > _ROWS:
        lines.append(f"  ... and {len(ordered) - _ROWS} more rows; see the ranks' dump files")
    return "\n".join(lines)


_ON_HOST = " on its host"
_SECONDS = "\0"  # placeholder for the seconds in a row: ranks with the same position share a row whatever their seconds


def _place(status: Status) -> tuple[str, float]:
    """Return the place of a rank, and the seconds for `_SECONDS`."""
    if status.get("died"):
        return f"died{_ON_HOST}: {status['died']}", 0.0
    if "silent" in status:
        state = f": {status['state']}" if status.get("state") else ""
        return f"not responding for {_SECONDS}{_ON_HOST}{state}", status["silent"]
    if status.get("left"):
        return f"exited {_SECONDS} ago {left(status['left'])}", status["left"]["seconds"]
    if status["running"]:
        longest = max(status["running"], key=lambda each: each["seconds"])
        more = len(status["running"]) - 1
        beside = f" (and {more} more operation{'s' if more > 1 else ''})" if more else ""
        return f"in {operation(longest)}, at {longest['where']}, for {_SECONDS}{beside}", longest["seconds"]
    at = f"at {status['main']}" if status["main"] else "its main thread has ended, other threads are running"
    last = status["last"]
    if last is None:
        return f"in no operation, none called yet; {at}", 0.0
    return f"in no operation; {at}; last called {_SECONDS} ago: {operation(last)}, at {last['where']}", last["called"]


def left(leave: Mapping[str, Any]) -> str:
    """Return how a rank exited: `with status 3`, or `at the end of its program`."""
    return "at the end of its program" if leave["status"] is None else f"with status {leave['status']}"
