"""What the dump files of a job show, in sentences and a table: its size, the waits of its ranks, its straggler."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from mpicomm import terminal
from mpicomm.recorder import rank_text
from mpicomm.reports import job_trace
from mpicomm.reports.job_trace import RankDump, RankWait


def of(dumps: Sequence[RankDump], all_waits: Sequence[RankWait]) -> dict[str, Any]:
    """Return the times and numbers of a job, of each rank, and of the straggler, for whom the others waited longest.

    Args:
        dumps: The dump files of the job.
        all_waits: What `job_trace.waits` returns for them.
    """
    waiting: dict[int, float] = collections.defaultdict(float)
    waited_for: dict[int, float] = collections.defaultdict(float)
    numbers: dict[int, int] = collections.defaultdict(int)
    for wait in all_waits:
        waiting[wait.operation.rank] += wait.end - wait.start
        for rank in wait.ranks:
            waited_for[rank] += wait.end - wait.start
            numbers[rank] += 1
    last = max(waited_for, key=lambda rank: (waited_for[rank], -rank), default=None)
    operations = [operation for dump in dumps for operation in dump.operations]
    start = min((operation.called for operation in operations), default=0.0)
    end = max((operation.end for operation in operations), default=0.0)
    ranks = [
        {
            "rank": dump.rank,
            "host": dump.host,
            "operations": len(dump.operations),
            "not_over": sum(not operation.is_over for operation in dump.operations),
            "wait_seconds": waiting[dump.rank],
            "waited_for_seconds": waited_for.get(dump.rank, 0.0),
            "clock": dump.clock,
            "clock_error_seconds": dump.error,
        }
        for dump in dumps
    ]
    return {
        "seconds": end - start,
        "messages": len(job_trace.arrows(dumps)),
        "size": max((dump.size for dump in dumps), default=0),
        "ranks": ranks,
        "straggler": None if last is None else {"rank": last, "seconds": waited_for[last], "waits": numbers[last]},
    }


def headline(summary: Mapping[str, Any]) -> str:
    """Return `4 ranks on 2 hosts, 964 operations and 160 messages in 0.341 s; 3 operations were not over`.

    It begins with `3 of 4 ranks` if dump files are missing.
    """
    ranks, size = summary["ranks"], summary["size"]
    known = "" if len(ranks) == size else f"{len(ranks):,} of "
    text = (
        f"{known}{_count(size, 'rank')} on {_count(len({rank['host'] for rank in ranks}), 'host')}, "
        f"{_count(sum(rank['operations'] for rank in ranks), 'operation')} and "
        f"{_count(summary['messages'], 'message')} in {summary['seconds']:.3f} s"
    )
    if not_over := sum(rank["not_over"] for rank in ranks):
        text += f"; {_count(not_over, 'operation')} {'was' if not_over == 1 else 'were'} not over"
    return text


def straggler_line(summary: Mapping[str, Any]) -> str:
    """Return the sentence on the straggler, and whether the clocks are too inaccurate to be sure of it."""
    straggler = summary["straggler"]
    if straggler is None:
        return "No rank waited for another rank."
    hosts = {rank["rank"]: rank["host"] for rank in summary["ranks"]}
    host = hosts.get(straggler["rank"])
    where = ", which wrote no dump file" if host is None else f" on {host}"
    line = (
        f"The other ranks waited longest for rank {straggler['rank']}{where}: {straggler['seconds']:.3f} s in total, "
        f"in {_count(straggler['waits'], 'wait')}."
    )
    if reason := _uncertainty(summary["ranks"], straggler["seconds"] / straggler["waits"]):
        line += f" This is uncertain, another rank may be the last one: {reason}."
    return line


def _uncertainty(ranks: Sequence[Mapping[str, Any]], mean_wait: float) -> str:
    """Return why the differences between the clocks may be mistaken for waits; empty if they are smaller."""
    if unknown := [rank["rank"] for rank in ranks if rank["clock"] == job_trace.WALL_CLOCK]:
        return f"the times of {rank_text.name_ranks(unknown)} are those of the wall clock, whose error is unknown"
    error = max(rank["clock_error_seconds"] for rank in ranks)
    if error <= mean_wait:
        return ""
    return f"the mean wait of {mean_wait * 1e6:.0f} us is shorter than the error of the clocks, {error * 1e6:.0f} us"


def table(summary: Mapping[str, Any]) -> Table:
    """Return the table of the ranks: their operations, their waits and their clocks."""
    titles = ["rank", "host", "operations", "not over", "waits for others", "others wait for it", "clock"]
    rows = [
        [
            rank["rank"],
            rank["host"],
            f"{rank['operations']:,}",
            f"{rank['not_over']:,}",
            f"{rank['wait_seconds']:.3f} s",
            f"{rank['waited_for_seconds']:.3f} s",
            rank["clock"] + (f", to {rank['clock_error_seconds'] * 1e6:.0f} us" if rank["clock_error_seconds"] else ""),
        ]
        for rank in summary["ranks"]
    ]
    right = ("rank", "operations", "not over", "waits for others", "others wait for it")
    return terminal.table(titles, rows, right=right)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
