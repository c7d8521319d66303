"""The watchdog: a thread on every rank that detects hangs and dead ranks, reports them, and aborts the job.

While another thread may be inside MPI, its thread calls only two functions of it: MPI_Abort and, where ranks may fail,
MPI_Comm_revoke (`rank_failures`), which interrupts the blocked calls of the other threads. It does not busy-wait: it
wakes up for messages, signals and calls of other threads, and otherwise once a second, or every 50 ms while a step is
due soon. It reports the state of its own rank over the out-of-band channel to rank 0, whose `Coordinator` decides. If
rank 0 itself is dead or does not respond, the next rank reports in its place.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import math
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mpicomm import mpi
from mpicomm.json_messages import Message
from mpicomm.recorder import dump, flight_recorder, hang_report, rank_text
from mpicomm.recorder.dump import ClockOffset
from mpicomm.watchdog import coordinator, error_output, job_files, protocol, rank_failures, signals
from mpicomm.watchdog.channel import SUPERVISOR, Channel, ChannelEvent, RankInfo
from mpicomm.watchdog.clock import ClockMonitor
from mpicomm.watchdog.connected_ranks import ConnectedRanks
from mpicomm.watchdog.connection import Connection
from mpicomm.watchdog.coordinator import Coordinator
from mpicomm.watchdog.nvml import GPUReader
from mpicomm.watchdog.observers import OBSERVER
from mpicomm.watchdog.rank_0_monitor import RESPONSE_SECONDS, Rank0Monitor
from mpicomm.watchdog.rank_reports import OperationMonitor, RankExit

T = TypeVar("T")

_LATE_SECONDS = 5.0  # a check that is later than this shows that the process was suspended or held the GIL
_ERROR_SECONDS = 0.05  # pause after an error, which may recur on every iteration
_BUSY_SECONDS = 0.05  # between two iterations while a step is due soon
_TERM_SECONDS = 0.3  # a report of a dead rank may arrive in this time, before SIGTERM ends this process
_ENDED_SECONDS = 10.0  # after the decision to abort, the launcher must have ended this process within this time
_WRITE_SECONDS = 1.0  # how long the watchdog waits while the dump files are written
_EXIT_SECONDS = 0.5  # os._exit waits for rank 0's confirmation: some launchers kill the others before they report it
_ABORT_SECONDS = 5.0  # time limit for MPI_Abort to end this process
_CONTINUE_SECONDS = 5.0  # for rank 0 to confirm that a next world follows; it may be excluded because it is stopped

EXCLUDED_SECONDS = 10.0
"""The time in which an excluded rank (`shrink_group`) can complete operations with the others; then they end."""


@dataclasses.dataclass(frozen=True)
class WatchdogSettings:
    """The settings of the watchdog."""

    hang_seconds: float
    """Seconds that an operation may run before rank 0 collects the status of all ranks."""

    directory: Path | None
    """Directory of the dump files; None to write no files."""

    job: str = ""
    """The name of the job, the same after each recovery."""

    spares: int = 0
    """The number of spares: the highest ranks, which call no operations."""

    recovers: bool = False
    """Whether the job continues if a rank dies."""

    gpu: str = ""
    """The UUID of this rank's GPU; empty for the CPU."""

    synchronous_kernels: str = ""
    """The setting of the environment with which calls wait for their kernels on GPUs; empty without one."""

    ends_local_processes: bool = False
    """Whether to kill ranks of this node that cannot end themselves: srun, for example, waits for a stopped rank."""


class Watchdog:
    """The watchdog of one rank: its thread, and the messages that it sends and receives."""

    def __init__(
        self,
        rank_info: RankInfo,
        channel: Channel,
        limits: WatchdogSettings,
        end: Callable[[int], Any],
        claim: Callable[[], bool],
    ) -> None:
        """Create the watchdog; `start` starts its thread.

        Args:
            end: Ends the job with the given exit status.
            claim: Returns True if no other rank has reported the cause of the job's end before.
        """
        self.rank_info = rank_info
        self._claim = claim
        self._channel = channel
        self._limits = limits
        self._end_job = end
        self._thread = threading.Thread(target=self._run, name="mpicomm-watchdog", daemon=True)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # from other threads
        self._is_stopping = False
        self._is_established = False
        self._early_losses: list[ChannelEvent] = []  # before every rank had connected
        self._coordinator = None
        if rank_info.rank == 0:
            self._coordinator = Coordinator(
                rank_info.hosts,
                rank_info.hubs,
                limits.hang_seconds,
                spares=limits.spares,
                recovers=limits.recovers,
                synchronous_kernels=limits.synchronous_kernels,
            )
        self._events: collections.deque[coordinator.Event] = collections.deque()  # for the coordinator
        self._operations = OperationMonitor(
            rank_info.rank, limits.hang_seconds, limits.directory, self._report, GPUReader(limits.gpu)
        )
        self._connected = ConnectedRanks(rank_info, channel, self._send_to_rank_0)
        self._rank_0 = Rank0Monitor(rank_info, self._connected.state_of, limits.synchronous_kernels)
        self._exit = RankExit(rank_info.rank, self._report)
        self._clock = ClockMonitor(rank_info.rank)
        self._answers: dict[int, queue.SimpleQueue[protocol.MissingAnswer]] = {}
        self._is_acknowledged = threading.Event()
        self._next_tick = 0.0
        self._has_failed = False
        self._dump_fields = {"size": rank_info.size, "host": rank_info.hosts[rank_info.rank]}  # for the dump files
        self._term_at = math.inf  # when SIGTERM ends this process
        self._exit_at = math.inf  # once the job is ending: when this process exits if the launcher has not ended it
        self._excluded_at = math.inf  # when the other ranks have continued without this one
        self._excluded: Sequence[int] = ()  # this rank, and others
        self._broken_groups: list[tuple[float, protocol.GroupBroken]] = []  # from when on they cannot be used

    # -- for other threads ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and watch for SIGTERM."""
        signals.watch(self._channel.wake_fd)
        self._thread.start()

    def establish(self) -> None:
        """Record that every rank has connected: from now on, a rank that loses its connection is dead."""

        def establish() -> None:
            self._is_established = True
            for event in self._early_losses:
                self._receive_loss(event)

        self._post(establish)

    def attach_parent(self, connection: Connection) -> None:
        """Take over rank 0's connection to `mpicomm run`, and report the start of the job."""

        def attach() -> None:
            self._channel.attach_parent(connection)
            hosts = rank_text.ranks_by_host(self.rank_info.hosts[: self.rank_info.size - self._limits.spares])
            self._channel.send_to_parent(protocol.JobStarted(hosts, self._limits.job, self._limits.recovers))
            self._events.append(coordinator.ParentAttached())  # ranks may have exited during the connection's set-up

        self._post(attach)

    def accept_observers(self, program: str, started: float) -> None:
        """Let rank 0 answer commands of this user on this host that ask for the status of all ranks.

        Args:
            program: The command line of the program.
            started: When it started, in seconds since the epoch.
        """
        size = self.rank_info.size - self._limits.spares
        self._post(lambda: self._channel.accept_observers(job_files.new(self._limits.job, size, program, started)))

    def leave(self, status: int | None, *, is_stuck: bool, waits: bool = True, sends: bool = False) -> None:
        """Report that this rank calls no more operations.

        Args:
            is_stuck: An operation of this rank may never end, so that MPI cannot be finalized.
            waits: Whether the rank waits for the other ranks before its process ends.
            sends: Whether messages that this rank sent are still in flight.
        """

        def leave() -> None:
            self._operations.report_ended_waits()  # this rank must not wait for ranks that have exited
            self._exit.report(status, is_stuck=is_stuck, waits=waits, sends=sends)

        self._post(leave)

    def wait_for_all_to_leave(self, meanwhile: Callable[[], Any], pause: float) -> bool:
        """Wait until every rank has reported its exit, and call `meanwhile` every `pause` seconds.

        Returns:
            Whether a rank has an operation that may never end.

        Raises:
            RankFailedError: If a rank has failed that has not reported its exit, and the others continue without it.
        """
        while not self._exit.all_exited.wait(pause) and self._thread.is_alive():
            meanwhile()
            if failures := rank_failures.known():
                raise failures.error()
        return self._exit.is_stuck

    def continue_without(self, excluded: Sequence[int], *, aborts: bool) -> None:
        """Report that this rank continues in a next world without some ranks, and wait until all others do, too.

        If rank 0 does not respond, perhaps since it is stopped and therefore excluded, do not wait for the others.

        Args:
            excluded: These ranks.
            aborts: Whether their operations with the others end at once.

        Raises:
            RankFailedError: If a rank has failed before.
        """
        all_continue = self._exit.all_exited
        self._is_acknowledged.clear()
        self._post_report(protocol.RankContinues(self.rank_info.rank, rank_text.ranges(excluded), aborts))
        is_over = lambda: all_continue.is_set() or rank_failures.known() is not None  # noqa: E731
        mpi.poll(lambda: self._is_acknowledged.is_set() or is_over(), _CONTINUE_SECONDS)
        if self._is_acknowledged.is_set():
            mpi.poll(is_over, math.inf)
        if not all_continue.is_set() and (failures := rank_failures.known()):
            raise failures.error()
        all_continue.set()  # from now on, the loss of a connection is no failure

    def has_seen_all_exit(self) -> bool:
        """Return whether every rank of the world has reported its exit."""
        return self._exit.all_exited.is_set()

    @property
    def has_lost_rank_0(self) -> bool:
        """Whether the connection to rank 0 is lost, or to the hub of this node; False if ranks may fail."""
        return self._rank_0.is_lost

    def take_down(self) -> None:
        """Start the deadline for destroying the process groups."""
        self._exit.start_deadline()

    def fail(self) -> None:
        """Report that this rank has failed, and that it prints the error and aborts the job itself."""
        self._post_report(protocol.RankAborts(self.rank_info.rank))

    def exit_at_once(self, status: int) -> None:
        """Report that this rank is about to call `os._exit`, and wait up to 0.5 s for rank 0's confirmation."""
        if self._exit_at == math.inf and threading.current_thread() is not self._thread:
            self._post_report(protocol.ExitingAtOnce(self.rank_info.rank, status))
            self._is_acknowledged.wait(_EXIT_SECONDS)

    def missing(self, operation: flight_recorder.Operation) -> tuple[list[int], str]:
        """Ask rank 0 which ranks have not called an operation.

        Returns:
            The ranks and a table of where they are. If rank 0 does not respond, no ranks and the state of rank 0.
        """
        answers = self._answers[operation.number] = queue.SimpleQueue()
        info, needs = operation.describe(time.monotonic()), rank_text.ranges(operation.needs)
        self._post_report(protocol.MissingQuery(self.rank_info.rank, info, needs))
        try:
            answer = answers.get(timeout=RESPONSE_SECONDS)
        except queue.Empty:
            return [], f"{self._rank_0.describe_silence(RESPONSE_SECONDS)}."
        finally:
            self._answers.pop(operation.number, None)
        return rank_text.parse_ranges(answer.ranks), answer.table

    def break_group(self, name: str, cause: str, remedy: str = "", seconds: float = 0.0) -> None:
        """Report that this rank has stopped waiting in a group, so that no rank uses the group any more.

        Args:
            name: The name of the group.
            cause: Why; for errors.
            remedy: The next step; for errors.
            seconds: The time in which other ranks can complete their operations on the group.
        """
        self._post_report(protocol.GroupBroken(name, cause, remedy, seconds))

    def clock_offset(self) -> ClockOffset | None:
        """Return the difference between the clocks of this rank and rank 0; None if it has not been measured."""
        return self._clock.offset()

    def stop(self) -> None:
        """Stop the thread and close the channel."""
        self._is_stopping = True
        signals.unwatch()
        self._channel.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close_after_fork(self) -> None:
        """Close the rank's descriptors in a forked child: a copy that stays open would hide the rank's death."""
        signals.unwatch()
        self._channel.close_after_fork()

    def _post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        self._channel.wake()

    def _post_report(self, message: Message) -> None:
        self._post(lambda: self._report(message))

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_stopping:
            self._run_once()
        self._channel.close()

    def _run_once(self) -> None:
        # 1. messages of other ranks, calls of other threads
        for event in self._poll():
            self._attempt(self._receive, event)
        while not self._calls.empty():
            self._attempt(self._calls.get())
        # 2. checks once a second
        now = time.monotonic()
        if now >= self._next_tick:
            self._extend_deadlines(now)
            self._next_tick = now + protocol.HEARTBEAT_SECONDS
            self._attempt(self._check_once_a_second, now)
        # 3. steps that are due
        self._attempt(self._connected.close_collections, now)
        if self._coordinator is not None:
            self._events.append(coordinator.Tick())
            while self._events:  # more may follow from the actions
                self._coordinate(self._events.popleft())
        self._attempt(self._check_end)

    def _coordinate(self, event: coordinator.Event) -> None:
        """Pass an event to the coordinator, and carry out the actions that it returns."""
        assert self._coordinator is not None
        for action in self._attempt(self._coordinator.handle, event, time.monotonic()) or []:
            self._attempt(self._perform, action)

    def _perform(self, action: coordinator.Action) -> None:
        match action:
            case coordinator.SendToRanks():
                self._send_to_ranks(action.message)
            case coordinator.SendToParent():
                self._channel.send_to_parent(action.message)
            case coordinator.AnswerObservers():
                self._channel.answer_observers(action.messages)
            case coordinator.Print():
                self.print_report(action.text)
            case coordinator.ReportCause():
                is_first = (
                    self._attempt(self._claim) is not False
                )  # also after an error: two reports are better than none
                if is_first:
                    self.print_report(action.text)
                # Before the next action: a rank that calls os._exit ends when that acknowledges it.
                self._coordinate(coordinator.CauseReported(is_first))
            case coordinator.Abort():
                self._abort(action.status)

    def _attempt(self, step: Callable[..., T], *arguments: Any) -> T | None:
        """Run one step. An error in it must neither end the job nor keep the following steps from running."""
        try:
            return step(*arguments)
        except Exception:  # noqa: BLE001
            if not self._has_failed:
                self._has_failed = True
                trace = traceback.format_exc()
                self.print_report(
                    f"[mpicomm] the watchdog of rank {self.rank_info.rank} caught an error and continues. "
                    f"Report it as a bug of mpicomm:\n{trace}"
                )
            time.sleep(_ERROR_SECONDS)
            return None

    def _poll(self) -> list[ChannelEvent]:
        """Wait for messages, signals or the next step."""
        is_busy = self._connected.is_collecting or self._term_at < math.inf
        is_busy = is_busy or (self._coordinator is not None and self._coordinator.is_busy)
        before = time.monotonic()
        pause = _BUSY_SECONDS if is_busy else max(0.0, self._next_tick - before)
        events = self._attempt(self._channel.poll, pause) or []
        if time.monotonic() > before + pause + _LATE_SECONDS:
            # Launchers wake stopped ranks to end them: handle SIGTERM before the connections that it has closed.
            time.sleep(_TERM_SECONDS)
            events += self._attempt(self._channel.poll, 0.0) or []
        self._attempt(self._handle_signals)
        return events

    def _extend_deadlines(self, now: float) -> None:
        """Extend running operations' deadlines by the time in which this process was suspended or held the GIL."""
        late = now - self._next_tick
        if self._next_tick and late > _LATE_SECONDS:
            for operation in flight_recorder.running():
                operation.extend_deadline(late)

    def _check_once_a_second(self, now: float) -> None:
        if self._coordinator is None:
            self._channel.send_up(protocol.Heartbeat())
            self._probe_clock()
        if self._excluded_at < math.inf:
            self._check_excluded(now)
        else:
            self._operations.check(now)
        self._exit.check()
        self._break_groups(now)

    def _probe_clock(self) -> None:
        if (probe := self._clock.probe()) is not None:
            self._channel.send_up(probe)

    def _handle_signals(self) -> None:
        now = time.monotonic()
        if signals.deliver(self._channel.take_woken()) and self._term_at == math.inf:
            # The launcher may have sent it because a rank has died, which rank 0 is about to report.
            self._term_at = now + _TERM_SECONDS
            if not self._exit.is_reported:
                self._report(protocol.RankTerminated(self.rank_info.rank))
        if now >= self._term_at:
            self._channel.close_observers()
            signals.end_by_sigterm()

    # -- messages ------------------------------------------------------------------------------------------------

    def _receive(self, event: ChannelEvent) -> None:
        if event.rank == SUPERVISOR:
            self._receive_from_parent(event)
        elif event.rank == OBSERVER:
            self._events.append(protocol.StatusRequest())
        elif event.message is None:
            self._receive_loss(event)
        elif isinstance(event.message, protocol.ClockAnswer):
            self._clock.record(event.message)
            self._probe_clock()
        elif event.rank is None:
            self._rank_0.record_response()
            self._send_to_ranks(event.message)
        else:
            self._receive_from_child(event.message)

    def _receive_loss(self, event: ChannelEvent) -> None:
        if not self._is_established:
            self._early_losses.append(event)
        elif self._term_at < math.inf:
            return  # a launcher that sends SIGTERM sends it to the other ranks, too
        elif event.rank is not None:
            self._send_to_rank_0(protocol.RankDied(event.rank, event.lost, event.crash))
        elif self._limits.recovers and not hang_report.is_unreachable(event.lost):
            self._rank_0.record_response()  # the next world has another rank 0
            if not self._exit.all_exited.is_set():
                cause = hang_report.cause_of_loss(event.lost, event.crash)
                self._send_to_ranks(protocol.ContinueWithout({str(self.rank_info.hub): cause}))
        elif not self._exit.all_exited.is_set():
            self._rank_0.record_loss(event.lost, event.crash)

    def _receive_from_parent(self, event: ChannelEvent) -> None:
        if event.message is None:
            self._events.append(coordinator.ParentLost(event.lost))
        elif isinstance(event.message, protocol.StopAsked):
            number = signals.handled(event.message.signal)
            self._channel.send_to_parent(protocol.StopAnswered(event.message.signal, number is not None))
            if number is not None:
                self._send_to_ranks(protocol.RaiseSignal(number))
        elif isinstance(event.message, protocol.StatusRequest):
            self._events.append(event.message)

    def _receive_from_child(self, message: Message) -> None:
        if isinstance(message, protocol.Heartbeat):
            return
        if isinstance(message, protocol.ClockProbe):
            self._channel.send_to(message.rank, self._clock.answer(message))
            return
        if isinstance(message, protocol.StatusReport):
            self._connected.record_status(message)
        self._send_to_rank_0(message)

    def _send_to_rank_0(self, message: Message) -> None:
        if self._coordinator is not None:
            self._events.append(message)
        else:
            self._channel.send_up(message)

    def _report(self, message: Message) -> None:
        """Send a message of this rank to rank 0."""
        if isinstance(message, protocol.LateOperation) and self._coordinator is None:
            self._rank_0.expect_response(message)
        self._send_to_rank_0(message)

    def _send_to_ranks(self, message: Message) -> None:
        """Send a message of rank 0 to the rank that it names, or to every rank; each hub forwards it."""
        if not isinstance(message, protocol.ToOneRank):
            self._channel.send_down(message)
            self._receive_from_rank_0(message)
        elif message.to == self.rank_info.rank:
            self._receive_from_rank_0(message)
        else:
            hub = self.rank_info.hubs[message.to]
            self._channel.send_to(message.to if hub == self.rank_info.rank else hub, message)

    def _receive_from_rank_0(self, message: Message) -> None:
        match message:
            case protocol.CollectStatus():
                now = time.monotonic()
                self._connected.start_collection(message.number, now)
                if message.files:
                    self._write_files()
                status = self._operations.status(now, with_usage=message.usage)
                self._operations.report_ended_waits()  # before it sends the status, of which they are no part any more
                self._report(protocol.StatusReport(self.rank_info.rank, message.number, status))
            case protocol.MissingAnswer():
                if message.number in self._answers:
                    self._answers[message.number].put(message)
            case protocol.GroupBroken():
                self._broken_groups.append((time.monotonic() + message.seconds, message))
                self._break_groups(time.monotonic())
            case protocol.Acknowledgement():
                self._is_acknowledged.set()
            case protocol.AllExited():
                self._exit.is_stuck = message.is_stuck
                self._exit.all_exited.set()
            case protocol.RaiseSignal():
                if signals.handled(message.signal) == message.signal:
                    os.kill(os.getpid(), message.signal)
            case protocol.ContinueWithout():
                if (failures := rank_failures.current()) is not None:
                    failures.record({int(rank): reason for rank, reason in message.reasons.items()})
            case protocol.WorldShrunk():
                self._exit.all_exited.set()
                excluded = rank_text.parse_ranges(message.excluded)
                if self.rank_info.rank in excluded:
                    self._excluded = excluded
                    self._excluded_at = time.monotonic() - (EXCLUDED_SECONDS if message.aborts else 0.0)
                    if self._limits.recovers:
                        mpi.record_lost_processes()
            case protocol.JobEnding():
                self._end(message)

    def _break_groups(self, now: float) -> None:
        """Break the groups that cannot be used any more from now on."""
        due = [message for at, message in self._broken_groups if at <= now]
        self._broken_groups = [(at, message) for at, message in self._broken_groups if at > now]
        for message in due:
            flight_recorder.break_group(message.group, message.cause, message.remedy)

    def _check_excluded(self, now: float) -> None:
        """End the groups that this rank had with the others, which have excluded it.

        If it waits for them in MPI, which nothing interrupts, abort the job.
        """
        if now < self._excluded_at + EXCLUDED_SECONDS:
            return
        cause = f"the other ranks have excluded {rank_text.name_ranks(self._excluded)} with shrink_group()"
        broken = [group for group in flight_recorder.groups() if not set(group.ranks) <= set(self._excluded)]
        for group in broken:
            flight_recorder.break_group(group.name, cause, "Exit from this process.")
        until = now - EXCLUDED_SECONDS
        waits = [
            each
            for each in flight_recorder.running()
            if each.group in broken and max(each.start or now, self._excluded_at + EXCLUDED_SECONDS) <= until
        ]
        if waits:
            self.print_report(
                f"[mpicomm] {rank_text.full_name([self.rank_info.rank], self.rank_info.hosts)}, which the other ranks "
                f"have excluded with shrink_group(), waits for them in "
                f"{rank_text.describe_operation(waits[0].describe(now))}; aborting the job.\n"
                f"Exclude only ranks that call no operation of the group any more, or that have failed."
            )
            self._abort(1)

    # -- the end of the job --------------------------------------------------------------------------------------

    def _end(self, message: protocol.JobEnding) -> None:
        if self._exit_at == math.inf:
            self._exit_at = time.monotonic() + _ENDED_SECONDS
            if (failures := rank_failures.current()) is not None:
                failures.is_aborting = True
            if message.files:
                self._write_files()
            self._kill_unresponsive_processes()

    def _check_end(self) -> None:
        """Exit if the launcher has not ended this process; act for rank 0 if it is dead or does not respond."""
        if self._coordinator is None and time.monotonic() >= self._exit_at:
            self._kill_unresponsive_processes()
            os._exit(1)
        is_late = self._exit.is_late(self._rank_0.turn)
        if self._exit_at < math.inf:
            return
        if is_late:
            self._abort_alone("all ranks have exited, but destroying their process groups timed out")
        if self._coordinator is not None or self._term_at < math.inf:
            return
        if cause := self._rank_0.cause_of_abort():
            remedy = self._rank_0.remedy(recovers=self._limits.recovers)
            self._abort_alone(cause, f"\n{remedy}" if remedy else "")
        if cause := self._rank_0.take_cause_of_report():
            self.print_report(f"[mpicomm] possible hang: {cause}.\n{self._own_row()}")
            self._write_files()

    def _abort_alone(self, cause: str, remedy: str = "") -> None:
        """Abort the job in place of rank 0; does not return."""
        self._exit_at = time.monotonic() + _ENDED_SECONDS
        if self._limits.recovers:  # otherwise ranks that lose this one would wait in recover() for an unreachable host
            self._channel.send_down(protocol.JobEnding(files=True))
        self._write_files()
        self._kill_unresponsive_processes()
        if self.rank_info.rank <= error_output.MAX_REPORTERS:
            self.print_report(
                f"[mpicomm] {cause}; rank {self.rank_info.rank} aborts the job.\n{self._own_row()}{remedy}"
            )
        time.sleep(_TERM_SECONDS)  # launchers forward output by pipes
        self._abort(1)

    def _abort(self, status: int) -> None:
        """Abort the job; if that fails, end this process, so that the launcher ends the job."""
        self._attempt(self._channel.close_observers)
        with Path(os.devnull).open("w") as nowhere, contextlib.suppress(Exception):
            faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=nowhere)
            self._kill_unresponsive_processes()
            self._end_job(status)
        os._exit(status)

    def _kill_unresponsive_processes(self) -> None:
        """Kill ranks of this host that cannot end themselves when the job ends, if the launcher would wait for them."""
        if self._limits.ends_local_processes:
            self._connected.kill_unresponsive(with_hub=self._rank_0.is_silent)

    def print_report(self, text: str) -> None:
        """Print a report to stderr."""
        error_output.print_stderr(text.rstrip("\n") + "\n")

    def _own_row(self) -> str:
        return hang_report.table({self.rank_info.rank: self._operations.status(time.monotonic())}, self.rank_info.hosts)

    def _write_files(self) -> None:
        if self._limits.directory is not None:
            offset = self._clock.offset()
            problem = dump.try_write(
                self._limits.directory, self.rank_info.rank, self._dump_fields, offset, _WRITE_SECONDS
            )
            if problem:  # the report is printed all the same
                self._report(protocol.DumpFailed(self.rank_info.rank, problem))


_current: Watchdog | None = None


def current() -> Watchdog | None:
    """Return the watchdog of this process; None if none is running."""
    return _current


def set_current(watchdog: Watchdog | None) -> None:
    """Set the watchdog of this process; None removes it."""
    global _current  # noqa: PLW0603  a process is in one job at a time
    _current = watchdog


def _close_after_fork() -> None:
    if _current is not None:
        _current.close_after_fork()
        set_current(None)


os.register_at_fork(after_in_child=_close_after_fork)
