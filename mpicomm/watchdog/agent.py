"""The watchdog: a thread of every rank that notices when the job cannot go on, and says why.

It calls no MPI but Abort, spins nowhere, and wakes once a second. What it sees of its own rank it tells up the side
channel to rank 0, whose `Coordinator` decides. Where rank 0 itself is gone or stands still, the next rank speaks for it.
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
"""Seconds that a rank waits for one that has left in good order, before the job ends."""

_LATE_SECONDS = 5.0  # by which a look is late if the process stood still
_ERROR_SECONDS = 0.05  # pause after an error, which may come again and again
_TICK = 1.0  # seconds between two looks
_LONGEST_GAP = 2 * _TICK  # seconds between two looks that count, as each does for a deadline
_HUBS_SECONDS = 2.0  # in which the ranks of a hub answer it
_SILENCE = 1.5 * COLLECT_SECONDS  # without an answer, after which rank 0 counts as silent
_SPEAKERS = 8  # how many ranks may speak in rank 0's place,
_TURN_SECONDS = 2.0  # each so long after the one before
_TERM_SECONDS = 0.3  # in which news of a rank's death may come, before SIGTERM is obeyed
_ENDED_SECONDS = 10.0  # in which the end of the job must have reached a rank
_WRITE_SECONDS = 1.0  # that the watchdog waits for a rank's files
_TAKE_DOWN_SECONDS = 60.0  # in which ranks that have all left have destroyed one more of their groups
_UNREACHABLE = {os.strerror(each) for each in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)}
_EXIT_SECONDS = 0.5  # that os._exit waits to be heard: some launchers kill the others before they can say why
_ABORT_SECONDS = 5.0  # in which an abort must have ended this process


@dataclasses.dataclass(frozen=True)
class RankInfo:
    """A rank's place among the watchdogs."""

    rank: int
    hosts: Sequence[str]
    """The host of every rank."""

    nodes: Sequence[int]
    """The node of every rank."""

    hubs: Sequence[int]
    """The hub of every rank: the first rank of its node, or rank 0 for those."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def hub(self) -> int:
        """This rank's hub."""
        return self.hubs[self.rank]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the watchdog goes by."""

    hang_seconds: float
    """After so many seconds in an operation, the job's ranks are asked where they are."""

    directory: Path | None
    """Where files go; None for none."""

    ends_local_processes: bool = False
    """Whether the launcher may wait for a rank that cannot end itself, as srun does for a stopped one."""


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
        """Make the watchdog; `start` sets it to work.

        Args:
            end: Ends the job with a status.
            claim: Tells whether nobody has named a cause of the job's end yet.
            prepare: Called first on the watchdog's thread.
        """
        self.place = place
        self._channel = channel
        self._limits = limits
        self._end_job = end
        self.claim = claim
        self._prepare = prepare
        self._is_established = False
        self._early: list[ChannelEvent] = []  # connections lost before every rank had one
        self._coordinator = Coordinator(place.hosts, place.hubs, limits.hang_seconds, self) if place.rank == 0 else None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mpicomm-watchdog", daemon=True)
        self._is_stopping = False
        self._is_ending = False
        self._end_by = 0.0  # when this process must have been ended, once that is decided
        self._has_failed = False
        self._all_left = threading.Event()
        self._is_stuck = False  # whether some rank is, once all have left
        self._gone_by: Deadline | None = None  # by when this process must have taken down one more of its groups
        self._taken_down: flight_recorder.Operation | None = None  # the last of them
        self._left: Message | None = None
        self._next_tick = 0.0
        self._told: dict[int, set[str]] = {}  # by operation: what was told of it
        self._heard: dict[int, float] = {}  # by child: when it last said something
        self._started = time.monotonic()
        self._rounds: dict[int, tuple[float, set[int]]] = {}  # by collection: until when, and whose answers are open
        self._answer_due: Deadline | None = None  # by when rank 0 must answer what it was asked
        self._orphaned: tuple[Deadline, str] | None = None  # how long to wait since the hub was lost, and why it was
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._term_at: float | None = None
        self._heard_exit = threading.Event()

    # -- for other threads ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, and notice signals."""
        signals.watch(self._channel.wake_fd)
        self._thread.start()

    def establish(self) -> None:
        """Take note that every rank has connected: from now on, who is lost is dead."""

        def establish() -> None:
            self._is_established = True
            for event in self._early:
                self._take(event)

        self._post(establish)

    def leave(self, status: int | None, *, is_stuck: bool, waits: bool = True, sends: bool = False) -> None:
        """Say that this rank calls no more operations.

        Args:
            is_stuck: An operation of this rank may never end, so that MPI cannot be finalised.
            waits: Whether it waits for the others now, or goes at once.
            sends: Whether messages of it are on their way.
        """
        self._post(lambda: self._leave(status, is_stuck=is_stuck, waits=waits, sends=sends))

    def wait_for_all_to_leave(self, meanwhile: Callable[[], Any], pause: float) -> bool:
        """Wait until every rank has left, and call `meanwhile` every `pause` seconds.

        Returns:
            Whether a rank is stuck.
        """
        while not self._all_left.wait(pause) and self._thread.is_alive():
            meanwhile()
        return self._is_stuck

    def take_down(self) -> None:
        """Say that this rank destroys its groups now, none of which must take long: all ranks do."""
        self._gone_by = Deadline(_TAKE_DOWN_SECONDS, _LONGEST_GAP)

    def fail(self) -> None:
        """Say that this rank has failed, tells why itself, and ends the job."""
        self._post(lambda: self._tell({"kind": "failed", "rank": self.place.rank}))

    def exit_at_once(self, status: int) -> None:
        """Say that this rank is about to call `os._exit`, and wait a moment until that is heard."""
        if self._is_ending or threading.current_thread() is self._thread:
            return
        self._post(lambda: self._tell({"kind": "exits", "rank": self.place.rank, "status": status}))
        self._heard_exit.wait(_EXIT_SECONDS)

    def missing(self, operation: flight_recorder.Operation) -> tuple[list[int], str]:
        """Find out which ranks have not come to an operation.

        Returns:
            The ranks, and a table of where they are; nobody, and what is known of rank 0, if that does not answer.
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
        """Say that this rank has given up waiting in a group: no other needs to come to it."""
        self._post(lambda: self._tell({"kind": "broken", "group": name, "cause": cause}))

    def stop(self) -> None:
        """End the thread and close the channel."""
        self._is_stopping = True
        signals.unwatch()
        self._channel.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.put(call)
        self._channel.wake()

    def forget(self) -> None:
        """Let go, in a forked child, of what is the rank's: a copy that stays open would hide the rank's death."""
        signals.unwatch()
        self._channel.forget()

    # -- the judge's hands ---------------------------------------------------------------------------------------

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
        """Print."""
        exit_hooks.say(text.rstrip("\n") + "\n")

    def end(self, status: int) -> None:
        """End the job; if that does not work, at least this process, and the launcher has to notice."""
        with Path(os.devnull).open("w") as nowhere, contextlib.suppress(Exception):
            faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=nowhere)
            self._kill_silent_neighbours()
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
            # Who was stopped is woken to be ended: SIGTERM must be seen before what it has done to the others.
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
        self._attempt(self._speak_for_rank_0, now)

    def _attempt(self, step: Callable[..., T], *arguments: Any) -> T | None:
        """Take one step; whatever error it meets, the job must not end by its watchdog, nor the steps behind fail."""
        try:
            return step(*arguments)
        except Exception:  # noqa: BLE001
            if not self._has_failed:
                self._has_failed = True
                trace = traceback.format_exc()
                self.speak(f"[mpicomm] the watchdog of rank {self.place.rank} met an error, and goes on:\n{trace}")
            time.sleep(_ERROR_SECONDS)
            return None

    def _forgive_a_pause(self, now: float) -> None:
        """Where this process stood still (suspended, or in code that keeps the GIL), let no deadline pass by that."""
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
        elif self._term_at is None:  # a launcher that sends SIGTERM sends it to the others, too
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
            self._kill_silent_neighbours()

    def _tell(self, message: Message) -> None:
        """Tell rank 0."""
        if self._coordinator is not None:
            self._coordinator.take(message, time.monotonic())
        else:
            self._channel.send_up(message)

    # -- this rank -----------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Look at what this rank waits for."""
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
        """Return what this rank waits for, and tell which waiting has ended of what was told."""
        running = list(flight_recorder.running())
        for number in self._told.keys() - {each.number for each in running}:
            del self._told[number]
            self._tell({"kind": "goes on", "rank": self.place.rank, "number": number})
        return running

    def _has_ended(self) -> bool:
        """Tell whether the program has ended by `sys.exit`, badly, while threads keep the process alive.

        Without that, the threads may be what the program is about.
        """
        if threading.main_thread().is_alive() or not exit_hooks.exit_status():
            return False
        return not flight_recorder.is_used_by_a_thread() and not flight_recorder.has_open_collectives()

    def _look_at(self, operation: flight_recorder.Operation, now: float) -> None:
        waited = now - (operation.start or now)
        timeout = operation.limit or operation.group.timeout
        hang_seconds = self._limits.hang_seconds
        if operation.limit is not None:  # elsewhere the program hears of its timeouts, however short, and goes on
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
            self._running()  # rank 0 is not to take this rank for one that waits for others that have left
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
        """Say where this rank is."""
        last = flight_recorder.last()
        running = sorted(self._running(), key=lambda each: each.number)
        return {
            "running": [each.describe(now) for each in running[:_SPEAKERS]],
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
        # A file system that stands still is one of the reasons why jobs do: it must not stop the watchdog as well.
        errors: list[OSError] = []
        writing = threading.Thread(target=self._write_files_here, args=(self._limits.directory, errors), daemon=True)
        writing.start()
        writing.join(_WRITE_SECONDS)
        for error in errors:  # the table comes all the same
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

    # -- others --------------------------------------------------------------------------------------------------

    def _close_rounds(self, now: float) -> None:
        """Answer for the ranks behind this hub that have not answered in time."""
        for number, (deadline, silent) in list(self._rounds.items()):
            if silent and now < deadline:
                continue
            del self._rounds[number]
            for rank in silent & self._channel.children.keys():
                seconds = now - self._heard.get(rank, self._started)
                self._tell_status(number, rank, {"silent": seconds, "state": self._state(rank)})

    def _state(self, rank: int) -> str:
        """Say what the system knows of a rank's process; empty for one on another host."""
        process = self._neighbours().get(rank)
        return "" if process is None else local_processes.state_of(process.pid)

    def _neighbours(self) -> dict[int, LocalProcess]:
        """Return the processes on this host that have introduced themselves."""
        here = self.place.nodes[self.place.rank]
        return {rank: each for rank, each in self._channel.processes.items() if self.place.nodes[rank] == here}

    def _kill_silent_neighbours(self) -> None:
        """Kill those that cannot end themselves, where the job ends and the launcher would wait for them."""
        if not self._limits.ends_local_processes:
            return
        latest = time.monotonic() - COLLECT_SECONDS
        silent = {rank for rank in self._channel.children if self._heard.get(rank, self._started) < latest}
        if self._answer_due is not None and self._answer_due.passed() > COLLECT_SECONDS:
            silent.add(self.place.hub)
        for rank, process in self._neighbours().items():
            if rank in silent or local_processes.is_stopped(process.pid):
                local_processes.kill(process)

    def _speak_for_rank_0(self, now: float) -> None:
        """Where rank 0 or the way to it is gone, or rank 0 does not answer, do what it would do."""
        if self._is_ending and self._coordinator is None and now >= self._end_by:
            self._kill_silent_neighbours()
            os._exit(1)  # the launcher has left this rank alone
        if self._gone_by is not None and self._gone_by.left() <= -self._turn() and not self._is_ending:
            self._end_alone("all ranks have come to their end, but their groups cannot be taken down")
        if self._is_ending or self._coordinator is not None or self._term_at is not None:
            return
        if self._orphaned is not None:
            own_turn, why = self._orphaned
            if own_turn.left() <= 0:
                self._end_alone(f"{self._called_hub()} died: {_cause(why)}")
        elif self._answer_due is not None and (left := self._answer_due.left()) <= 0:
            silent = self._silent_hub(_SILENCE - left)
            if self._asked["kind"] == "deadline" and left <= -self._turn():
                self._end_alone(silent)
            elif self._asked["kind"] == "hang":
                self._answer_due = None
                if self.place.rank == 1:
                    self.speak(f"[mpicomm] the job stands still: {silent}.\n{self._own_row(now)}")
                    self._write_files()

    def _silent_hub(self, seconds: float) -> str:
        state = self._state(self.place.hub)
        return f"{self._called_hub()} has not answered for {seconds:.0f} s{': ' if state else ''}{state}"

    def _turn(self) -> float:
        """Return how many seconds this rank waits for others to speak in rank 0's place."""
        behind = 0.0 if self.place.hub == 0 else COLLECT_SECONDS
        return turn_of(self.place.rank) + behind

    def _end_alone(self, cause: str) -> None:
        self._is_ending = True
        self._write_files()
        self._kill_silent_neighbours()
        if self.place.rank <= _SPEAKERS:
            self.speak(f"[mpicomm] {cause}; rank {self.place.rank} ends the job.\n{self._own_row(time.monotonic())}")
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
            # The launcher may send it because a rank has died, which rank 0 is about to say.
            self._term_at = now + _TERM_SECONDS
            if self._left is None:
                self._tell({"kind": "terminated", "rank": self.place.rank})
        if self._term_at is not None and now >= self._term_at:
            signals.end_by_sigterm()


def turn_of(rank: int) -> float:
    """Return how many seconds a rank waits for those before it, where rank 0 does not answer and one must speak."""
    return _TURN_SECONDS * min(max(rank - 1, 0), _SPEAKERS)


def _cause(lost: str) -> str:
    if lost in _UNREACHABLE:
        return f"its host cannot be reached any more ({lost})"
    return "its process has ended without a word (killed, crashed, os._exit or MPI_Abort)"


_current: Watchdog | None = None


def current() -> Watchdog | None:
    """Return the watchdog of this process, if one runs."""
    return _current


def set_current(watchdog: Watchdog | None) -> None:
    """Say which watchdog is the process's; None once there is none."""
    global _current  # noqa: PLW0603  a process is in one job at a time
    _current = watchdog


def _forget_in_child() -> None:
    if _current is not None:
        _current.forget()
        set_current(None)


os.register_at_fork(after_in_child=_forget_in_child)
