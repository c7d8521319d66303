"""The watchdog: a thread on every rank that detects hangs and dead ranks, reports them, and aborts the job.

The only MPI function that it calls is MPI_Abort. It does not busy-wait; it wakes up once a second. It reports the state
of its own rank over the out-of-band channel to rank 0, whose `Coordinator` decides. If rank 0 itself is dead or does
not respond, the next rank reports in its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mpicomm.durations import Deadline
from mpicomm.watchdog import dump, exit_hooks, flight_recorder, hang_report, local_processes, signals
from mpicomm.watchdog.channel import Channel, ChannelEvent
from mpicomm.watchdog.connection import Message
from mpicomm.watchdog.coordinator import COLLECT_SECONDS, Coordinator
from mpicomm.watchdog.local_processes import LocalProcess

T = TypeVar("T")

WAIT_LIMIT = 5.0
"""Seconds that a rank waits for another rank that has exited normally, before the watchdog aborts the job."""

_LATE_SECONDS = 5.0  # a check that is later than this shows that the process was suspended or held the GIL
_ERROR_SECONDS = 0.05  # pause after an error, which may recur on every iteration
_TICK = 1.0  # seconds between two checks
_LONGEST_GAP = 2 * _TICK  # the most seconds between two checks that count towards a deadline
_HUBS_SECONDS = 2.0  # time limit for the ranks of a hub to answer it
_SILENCE = 1.5 * COLLECT_SECONDS  # seconds without an answer after which rank 0 counts as not responding
_MAX_REPORTERS = 8  # how many ranks may report in place of rank 0
_TURN_SECONDS = 2.0  # delay of each of them after the previous one
_TERM_SECONDS = 0.3  # a report of a dead rank may arrive in this time, before SIGTERM ends this process
_ENDED_SECONDS = 10.0  # after the decision to abort, the launcher must have ended this process within this time
_WRITE_SECONDS = 1.0  # how long the watchdog waits while the dump files are written
_TAKE_DOWN_SECONDS = 60.0  # time limit for destroying each process group once all ranks have exited
_UNREACHABLE = {os.strerror(each) for each in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)}
_EXIT_SECONDS = 0.5  # os._exit waits for rank 0's confirmation: some launchers kill the others before they report it
_ABORT_SECONDS = 5.0  # time limit for MPI_Abort to end this process


@dataclasses.dataclass(frozen=True)
class RankInfo:
    """The rank's position in the tree of the out-of-band channel."""

    rank: int
    hosts: Sequence[str]
    """The host of every rank."""

    nodes: Sequence[int]
    """The node of every rank."""

    hubs: Sequence[int]
    """The hub of every rank: the first rank of its node; for these first ranks, rank 0."""

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return len(self.hosts)

    @property
    def hub(self) -> int:
        """The rank to which this rank connects."""
        return self.hubs[self.rank]


@dataclasses.dataclass(frozen=True)
class Limits:
    """The settings of the watchdog."""

    hang_seconds: float
    """Seconds that an operation may run before rank 0 collects the status of all ranks."""

    directory: Path | None
    """Directory of the dump files; None to write no files."""

    ends_local_processes: bool = False
    """Whether to kill ranks of this node that cannot end themselves: srun, for example, waits for a stopped rank."""


class Watchdog:
    """The watchdog of one rank."""

    def __init__(
        self,
        place: RankInfo,
        channel: Channel,
        limits: Limits,
        end: Callable[[int], Any],
        claim: Callable[[], bool],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the watchdog; `start` starts its thread.

        Args:
            end: Ends the job with the given exit status.
            claim: Returns True if no other rank has reported the cause of the job's end before.
            prepare: Called once, at the start of the watchdog's thread.
        """
        self.place = place
        self._channel = channel
        self._limits = limits
        self._end_job = end
        self.claim = claim
        self._prepare = prepare
        self._is_established = False
        self._early: list[ChannelEvent] = []  # connections lost before every rank had connected
        self._coordinator = Coordinator(place.hosts, place.hubs, limits.hang_seconds, self) if place.rank == 0 else None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mpicomm-watchdog", daemon=True)
        self._is_stopping = False
        self._is_ending = False
        self._end_by = 0.0  # once the job is ending: when the launcher must have ended this process
        self._has_failed = False
        self._all_left = threading.Event()
        self._is_stuck = False  # once all ranks have exited: whether one of them has an operation that may never end
        self._gone_by: Deadline | None = None  # deadline for destroying the next process group
        self._taken_down: flight_recorder.Operation | None = None  # the last operation at the last check
        self._left: Message | None = None
        self._next_tick = 0.0
        self._told: dict[int, set[str]] = {}  # by operation number: the kinds of messages sent to rank 0
        self._heard: dict[int, float] = {}  # by child rank: when its last message arrived
        self._started = time.monotonic()
        self._rounds: dict[int, tuple[float, set[int]]] = {}  # by collection: deadline, and ranks yet to answer
        self._answer_due: Deadline | None = None  # deadline for rank 0's answer
        self._orphaned: tuple[Deadline, str] | None = None  # deadline to act since the hub was lost, and the reason
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._term_at: float | None = None
        self._heard_exit = threading.Event()

    # -- for other threads ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and watch for SIGTERM."""
        signals.watch(self._channel.wake_fd)
        self._thread.start()

    def establish(self) -> None:
        """Record that every rank has connected: from now on, a rank that loses its connection is dead."""

        def establish() -> None:
            self._is_established = True
            for event in self._early:
                self._take(event)

        self._post(establish)

    def leave(self, status: int | None, *, is_stuck: bool, waits: bool = True, sends: bool = False) -> None:
        """Report that this rank calls no more operations.

        Args:
            is_stuck: An operation of this rank may never end, so that MPI cannot be finalized.
            waits: Whether the rank waits for the other ranks before its process ends.
            sends: Whether messages that this rank sent are still in flight.
        """
        self._post(lambda: self._leave(status, is_stuck=is_stuck, waits=waits, sends=sends))

    def wait_for_all_to_leave(self, meanwhile: Callable[[], Any], pause: float) -> bool:
        """Wait until every rank has reported its exit, and call `meanwhile` every `pause` seconds.

        Returns:
            Whether a rank has an operation that may never end.
        """
        while not self._all_left.wait(pause) and self._thread.is_alive():
            meanwhile()
        return self._is_stuck

    def take_down(self) -> None:
        """Start the deadline for destroying a group: all ranks destroy theirs now, so none takes long."""
        self._gone_by = Deadline(_TAKE_DOWN_SECONDS, _LONGEST_GAP)

    def fail(self) -> None:
        """Report that this rank has failed, and that it prints the error and aborts the job itself."""
        self._post(lambda: self._tell({"kind": "failed", "rank": self.place.rank}))

    def exit_at_once(self, status: int) -> None:
        """Report that this rank is about to call `os._exit`, and wait up to 0.5 s for rank 0's confirmation."""
        if self._is_ending or threading.current_thread() is self._thread:
            return
        self._post(lambda: self._tell({"kind": "exits", "rank": self.place.rank, "status": status}))
        self._heard_exit.wait(_EXIT_SECONDS)

    def missing(self, operation: flight_recorder.Operation) -> tuple[list[int], str]:
        """Ask rank 0 which ranks have not called an operation.

        Returns:
            The ranks and a table of where they are. If rank 0 does not respond, no ranks and the state of rank 0.
        """
        answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers[operation.number] = answers
        ask = {
            "kind": "missing",
            "rank": self.place.rank,
            "number": operation.number,
            "needs": hang_report.ranges(operation.needs),
            "group": operation.group.name,
            "sequence": operation.sequence or 0,
        }
        self._post(lambda: self._tell(ask))
        try:
            answer = answers.get(timeout=_SILENCE)
        except queue.Empty:
            return [], f"{self._silent_hub(_SILENCE)}."
        finally:
            self._answers.pop(operation.number, None)
        return hang_report.parse_ranges(answer["missing"]), answer["table"]

    def break_group(self, name: str, cause: str) -> None:
        """Report that this rank has stopped waiting in a group, so that no rank uses the group any more."""
        self._post(lambda: self._tell({"kind": "broken", "group": name, "cause": cause}))

    def stop(self) -> None:
        """Stop the thread and close the channel."""
        self._is_stopping = True
        signals.unwatch()
        self._channel.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.put(call)
        self._channel.wake()

    def forget(self) -> None:
        """Close the rank's descriptors in a forked child: a copy that stays open would hide the rank's death."""
        signals.unwatch()
        self._channel.forget()

    # -- actions of the coordinator ------------------------------------------------------------------------------

    def tell_all(self, message: Message) -> None:
        """Send a message to every rank."""
        self._take_from_above(message)

    def tell(self, rank: int, message: Message) -> None:
        """Send a message to one rank."""
        if rank == self.place.rank:
            self._take_from_above(message)
        else:
            hub = self.place.hubs[rank]
            self._channel.send_to(rank if hub == self.place.rank else hub, {**message, "to": rank})

    def speak(self, text: str) -> None:
        """Print a report to stderr."""
        exit_hooks.say(text.rstrip("\n") + "\n")

    def end(self, status: int) -> None:
        """Abort the job; if that fails, end this process, so that the launcher ends the job."""
        with Path(os.devnull).open("w") as nowhere, contextlib.suppress(Exception):
            faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=nowhere)
            self._kill_unresponsive_processes()
            self._end_job(status)
        os._exit(status)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._attempt(self._prepare)
        while not self._is_stopping:
            self._turn_once()
        self._channel.close()

    def _turn_once(self) -> None:
        pause, before = self._pause(), time.monotonic()
        events = self._attempt(self._channel.poll, pause) or []
        if time.monotonic() > before + pause + _LATE_SECONDS:
            # Launchers wake stopped ranks to end them: handle SIGTERM before the connections that it has closed.
            time.sleep(_TERM_SECONDS)
            events += self._attempt(self._channel.poll, 0.0) or []
        self._attempt(self._take_signals)
        now = time.monotonic()
        self._heard |= {event.rank: now for event in events if event.rank is not None}
        for event in events:
            self._attempt(self._take, event)
        while not self._inbox.empty():
            self._attempt(self._inbox.get())
        now = time.monotonic()
        if now >= self._next_tick:
            self._forgive_a_pause(now)
            self._next_tick = now + _TICK
            self._attempt(self._look, now)
        self._attempt(self._close_rounds, now)
        if self._coordinator is not None:
            self._attempt(self._coordinator.tick, now)
        self._attempt(self._act_for_rank_0, now)

    def _attempt(self, step: Callable[..., T], *arguments: Any) -> T | None:
        """Run one step. An error in it must neither end the job nor keep the following steps from running."""
        try:
            return step(*arguments)
        except Exception:  # noqa: BLE001
            if not self._has_failed:
                self._has_failed = True
                trace = traceback.format_exc()
                self.speak(
                    f"[mpicomm] the watchdog of rank {self.place.rank} caught an error and continues. "
                    f"Report it as a bug of mpicomm:\n{trace}"
                )
            time.sleep(_ERROR_SECONDS)
            return None

    def _forgive_a_pause(self, now: float) -> None:
        """Extend running operations' deadlines by the time in which this process was suspended or held the GIL."""
        late = now - self._next_tick
        if self._next_tick and late > _LATE_SECONDS:
            for operation in flight_recorder.running():
                operation.forgive(late)

    def _pause(self) -> float:
        is_busy = self._rounds or self._term_at or (self._coordinator is not None and self._coordinator.is_busy)
        return 0.05 if is_busy else max(0.0, self._next_tick - time.monotonic())

    def _take(self, event: ChannelEvent) -> None:
        if event.lost and not self._is_established:
            self._early.append(event)
        elif event.rank is None:
            if event.message is not None:
                self._take_from_above(event.message)
            elif not self._all_left.is_set() and self._term_at is None:
                self._orphaned = (Deadline(self._turn(), _LONGEST_GAP), event.lost)
        elif event.message is not None:
            self._take_from_below(event.message)
        elif self._term_at is None:  # a launcher that sends SIGTERM sends it to the other ranks, too
            self._tell({"kind": "died", "rank": event.rank, "why": _cause(event.lost)})

    def _take_from_below(self, message: Message) -> None:
        if message["kind"] == "beat":
            return
        if message["kind"] == "status" and message["number"] in self._rounds:
            self._rounds[message["number"]][1].discard(message["rank"])
        self._tell(message)

    def _take_from_above(self, message: Message) -> None:
        self._answer_due = None
        to = message.get("to")
        if to not in (None, self.place.rank):
            self._channel.send_to(to, message)
            return
        if to is None:
            self._channel.send_down(message)
        kind = message["kind"]
        if kind == "collect":
            self._answer_collect(message)
        elif kind == "answer" and message["number"] in self._answers:
            self._answers[message["number"]].put(message)
        elif kind == "broken":
            flight_recorder.break_group(message["group"], message["cause"])
        elif kind == "heard":
            self._heard_exit.set()
        elif kind == "all left":
            self._is_stuck = message["is_stuck"]
            self._all_left.set()
        elif kind == "ending" and not self._is_ending:
            self._is_ending = True
            self._end_by = time.monotonic() + _ENDED_SECONDS
            if message["files"]:
                self._write_files()
            self._kill_unresponsive_processes()

    def _tell(self, message: Message) -> None:
        if self._coordinator is not None:
            self._coordinator.take(message, time.monotonic())
        else:
            self._channel.send_up(message)

    # -- this rank -----------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Check the operations for which this rank waits; runs once a second."""
        if self._coordinator is None:
            self._channel.send_up({"kind": "beat"})
        flight_recorder.refresh_streams()
        if self._gone_by is not None and flight_recorder.last() is not self._taken_down:
            self._taken_down = flight_recorder.last()
            self.take_down()
        for operation in self._running():
            self._look_at(operation, now)
        if self._left is None and self._has_ended():
            self._leave(exit_hooks.exit_status(), is_stuck=False, waits=True, sends=False)

    def _running(self) -> list[flight_recorder.Operation]:
        """Return the operations for which this rank waits; tell rank 0 which reported operations have ended."""
        running = list(flight_recorder.running())
        for number in self._told.keys() - {each.number for each in running}:
            del self._told[number]
            self._tell({"kind": "goes on", "rank": self.place.rank, "number": number})
        return running

    def _has_ended(self) -> bool:
        """Return whether `sys.exit` with a status other than 0 ended the program while threads keep the process alive.

        Without such a status, the threads may do the work of the program.
        """
        if threading.main_thread().is_alive() or not exit_hooks.exit_status():
            return False
        return not flight_recorder.is_used_by_a_thread() and not flight_recorder.has_open_collectives()

    def _look_at(self, operation: flight_recorder.Operation, now: float) -> None:
        waited = now - (operation.start or now)
        timeout = operation.limit or operation.group.timeout
        hang_seconds = self._limits.hang_seconds
        if operation.limit is not None:  # otherwise TimeoutError is raised, and the program may continue after it
            hang_seconds = min(hang_seconds, timeout / 2)
        if waited <= min(WAIT_LIMIT, hang_seconds):
            return
        what = operation.describe(now)
        ask = {
            "rank": self.place.rank,
            "number": operation.number,
            "what": what,
            "seconds": waited,
            "timeout": timeout,
            "raises": operation.limit is None,
            "files": self._files_note(),
        }
        if waited > WAIT_LIMIT and self._is_news(operation, "waits"):
            needs = hang_report.ranges(operation.needs)
            name, sequence = operation.group.name, operation.sequence
            self._tell(
                {
                    **ask,
                    "kind": "waits",
                    "number": operation.number,
                    "needs": needs,
                    "group": name,
                    "sequence": sequence,
                }
            )
        if waited > timeout and operation.limit is not None and self._is_news(operation, "deadline"):
            self._ask({**ask, "kind": "deadline"})
        elif waited > hang_seconds and self._is_news(operation, "hang"):
            self._ask({**ask, "kind": "hang"})

    def _ask(self, ask: Message) -> None:
        self._answer_due = self._answer_due or Deadline(_SILENCE, _LONGEST_GAP)
        self._asked = ask
        self._tell(ask)

    def _is_news(self, operation: flight_recorder.Operation, what: str) -> bool:
        told = self._told.setdefault(operation.number, set())
        is_news = what not in told
        told.add(what)
        return is_news

    def _leave(self, status: int | None, *, is_stuck: bool, waits: bool, sends: bool) -> None:
        if self._left is None:
            self._running()  # reports ended waits: for rank 0, this rank must not wait for ranks that have exited
            self._left = {
                "kind": "left",
                "rank": self.place.rank,
                "status": status,
                "is_stuck": is_stuck,
                "waits": waits,
                "sends": sends,
                "sequences": flight_recorder.sequences(),
            }
            self._tell(self._left)

    def _status(self, now: float) -> dict[str, Any]:
        """Return the status of this rank: its operations, and where its main thread is."""
        last = flight_recorder.last()
        running = sorted(self._running(), key=lambda each: each.number)
        return {
            "running": [each.describe(now) for each in running[:_MAX_REPORTERS]],
            "last": None if last is None else last.describe(now),
            "main": flight_recorder.line_of_main_thread(),
            "sequences": flight_recorder.sequences(),
        }

    def _answer_collect(self, message: Message) -> None:
        now = time.monotonic()
        if self._channel.children:
            self._rounds[message["number"]] = (now + _HUBS_SECONDS, set(self._channel.children))
        if message["files"]:
            self._write_files()
        self._tell_status(message["number"], self.place.rank, self._status(now))

    def _tell_status(self, number: int, rank: int, status: dict[str, Any]) -> None:
        self._tell({"kind": "status", "number": number, "rank": rank, "status": status})

    def _write_files(self) -> None:
        if self._limits.directory is None:
            return
        # A blocked file system is a common reason for hangs: it must not block the watchdog as well.
        errors: list[OSError] = []
        writing = threading.Thread(target=self._write_files_here, args=(self._limits.directory, errors), daemon=True)
        writing.start()
        writing.join(_WRITE_SECONDS)
        for error in errors:  # the report is printed all the same
            self._tell({"kind": "no files", "rank": self.place.rank, "why": str(error)})

    def _write_files_here(self, directory: Path, errors: list[OSError]) -> None:
        about = {"size": self.place.size, "host": self.place.hosts[self.place.rank]}
        try:
            dump.write(directory, self.place.rank, about, is_of_job=True)
        except OSError as error:
            errors.append(error)

    def _files_note(self) -> str:
        directory = self._limits.directory
        return "" if directory is None else f"  operations and stacks of every rank: {directory}"

    # -- other ranks ---------------------------------------------------------------------------------------------

    def _close_rounds(self, now: float) -> None:
        """Answer for the ranks of this hub that have not answered in time."""
        for number, (deadline, silent) in list(self._rounds.items()):
            if silent and now < deadline:
                continue
            del self._rounds[number]
            for rank in silent & self._channel.children.keys():
                seconds = now - self._heard.get(rank, self._started)
                self._tell_status(number, rank, {"silent": seconds, "state": self._state(rank)})

    def _state(self, rank: int) -> str:
        """Return the state of a rank's process according to /proc; empty for a process on another host."""
        process = self._local_processes().get(rank)
        return "" if process is None else local_processes.state_of(process.pid)

    def _local_processes(self) -> dict[int, LocalProcess]:
        """Return the processes of this host whose pid is known, by rank."""
        here = self.place.nodes[self.place.rank]
        return {rank: each for rank, each in self._channel.processes.items() if self.place.nodes[rank] == here}

    def _kill_unresponsive_processes(self) -> None:
        """Kill ranks of this host that cannot end themselves when the job ends, if the launcher would wait for them."""
        if not self._limits.ends_local_processes:
            return
        latest = time.monotonic() - COLLECT_SECONDS
        silent = {rank for rank in self._channel.children if self._heard.get(rank, self._started) < latest}
        if self._answer_due is not None and self._answer_due.passed() > COLLECT_SECONDS:
            silent.add(self.place.hub)
        for rank, process in self._local_processes().items():
            if rank in silent or local_processes.is_stopped(process.pid):
                local_processes.kill(process)

    def _act_for_rank_0(self, now: float) -> None:
        """Report and abort in place of rank 0, if it is dead, unreachable or not responding."""
        # 1. the job is ending
        if self._is_ending and self._coordinator is None and now >= self._end_by:
            self._kill_unresponsive_processes()
            os._exit(1)  # the launcher has not ended this rank
        if self._gone_by is not None and self._gone_by.left() <= -self._turn() and not self._is_ending:
            self._end_alone("all ranks have exited, but destroying their process groups timed out")
        if self._is_ending or self._coordinator is not None or self._term_at is not None:
            return
        # 2. the connection to the hub is lost
        if self._orphaned is not None:
            own_turn, why = self._orphaned
            if own_turn.left() <= 0:
                self._end_alone(f"{self._called_hub()} died: {_cause(why)}")
        # 3. rank 0 does not respond
        elif self._answer_due is not None and (left := self._answer_due.left()) <= 0:
            silent = self._silent_hub(_SILENCE - left)
            if self._asked["kind"] == "deadline" and left <= -self._turn():
                self._end_alone(silent)
            elif self._asked["kind"] == "hang":
                self._answer_due = None
                if self.place.rank == 1:
                    self.speak(f"[mpicomm] possible hang: {silent}.\n{self._own_row(now)}")
                    self._write_files()

    def _silent_hub(self, seconds: float) -> str:
        state = self._state(self.place.hub)
        return f"{self._called_hub()} has not responded for {seconds:.0f} s{': ' if state else ''}{state}"

    def _turn(self) -> float:
        """Return how many seconds this rank waits for other ranks to report in place of rank 0."""
        behind = 0.0 if self.place.hub == 0 else COLLECT_SECONDS
        return turn_of(self.place.rank) + behind

    def _end_alone(self, cause: str) -> None:
        self._is_ending = True
        self._write_files()
        self._kill_unresponsive_processes()
        if self.place.rank <= _MAX_REPORTERS:
            self.speak(f"[mpicomm] {cause}; rank {self.place.rank} aborts the job.\n{self._own_row(time.monotonic())}")
        time.sleep(_TERM_SECONDS)  # launchers forward output by pipes
        self.end(1)

    def _own_row(self, now: float) -> str:
        return hang_report.table({self.place.rank: self._status(now)}, self.place.hosts)

    def _called_hub(self) -> str:
        hub = self.place.hub
        return f"rank {hub} of {self.place.size} on {self.place.hosts[hub]}"

    # -- signals -------------------------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        numbers, self._channel.woken = self._channel.woken, bytearray()
        now = time.monotonic()
        if signals.deliver(bytes(numbers)) and self._term_at is None:
            # The launcher may have sent it because a rank has died, which rank 0 is about to report.
            self._term_at = now + _TERM_SECONDS
            if self._left is None:
                self._tell({"kind": "terminated", "rank": self.place.rank})
        if self._term_at is not None and now >= self._term_at:
            signals.end_by_sigterm()


def turn_of(rank: int) -> float:
    """Return how many seconds a rank waits for lower ranks to report, when rank 0 does not respond."""
    return _TURN_SECONDS * min(max(rank - 1, 0), _MAX_REPORTERS)


def _cause(lost: str) -> str:
    if lost in _UNREACHABLE:
        return f"its host is unreachable ({lost})"
    return "its process ended without reporting an error (killed, crashed, os._exit or MPI_Abort)"


_current: Watchdog | None = None


def current() -> Watchdog | None:
    """Return the watchdog of this process; None if none is running."""
    return _current


def set_current(watchdog: Watchdog | None) -> None:
    """Set the watchdog of this process; None removes it."""
    global _current  # noqa: PLW0603  a process is in one job at a time
    _current = watchdog


def _forget_in_child() -> None:
    if _current is not None:
        _current.forget()
        set_current(None)


os.register_at_fork(after_in_child=_forget_in_child)
