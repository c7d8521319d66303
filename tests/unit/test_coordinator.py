"""The coordinator: the reports and actions of rank 0 when ranks die, exit or hang."""

from __future__ import annotations

from typing import Any

import pytest

from mpicomm.watchdog import coordinator as judges
from mpicomm.watchdog import hang_report
from mpicomm.watchdog.connection import Message
from mpicomm.watchdog.coordinator import COLLECT_SECONDS, Coordinator

SIZE = 4
HANG_SECONDS = 60.0
GATHER, LAUNCHER = judges._GATHER_SECONDS, judges._LAUNCHER_SECONDS
TRANSIT = judges._TRANSIT_SECONDS
TELLER, END = judges._TELLER_SECONDS, judges._END_SECONDS
TWO_NODES = (0, 0, 1, 1)
EVERYBODY = hang_report.ranges(range(SIZE))


class Hands:
    """Records the actions that the coordinator requests."""

    def __init__(self, may_claim: bool = True) -> None:
        self.may_claim = may_claim
        self.claims = 0
        self.to_all: list[Message] = []
        self.told: list[tuple[int, Message]] = []
        self.said: list[str] = []
        self.ended: list[int] = []

    def tell_all(self, message: Message) -> None:
        self.to_all.append(message)

    def tell(self, rank: int, message: Message) -> None:
        self.told.append((rank, message))

    def speak(self, text: str) -> None:
        self.said.append(text)

    def claim(self) -> bool:
        self.claims += 1
        return self.may_claim

    def end(self, status: int) -> None:
        self.ended.append(status)

    def kinds(self) -> list[str]:
        return [message["kind"] for message in self.to_all]


class Court:
    """A coordinator whose clock the test advances."""

    def __init__(self, *, nodes: tuple[int, ...] = (0,) * SIZE, may_claim: bool = True) -> None:
        self.hands = Hands(may_claim)
        first = [nodes.index(node) for node in nodes]
        hubs = [0 if first[rank] == rank else first[rank] for rank in range(SIZE)]
        self.coordinator = Coordinator([f"node{node}" for node in nodes], hubs, HANG_SECONDS, self.hands)
        self.now = 1000.0

    def take(self, **message: Any) -> None:
        self.coordinator.take(message, self.now)

    def lose(self, rank: int, why: str = "killed") -> None:
        self.coordinator.lose(rank, why, self.now)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.coordinator.tick(self.now)

    def answer(self, *ranks: int, **status: Any) -> None:
        for rank in ranks:
            self.take(kind="status", number=self.number, rank=rank, status=status_of(**status))

    @property
    def number(self) -> int:
        """The number of the last status collection."""
        numbers: list[int] = [message["number"] for message in self.hands.to_all if message["kind"] == "collect"]
        return numbers[-1]

    def wait_in(self, rank: int, sequence: int | None = 42, needs: str = EVERYBODY, group: str = "0") -> None:
        self.take(kind="waits", rank=rank, number=7, needs=needs, group=group, sequence=sequence)

    def leave(
        self,
        rank: int,
        status: int | None = 0,
        sequence: int = 41,
        *,
        is_stuck: bool = False,
        waits: bool = True,
        sends: bool = False,
    ) -> None:
        about = {"is_stuck": is_stuck, "waits": waits, "sends": sends}
        self.take(kind="left", rank=rank, status=status, sequences={"0": sequence}, **about)

    def hang(self, rank: int, seconds: float = 61.0) -> None:
        self.ask(rank, "hang", seconds, 1800.0)

    def deadline(self, rank: int, seconds: float, timeout: float) -> None:
        self.ask(rank, "deadline", seconds, timeout)

    def ask(self, rank: int, kind: str, seconds: float, timeout: float, *, raises: bool = False) -> None:
        about = {"what": what(), "seconds": seconds, "timeout": timeout, "raises": raises, "files": "  files: /tmp/x"}
        self.take(kind=kind, rank=rank, number=7, **about)

    def miss(self, rank: int, sequence: int = 42, needs: str = EVERYBODY) -> None:
        self.take(kind="missing", rank=rank, number=7, needs=needs, group="0", sequence=sequence)


def what(**changes: Any) -> dict[str, Any]:
    """Return a rank's description of an operation."""
    return {
        "name": "all_reduce",
        "sequence": 42,
        "is_message": False,
        "peer": None,
        "dtype": "float32",
        "count": 1024,
        "members": "",
        "where": "train.py:88",
        "seconds": 61.0,
        "called": 61.0,
        **changes,
    }


def status_of(sequence: int = 42, **changes: Any) -> dict[str, Any]:
    """Return a rank's status report."""
    return {"running": [what()], "last": what(), "main": "train.py:88", "sequences": {"0": sequence}, **changes}


# -- dead ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_message", [True, False])
def test_a_rank_that_died_is_named_once_and_ends_the_job(by_message: bool) -> None:
    court = Court()
    for _ in range(3):
        if by_message:
            court.take(kind="died", rank=2, why="its process has ended")
        else:
            court.lose(2, "its process has ended")
    assert court.hands.said == ["[mpicomm] rank 2 of 4 on node0 died: its process has ended"]
    assert court.hands.to_all == [{"kind": "ending", "files": True}]
    assert court.hands.claims == 1


def test_the_launcher_may_end_the_job_first() -> None:
    court = Court()
    court.lose(2)
    court.tick(LAUNCHER - 0.01)
    assert (court.coordinator.is_ending, court.coordinator.is_busy, court.hands.ended) == (True, True, [])
    court.tick(0.01)
    assert court.hands.ended == [1]


def test_an_end_that_did_not_work_is_tried_again() -> None:
    court = Court()
    court.lose(2)
    court.tick(LAUNCHER)
    court.tick(TELLER - 0.01)
    assert court.hands.ended == [1]
    court.tick(0.01)
    assert court.hands.ended == [1, 1]


def test_the_first_of_many_deaths_is_the_cause() -> None:
    court = Court()
    for rank in (3, 1, 2):
        court.lose(rank)
    assert court.hands.said == ["[mpicomm] rank 3 of 4 on node0 died: killed"]
    assert court.hands.kinds() == ["ending"]


def test_a_rank_that_left_and_does_not_wait_for_the_others_has_not_died() -> None:
    court = Court()
    court.leave(2, waits=False)
    court.lose(2)
    court.tick(100)
    assert (court.hands.said, court.hands.to_all, court.coordinator.is_busy) == ([], [], False)


def test_a_rank_that_left_and_waits_for_the_others_can_die() -> None:
    court = Court()
    court.leave(2)
    court.lose(2)
    assert court.hands.said == ["[mpicomm] rank 2 of 4 on node0 died: killed"]


def test_a_rank_that_calls_os_exit_is_named_and_told_that_it_was_heard() -> None:
    court = Court()
    court.take(kind="exits", rank=2, status=3)
    court.lose(2)
    assert court.hands.said == ["[mpicomm] rank 2 of 4 on node0 called os._exit(3)"]
    assert court.hands.told == [(2, {"kind": "heard"})]
    court.tick(LAUNCHER)
    assert court.hands.ended == [1]


# -- failure reports and abort of the job ----------------------------------------------------------------------------


def test_a_rank_that_failed_and_then_died_tells_it_itself() -> None:
    court = Court()
    court.take(kind="failed", rank=2)
    court.lose(2)
    assert (court.hands.said, court.hands.claims) == ([], 0)
    assert court.hands.to_all == [{"kind": "ending", "files": False}]
    court.tick(TELLER - 0.01)
    assert court.hands.ended == []
    court.tick(0.01)
    assert court.hands.ended == [1]


def test_a_rank_that_got_sigterm_and_then_died_is_named_so() -> None:
    court = Court()
    court.take(kind="terminated", rank=2)
    assert court.hands.to_all == []
    court.lose(2)
    assert court.hands.said == [
        "[mpicomm] rank 2 of 4 on node0 was terminated by SIGTERM, which rank 0 did not receive"
    ]


def test_who_may_not_claim_says_nothing_but_ends_the_job() -> None:
    court = Court(may_claim=False)
    court.lose(2)
    assert (court.hands.said, court.hands.claims) == ([], 1)
    assert court.hands.to_all == [{"kind": "ending", "files": False}]
    court.tick(TELLER - 0.01)
    assert court.hands.ended == []
    court.tick(0.01)
    assert court.hands.ended == [1]


def test_who_may_not_claim_says_nothing_of_leavers() -> None:
    court = Court(may_claim=False)
    court.leave(2)
    court.wait_in(0)
    court.tick(GATHER)
    court.answer(*range(SIZE))
    court.tick()
    assert (court.hands.said, court.hands.kinds()) == ([], ["collect", "ending"])
    court.tick(TELLER)
    assert court.hands.ended == [1]


def test_nothing_is_asked_of_a_job_that_ends() -> None:
    court = Court()
    court.lose(2)
    court.hang(1)
    court.tick(COLLECT_SECONDS + 1)
    assert court.hands.kinds() == ["ending"]
    assert len(court.hands.said) == 1


def test_a_broken_group_is_told_to_all() -> None:
    court = Court()
    message = {"kind": "broken", "group": "0", "cause": "rank 2 gave up"}
    court.take(**message)
    assert court.hands.to_all == [message]
    assert not court.coordinator.is_busy


# -- exited ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaver_first", [True, False])
def test_a_rank_that_left_while_others_wait_for_it_is_named(leaver_first: bool) -> None:
    court = Court()
    if leaver_first:
        court.leave(2, status=None)
    for rank in (0, 1, 3):
        court.wait_in(rank)
    if not leaver_first:
        assert not court.coordinator.is_busy
        court.leave(2, status=None)
    court.tick(GATHER - 0.01)
    assert court.hands.to_all == []
    court.tick(0.01)
    assert court.hands.to_all == [{"kind": "collect", "number": 1, "files": True}]
    court.answer(0, 1, 3)
    court.answer(2, running=[])
    court.tick()
    (text,) = court.hands.said
    first, *rows = text.splitlines()
    assert first == "[mpicomm] rank 2 of 4 on node0 has exited, but other ranks wait for it; aborting the job"
    assert rows == [
        "  ranks 0, 1, 3  in all_reduce #42, float32[1024], at train.py:88, for 61 s",
        f"  rank 2         exited {GATHER:.0f} s ago at the end of its program",
    ]
    assert court.hands.kinds() == ["collect", "ending"]
    court.tick(END - 0.01)
    assert court.hands.ended == []
    court.tick(0.01)
    assert court.hands.ended == [1]


def test_several_leavers_are_named_together() -> None:
    court = Court(nodes=TWO_NODES)
    court.leave(2)
    court.leave(1)
    court.wait_in(0)
    court.tick(GATHER)
    court.answer(*range(SIZE))
    court.tick()
    (text,) = court.hands.said
    assert text.startswith("[mpicomm] ranks 1, 2 of 4 on node0, node1 have exited, but other ranks wait for them; ")


@pytest.mark.parametrize(("left_with", "ends_with"), [(None, 1), (0, 1), (3, 3)])
def test_the_job_ends_with_the_status_of_the_leaver(left_with: int | None, ends_with: int) -> None:
    court = Court()
    court.leave(2, status=left_with)
    court.wait_in(0)
    court.tick(GATHER)
    court.answer(*range(SIZE))
    court.tick()
    court.tick(END)
    assert court.hands.ended == [ends_with]


@pytest.mark.parametrize("reached", [42, 43])
def test_who_left_after_it_had_come_is_not_waited_for(reached: int) -> None:
    court = Court()
    court.leave(2, sequence=reached)
    court.wait_in(0, sequence=42)
    court.tick(100)
    assert (court.hands.to_all, court.coordinator.is_busy) == ([], False)


def test_who_never_called_anything_on_a_group_is_waited_for() -> None:
    court = Court()
    court.leave(2, sequence=99)
    court.wait_in(0, sequence=1, group="5")
    court.tick(GATHER)
    assert court.hands.kinds() == ["collect"]


def test_who_left_is_not_waited_for_in_a_group_of_others() -> None:
    court = Court()
    court.leave(2)
    court.wait_in(0, needs="0, 1")
    court.tick(100)
    assert court.hands.to_all == []


def test_who_goes_on_did_not_wait_for_the_leaver() -> None:
    court = Court()
    court.wait_in(0)
    court.leave(2)
    court.take(kind="goes on", rank=0, number=7)
    court.take(kind="goes on", rank=1, number=7)  # rank 1 has not reported a wait
    court.tick(GATHER)
    assert (court.hands.to_all, court.coordinator.is_busy) == ([], False)


@pytest.mark.parametrize("leaver_first", [True, False])
def test_a_message_from_somebody_who_left_does_not_come(leaver_first: bool) -> None:
    court = Court()
    for happens in (court.leave, court.wait_in) if leaver_first else (court.wait_in, court.leave):
        if happens == court.leave:
            court.leave(2, sequence=99)
        else:
            court.wait_in(0, sequence=None, needs="2")
    court.tick(GATHER)
    assert court.hands.to_all == []  # the message may still be in transit
    court.tick(TRANSIT - GATHER)
    court.answer(*range(SIZE))
    court.tick()
    assert court.hands.said[0].startswith("[mpicomm] rank 2 of 4 on node0 has exited, but other ranks wait for it")


def test_a_long_message_may_be_on_its_way_for_longer() -> None:
    court = Court()
    court.wait_in(0, sequence=None, needs="2")
    court.leave(2, sequence=99, sends=True)
    court.tick(HANG_SECONDS - 0.01)
    assert court.hands.to_all == []
    court.tick(0.01)
    assert court.hands.kinds() == ["collect"]


def test_a_message_that_was_on_its_way_comes() -> None:
    court = Court()
    court.wait_in(0, sequence=None, needs="2")
    court.leave(2, sequence=99)
    court.tick(TRANSIT - 0.01)
    court.take(kind="goes on", rank=0, number=7)
    court.tick(0.01)
    assert (court.hands.to_all, court.coordinator.is_busy) == ([], False)


def test_who_has_left_with_an_operation_that_nobody_joined_still_waits() -> None:
    court = Court()
    for rank in (0, 1, 3):
        court.leave(rank)
    court.leave(2, sequence=42, is_stuck=True)
    court.wait_in(2)
    court.tick(GATHER)
    court.answer(*range(SIZE))
    court.tick()
    assert court.hands.said[0].startswith("[mpicomm] ranks 0, 1, 3 of 4 on node0 have exited, but other ranks wait")


def test_who_takes_its_groups_down_waits_for_nobody_who_left() -> None:
    court = Court()
    for rank in range(SIZE):
        court.leave(rank)
    court.wait_in(2, sequence=43)
    court.tick(100)
    assert (court.hands.kinds(), court.hands.said) == (["all left"], [])


@pytest.mark.parametrize("silent", [{}, {"silent": 3.0, "state": ""}], ids=["no word", "its hub's word"])
def test_who_does_not_answer_may_wait_no_more(silent: dict[str, Any]) -> None:
    """The wait counts again as soon as the rank answers and still waits."""
    court = Court()
    court.wait_in(0)
    court.leave(2)
    court.tick(GATHER)
    court.answer(1, 2, 3)
    if silent:
        court.take(kind="status", number=court.number, rank=0, status=silent)
    court.tick(COLLECT_SECONDS)
    assert (court.hands.said, court.coordinator.is_ending) == ([], False)
    court.tick(TRANSIT)
    court.answer(*range(SIZE))
    court.tick()
    assert court.hands.said[0].startswith("[mpicomm] rank 2 of 4 on node0 has exited, but other ranks wait for it")


def test_a_message_from_anybody_may_come_until_all_others_have_left() -> None:
    court = Court()
    court.wait_in(0, sequence=None)
    court.leave(1)
    court.leave(2)
    court.tick(100)
    assert court.hands.to_all == []
    court.leave(3)
    court.tick(GATHER)
    assert court.hands.to_all == []
    court.tick(TRANSIT - GATHER)
    assert court.hands.kinds() == ["collect"]
    court.answer(*range(SIZE))
    court.tick()
    assert court.hands.said[0].startswith("[mpicomm] ranks 1-3 of 4 on node0 have exited")


def test_a_rank_alone_in_its_group_waits_for_nobody() -> None:
    court = Court()
    court.wait_in(0, needs="0")
    court.leave(2)
    court.tick(GATHER)
    assert court.hands.to_all == []


def test_the_leavers_are_judged_by_what_is_so_when_all_have_waited() -> None:
    court = Court()
    court.leave(2)
    court.wait_in(0)
    court.tick(GATHER / 2)
    court.leave(3)
    court.tick(GATHER / 2)
    court.answer(*range(SIZE))
    court.tick()
    assert court.hands.said[0].startswith("[mpicomm] ranks 2, 3 of 4 on node0 have exited")


@pytest.mark.parametrize("stuck", [None, 0, 3])
def test_all_are_told_when_all_have_left(stuck: int | None) -> None:
    court = Court()
    for rank in (2, 0, 3):
        court.leave(rank, is_stuck=rank == stuck)
    assert court.hands.to_all == []
    court.leave(1)
    assert court.hands.to_all == [{"kind": "all left", "is_stuck": stuck is not None}]
    for rank in range(SIZE):
        court.lose(rank)
    court.tick(100)
    assert (court.hands.said, court.hands.ended) == ([], [])


def test_it_costs_little_that_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(text: str) -> list[int]:
        parsed.append(text)
        return list(range(SIZE))

    monkeypatch.setattr(hang_report, "parse_ranges", parse)
    court = Court()
    court.leave(3, sequence=99)
    for number in range(100):
        court.take(kind="waits", rank=0, number=number, needs=EVERYBODY, group="0", sequence=42)
    court.tick(GATHER)
    assert parsed == [EVERYBODY]


# -- hangs and timeouts ----------------------------------------------------------------------------------------------


def test_a_hang_is_reported_with_everybodys_place() -> None:
    court = Court()
    court.hang(3, seconds=61.4)
    assert court.hands.told == [(3, {"kind": "heard"})]
    assert court.hands.to_all == [{"kind": "collect", "number": 1, "files": True}]
    court.answer(0, 1, 3)
    court.answer(2, sequence=41, running=[what(name="broadcast", sequence=41, peer=0, where="train.py:97")])
    court.tick()
    (text,) = court.hands.said
    assert text == (
        "[mpicomm] possible hang: rank 3 has waited 61 s; aborting at the 1800 s timeout\n"
        "  ranks 0, 1, 3  in all_reduce #42, float32[1024], at train.py:88, for 61 s\n"
        "  rank 2         in broadcast #41, root rank 0, float32[1024], at train.py:97, for 61 s\n"
        "  files: /tmp/x"
    )
    assert (court.coordinator.is_busy, court.hands.ended, court.hands.claims) == (False, [], 0)


def test_what_comes_after_a_hang_where_timeouts_are_exceptions() -> None:
    court = Court()
    court.ask(3, "hang", 61.0, 1800.0, raises=True)
    court.answer(0, 1, 2, 3)
    court.tick()
    assert "rank 3 has waited 61 s; raising TimeoutError at the 1800 s timeout\n" in court.hands.said[0]


def test_many_who_hang_at_once_are_one_report() -> None:
    court = Court()
    for rank in range(SIZE):
        court.hang(rank)
    court.answer(*range(SIZE))
    court.tick()
    assert court.hands.kinds() == ["collect"]
    assert len(court.hands.said) == 1
    assert "rank 0 has waited" in court.hands.said[0]
    assert [rank for rank, message in court.hands.told if message == {"kind": "heard"}] == list(range(SIZE))


def test_a_hang_is_reported_once_in_its_time() -> None:
    court = Court()
    court.hang(0)
    court.answer(*range(SIZE))
    court.tick()
    court.tick(HANG_SECONDS - 0.01)
    court.hang(1)
    court.tick(COLLECT_SECONDS)
    assert court.hands.kinds() == ["collect"]
    assert court.hands.told == [(0, {"kind": "heard"}), (1, {"kind": "heard"})]
    court.hang(2)
    court.answer(*range(SIZE))
    court.tick()
    assert court.hands.kinds() == ["collect", "collect"]
    assert len(court.hands.said) == 2


@pytest.mark.parametrize("timeout", [1800.0, 0.5])
def test_a_deadline_ends_the_job(timeout: float) -> None:
    court = Court()
    court.deadline(1, timeout + 1, timeout)
    court.answer(*range(SIZE))
    court.tick()
    (text,) = court.hands.said
    assert text == (
        f"[mpicomm] rank 1 of 4 on node0 timed out after {timeout:g} s in all_reduce #42, float32[1024]; "
        "aborting the job\n"
        "  ranks 0-3  in all_reduce #42, float32[1024], at train.py:88, for 61 s\n"
        "  files: /tmp/x"
    )
    assert court.hands.to_all[-1] == {"kind": "ending", "files": True}
    court.tick(END)
    assert court.hands.ended == [1]


def test_a_deadline_is_heard_while_a_hang_is_looked_at() -> None:
    court = Court()
    court.hang(0)
    court.deadline(1, 31.0, 30.0)
    court.answer(*range(SIZE))
    court.tick()
    (text,) = court.hands.said
    assert "timed out after 30 s in " in text


def test_a_deadline_does_not_wait_for_the_next_report() -> None:
    court = Court()
    court.hang(0)
    court.answer(*range(SIZE))
    court.tick()
    court.deadline(1, 31.0, 30.0)
    assert court.hands.kinds() == ["collect", "collect"]


class AnswersAtOnce(Hands):
    """The actions of rank 0, which receives a request before all other ranks."""

    court: Court

    def tell_all(self, message: Message) -> None:
        super().tell_all(message)
        if message["kind"] == "collect":
            self.court.take(kind="goes on", rank=0, number=7)


def test_an_operation_of_rank_0_may_end_when_it_is_asked_for() -> None:
    court = Court()
    court.hands = court.coordinator._actions = AnswersAtOnce()
    court.hands.court = court
    court.deadline(0, 61.0, 60.0)
    court.answer(*range(SIZE), running=[])
    court.tick()
    assert (court.hands.said, court.coordinator.is_ending) == ([], False)


def test_a_hang_that_ends_while_it_is_looked_at_is_none() -> None:
    court = Court()
    court.hang(0)
    court.take(kind="goes on", rank=0, number=7)
    court.answer(*range(SIZE))
    court.tick()
    assert (court.hands.said, court.coordinator.is_busy) == ([], False)


def test_a_deadline_that_ends_while_it_is_looked_at_ends_nothing() -> None:
    court = Court()
    court.hang(0)
    court.deadline(1, 31.0, 30.0)
    court.take(kind="goes on", rank=1, number=8)  # a different operation
    court.take(kind="goes on", rank=1, number=7)
    court.answer(*range(SIZE))
    court.tick(TELLER)
    assert len(court.hands.said) == 1
    assert court.hands.said[0].startswith("[mpicomm] possible hang: rank 0 has waited")
    assert (court.hands.ended, court.coordinator.is_ending) == ([], False)


def test_leavers_for_whom_nobody_waits_any_more_are_not_named() -> None:
    court = Court()
    court.leave(2)
    court.wait_in(0)
    court.tick(GATHER)
    court.take(kind="goes on", rank=0, number=7)
    court.answer(*range(SIZE))
    court.tick()
    assert (court.hands.said, court.coordinator.is_ending) == ([], False)


def test_files_are_written_at_the_first_hang_and_at_the_end() -> None:
    court = Court()
    for _ in range(3):
        court.hang(0)
        court.answer(*range(SIZE))
        court.tick()
        court.tick(HANG_SECONDS)
    court.deadline(1, 31.0, 30.0)
    assert [message["files"] for message in court.hands.to_all] == [True, False, False, True]


# -- status of all ranks ---------------------------------------------------------------------------------------------


def test_a_collection_ends_as_soon_as_all_have_answered() -> None:
    court = Court()
    court.hang(0)
    court.answer(0, 1, 2)
    court.tick()
    assert court.hands.said == []
    court.answer(3)
    court.tick()
    assert len(court.hands.said) == 1


def test_a_collection_ends_in_any_case() -> None:
    court = Court()
    court.hang(0)
    court.tick(COLLECT_SECONDS - 0.01)
    assert (court.hands.said, court.coordinator.is_busy) == ([], True)
    court.tick(0.01)
    (text,) = court.hands.said
    assert f"  ranks 0-3  not responding for {COLLECT_SECONDS:.0f} s on node0" in text
    assert not court.coordinator.is_busy


def test_an_answer_that_comes_too_late_is_no_answer_to_the_next_question() -> None:
    court = Court()
    court.hang(0)
    court.tick(COLLECT_SECONDS)
    court.answer(2, running=[what(where="old.py:1")])
    court.tick(HANG_SECONDS)
    court.hang(0)
    court.take(kind="status", number=1, rank=2, status=status_of(running=[what(where="old.py:1")]))
    court.answer(0, 1, 3)
    court.tick()
    assert len(court.hands.said) == 1
    court.answer(2)
    court.tick()
    assert len(court.hands.said) == 2
    assert "old.py" not in court.hands.said[1]


def test_a_rank_that_does_not_answer_its_hub_is_shown_with_its_state() -> None:
    court = Court(nodes=TWO_NODES)
    court.hang(0)
    court.answer(0, 1, 2)
    silent = {"silent": 31.0, "state": "process 77 is stopped by a signal (SIGSTOP); resume it with SIGCONT"}
    court.take(kind="status", number=1, rank=3, status=silent)
    court.tick()
    assert court.hands.said[0].splitlines()[2] == (
        "  rank 3     not responding for 31 s on node1: process 77 is stopped by a signal (SIGSTOP); "
        "resume it with SIGCONT"
    )


def test_ranks_behind_a_hub_that_does_not_answer_are_shown_so() -> None:
    court = Court(nodes=TWO_NODES)
    court.hang(0)
    court.answer(0, 1)
    court.tick(COLLECT_SECONDS)
    assert court.hands.said[0].splitlines()[1:-1] == [
        "  ranks 0, 1  in all_reduce #42, float32[1024], at train.py:88, for 61 s",
        "  rank 2      not responding for 4 s on node1",
        "  rank 3      not responding for 4 s on node1: its hub, rank 2, does not respond",
    ]


def test_a_rank_that_left_and_is_asked_is_shown_as_left() -> None:
    court = Court()
    court.leave(2, status=0)
    court.tick(12)
    court.hang(0)
    court.answer(*range(SIZE))
    court.tick()
    assert court.hands.said[0].splitlines()[2] == "  rank 2         exited 12 s ago with status 0"


# -- missing ranks ---------------------------------------------------------------------------------------------------


def test_who_gave_up_waiting_hears_who_has_not_come() -> None:
    court = Court()
    court.miss(1)
    assert court.hands.to_all == [{"kind": "collect", "number": 1, "files": False}]
    court.answer(0, 1)
    court.answer(2, sequence=41, running=[], last=None, main="train.py:12")
    court.answer(3, sequence=43)
    court.tick()
    assert court.hands.told == [
        (1, {"kind": "heard"}),
        (
            1,
            {
                "kind": "answer",
                "number": 7,
                "missing": "2",
                "table": "  rank 2  in no operation, none called yet; at train.py:12",
            },
        ),
    ]
    assert (court.hands.said, court.hands.ended, court.coordinator.is_ending) == ([], [], False)


def test_only_those_of_the_group_can_be_missing() -> None:
    court = Court()
    court.miss(1, needs="0, 1")
    court.answer(*range(SIZE), sequence=41)
    court.tick()
    assert court.hands.told[-1][1]["missing"] == "0, 1"


def test_who_does_not_answer_is_missing() -> None:
    court = Court()
    court.miss(1)
    court.answer(0, 1, 3)
    court.tick(COLLECT_SECONDS)
    assert court.hands.told[-1][1]["missing"] == "2"
    assert "rank 2  not responding" in court.hands.told[-1][1]["table"]


def test_everybody_who_asks_is_answered() -> None:
    court = Court()
    court.hang(0)
    for rank in (1, 2, 3):
        court.miss(rank, sequence=43)
    court.answer(1, 2, 3, sequence=43)
    court.answer(0)
    court.tick()
    answers = [(rank, message["missing"]) for rank, message in court.hands.told if message["kind"] == "answer"]
    assert answers == [(1, "0"), (2, "0"), (3, "0")]
    assert len(court.hands.said) == 1


def test_nobody_is_missing() -> None:
    court = Court()
    court.miss(1)
    court.answer(*range(SIZE))
    court.tick()
    assert (court.hands.told[-1][1]["missing"], court.hands.told[-1][1]["table"]) == ("", "")
