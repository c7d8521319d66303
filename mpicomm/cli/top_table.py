"""The status of a job's ranks as a table and as JSON: pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich import filesize
from rich.table import Table

from mpicomm import terminal
from mpicomm.cli.job_observer import JobStatus
from mpicomm.recorder import rank_text
from mpicomm.recorder.status import ExitedRank, NotResponding, Status

_TITLES = ("rank", "host", "operation", "line", "seconds", "bytes/s", "memory")
_GPU_TITLES = ("GPU memory", "GPU %")


@dataclasses.dataclass(frozen=True)
class RankRow:
    """The status of one rank."""

    rank: int
    host: str
    state: str
    """in_operation, computing (in no operation), not_responding or exited."""

    operation: str = ""
    """The operation in which the rank has been longest; its state if it does not respond or has exited."""

    line: str = ""
    """The source line of the operation's call; the line of the main thread if the rank is in no operation."""

    seconds: float | None = None
    """Seconds in the operation, without an answer, or since the exit."""

    bytes_per_second: float | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    gpu_memory_total: int | None = None
    gpu_utilization: int | None = None


def rows(status: JobStatus) -> list[RankRow]:
    """Return one row per rank."""
    pairs = zip(status.hosts, status.statuses, strict=True)
    return [_row(rank, host, rank_status) for rank, (host, rank_status) in enumerate(pairs)]


def as_json(status: JobStatus) -> dict[str, Any]:
    """Return the status for `--json`."""
    return {
        "job": status.job.name,
        "size": status.job.size,
        "program": status.job.program,
        "started": status.job.started,
        "answer_seconds": round(status.seconds, 6),
        "ranks": [dataclasses.asdict(row) for row in rows(status)],
    }


def table(ranks: Sequence[RankRow]) -> Table:
    """Return the table; it has columns for the GPU if a rank has one."""
    has_gpu = any(row.gpu_memory is not None or row.gpu_utilization is not None for row in ranks)
    titles = [*_TITLES, *(_GPU_TITLES if has_gpu else ())]
    cells = [_cells(row)[: len(titles)] for row in ranks]
    return terminal.table(titles, cells, right=("rank", "seconds", "bytes/s", "memory", *_GPU_TITLES))


def _row(rank: int, host: str, status: Status) -> RankRow:
    if isinstance(status, NotResponding):
        text = f"not responding{': ' if status.state else ''}{status.state}"
        return RankRow(rank, host, "not_responding", text, seconds=round(status.seconds, 3))
    if isinstance(status, ExitedRank):
        return RankRow(rank, host, "exited", f"exited {status.manner}", seconds=round(status.seconds, 3))
    usage = {} if status.usage is None else vars(status.usage)
    if (longest := status.longest) is None:
        return RankRow(rank, host, "computing", line=status.main, **usage)
    text = rank_text.describe_operation(longest)
    return RankRow(rank, host, "in_operation", text, longest.where, longest.seconds, **usage)


def _cells(row: RankRow) -> list[str]:
    gpu = _size(row.gpu_memory)
    if row.gpu_memory is not None and row.gpu_memory_total is not None:
        gpu += f" of {_size(row.gpu_memory_total)}"
    return [
        str(row.rank),
        row.host,
        row.operation,
        row.line,
        "" if row.seconds is None else f"{row.seconds:.1f}",
        _size(row.bytes_per_second),
        _size(row.memory),
        gpu,
        "" if row.gpu_utilization is None else str(row.gpu_utilization),
    ]


def _size(number: float | None) -> str:
    return "" if number is None else filesize.decimal(int(number))
