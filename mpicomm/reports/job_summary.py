"""What the dump files of a job show, in sentences and a table: its size, the waits of its ranks, its straggler."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from mpicomm import terminal
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
        "ranks": ranks,
        "straggler": None if last is None else {"rank": last, "seconds": waited_for[last], "waits": numbers[last]},
    }


def headline(summary: Mapping[str, Any]) -> str:
    """Return `4 ranks on 2 hosts, 964 operations and 160 messages in 0.341 s; 3 operations were not over`."""
    ranks = summary["ranks"]
    text = (
        f"{_count(len(ranks), 'rank')} on {_count(len({rank['host'] for rank in ranks}), 'host')}, "
        f"{_count(sum(rank['operations'] for rank in ranks), 'operation')} and "
        f"{_count(summary['messages'], 'message')} in {summary['seconds']:.3f} s"
    )
    if not_over := sum(rank["not_over"] for rank in ranks):
        text += f"; {_count(not_over, 'operation')} {'was' if not_over == 1 else 'were'} not over"
    return text


def straggler_line(summary: Mapping[str, Any]) -> str:
    """Return the sentence on the straggler."""
    straggler = summary["straggler"]
    if straggler is None:
        return "No rank waited for another rank."
    hosts = {rank["rank"]: rank["host"] for rank in summary["ranks"]}
    host = hosts.get(straggler["rank"])
    where = ", which wrote no dump file" if host is None else f" on {host}"
    return (
        f"The other ranks waited longest for rank {straggler['rank']}{where}: {straggler['seconds']:.3f} s in total, "
        f"in {_count(straggler['waits'], 'wait')}."
    )


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
