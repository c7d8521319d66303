"""The operations of all ranks on one time axis, as an HTML page without references to other files.

The browser draws the page from columns of whole numbers, since a list of objects would be several times larger: of a
lane, the differences between the calls of its operations, and their durations, in nanoseconds.
"""

from __future__ import annotations

import base64
import gzip
import html
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mpicomm.reports import html_report, job_summary, job_trace
from mpicomm.reports.job_trace import DumpedOperation, RankDump, RankWait

_DETAILS = ("name", "group", "dtype", "count", "nbytes", "peer", "tag", "where", "is_over")
_OPEN_RANKS = 16  # the table of more ranks is closed, so that the page begins with the timeline


def page(dumps: Sequence[RankDump], title: str) -> str:
    """Return the page.

    Args:
        dumps: The dump files of a job.
        title: The title of the page.
    """
    waits = job_trace.waits(dumps)
    summary = job_summary.of(dumps, waits)
    data = _data(dumps, waits, summary["straggler"])
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), compresslevel=6)
    parts = {
        "TITLE": html.escape(title),
        "SUMMARY": html.escape(job_summary.headline(summary)),
        "STRAGGLER": html.escape(job_summary.straggler_line(summary)),
        "OPEN": " open" if len(dumps) <= _OPEN_RANKS else "",
        "TABLE": html_report.table(job_summary.table(summary)),
        "DATA": base64.b64encode(packed).decode(),
    }
    return html_report.fill("timeline.html", parts)


# -- the data of the drawing -------------------------------------------------------------------------------------------


def _data(
    dumps: Sequence[RankDump], all_waits: Sequence[RankWait], straggler: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the data that the page draws. Operations are numbered in the order of ranks and lanes."""
    start = min((operation.called for dump in dumps for operation in dump.operations), default=0.0)
    end = max((operation.end for dump in dumps for operation in dump.operations), default=0.0)
    waits_of = {id(wait.operation): wait for wait in all_waits}
    details: dict[Any, int] = {}  # distinct rows, to which the columns of the page refer by index
    texts: dict[Any, int] = {}
    numbers: dict[int, int] = {}  # by the id of an operation
    ranks = []
    for dump in dumps:
        lanes = []
        for name, operations in job_trace.assign_lanes(dump.operations):
            numbers.update(zip(map(id, operations), itertools.count(len(numbers))))
            columns, waits = _columns(operations, start, details), _wait_columns(operations, waits_of, texts)
            lanes.append({"name": name, **columns, "waits": waits})
        ranks.append({"rank": dump.rank, "host": dump.host, "lanes": lanes})
    arrows = sorted(job_trace.arrows(dumps), key=lambda arrow: arrow.send.called)
    return {
        "duration": max(1, _nanoseconds(end - start)),
        "straggler": None if straggler is None else straggler["rank"],
        "ranks": ranks,
        "details": [dict(zip(_DETAILS, row, strict=True)) for row in details],
        "texts": list(texts),
        "messages": {
            "send": [numbers[id(arrow.send)] for arrow in arrows],
            "receive": [numbers[id(arrow.receive)] for arrow in arrows],
        },
    }


def _index(rows: dict[Any, int], row: Any) -> int:
    """Return the index of a row; a new row is the last one."""
    return rows.setdefault(row, len(rows))


def _columns(operations: Sequence[DumpedOperation], start: float, details: dict[Any, int]) -> dict[str, list[int]]:
    called = [_nanoseconds(operation.called - start) for operation in operations]
    return {
        "called": [moment - before for before, moment in itertools.pairwise([0, *called])],
        "length": [_nanoseconds(operation.end - operation.called) for operation in operations],
        "queued": [_nanoseconds(_queued_seconds(operation)) for operation in operations],
        "detail": [_index(details, tuple(operation.fields[name] for name in _DETAILS)) for operation in operations],
        "sequence": [-1 if operation.key is None else operation.key[2] for operation in operations],
    }


def _queued_seconds(operation: DumpedOperation) -> float:
    """Return the time before an operation began; of a message, `start` is the beginning of the wait for it."""
    return 0.0 if operation.is_message or operation.start is None else operation.start - operation.called


def _wait_columns(
    operations: Sequence[DumpedOperation], waits_of: Mapping[int, RankWait], texts: dict[Any, int]
) -> dict[str, list[int]]:
    pairs = [
        (index, wait) for index, operation in enumerate(operations) if (wait := waits_of.get(id(operation))) is not None
    ]
    return {
        "operation": [index for index, _ in pairs],
        "offset": [_nanoseconds(wait.start - wait.operation.called) for _, wait in pairs],
        "length": [_nanoseconds(wait.end - wait.start) for _, wait in pairs],
        "text": [_index(texts, job_trace.name_wait(wait)) for _, wait in pairs],
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
