"""The coordinator: the reports and actions of rank 0 when ranks die, exit or hang."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Sequence
from typing import Any

import pytest

from mpicomm.json_messages import Message
from mpicomm.recorder import hang_report, rank_text
from mpicomm.recorder.hang_report import DEATH_REMEDY, HOST_REMEDY, remedy_after_death
from mpicomm.recorder.status import Crash, ExitedRank, NotResponding, OperationInfo, RankStatus
from mpicomm.watchdog import coordinator as coordinators
from mpicomm.watchdog import protocol
from mpicomm.watchdog.agent import Watchdog, WatchdogSettings
from mpicomm.watchdog.channel import Channel, RankInfo
from mpicomm.watchdog.coordinator import (
    Abort,
    AnswerObservers,
    CauseReported,
    Coordinator,
    Event,
    ParentAttached,
    ParentLost,
    Print,
    ReportCause,
    SendToParent,
    SendToRanks,
    Tick,
)
from mpicomm.watchdog.protocol import (
    COLLECT_SECONDS,
    Acknowledgement,
    AllExited,
    CollectStatus,
    GroupBroken,
    JobEnding,
    LateOperation,
    MissingAnswer,
    PossibleHang,
    StatusReport,
    TimedOut,
    WaitEnded,
)
from mpicomm.watchdog.rank_0_monitor import Rank0Monitor

SIZE = 4
HANG_SECONDS = 60.0
GATHER, LAUNCHER = coordinators._GATHER_SECONDS, coordinators._LAUNCHER_SECONDS
TRANSIT = coordinators._TRANSIT_SECONDS
REPORTER, DUMP = coordinators._REPORTER_SECONDS, coordinators._DUMP_SECONDS
TWO_NODES = (0, 0, 1, 1)
KILLED = hang_report.cause_of_loss("closed")
ALL_RANKS = rank_text.ranges(range(SIZE))


class Court:
    """A coordinator whose clock the test advances, and its actions by kind."""

    def __init__(
        self,
        *,
        nodes: Sequence[int] = (0,) * SIZE,
        may_claim: bool = True,
        recovers: bool = False,
        spares: int = 0,
    ) -> None:
        hubs = [0 if nodes.index(node) == rank else nodes.index(node) for rank, node in enumerate(nodes)]
        hosts = [f"node{node}" for node in nodes]
        self.coordinator = Coordinator(hosts, hubs, HANG_SECONDS, spares=spares, recovers=recovers)
        self.now = 1000.0
        self.may_claim = may_claim
        self.claims = 0
        self.to_all: list[Message] = []
        self.to_one: list[protocol.ToOneRank] = []
        self.printed: list[str] = []
        self.aborts: list[int] = []
        self.to_parent: list[Message] = []
        self.observed: list[Sequence[Message]] = []

    def receive(self, event: Event) -> None:
        """Let the coordinator process an event, and record its actions."""
        for action in self.coordinator.handle(event, self.now):
            match action:
                case SendToRanks(protocol.ToOneRank() as message):
                    self.to_one.append(message)
                case SendToRanks(message):
                    self.to_all.append(message)
                case SendToParent(message):
                    self.to_parent.append(message)
                case AnswerObservers(messages):
                    self.observed.append(messages)
                case Print(text):
                    self.printed.append(text)
                case Abort(status):
                    self.aborts.append(status)
                case ReportCause(text):
                    self.claims += 1
                    self.printed += [text] if self.may_claim else []
                    self.receive(CauseReported(self.may_claim))

    def kinds(self) -> list[type[Message]]:
        return [type(message) for message in self.to_all]

    def lose(self, rank: int) -> None:
        self.receive(protocol.RankDied(rank, "closed", None))

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.receive(Tick())

    def answer(self, *ranks: int, **status: Any) -> None:
        for rank in ranks:
            self.receive(StatusReport(rank, self.number, status_of(**status)))

    def answer_all(self) -> None:
        """Answer for all ranks, which completes the collection."""
        self.answer(*range(SIZE))
        self.tick()

    @property
    def number(self) -> int:
        """The number of the last status collection."""
        return [message.number for message in self.to_all if isinstance(message, CollectStatus)][-1]

    def answers(self) -> list[MissingAnswer]:
        return [message for message in self.to_one if isinstance(message, MissingAnswer)]

    def wait_in(self, rank: int, sequence: int | None = 42, needs: str = ALL_RANKS, group: str = "0") -> None:
        self.receive(protocol.WaitStarted(rank, operation_text(sequence=sequence, group=group), needs))

    def end_wait(self, rank: int, number: int = 7) -> None:
        self.receive(WaitEnded(rank, number))

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
        self.receive(protocol.RankExited(rank, status, is_stuck, waits, sends, {"0": sequence}))

    def hang(self, rank: int, seconds: float = 61.0) -> None:
        self.ask(PossibleHang, rank, seconds, 1800.0)

    def deadline(self, rank: int, seconds: float, timeout: float) -> None:
        self.ask(TimedOut, rank, seconds, timeout)

    def ask(
        self, kind: type[LateOperation], rank: int, seconds: float, timeout: float, *, raises: bool = False
    ) -> None:
        self.receive(kind(rank, operation_text(seconds=seconds), ALL_RANKS, timeout, raises, "  files: /tmp/x"))

    def miss(self, rank: int, sequence: int = 42, needs: str = ALL_RANKS) -> None:
        self.receive(protocol.MissingQuery(rank, operation_text(sequence=sequence), needs))


def operation_text(**changes: Any) -> OperationInfo:
    """Return a rank's description of an operation."""
    operation = OperationInfo(
        7, "all_reduce", "0", "", 42, False, "float32", 1024, None, "train.py:88", 61.0, 61.0, False
    )
    return dataclasses.replace(operation, **changes)


def status_of(sequence: int = 42, **changes: Any) -> RankStatus:
    """Return a rank's status report."""
    status = RankStatus([operation_text()], operation_text(), "train.py:88", {"0": sequence})
    return dataclasses.replace(status, **changes)


@pytest.fixture(name="court")
def _court() -> Court:
    return Court()


# -- dead ranks ------------------------------------------------------------------------------------------------------


def died(rank: int) -> str:
    """Return the report of a rank's death."""
    return f"[mpicomm] rank {rank} of {SIZE} on node0 died: {KILLED}; aborting the job\n{DEATH_REMEDY}"


def test_a_rank_that_died_is_named_once_and_ends_the_job(court: Court) -> None:
    for rank in (2, 2, 3, 1):
        court.lose(rank)
    assert court.printed == [died(2)]
    assert court.to_all == [JobEnding(files=True)]
    assert court.claims == 1


def test_the_remedy_depends_on_whether_the_rank_has_crashed(court: Court) -> None:
    court.receive(protocol.RankDied(2, "crashed", Crash("SIGSEGV", "")))
    assert court.printed[0].splitlines()[0].endswith("died: SIGSEGV ended its process; aborting the job")
    assert court.printed[0].splitlines()[1:] == [remedy_after_death(Crash("SIGSEGV", ""), "")]
    assert court.printed[0].endswith("run the job under gdb.")


@pytest.mark.parametrize("crash", [None, Crash("SIGSEGV", 'File "a.py", line 1 in f'), Crash("SIGABRT", "")])
def test_the_ranks_of_a_hub_that_died_report_it(crash: Crash | None) -> None:
    monitor = Rank0Monitor(RankInfo(1, ["alpha"] * 2, [0, 0], [0, 0]), lambda rank: "")
    monitor.record_loss("closed", crash)
    reason = {
        "": "its process ended without reporting an error or a signal",
        "SIGSEGV": 'SIGSEGV ended its process; last Python line: File "a.py", line 1 in f',
        "SIGABRT": "SIGABRT ended its process",
    }[crash.signal if crash else ""]
    assert monitor.cause_of_abort().startswith(f"rank 0 of 2 on alpha died: {reason}")
    assert monitor.remedy(recovers=False) == remedy_after_death(crash, "")


def test_one_rank_after_the_other_acts_in_place_of_rank_0() -> None:
    hosts, nodes, hubs = ["alpha", "alpha", "beta", "beta"], [0, 0, 1, 1], [0, 0, 0, 2]
    turns = [Rank0Monitor(RankInfo(rank, hosts, nodes, hubs), lambda _: "").turn for rank in (1, 2, 3)]
    assert turns == sorted(set(turns))


def test_the_actions_after_a_death_are_returned_in_their_order() -> None:
    coordinator = Coordinator(["node0"] * SIZE, [0] * SIZE, HANG_SECONDS)
    cause = f"rank 2 of 4 on node0 died: {KILLED}"
    assert coordinator.handle(protocol.RankDied(2, "closed", None), 0.0) == [
        SendToParent(protocol.JobFailed(cause, "2")),
        ReportCause(f"[mpicomm] {cause}; aborting the job\n{DEATH_REMEDY}"),
    ]
    assert coordinator.handle(Tick(), 0.0) == []
    assert coordinator.handle(CauseReported(is_first=True), 0.0) == [SendToRanks(JobEnding(files=True))]
    assert coordinator.handle(Tick(), LAUNCHER) == [Abort(1)]


def test_the_actions_of_an_event_whose_handling_fails_are_not_those_of_the_next(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(court.coordinator, "_collect", None)  # the call of it fails, after the acknowledgement
    with pytest.raises(TypeError):
        court.hang(1)
    court.tick()
    assert (court.to_one, court.to_all) == ([], [])


def test_a_cause_is_printed_although_claiming_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def claim() -> bool:
        raise OSError("the store has ended")

    printed: list[str] = []
    monkeypatch.setattr(Watchdog, "print_report", lambda _, text: printed.append(text))
    rank_info = RankInfo(0, ["node0"] * SIZE, [0] * SIZE, [0] * SIZE)
    watch = Watchdog(rank_info, Channel(0, bytes(32)), WatchdogSettings(HANG_SECONDS, None), os._exit, claim)
    watch._send_to_rank_0(protocol.RankDied(2, "closed", None))
    watch._run_once()
    error, report = printed
    assert "OSError: the store has ended" in error
    assert report == died(2)
    watch._channel.close()


def test_a_rank_that_calls_os_exit_writes_its_files_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Message] = []
    monkeypatch.setattr(Watchdog, "_send_to_ranks", lambda _, message: sent.append(message))
    monkeypatch.setattr(Watchdog, "print_report", lambda _, text: None)
    rank_info = RankInfo(0, ["node0"] * SIZE, [0] * SIZE, [0] * SIZE)
    watch = Watchdog(rank_info, Channel(0, bytes(32)), WatchdogSettings(HANG_SECONDS, None), os._exit, lambda: True)
    watch._send_to_rank_0(protocol.ExitingAtOnce(2, 3))
    watch._run_once()
    assert sent == [JobEnding(files=True), Acknowledgement(2)]
    watch._channel.close()


def test_the_job_ends_with_mpicomm_run_unless_all_ranks_have_exited(court: Court) -> None:
    for rank in range(SIZE - 1):
        court.leave(rank)
    court.receive(ParentLost("closed"))
    cause = "rank 0 has lost the connection to mpicomm run (closed)"
    assert court.printed == [f"[mpicomm] {cause}; aborting the job"]
    court = Court()
    for rank in range(SIZE):
        court.leave(rank)
    court.receive(ParentLost("closed"))
    assert court.printed == []


def test_reports_before_mpicomm_run_is_connected_are_repeated(court: Court) -> None:
    court.leave(1)
    court.lose(2)
    court.to_parent.clear()
    court.receive(ParentAttached())
    cause = protocol.JobFailed(f"rank 2 of 4 on node0 died: {KILLED}", "2")
    assert court.to_parent == [protocol.RankFinished(1), cause]


def test_a_job_that_recovers_continues_without_a_rank_but_not_without_a_host() -> None:
    court = Court(nodes=TWO_NODES, recovers=True)
    court.lose(1)
    assert court.to_all == [protocol.ContinueWithout({"1": KILLED})]
    court.receive(ParentAttached())
    assert court.to_parent == [protocol.RankFinished(1, has_failed=True)] * 2
    court.receive(protocol.RankDied(2, os.strerror(errno.ETIMEDOUT), None))
    cause = "rank 2 of 4 on node1 died: its host is unreachable (Connection timed out)"
    assert court.to_parent[2:] == [protocol.JobFailed(cause, "2")]
    assert court.printed == [f"[mpicomm] {cause}; aborting the job\n{HOST_REMEDY}"]
    assert court.to_all[1:] == [JobEnding(files=True)]


def test_a_job_that_recovers_continues_without_a_rank_that_got_sigterm() -> None:
    court = Court(recovers=True)
    court.receive(protocol.RankTerminated(2))
    court.lose(2)
    reason = "it was terminated by SIGTERM, which rank 0 did not receive"
    assert court.to_all == [protocol.ContinueWithout({"2": reason})]


def test_the_launcher_may_end_the_job_first_and_an_abort_is_repeated(court: Court) -> None:
    court.lose(2)
    court.tick(LAUNCHER - 0.01)
    assert (court.coordinator.is_ending, court.coordinator.is_busy, court.aborts) == (True, True, [])
    court.tick(0.01)
    assert court.aborts == [1]
    court.tick(REPORTER - 0.01)
    assert court.aborts == [1]
    court.tick(0.01)
    assert court.aborts == [1, 1]


def test_a_rank_that_left_can_die_only_while_it_waits_for_the_others(court: Court) -> None:
    court.leave(1, waits=False)
    court.lose(1)
    court.tick(100)
    assert (court.printed, court.to_all, court.coordinator.is_busy) == ([], [], False)
    court.leave(2)
    court.lose(2)
    assert court.printed == [died(2)]


def test_ranks_continue_without_ranks_that_have_not_failed(court: Court) -> None:
    court.receive(protocol.RankContinues(2, "3", False))  # another list
    court.receive(protocol.RankContinues(0, "1", False))
    court.receive(protocol.RankContinues(3, "1", False))
    court.lose(3)  # it has closed its connection first
    assert court.to_one == [Acknowledgement(rank) for rank in (2, 0, 3)]
    assert court.to_all == []
    court.receive(protocol.RankContinues(2, "1", False))
    assert court.to_all == [protocol.WorldShrunk("1", False)]
    for rank in (0, 1, 2):
        court.lose(rank)
    assert court.claims == 0


def test_ranks_do_not_continue_without_a_live_rank_if_another_one_has_failed() -> None:
    court = Court(recovers=True)
    court.receive(protocol.RankContinues(0, "1", False))
    court.lose(3)
    court.receive(protocol.RankContinues(2, "1, 3", False))
    court.receive(protocol.RankContinues(0, "1, 3", False))
    assert protocol.WorldShrunk not in court.kinds()


def test_a_rank_that_calls_os_exit_is_named_and_gets_an_acknowledgement(court: Court) -> None:
    court.receive(protocol.ExitingAtOnce(2, 3))
    court.lose(2)
    assert court.printed == [
        f"[mpicomm] rank 2 of 4 on node0 called os._exit(3); aborting the job\n{coordinators._EXIT_REMEDY}"
    ]
    assert court.to_one == [Acknowledgement(2)]
    court.tick(LAUNCHER)
    assert court.aborts == [1]


# -- failure reports and abort of the job ----------------------------------------------------------------------------


def test_a_rank_that_failed_and_then_died_reports_the_failure_itself(court: Court) -> None:
    court.receive(protocol.RankAborts(2))
    court.lose(2)
    assert (court.printed, court.claims) == ([], 0)
    assert court.to_all == [JobEnding(files=False)]
    court.tick(REPORTER - 0.01)
    assert court.aborts == []
    court.tick(0.01)
    assert court.aborts == [1]


def test_a_rank_that_got_sigterm_and_then_died_is_named_so(court: Court) -> None:
    court.receive(protocol.RankTerminated(2))
    assert court.to_all == []
    court.lose(2)
    assert court.printed == [
        "[mpicomm] rank 2 of 4 on node0 was terminated by SIGTERM, which rank 0 did not receive; aborting the job\n"
        + coordinators._SIGTERM_REMEDY
    ]


def test_a_coordinator_without_the_claim_ends_the_job_silently() -> None:
    court = Court(may_claim=False)
    court.lose(2)
    assert (court.printed, court.claims) == ([], 1)
    assert court.to_all == [JobEnding(files=False)]
    court.tick(REPORTER - 0.01)
    assert court.aborts == []
    court.tick(0.01)
    assert court.aborts == [1]


def test_a_coordinator_without_the_claim_does_not_report_exits() -> None:
    court = Court(may_claim=False)
    court.leave(2)
    court.wait_in(0)
    court.tick(GATHER)
    court.answer_all()
    assert (court.printed, court.kinds()) == ([], [CollectStatus, JobEnding])
    court.tick(REPORTER)
    assert court.aborts == [1]


def test_no_status_is_requested_while_the_job_ends(court: Court) -> None:
    court.lose(2)
    court.hang(1)
    court.tick(COLLECT_SECONDS + 1)
    assert court.kinds() == [JobEnding]
    assert len(court.printed) == 1


def test_a_death_matters_more_than_a_report_in_progress(court: Court) -> None:
    court.hang(1)
    court.answer(*range(SIZE))
    court.lose(2)
    court.tick(COLLECT_SECONDS + 1)
    assert court.printed == [died(2)]
    assert court.aborts == [1]


def test_a_broken_group_is_reported_to_all(court: Court) -> None:
    message = GroupBroken("0", "rank 2 gave up")
    court.receive(message)
    assert court.to_all == [message]
    assert not court.coordinator.is_busy


# -- exited ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exit_first", [True, False])
def test_a_rank_that_left_while_others_wait_for_it_is_named(court: Court, exit_first: bool) -> None:
    if exit_first:
        court.leave(2, status=None)
        assert not court.coordinator.is_busy
    for rank in (0, 1, 3):
        court.wait_in(rank)
    if not exit_first:
        assert not court.coordinator.is_busy
        court.leave(2, status=None)
    assert court.coordinator.is_busy
    court.tick(GATHER - 0.01)
    assert court.to_all == []
    court.tick(0.01)
    assert court.to_all == [CollectStatus(1, files=True)]
    court.answer(0, 1, 3)
    court.answer(2, running=[])
    court.tick()
    (text,) = court.printed
    first, *rows = text.splitlines()
    assert first == "[mpicomm] rank 2 of 4 on node0 has exited, but other ranks wait for it; aborting the job"
    assert rows == [
        "  ranks 0, 1, 3  in all_reduce #42, float32[1024], at train.py:88, for 61 s",
        f"  rank 2         exited {GATHER:.0f} s ago at the end of its program",
    ]
    assert court.kinds() == [CollectStatus, JobEnding]
    court.tick(DUMP - 0.01)
    assert court.aborts == []
    court.tick(0.01)
    assert court.aborts == [1]


def test_exited_ranks_of_collectives_and_of_messages_are_named_together() -> None:
    court = Court(nodes=TWO_NODES)
    court.leave(1, sequence=99)
    court.leave(2)
    court.wait_in(0, sequence=None, needs="1")
    court.wait_in(3)
    court.tick(TRANSIT)
    court.answer_all()
    (text,) = court.printed
    assert text.startswith("[mpicomm] ranks 1, 2 of 4 on node0, node1 have exited, but other ranks wait for them; ")


@pytest.mark.parametrize(("left_with", "ends_with"), [(None, 1), (0, 1), (3, 3)])
def test_the_job_ends_with_the_status_of_the_exited_rank(court: Court, left_with: int | None, ends_with: int) -> None:
    court.leave(2, status=left_with)
    court.wait_in(0)
    court.tick(GATHER)
    court.answer_all()
    court.tick(DUMP)
    assert court.aborts == [ends_with]


@pytest.mark.parametrize("reached", [42, 43])
def test_a_rank_that_left_after_its_arrival_is_not_awaited(court: Court, reached: int) -> None:
    court.leave(2, sequence=reached)
    court.wait_in(0, sequence=42)
    court.tick(100)
    assert (court.to_all, court.coordinator.is_busy) == ([], False)


def test_a_rank_that_never_used_a_group_is_awaited(court: Court) -> None:
    court.leave(2, sequence=99)
    court.wait_in(0, sequence=1, group="5")
    court.tick(GATHER)
    assert court.kinds() == [CollectStatus]


def test_a_rank_that_left_is_not_awaited_in_groups_without_it(court: Court) -> None:
    court.leave(2)
    court.wait_in(0, needs="0, 1")
    court.tick(100)
    assert court.to_all == []


def test_a_rank_that_continues_did_not_wait_for_the_exited_one(court: Court) -> None:
    court.wait_in(0)
    court.leave(2)
    court.end_wait(0)
    court.end_wait(1)  # rank 1 has not reported a wait
    court.tick(GATHER)
    assert (court.to_all, court.coordinator.is_busy) == ([], False)


@pytest.mark.parametrize("exit_first", [True, False])
def test_a_message_from_an_exited_rank_does_not_arrive(court: Court, exit_first: bool) -> None:
    for happens in (court.leave, court.wait_in) if exit_first else (court.wait_in, court.leave):
        if happens == court.leave:
            court.leave(2, sequence=99)
        else:
            court.wait_in(0, sequence=None, needs="2")
    court.tick(GATHER)
    assert court.to_all == []  # the message may still be in transit
    court.tick(TRANSIT - GATHER)
    court.answer_all()
    assert court.printed[0].startswith("[mpicomm] rank 2 of 4 on node0 has exited, but other ranks wait for it")


def test_a_long_message_may_be_on_its_way_for_longer(court: Court) -> None:
    court.wait_in(0, sequence=None, needs="2")
    court.leave(2, sequence=99, sends=True)
    court.tick(HANG_SECONDS - 0.01)
    assert court.to_all == []
    court.tick(0.01)
    assert court.kinds() == [CollectStatus]


def test_a_rank_that_left_in_an_unmatched_operation_still_waits(court: Court) -> None:
    for rank in (0, 1, 3):
        court.leave(rank)
    court.leave(2, sequence=42, is_stuck=True)
    court.wait_in(2)
    court.tick(GATHER)
    court.answer_all()
    assert court.printed[0].startswith("[mpicomm] ranks 0, 1, 3 of 4 on node0 have exited, but other ranks wait")


def test_shutdown_waits_for_no_exited_rank(court: Court) -> None:
    for rank in range(SIZE):
        court.leave(rank)
    court.wait_in(2, sequence=43)
    court.tick(100)
    assert (court.kinds(), court.printed) == ([AllExited], [])


@pytest.mark.parametrize("silent", [None, NotResponding(3.0, "")], ids=["no word", "its hub's word"])
def test_a_rank_that_does_not_reply_may_have_stopped_waiting(court: Court, silent: NotResponding | None) -> None:
    """The wait counts again as soon as the rank answers and still waits."""
    court.wait_in(0)
    court.leave(2)
    court.tick(GATHER)
    court.answer(1, 2, 3)
    if silent:
        court.receive(StatusReport(0, court.number, silent))
    court.tick(COLLECT_SECONDS)
    assert (court.printed, court.coordinator.is_ending) == ([], False)
    court.tick(TRANSIT)
    court.answer_all()
    assert court.printed[0].startswith("[mpicomm] rank 2 of 4 on node0 has exited, but other ranks wait for it")


def test_a_message_from_any_source_may_arrive_until_all_others_have_left(court: Court) -> None:
    court.wait_in(0, sequence=None)
    court.leave(1)
    court.leave(2)
    court.tick(100)
    assert court.to_all == []
    court.leave(3)
    court.tick(GATHER)
    assert court.to_all == []
    court.tick(TRANSIT - GATHER)
    assert court.kinds() == [CollectStatus]
    court.answer_all()
    assert court.printed[0].startswith("[mpicomm] ranks 1-3 of 4 on node0 have exited")


def test_exits_are_decided_after_all_ranks_have_waited(court: Court) -> None:
    court.leave(2)
    court.wait_in(0)
    court.tick(GATHER / 2)
    court.leave(3)
    court.tick(GATHER / 2)
    court.answer_all()
    assert court.printed[0].startswith("[mpicomm] ranks 2, 3 of 4 on node0 have exited")


@pytest.mark.parametrize("stuck", [None, 0, 3])
def test_all_ranks_are_notified_when_all_have_left(court: Court, stuck: int | None) -> None:
    for rank in (2, 0, 3):
        court.leave(rank, is_stuck=rank == stuck)
    assert court.to_all == []
    court.leave(1)
    assert court.to_all == [AllExited(is_stuck=stuck is not None)]
    for rank in range(SIZE):
        court.lose(rank)
    court.tick(100)
    assert (court.printed, court.aborts) == ([], [])


def test_it_costs_little_that_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def parse(text: str) -> list[int]:
        parsed.append(text)
        return list(range(SIZE))

    monkeypatch.setattr(rank_text, "parse_ranges", parse)
    court = Court()
    court.leave(3, sequence=99)
    for number in range(100):
        court.receive(protocol.WaitStarted(0, operation_text(number=number), ALL_RANKS))
    court.tick(GATHER)
    assert parsed == [ALL_RANKS]


# -- hangs and timeouts ----------------------------------------------------------------------------------------------


def test_a_hang_is_reported_with_the_positions_of_all_ranks(court: Court) -> None:
    court.hang(3, seconds=61.4)
    assert court.to_one == [Acknowledgement(3)]
    assert court.to_all == [CollectStatus(1, files=True)]
    court.answer(0, 1, 3)
    court.answer(2, sequence=41, running=[operation_text(name="broadcast", sequence=41, peer=0, where="train.py:97")])
    court.tick()
    (text,) = court.printed
    assert text == (
        "[mpicomm] possible hang: rank 3 has waited 61 s; aborting at the 1800 s timeout\n"
        "  ranks 0, 1, 3  in all_reduce #42, float32[1024], at train.py:88, for 61 s\n"
        "  rank 2         in broadcast #41, root rank 0, float32[1024], at train.py:97, for 61 s\n"
        "  files: /tmp/x"
    )
    assert (court.coordinator.is_busy, court.aborts, court.claims) == (False, [], 0)


def test_after_a_hang_where_timeouts_are_exceptions(court: Court) -> None:
    court.ask(PossibleHang, 3, 61.0, 1800.0, raises=True)
    court.answer(0, 1, 2, 3)
    court.tick()
    assert "rank 3 has waited 61 s; raising TimeoutError at the 1800 s timeout\n" in court.printed[0]


def test_simultaneous_hangs_are_one_report(court: Court) -> None:
    for rank in range(SIZE):
        court.hang(rank)
    court.answer_all()
    assert court.kinds() == [CollectStatus]
    assert len(court.printed) == 1
    assert "rank 0 has waited" in court.printed[0]
    assert court.to_one == [Acknowledgement(rank) for rank in range(SIZE)]


def test_a_hang_is_reported_once_in_its_time(court: Court) -> None:
    court.hang(0)
    court.answer_all()
    court.tick(HANG_SECONDS - 0.01)
    court.hang(1)
    court.tick(COLLECT_SECONDS)
    assert court.kinds() == [CollectStatus]
    assert court.to_one == [Acknowledgement(0), Acknowledgement(1)]
    court.hang(2)
    court.answer_all()
    assert court.kinds() == [CollectStatus, CollectStatus]
    assert len(court.printed) == 2


@pytest.mark.parametrize("timeout", [1800.0, 0.5])
def test_a_deadline_ends_the_job(court: Court, timeout: float) -> None:
    court.deadline(1, timeout + 1, timeout)
    court.answer_all()
    (text,) = court.printed
    assert text == (
        f"[mpicomm] rank 1 of 4 on node0 timed out after {timeout:g} s in all_reduce #42, float32[1024]; "
        "aborting the job\n"
        "  ranks 0-3  in all_reduce #42, float32[1024], at train.py:88, for 61 s\n"
        "  files: /tmp/x"
    )
    assert court.to_all[-1] == JobEnding(files=True)
    court.tick(DUMP)
    assert court.aborts == [1]


def test_ranks_that_do_not_respond_are_named_with_the_timeout() -> None:
    court = Court(nodes=TWO_NODES)
    court.deadline(1, 31.0, 30.0)
    court.answer(0, 1, 2)
    court.tick(COLLECT_SECONDS)
    cause = "rank 1 of 4 on node0 timed out after 30 s in all_reduce #42, float32[1024]"
    cause += "; not responding: rank 3 of 4 on node1"
    assert court.to_parent == [protocol.JobFailed(cause, "3")]
    assert court.printed[0].startswith(f"[mpicomm] {cause}; aborting the job\n")


def test_a_timeout_is_received_during_the_report_of_a_hang(court: Court) -> None:
    court.hang(0)
    court.deadline(1, 31.0, 30.0)
    court.answer_all()
    (text,) = court.printed
    assert "timed out after 30 s in " in text


def test_a_deadline_does_not_wait_for_the_next_report(court: Court) -> None:
    court.hang(0)
    court.answer_all()
    court.deadline(1, 31.0, 30.0)
    assert court.kinds() == [CollectStatus, CollectStatus]


def test_a_hang_that_ends_during_the_collection_is_not_reported(court: Court) -> None:
    court.hang(0)
    court.end_wait(0)
    court.answer_all()
    assert (court.printed, court.coordinator.is_busy) == ([], False)


def test_a_timeout_that_ends_during_the_collection_ends_no_job(court: Court) -> None:
    court.hang(0)
    court.deadline(1, 31.0, 30.0)
    court.end_wait(1, 8)  # a different operation
    court.end_wait(1)
    court.answer(*range(SIZE))
    court.tick(REPORTER)
    assert len(court.printed) == 1
    assert court.printed[0].startswith("[mpicomm] possible hang: rank 0 has waited")
    assert (court.aborts, court.coordinator.is_ending) == ([], False)


def test_exited_ranks_that_are_no_longer_awaited_are_not_named(court: Court) -> None:
    court.leave(2)
    court.wait_in(0)
    court.tick(GATHER)
    court.end_wait(0)
    court.answer_all()
    assert (court.printed, court.coordinator.is_ending) == ([], False)


def test_files_are_written_at_the_first_hang_and_at_the_end(court: Court) -> None:
    for _ in range(3):
        court.hang(0)
        court.answer(*range(SIZE))
        court.tick()
        court.tick(HANG_SECONDS)
    court.deadline(1, 31.0, 30.0)
    assert [message.files for message in court.to_all if isinstance(message, CollectStatus)] == [
        True,
        False,
        False,
        True,
    ]


def test_the_first_failure_to_write_files_is_printed() -> None:
    court = Court(nodes=TWO_NODES)
    for rank in (2, 1):
        court.receive(protocol.DumpFailed(rank, "no space left"))
    text = "[mpicomm] rank 2 on node1 cannot write its flight recorder and stacks: no space left"
    assert court.printed == [text]


# -- status of all ranks ---------------------------------------------------------------------------------------------


def test_a_collection_ends_in_any_case(court: Court) -> None:
    court.hang(0)
    court.tick(COLLECT_SECONDS - 0.01)
    assert (court.printed, court.coordinator.is_busy) == ([], True)
    court.tick(0.01)
    (text,) = court.printed
    assert f"  ranks 0-3  not responding for {COLLECT_SECONDS:.0f} s on node0" in text
    assert not court.coordinator.is_busy


def test_a_late_reply_is_no_reply_to_the_next_request(court: Court) -> None:
    court.hang(0)
    court.tick(COLLECT_SECONDS)
    court.answer(2, running=[operation_text(where="old.py:1")])
    court.tick(HANG_SECONDS)
    court.hang(0)
    court.receive(StatusReport(2, 1, status_of(running=[operation_text(where="old.py:1")])))
    court.answer(0, 1, 3)
    court.tick()
    assert len(court.printed) == 1
    court.answer(2)
    court.tick()
    assert len(court.printed) == 2
    assert "old.py" not in court.printed[1]


def test_a_rank_that_does_not_answer_its_hub_is_shown_with_its_state() -> None:
    court = Court(nodes=TWO_NODES)
    court.hang(0)
    court.answer(0, 1, 2)
    silent = NotResponding(31.0, "process 77 is stopped by a signal (SIGSTOP); resume it with SIGCONT")
    court.receive(StatusReport(3, 1, silent))
    court.tick()
    assert court.printed[0].splitlines()[2] == (
        "  rank 3     not responding for 31 s on node1: process 77 is stopped by a signal (SIGSTOP); "
        "resume it with SIGCONT"
    )


def test_ranks_of_a_hub_that_does_not_reply_are_shown_as_such() -> None:
    court = Court(nodes=TWO_NODES)
    court.hang(0)
    court.answer(0, 1)
    court.tick(COLLECT_SECONDS)
    assert court.printed[0].splitlines()[1:-1] == [
        "  ranks 0, 1  in all_reduce #42, float32[1024], at train.py:88, for 61 s",
        "  rank 2      not responding for 4 s on node1",
        "  rank 3      not responding for 4 s on node1: rank 2, which forwards its messages, does not respond",
    ]


def test_a_rank_that_left_is_shown_as_left(court: Court) -> None:
    court.leave(2, status=0)
    court.tick(12)
    court.hang(0)
    court.answer_all()
    assert court.printed[0].splitlines()[2] == "  rank 2         exited 12 s ago with status 0"


# -- missing ranks ---------------------------------------------------------------------------------------------------


def test_a_rank_whose_wait_timed_out_gets_the_missing_ranks(court: Court) -> None:
    court.miss(1)
    assert court.to_all == [CollectStatus(1, files=False)]
    court.answer(0, 1)
    court.answer(2, sequence=41, running=[], last=None, main="train.py:12")
    court.answer(3, sequence=43)
    court.tick()
    assert court.to_one == [
        Acknowledgement(1),
        MissingAnswer(1, 7, "2", "  rank 2  not in an operation, none called yet; at train.py:12"),
    ]
    assert (court.printed, court.aborts, court.coordinator.is_ending) == ([], [], False)


def test_ranks_of_the_group_that_do_not_reply_are_missing(court: Court) -> None:
    court.miss(1, needs="0-2")
    court.answer(0, 1, 3, sequence=41)
    court.tick(COLLECT_SECONDS)
    assert court.answers()[-1].ranks == "0-2"
    assert court.answers()[-1].table.splitlines()[1:] == ["  rank 2      not responding for 4 s on node0"]


def test_every_request_is_answered(court: Court) -> None:
    court.hang(0)
    for rank in (1, 2, 3):
        court.miss(rank, sequence=43)
    court.answer(1, 2, 3, sequence=43)
    court.answer(0)
    court.tick()
    assert [(answer.to, answer.ranks) for answer in court.answers()] == [(1, "0"), (2, "0"), (3, "0")]
    assert len(court.printed) == 1


def test_no_rank_is_missing(court: Court) -> None:
    court.miss(1)
    court.answer_all()
    assert (court.answers()[-1].ranks, court.answers()[-1].table) == ("", "")


# -- observers -------------------------------------------------------------------------------------------------------

PAUSE = coordinators._OBSERVATION_SECONDS


def observe(court: Court) -> int:
    """Let an observer ask, and return the number of the collection."""
    court.receive(protocol.StatusRequest())
    assert court.coordinator.is_busy
    court.tick(PAUSE)
    assert court.to_all[-1] == CollectStatus(court.number, files=False, usage=True)
    return court.number


def test_an_observer_gets_the_status_of_every_rank() -> None:
    court = Court(nodes=TWO_NODES)
    observe(court)
    for rank in range(SIZE):
        assert court.observed == []
        court.answer(rank, sequence=rank)
        court.tick()
    reports = [StatusReport(rank, court.number, status_of(sequence=rank)) for rank in range(SIZE)]
    complete = protocol.StatusComplete({"node0": "0, 1", "node1": "2, 3"})
    assert court.observed == [[*reports, complete]]
    assert not court.coordinator.is_busy
    assert court.printed == []


def test_an_observer_is_answered_without_a_silent_or_an_exited_rank(court: Court) -> None:
    court.leave(2, status=3)
    number = observe(court)
    court.answer(0, 2, 3)
    exited = court.now - PAUSE  # before the observer asked
    court.tick(COLLECT_SECONDS)
    (messages,) = court.observed
    assert messages[1] == StatusReport(1, number, NotResponding(COLLECT_SECONDS, ""))
    assert messages[2] == StatusReport(2, number, ExitedRank(3, court.now - exited))


def test_an_observer_is_answered_without_a_failed_rank() -> None:
    court = Court(recovers=True)
    court.lose(1)
    number = observe(court)
    court.answer(0, 2, 3)
    court.tick()
    (messages,) = court.observed
    assert messages[1] == StatusReport(1, number, NotResponding(0.0, "it has failed"))


def test_an_observer_neither_hides_nor_answers_a_hang(court: Court) -> None:
    observed = observe(court)
    court.hang(0)  # while the ranks answer the observer
    assert court.to_all[-1] == CollectStatus(court.number, files=True)
    assert court.number != observed
    for rank in range(SIZE):  # only to the observer
        court.receive(StatusReport(rank, observed, status_of()))
    court.tick()
    assert (len(court.observed), court.printed) == (1, [])
    court.answer_all()
    assert len(court.printed) == 1
    assert len(court.observed) == 1


def test_observers_share_a_collection_and_wait_for_the_next(court: Court) -> None:
    for _ in range(3):
        court.receive(protocol.StatusRequest())
    court.tick()
    court.receive(protocol.StatusRequest())  # the answer that is under way is for this one, too
    court.answer_all()
    court.receive(protocol.StatusRequest())
    court.tick(PAUSE / 2)
    assert court.kinds() == [CollectStatus]
    court.tick(PAUSE)
    assert court.kinds() == [CollectStatus, CollectStatus]


def test_an_observer_of_a_job_that_is_ending_is_refused(court: Court) -> None:
    observe(court)
    court.lose(2)
    court.tick()
    refused = protocol.StatusRefused(f"the job is being aborted: rank 2 of 4 on node0 died: {KILLED}")
    assert court.observed == [[refused]]
    court.receive(protocol.StatusRequest())
    court.tick()
    assert court.observed == [[refused], [refused]]
    assert court.kinds() == [CollectStatus, JobEnding]


def test_a_spare_does_not_count_as_a_rank() -> None:
    court = Court(nodes=(0,) * (SIZE + 1), spares=1)
    observe(court)
    court.answer(*range(1, SIZE + 1))
    court.tick()
    assert court.observed == []
    court.answer(0)
    court.tick()
    assert len(court.observed[0]) == SIZE + 1  # with StatusComplete


def test_many_ranks_are_observed_less_often() -> None:
    size = 1000
    court = Court(nodes=(0,) * size)
    observe(court)
    court.answer(*range(size))
    court.tick()
    court.receive(protocol.StatusRequest())
    court.tick(0.99 * size * coordinators._OBSERVATION_SECONDS_PER_RANK)
    assert court.kinds() == [CollectStatus]
    court.tick(0.02 * size * coordinators._OBSERVATION_SECONDS_PER_RANK)
    assert court.kinds() == [CollectStatus, CollectStatus]
