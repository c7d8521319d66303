"""The watchdog's coordinator on rank 0: decides from the reports of all ranks when to abort the job.

It has no thread, no socket and no side effects, and reads no clock: the watchdog passes events with their times, and
carries out the actions that `Coordinator.handle` returns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from mpicomm.json_messages import Message
from mpicomm.recorder import hang_report, rank_text
from mpicomm.recorder.status import ExitedRank, NotResponding, RankStatus, Status
from mpicomm.watchdog import protocol
from mpicomm.watchdog.protocol import COLLECT_SECONDS, StatusReport

_GATHER_SECONDS = 0.5  # waits of other ranks for the same ranks are collected for so long
_TRANSIT_SECONDS = 5.0  # a message may arrive this long after its sender has exited,
_SENDING_SECONDS = 60.0  # or this long (at most the hang limit) if the sender had sends in flight
_LAUNCHER_SECONDS = 2.0  # time for the launcher to end the job itself, with the dead rank's own status
_REPORTER_SECONDS = 5.0  # time for a rank that has reported its failure to abort the job
_OBSERVATION_SECONDS = 0.1  # at least between two collections for observers,
_OBSERVATION_SECONDS_PER_RANK = 1e-3  # more with many ranks: so they use only a few per cent of rank 0's watchdog
_DUMP_SECONDS = 0.5  # time for the ranks to write their dump files

_EXIT_REMEDY = "os._exit skips what ends a job: return from the program, or call sys.exit()."
_SIGTERM_REMEDY = "Check who sent it: the scheduler (preemption, a limit of that host) or a kill of that process alone."


# -- events, besides the messages of ranks -----------------------------------------------------------------------------


class Tick:
    """Time has passed: the steps that are due are carried out."""


class ParentAttached:
    """Rank 0 has been connected to `mpicomm run`."""


@dataclasses.dataclass(frozen=True)
class ParentLost:
    """The connection to `mpicomm run` has ended."""

    reason: str


@dataclasses.dataclass(frozen=True)
class CauseReported:
    """The answer to `ReportCause`."""

    is_first: bool
    """Whether no other rank has reported a cause."""


Event: TypeAlias = Message | Tick | ParentAttached | ParentLost | CauseReported

# -- actions -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SendToRanks:
    """Send a message to the rank that it names, or to every rank, rank 0 included."""

    message: Message


@dataclasses.dataclass(frozen=True)
class SendToParent:
    """Send a message to `mpicomm run`, if it started the job."""

    message: Message


@dataclasses.dataclass(frozen=True)
class AnswerObservers:
    """Send the messages to the observers that have asked for the status."""

    messages: Sequence[Message]


@dataclasses.dataclass(frozen=True)
class Print:
    """Print a report."""

    text: str


@dataclasses.dataclass(frozen=True)
class ReportCause:
    """Print why the job ends, unless another rank has; the answer is the event `CauseReported`."""

    text: str


@dataclasses.dataclass(frozen=True)
class Abort:
    """Abort the job with an exit status."""

    status: int


Action: TypeAlias = SendToRanks | SendToParent | AnswerObservers | Print | ReportCause | Abort


@dataclasses.dataclass
class _Collection:
    """One collection of the status of all ranks."""

    number: int
    deadline: float
    # The requests that the collection answers, by type, rank and operation number.
    requests: dict[tuple[type[Message], int, int], protocol.LateOperation | protocol.MissingQuery]
    is_for_exits: bool = False  # ranks wait for ranks that have exited
    statuses: dict[int, Status] = dataclasses.field(default_factory=dict)


class Coordinator:
    """Decides from the reports of the ranks whether the job hangs, which ranks are at fault, and when to abort."""

    def __init__(
        self,
        hosts: Sequence[str],
        hubs: Sequence[int],
        hang_seconds: float,
        *,
        spares: int = 0,
        recovers: bool = False,
        synchronous_kernels: str = "",
    ) -> None:
        """Create the coordinator.

        Args:
            hosts: The host of every rank, spares last.
            hubs: The hub of every rank.
            hang_seconds: Seconds between two hang reports.
            spares: The number of spares, which call no operations.
            recovers: Whether the job continues if a rank dies.
            synchronous_kernels: The setting with which calls wait for their kernels on GPUs; empty without one.
        """
        self.size = len(hosts) - spares
        self._recovers = recovers
        self._synchronous_kernels = synchronous_kernels
        self._failed: set[int] = set()
        self._hosts = hosts
        self._hubs = hubs
        self._hang_seconds = hang_seconds
        self._actions: list[Action] = []  # of the present call of `handle`
        self._exits: dict[int, protocol.RankExited] = {}
        self._exit_times: dict[int, float] = {}
        self._terminated: set[int] = set()
        self._continuing: dict[int, str] = {}  # the ranks that continue in a next world, and which they exclude
        self._has_shrunk = False  # whether all ranks do that are not excluded from it
        self._waits: dict[tuple[int, int], protocol.WaitStarted] = {}
        self._collection: _Collection | None = None
        self._observation: _Collection | None = None  # for observers: not one on which a decision about the job depends
        self._observe_at = math.inf
        self._next_observation = 0.0
        self._collections = 0
        self._next_report = 0.0
        self._has_files = False
        self._has_warned_of_files = False
        self._check_exits_at = math.inf
        self._abort_at = math.inf
        self._status = 1
        self._failure = protocol.JobFailed("")  # the first one; its text is one line, and empty if no rank has failed

    @property
    def is_ending(self) -> bool:
        """Whether the coordinator has decided to abort the job."""
        return self._abort_at < math.inf

    @property
    def is_busy(self) -> bool:
        """Whether a step is due soon, so that a `Tick` is needed often."""
        is_collecting = self._collection is not None or self._observation is not None
        return is_collecting or min(self._check_exits_at, self._observe_at, self._abort_at) < math.inf

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process an event, and return the actions to carry out, in their order."""
        self._actions = []  # new: an event whose handling failed may have left some
        match event:
            case Tick():
                self._tick(now)
            case CauseReported():
                if not event.is_first:  # the rank that has reported the cause aborts the job
                    self._abort_at = now + _REPORTER_SECONDS
                self._send(protocol.JobEnding(files=event.is_first))
            case ParentAttached():
                self._repeat_reports_to_parent()
            case ParentLost():
                if len(self._exits) < self.size:  # the launcher is about to end, or has ended
                    cause = f"rank 0 has lost the connection to mpicomm run ({event.reason})"
                    self._abort(cause, _LAUNCHER_SECONDS, now)
            case protocol.StatusRequest():
                if self._observation is None:  # soon, if the status has just been collected
                    self._observe_at = max(now, self._next_observation)
            case _:
                self._receive(event, now)
        return self._actions

    def _receive(self, message: Message, now: float) -> None:
        if self._has_shrunk:
            return
        match message:
            case protocol.RankContinues():
                self._receive_continuation(message)
            case protocol.StatusReport():
                for collection in (self._collection, self._observation):
                    if collection is not None and message.number == collection.number and message.rank < self.size:
                        collection.statuses[message.rank] = message.status
            case protocol.WaitStarted():
                self._waits[message.rank, message.operation.number] = message
                self._expect_check_of_exits(now)
            case protocol.WaitEnded():
                self._end_wait(message)
            case protocol.PossibleHang() | protocol.TimedOut() | protocol.MissingQuery():
                self._send(protocol.Acknowledgement(message.rank))
                self._collect(message, now)
            case protocol.RankExited():
                self._receive_exit(message, now)
            case protocol.ExitingAtOnce():
                self._end_rank(message.rank, f"called os._exit({message.status})", _EXIT_REMEDY, now)
                self._send(protocol.Acknowledgement(message.rank))
            case protocol.RankTerminated():
                self._terminated.add(message.rank)
            case protocol.RankDied():
                self._receive_death(message, now)
            case protocol.RankAborts():
                self._report_failure(f"{self._name([message.rank])} failed", [message.rank])
                if not self.is_ending:
                    self._abort_at = now + _REPORTER_SECONDS
                    self._send(protocol.JobEnding(files=False))
            case protocol.DumpFailed():
                self._warn_of_files(message)
            case protocol.GroupBroken():
                self._send(message)

    def _tick(self, now: float) -> None:
        self._serve_observers(now)
        if self.is_ending:
            if now >= self._abort_at:
                self._abort_at = now + _REPORTER_SECONDS
                self._actions.append(Abort(self._status))
            return
        collection = self._collection
        if collection is not None and (now >= collection.deadline or len(collection.statuses) == self.size):
            self._collection = None
            self._evaluate(collection, now)
        if now >= self._check_exits_at:
            self._check_exits_at = math.inf
            self._check_exits(now)

    def _repeat_reports_to_parent(self) -> None:
        """Report to `mpicomm run` what has happened before rank 0 was connected to it."""
        for rank in self._exits:
            self._actions.append(SendToParent(protocol.RankFinished(rank)))
        for rank in self._failed:
            self._actions.append(SendToParent(protocol.RankFinished(rank, has_failed=True)))
        if self._failure.cause:
            self._actions.append(SendToParent(self._failure))

    def _warn_of_files(self, message: protocol.DumpFailed) -> None:
        """Print why files cannot be written: once, since the reason is usually the same on all ranks."""
        if not self._has_warned_of_files:
            self._has_warned_of_files = True
            name = f"rank {message.rank} on {self._hosts[message.rank]}"
            text = f"[mpicomm] {name} cannot write its flight recorder and stacks: {message.reason}"
            self._actions.append(Print(text))

    # -- observers -----------------------------------------------------------------------------------------------

    def _serve_observers(self, now: float) -> None:
        observation = self._observation
        if self.is_ending:
            if observation is not None or self._observe_at < math.inf:
                self._observation, self._observe_at = None, math.inf
                refused = protocol.StatusRefused(f"the job is being aborted: {self._failure.cause}")
                self._actions.append(AnswerObservers([refused]))
        elif observation is not None:
            is_complete = len(observation.statuses.keys() | self._failed) == self.size
            if is_complete or now >= observation.deadline:
                self._observation = None
                self._next_observation = now + max(_OBSERVATION_SECONDS, _OBSERVATION_SECONDS_PER_RANK * self.size)
                self._actions.append(AnswerObservers(self._observed(observation, now)))
        elif now >= self._observe_at:
            self._observe_at = math.inf
            self._collections += 1
            self._observation = _Collection(self._collections, now + COLLECT_SECONDS, {})
            self._send(protocol.CollectStatus(self._collections, files=False, usage=True))

    def _observed(self, observation: _Collection, now: float) -> list[Message]:
        statuses = {rank: NotResponding(0.0, "it has failed") for rank in self._failed} | observation.statuses
        rows = [(rank, self._row(rank, statuses.get(rank), now)) for rank in range(self.size)]
        reports: list[Message] = [StatusReport(rank, observation.number, row) for rank, row in rows]
        return [*reports, protocol.StatusComplete(rank_text.ranks_by_host(self._hosts[: self.size]))]

    # -- ranks that have exited ----------------------------------------------------------------------------------

    def _receive_exit(self, message: protocol.RankExited, now: float) -> None:
        self._exits[message.rank] = message
        self._exit_times[message.rank] = now
        self._actions.append(SendToParent(protocol.RankFinished(message.rank)))
        if len(self._exits) == self.size:
            self._send(protocol.AllExited(any(report.is_stuck for report in self._exits.values())))
        else:
            self._expect_check_of_exits(now)

    def _receive_continuation(self, message: protocol.RankContinues) -> None:
        self._continuing[message.rank] = message.excluded
        self._send(protocol.Acknowledgement(message.rank))
        agreeing = list(self._continuing.values()).count(message.excluded)
        self._has_shrunk = agreeing + len(rank_text.parse_ranges(message.excluded)) == self.size and not self._failed
        if self._has_shrunk:
            self._check_exits_at = math.inf
            self._collection = None
            self._send(protocol.WorldShrunk(message.excluded, message.aborts))

    def _expect_check_of_exits(self, now: float) -> None:
        if self._waits and self._exits:
            self._check_exits_at = min(self._check_exits_at, now + _GATHER_SECONDS)

    def _check_exits(self, now: float) -> None:
        if self._find_absent(self._waits.values(), now):
            self._collect(None, now)
        elif self._waits:
            arrivals = map(self._last_arrival, self._exits)
            self._check_exits_at = min((arrival for arrival in arrivals if arrival > now), default=math.inf)

    def _find_absent(self, waits: Iterable[protocol.WaitStarted], now: float) -> list[int]:
        """Return the ranks that have exited without calling an operation for which another rank waits."""
        # 1. the distinct waits: thousands of ranks usually wait for the same ranks
        collectives: set[tuple[str, str, int]] = set()
        messages: set[tuple[str, int]] = set()
        for wait in waits:
            if wait.rank in self._exits and not self._exits[wait.rank].is_stuck:
                continue  # it only destroys its groups, for which it waits together with all other ranks
            if wait.operation.sequence is None:
                messages.add((wait.needs, wait.rank))
            else:
                collectives.add((wait.needs, wait.operation.group, wait.operation.sequence))
        # 2. the ranks that have exited before the collective, or before they sent the message
        absent: set[int] = set()
        for needs, group, sequence in collectives:
            needed = set(rank_text.parse_ranges(needs))
            exits = [self._exits[rank] for rank in self._exits.keys() & needed]
            absent.update(report.rank for report in exits if report.sequences.get(group, -1) < sequence)
        for needs, receiver in messages:
            senders = set(rank_text.parse_ranges(needs)) - {receiver}
            if all(rank in self._exits and now >= self._last_arrival(rank) for rank in senders):
                absent |= senders
        return sorted(absent)

    def _last_arrival(self, rank: int) -> float:
        """Return the time after which no message can arrive that a rank sent before it exited."""
        sends = self._exits[rank].sends
        return self._exit_times[rank] + (min(self._hang_seconds, _SENDING_SECONDS) if sends else _TRANSIT_SECONDS)

    # -- the status of all ranks ---------------------------------------------------------------------------------

    def _collect(self, request: protocol.LateOperation | protocol.MissingQuery | None, now: float) -> None:
        """Collect the status of all ranks for a request; None to look for ranks that have exited."""
        if self.is_ending or (isinstance(request, protocol.PossibleHang) and now < self._next_report):
            return
        is_new = self._collection is None
        if self._collection is None:
            self._collections += 1
            self._collection = _Collection(self._collections, now + COLLECT_SECONDS, {})
        if request is None:
            self._collection.is_for_exits = True
        else:
            self._collection.requests[type(request), request.rank, request.operation.number] = request
        if is_new:
            # A slow checkpoint looks like a hang: write one set of files, and no other until the job ends.
            is_for_job = not isinstance(request, protocol.MissingQuery)
            wants_files = isinstance(request, protocol.TimedOut) or (is_for_job and not self._has_files)
            self._has_files = self._has_files or wants_files
            self._send(protocol.CollectStatus(self._collections, wants_files))

    def _end_wait(self, message: protocol.WaitEnded) -> None:
        self._waits.pop((message.rank, message.number), None)
        if self._collection is not None:
            for kind in (protocol.PossibleHang, protocol.TimedOut):
                self._collection.requests.pop((kind, message.rank, message.number), None)

    def _evaluate(self, collection: _Collection, now: float) -> None:
        # 1. complete the status table
        statuses = collection.statuses
        # A rank that answers has reported its ended waits before. The waits of any other rank may have ended, too.
        waits = [wait for wait in self._waits.values() if isinstance(statuses.get(wait.rank), RankStatus)]
        absent = self._find_absent(waits, now)
        rows = {rank: self._row(rank, statuses.get(rank), now) for rank in range(self.size)}
        # 2. answer the ranks that asked which ranks are missing
        requests = list(collection.requests.values())
        for request in requests:
            if isinstance(request, protocol.MissingQuery):
                self._answer(request, statuses, rows)
        # 3. abort for ranks that have exited, abort at a timeout, or report a possible hang
        if collection.is_for_exits and absent:
            self._abort_for_exits(absent, rows, now)
            return
        if collection.is_for_exits and self._waits:  # a waiting rank may be silent
            self._check_exits_at = min(self._check_exits_at, now + _TRANSIT_SECONDS)
        timeouts = [request for request in requests if isinstance(request, protocol.TimedOut)]
        hangs = [request for request in requests if isinstance(request, protocol.PossibleHang)]
        if timeouts:
            self._abort_for_timeout(timeouts[0], rows, now)
        elif hangs:
            self._next_report = now + self._hang_seconds
            self._actions.append(Print(f"{_describe(hangs[0])}\n{self._table(rows)}\n{hangs[0].files}"))

    def _row(self, rank: int, status: Status | None, now: float) -> Status:
        if status is None:
            hub = self._hubs[rank]
            return NotResponding(
                COLLECT_SECONDS,
                "" if hub in (rank, 0) else f"rank {hub}, which forwards its messages, does not respond",
            )
        if rank in self._exits and isinstance(status, RankStatus):
            return ExitedRank(self._exits[rank].status, now - self._exit_times[rank])
        return status

    def _answer(self, query: protocol.MissingQuery, statuses: Mapping[int, Status], rows: Mapping[int, Status]) -> None:
        missing = {}
        group, sequence = query.operation.group, query.operation.sequence or 0
        for rank in rank_text.parse_ranges(query.needs):
            status = statuses.get(rank)
            if not isinstance(status, RankStatus) or status.sequences.get(group, -1) < sequence:
                missing[rank] = rows[rank]
        number, table = query.operation.number, self._table(missing)
        self._send(protocol.MissingAnswer(query.rank, number, rank_text.ranges(missing), table))

    # -- aborting the job ----------------------------------------------------------------------------------------

    def _receive_death(self, message: protocol.RankDied, now: float) -> None:
        report = self._exits.get(message.rank)
        if message.rank in self._continuing:
            return
        if report is not None and (len(self._exits) == self.size or not report.waits):
            return
        reason = hang_report.cause_of_loss(message.lost, message.crash)
        event = f"died: {reason}"
        remedy = hang_report.remedy_after_death(message.crash, self._synchronous_kernels)
        if message.rank in self._terminated:
            event, reason, remedy = "was terminated by SIGTERM, which rank 0 did not receive", "", _SIGTERM_REMEDY
        if hang_report.is_unreachable(message.lost) and self._recovers:
            # MPI_Comm_shrink would wait for that host, and mpirun ends the job as soon as it notices the loss.
            remedy = hang_report.HOST_REMEDY
            self._abort(f"{self._name([message.rank])} {event}", _LAUNCHER_SECONDS, now, [message.rank], details=remedy)
        else:
            self._end_rank(message.rank, event, remedy, now, reason)

    def _end_rank(self, rank: int, event: str, remedy: str, now: float, reason: str = "") -> None:
        """Abort the job because a rank has ended, or let the other ranks continue without it.

        Args:
            event: What has happened to the rank, as the predicate of a sentence.
            reason: The same as a sentence, if it differs.
        """
        if not self._recovers or self.is_ending:
            self._abort(f"{self._name([rank])} {event}", _LAUNCHER_SECONDS, now, [rank], details=remedy)
        elif rank not in self._failed:
            self._failed.add(rank)
            self._actions.append(SendToParent(protocol.RankFinished(rank, has_failed=True)))
            self._send(protocol.ContinueWithout({str(rank): reason or f"it {event}"}))

    def _abort_for_exits(self, absent: list[int], rows: Mapping[int, Status], now: float) -> None:
        is_one = len(absent) == 1
        phrase = f"{'has' if is_one else 'have'} exited, but other ranks wait for {'it' if is_one else 'them'}"
        status = self._exits[absent[0]].status
        cause = f"{self._name(absent)} {phrase}"
        failed = [rank for rank in absent if self._exits[rank].status]
        self._abort(cause, _DUMP_SECONDS, now, failed, status=status or 1, details=self._table(rows))

    def _abort_for_timeout(self, late: protocol.TimedOut, rows: Mapping[int, Status], now: float) -> None:
        silent = [rank for rank, row in rows.items() if isinstance(row, NotResponding)]
        operation = rank_text.describe_operation(late.operation)
        cause = f"{self._name([late.rank])} timed out after {late.timeout:g} s in {operation}"
        cause += f"; not responding: {self._name(silent)}" if silent else ""
        self._abort(cause, _DUMP_SECONDS, now, silent, details=f"{self._table(rows)}\n{late.files}")

    def _abort(
        self,
        cause: str,
        seconds: float,
        now: float,
        ranks: Sequence[int] = (),
        *,
        status: int = 1,
        details: str = "",
    ) -> None:
        """Print the cause, and abort the job after some seconds; the first cause counts.

        Args:
            cause: In one line, also for `mpicomm run`.
            ranks: The ranks that have failed.
            details: Further lines.
        """
        if self.is_ending:
            return
        self._status = status
        self._report_failure(cause, ranks)
        self._abort_at = now + seconds
        self._actions.append(ReportCause("\n".join(filter(None, [f"[mpicomm] {cause}; aborting the job", details]))))

    def _report_failure(self, cause: str, ranks: Sequence[int]) -> None:
        failure = protocol.JobFailed(cause, rank_text.ranges(ranks))
        self._failure = self._failure if self._failure.cause else failure
        self._actions.append(SendToParent(failure))

    def _send(self, message: Message) -> None:
        self._actions.append(SendToRanks(message))

    def _table(self, rows: Mapping[int, Status]) -> str:
        return hang_report.table(rows, self._hosts)

    def _name(self, ranks: Sequence[int]) -> str:
        return rank_text.full_name(ranks, self._hosts)


def _describe(late: protocol.PossibleHang) -> str:
    then = "raising TimeoutError" if late.raises else "aborting"
    waited = f"rank {late.rank} has waited {late.operation.seconds or 0.0:.0f} s"
    return f"[mpicomm] possible hang: {waited}; {then} at the {late.timeout:.0f} s timeout"
