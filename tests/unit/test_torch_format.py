"""The dump files in the format of torch's flight recorder: what PyTorch's analyser finds in those of several ranks."""

from __future__ import annotations

import itertools
import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components import types as analyser_types

from mpicomm.recorder import flight_recorder, torch_format
from mpicomm.recorder.flight_recorder import RING, Group

SIZE = 4


class Rank:
    """One rank, whose operations are recorded and written before those of the next rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.world = Group("0", range(SIZE), 1800.0, is_world=True)

    def collective(self, name: str = "all_reduce", group: Group | None = None, *, is_over: bool = True) -> None:
        operation = flight_recorder.note(group or self.world, name, torch.float32, 8, None, False, True)
        if is_over:
            operation.finish()

    def message(self, name: str, peer: int, tag: int = 0, *, is_over: bool = True) -> None:
        operation = flight_recorder.note(self.world, name, torch.float32, 8, peer, True, False)
        operation.number_message(tag)
        if is_over:
            operation.finish()


def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the recorder to its state at the start of a process, until the end of the test."""
    monkeypatch.setattr(flight_recorder, "_ring", [None] * RING)
    monkeypatch.setattr(flight_recorder, "_latest", [None])
    monkeypatch.setattr(flight_recorder, "_running", {})
    monkeypatch.setattr(flight_recorder, "_numbers", itertools.count())
    monkeypatch.setattr(flight_recorder, "_groups", {})


@pytest.fixture
def reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[Callable[[Rank], None]], list[str]]:
    """Return a function that runs a program on each rank, and returns what the analyser reports on their files."""

    def run(program: Callable[[Rank], None]) -> list[str]:
        for rank in range(SIZE):
            empty(monkeypatch)
            program(Rank(rank))
            content = torch_format.encoded(rank, flight_recorder.recorded(), 100.0, 1e9)
            (tmp_path / torch_format.FILE.format(rank=rank)).write_bytes(content)
        # Files of other kinds in the directory do not disturb it.
        (tmp_path / "rank-0.json").write_text("{}")
        with caplog.at_level(logging.INFO, logger="Flight Recorder"):
            fr_trace.main([str(tmp_path)])
        return [record.getMessage() for record in caplog.records]

    return run


def missing(lines: list[str]) -> list[tuple[str, str]]:
    """Return the group and the missing ranks of each report of an operation that ranks have not joined."""
    found: list[tuple[str, str]] = []
    for line in lines:
        if group := re.match(r"group info: (.*)", line):
            found.append((group[1], ""))
        elif ranks := re.match(r"missing ranks: \{(.*)\}", line):
            found[-1] = found[-1][0], ranks[1]
    return found


def test_the_analyser_knows_all_names() -> None:
    assert set(torch_format._NAMES.values()) <= analyser_types.COLLECTIVES | analyser_types.P2P


def test_equal_programs_have_no_errors(reported: Callable[..., list[str]]) -> None:
    def program(mine: Rank) -> None:
        for name in sorted(torch_format._NAMES.keys() - {"send", "recv"}):
            mine.collective(name)
        mine.message("send", (mine.rank + 1) % SIZE)
        mine.message("recv", (mine.rank - 1) % SIZE)
        mine.message("send", mine.rank)
        mine.message("recv", mine.rank)

    assert reported(program) == []


def test_a_rank_that_does_not_call_a_collective_is_missing(reported: Callable[..., list[str]]) -> None:
    def program(mine: Rank) -> None:
        mine.collective()
        if mine.rank != 2:
            mine.collective(is_over=False)

    assert missing(reported(program)) == [("0:default_pg", "2")]


@pytest.mark.parametrize("is_skewed", [False, True])
def test_ring_buffers_that_begin_at_different_operations_are_aligned(
    reported: Callable[..., list[str]], is_skewed: bool
) -> None:
    """Rank 1 sends so many messages that its ring buffer holds fewer collectives; rank 2 does not call the last one."""

    def program(mine: Rank) -> None:
        pair = Group("1", [0, 1], 1800.0, is_world=False)
        for _ in range(2 * RING):
            mine.collective()
            if mine.rank < 2:
                mine.collective(group=pair)
            if is_skewed and mine.rank in (1, 3):
                for _ in range(3):
                    mine.message(*(("send", 3) if mine.rank == 1 else ("recv", 1)))
        if mine.rank != 2:
            mine.collective(is_over=False)

    assert missing(reported(program)) == [("0:default_pg", "2")]


def test_queued_collectives_have_the_numbers_with_which_they_will_run(reported: Callable[..., list[str]]) -> None:
    def program(mine: Rank) -> None:
        if mine.rank != 2:
            mine.collective(is_over=False)
        for _ in range(2):
            flight_recorder.note(mine.world, "all_reduce", torch.float32, 8, None, False, mine.rank == 2)

    lines = reported(program)
    assert [line for line in lines if line.startswith("Not all ranks")] == [
        "Not all ranks joining collective, sequence number: 3"
    ]


def test_messages_match_by_sender_receiver_and_tag(reported: Callable[..., list[str]]) -> None:
    """Rank 0 sends to rank 1 with two tags, which rank 1 receives in another order; one receive has no send."""

    def program(mine: Rank) -> None:
        if mine.rank == 0:
            for tag in (5, 0, 5):
                mine.message("send", 1, tag)
        if mine.rank == 1:
            for tag in (0, 5, 5):
                mine.message("recv", 0, tag)
            mine.message("recv", 3, is_over=False)

    assert missing(reported(program)) == [("0 3->1:messages", "3")]


def test_another_collective_is_a_type_mismatch(reported: Callable[..., list[str]]) -> None:
    def program(mine: Rank) -> None:
        mine.collective("broadcast" if mine.rank == 2 else "all_reduce", is_over=False)

    errors = [line for line in reported(program) if line.startswith("error msg:")]
    assert len(errors) == 1
    assert "Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH" in errors[0]


def test_an_entry_has_state_times_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    empty(monkeypatch)
    group = Group("7", [4, 6], 30.0, is_world=False)
    operation = flight_recorder.note(group, "all_reduce", torch.bfloat16, 12, None, False, True)
    content: dict[str, Any] = pickle.loads(torch_format.encoded(6, [operation], operation.called_at, 1000.0))
    assert content["pg_config"] == {"7": {"name": "7", "desc": "undefined", "ranks": "[4, 6]"}}
    (entry,) = content["entries"]
    assert (entry["state"], entry["timeout_ms"], entry["input_sizes"]) == ("started", 30_000, [[12]])
    assert entry["time_created_ns"] == pytest.approx(1000 * 10**9, abs=1000)
    assert entry["frames"][0]["name"] == "test_an_entry_has_state_times_and_line"
