"""The text of the report on a job that hangs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mpicomm.recorder import hang_report, rank_text
from mpicomm.recorder.status import ExitedRank, OperationInfo, RankStatus, Status


def operation_text(**changes: Any) -> OperationInfo:
    """Return an operation as `flight_recorder.Operation.describe` does."""
    operation = OperationInfo(
        7, "all_reduce", "0", "", 42, False, "float32", 1024, None, "train.py:88", 31.0, 31.0, False
    )
    return dataclasses.replace(operation, **changes)


def inside(**changes: Any) -> RankStatus:
    """Return the status of a rank inside one operation."""
    return status_of(operation_text(**changes), last=operation_text(**changes), main="train.py:88")


def outside(main: str = "train.py:90", last: OperationInfo | None = None) -> RankStatus:
    return status_of(last=last, main=main)


def status_of(*running: OperationInfo, last: OperationInfo | None, main: str) -> RankStatus:
    return RankStatus(list(running), last, main, {"0": 42})


def table_of(*rows: Status) -> list[str]:
    return hang_report.table(dict(enumerate(rows)), ["alpha"] * len(rows)).splitlines()


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1], "0, 1"),
        ([0, 1, 2], "0-2"),
        ([7, 3, 0, 2, 1], "0-3, 7"),
        ([1, 2, 4, 5, 6, 9], "1, 2, 4-6, 9"),
        (range(10_000), "0-9999"),
        (range(0, 10_000, 7), ", ".join(map(str, range(0, 10_000, 7)))),
    ],
)
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert rank_text.ranges(ranks) == text
    assert rank_text.parse_ranges(text) == sorted(ranks)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2, 3], "ranks 0-3"),
        (range(0, 32, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30"),
        (range(0, 34, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, ... (17 in all)"),
        (range(0, 10_000, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, ... (5000 in all)"),
    ],
)
def test_ranks_are_called(ranks: list[int], text: str) -> None:
    assert rank_text.name_ranks(ranks) == text


# -- operations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "all_reduce #42, float32[1024]"),
        ({"name": "barrier", "dtype": "", "count": 0}, "barrier #42"),
        ({"name": "broadcast", "peer": 0}, "broadcast #42, root rank 0, float32[1024]"),
        ({"name": "send", "sequence": None, "is_message": True, "peer": 3}, "send to rank 3, float32[1024]"),
        ({"name": "recv", "sequence": None, "is_message": True, "peer": 3}, "recv from rank 3, float32[1024]"),
        ({"name": "recv", "sequence": None, "is_message": True}, "recv from any rank, float32[1024]"),
        ({"sequence": None}, "all_reduce (queued), float32[1024]"),
        ({"name": "broadcast", "sequence": None, "peer": 0}, "broadcast (queued), root rank 0, float32[1024]"),
        ({"members": "4-7"}, "all_reduce #42, float32[1024], in the group of ranks 4-7"),
        ({"members": "3"}, "all_reduce #42, float32[1024], in the group of rank 3"),
        (
            {"name": "reduce", "peer": 5, "members": "1, 5", "dtype": "bfloat16", "count": 0},
            "reduce #42, root rank 5, bfloat16[0], in the group of ranks 1, 5",
        ),
    ],
)
def test_an_operation_is_described(changes: dict[str, Any], text: str) -> None:
    assert rank_text.describe_operation(operation_text(**changes)) == text


# -- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leave_status", "text"), [(None, "at the end of its program"), (0, "with status 0"), (3, "with status 3")]
)
def test_how_a_rank_left(leave_status: int | None, text: str) -> None:
    assert table_of(ExitedRank(leave_status, 5.0)) == [f"  rank 0  exited 5 s ago {text}"]


def test_of_several_operations_the_longest_is_shown() -> None:
    first, second = operation_text(seconds=5.0), operation_text(name="broadcast", sequence=41, peer=0, seconds=50.0)
    assert table_of(status_of(first, second, last=second, main="train.py:88")) == [
        "  rank 0  in broadcast #41, root rank 0, float32[1024], at train.py:88, for 50 s (and 1 more operation)"
    ]
    (row,) = table_of(status_of(first, second, first, last=second, main="train.py:88"))
    assert row.endswith("for 50 s (and 2 more operations)")


def test_a_rank_in_no_operation_is_shown_with_its_last() -> None:
    assert table_of(outside(last=operation_text(name="barrier", dtype="", called=12.4))) == [
        "  rank 0  not in an operation; at train.py:90; last called 12 s ago: barrier #42, at train.py:88"
    ]


def test_a_rank_whose_program_has_ended() -> None:
    assert table_of(outside(main="")) == [
        "  rank 0  not in an operation, none called yet; its main thread has ended, other threads are running"
    ]


def test_a_row_shows_the_longest_of_its_ranks() -> None:
    assert table_of(inside(seconds=3.0), inside(seconds=31.0), inside(seconds=7.0)) == [
        "  ranks 0-2  in all_reduce #42, float32[1024], at train.py:88, for 31 s"
    ]


def test_rows_of_more_ranks_are_first() -> None:
    rows = table_of(inside(where="a.py:1"), inside(where="b.py:1"), inside(where="b.py:1"), inside(where="c.py:1"))
    assert [row.split("  ")[1] for row in rows] == ["ranks 1, 2", "rank 0", "rank 3"]


def test_a_table_of_many_places_is_cut() -> None:
    rows = table_of(*[inside(where=f"train.py:{rank}") for rank in range(40)])
    assert len(rows) == hang_report._ROWS + 1
    assert rows[-1] == "  ... and 8 more rows; see the ranks' dump files"


def test_a_table_of_many_ranks_reads_a_large_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    parse_ranges = rank_text.parse_ranges
    monkeypatch.setattr(rank_text, "parse_ranges", lambda text: read.append(text) or parse_ranges(text))
    members = rank_text.ranges(range(1, 2000, 2))
    statuses = {rank: inside(members=members, where=f"train.py:{rank % 2}") for rank in range(2000)}
    assert "ranks 1, 3, 5" in hang_report.table(statuses, ["alpha"] * 2000)
    assert read == [members]
