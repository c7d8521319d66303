"""The watchdog's coordinator on rank 0: receives the reports of all ranks and decides when to abort the job.

It has no thread and no socket, and reads no clock: the caller passes messages and times, and `Actions` carries out its
decisions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from mpicomm.watchdog import hang_report
from mpicomm.watchdog.connection import Message

COLLECT_SECONDS = 4.0
"""Time limit for the ranks' status reports. Hubs use a shorter one, to report ranks that do not answer them."""

_GATHER_SECONDS = 0.5  # waits of other ranks for the same ranks are collected for so long
_TRANSIT_SECONDS = 5.0  # a message may arrive this long after its sender has exited,
_SENDING_SECONDS = 60.0  # or this long (at most the hang limit) if the sender had sends in flight
_LAUNCHER_SECONDS = 2.0  # time for the launcher to end the job itself, with the dead rank's own status
_TELLER_SECONDS = 5.0  # time for a rank that has reported its failure to abort the job
_END_SECONDS = 0.5  # time for the ranks to write their dump files


class Actions(Protocol):
    """The actions that the coordinator can request."""

    def tell_all(self, message: Message) -> None:
        """Send a message to every rank, this one included."""

    def tell(self, rank: int, message: Message) -> None:
        """Send a message to one rank."""

    def speak(self, text: str) -> None:
        """Print a report, on rank 0 only."""

    def claim(self) -> bool:
        """Claim the right to report the cause of the job's end; False if another rank has it."""

    def end(self, status: int) -> None:
        """Abort the job with an exit status."""


@dataclasses.dataclass
class _Collection:
    """One collection of the status of all ranks."""

    number: int
    deadline: float
    asks: dict[tuple[str, int, int], Message] = dataclasses.field(default_factory=dict)
    """The requests that the collection answers, by kind, rank and operation number."""

    statuses: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)


class Coordinator:
    """Decides from the reports of the ranks whether the job hangs, which ranks are at fault, and when to abort."""

    def __init__(self, hosts: Sequence[str], hubs: Sequence[int], hang_seconds: float, actions: Actions) -> None:
        """Create the coordinator.

        Args:
            hosts: The host of every rank.
            hubs: The hub of every rank.
            hang_seconds: Seconds between two hang reports.
        """
        self.size = len(hosts)
        self._hosts = hosts
        self._hubs = hubs
        self._hang_seconds = hang_seconds
        self._actions = actions
        self._left: dict[int, dict[str, Any]] = {}
        self._died: dict[int, str] = {}
        self._terminated: set[int] = set()
        self._waits: dict[tuple[int, int], Message] = {}
        self._collection: _Collection | None = None
        self._collections = 0
        self._next_report = 0.0
        self._has_files = False
        self._has_warned_of_files = False
        self._check_at: float | None = None
        self._end_at: float | None = None
        self._status = 1

    @property
    def is_ending(self) -> bool:
        """Whether the coordinator has decided to abort the job."""
        return self._end_at is not None

    @property
    def is_busy(self) -> bool:
        """Whether a step is due soon, so that `tick` must be called often."""
        return any(each is not None for each in (self._collection, self._check_at, self._end_at))

    # -- messages ------------------------------------------------------------------------------------------------

    def take(self, message: Message, now: float) -> None:
        """Process a message of a rank."""
        kind = message["kind"]
        if kind == "status":
            self._take_status(message)
        elif kind == "left":
            self._take_left(message, now)
        elif kind == "waits":
            self._waits[message["rank"], message["number"]] = message
            self._look_for_leavers(now)
        elif kind == "goes on":
            self._waits.pop((message["rank"], message["number"]), None)
            self._drop_asks(message)
        elif kind == "died":
            self.lose(message["rank"], message["why"], now)
        elif kind == "failed":
            self._prepare_end(now + _TELLER_SECONDS, files=False)
        elif kind == "terminated":
            self._terminated.add(message["rank"])
        elif kind == "broken":
            self._actions.tell_all(message)
        elif kind == "no files":
            self._warn_of_files(message)
        elif kind == "exits":
            self._prepare_cause(message["rank"], f"called os._exit({message['status']})", now)
            self._actions.tell(message["rank"], {"kind": "heard"})
        elif kind in ("hang", "deadline", "missing"):
            self._actions.tell(message["rank"], {"kind": "heard"})
            self._ask(message, now)

    def lose(self, rank: int, why: str, now: float) -> None:
        """Process the loss of the connection to a rank."""
        has_gone = rank in self._left and (len(self._left) == self.size or not self._left[rank]["waits"])
        if has_gone or rank in self._died:
            return
        self._died[rank] = why
        what = "was terminated by SIGTERM, which rank 0 did not receive" if rank in self._terminated else f"died: {why}"
        self._prepare_cause(rank, what, now)

    def tick(self, now: float) -> None:
        """Carry out the steps that are due at the time `now`."""
        if self._end_at is not None:
            if now >= self._end_at:
                self._end_at = now + _TELLER_SECONDS
                self._actions.end(self._status)
            return
        if self._collection is not None and (now >= self._collection.deadline or self._is_complete()):
            self._close_collection(now)
        if self._check_at is not None and now >= self._check_at:
            self._check_at = None
            self._check_exited_ranks(now)

    def _warn_of_files(self, message: Message) -> None:
        """Print why files cannot be written: once, since the reason is usually the same on all ranks."""
        if not self._has_warned_of_files:
            self._has_warned_of_files = True
            rank = message["rank"]
            who = f"rank {rank} on {self._hosts[rank]}"
            self._actions.speak(f"[mpicomm] {who} cannot write its operations and stacks: {message['why']}")

    # -- ranks that have exited ----------------------------------------------------------------------------------

    def _take_left(self, message: Message, now: float) -> None:
        self._left[message["rank"]] = {**message, "moment": now}
        if len(self._left) == self.size:
            is_stuck = any(each["is_stuck"] for each in self._left.values())
            self._actions.tell_all({"kind": "all left", "is_stuck": is_stuck})
        else:
            self._look_for_leavers(now)

    def _look_for_leavers(self, now: float) -> None:
        if self._waits and self._left:
            self._check_at = min(self._check_at or math.inf, now + _GATHER_SECONDS)

    def _check_exited_ranks(self, now: float) -> None:
        if self._find_culprits(self._waits.values(), now):
            self._ask({"kind": "left"}, now)
        elif self._waits and (soon := [each for each in map(self._missed_at, self._left) if each > now]):
            self._check_at = min(soon)

    def _find_culprits(self, waits: Iterable[Message], now: float) -> list[int]:
        waits = [wait for wait in waits if not self._is_at_its_end(wait["rank"])]
        return sorted({rank for key in _distinct(waits) for rank in self._culprits(*key, now)})

    def _is_at_its_end(self, rank: int) -> bool:
        """Return whether a rank only destroys its groups, for which it waits together with all other ranks."""
        return rank in self._left and not self._left[rank]["is_stuck"]

    def _culprits(self, needs: str, group: str, sequence: int | None, waiter: int | None, now: float) -> list[int]:
        """Return the ranks that have exited without calling an operation for which another rank waits."""
        if sequence is None:
            others = [rank for rank in hang_report.parse_ranges(needs) if rank != waiter]
            have_gone = all(rank in self._left and now >= self._missed_at(rank) for rank in others)
            return others if others and have_gone else []
        needed = set(hang_report.parse_ranges(needs))
        return [
            rank
            for rank, leave in self._left.items()
            if rank in needed and leave["sequences"].get(group, -1) < sequence
        ]

    def _missed_at(self, rank: int) -> float:
        """Return the time after which no message can arrive that a rank sent before it exited."""
        leave = self._left[rank]
        moment: float = leave["moment"]
        return moment + (min(self._hang_seconds, _SENDING_SECONDS) if leave["sends"] else _TRANSIT_SECONDS)

    # -- the status of all ranks ---------------------------------------------------------------------------------

    def _ask(self, ask: Message, now: float) -> None:
        if self.is_ending or (ask["kind"] == "hang" and now < self._next_report):
            return
        is_new = self._collection is None
        if self._collection is None:
            self._collections += 1
            self._collection = _Collection(self._collections, now + COLLECT_SECONDS)
        self._collection.asks[ask["kind"], ask.get("rank", -1), ask.get("number", -1)] = ask
        if is_new:  # rank 0 answers inside this call, and may report that its operation has ended
            # A slow checkpoint looks like a hang: write one set of files, and no other until the job ends.
            wants_files = ask["kind"] == "deadline" or (ask["kind"] in ("left", "hang") and not self._has_files)
            self._has_files = self._has_files or wants_files
            self._actions.tell_all({"kind": "collect", "number": self._collections, "files": wants_files})

    def _drop_asks(self, message: Message) -> None:
        """Drop the requests for an operation that has ended in the meantime."""
        if self._collection is not None:
            for kind in ("hang", "deadline"):
                self._collection.asks.pop((kind, message["rank"], message["number"]), None)

    def _take_status(self, message: Message) -> None:
        if self._collection is not None and message["number"] == self._collection.number:
            self._collection.statuses[message["rank"]] = message["status"]

    def _is_complete(self) -> bool:
        assert self._collection is not None
        return len(self._collection.statuses) + len(self._died) >= self.size

    def _close_collection(self, now: float) -> None:
        assert self._collection is not None
        # 1. complete the status table
        asks, statuses = list(self._collection.asks.values()), self._collection.statuses
        self._collection = None
        # A rank that answers has reported its ended waits before. The waits of any other rank may have ended, too.
        still = {rank for rank, status in statuses.items() if "silent" not in status}
        culprits = self._find_culprits([wait for wait in self._waits.values() if wait["rank"] in still], now)
        for rank in range(self.size):
            statuses[rank] = self._complete(rank, statuses.get(rank), now)
        # 2. answer the ranks that asked which ranks are missing
        for ask in asks:
            if ask["kind"] == "missing":
                self._answer(ask, statuses)
        # 3. abort for ranks that have exited, abort at a timeout, or report a possible hang
        kinds = {ask["kind"] for ask in asks}
        if "left" in kinds and culprits:
            self._end_by_leavers(culprits, statuses, now)
            return
        if "left" in kinds and self._waits:
            self._check_at = min(self._check_at or math.inf, now + _TRANSIT_SECONDS)  # a waiting rank may be silent
        if "deadline" in kinds:
            self._end_by_deadline(next(ask for ask in asks if ask["kind"] == "deadline"), statuses, now)
        elif "hang" in kinds:
            self._next_report = now + self._hang_seconds
            first = next(ask for ask in asks if ask["kind"] == "hang")
            waited = f"{hang_report.called([first['rank']])} has waited {first['seconds']:.0f} s"
            then = "raising TimeoutError" if first["raises"] else "aborting"
            text = f"[mpicomm] possible hang: {waited}; {then} at the {first['timeout']:.0f} s timeout"
            self._actions.speak("\n".join([text, hang_report.table(statuses, self._hosts), first["files"]]))

    def _complete(self, rank: int, status: dict[str, Any] | None, now: float) -> dict[str, Any]:
        if rank in self._died:
            return {"died": self._died[rank]}
        if status is None:
            hub = self._hubs[rank]
            state = f"its hub, rank {hub}, does not respond" if hub not in (rank, 0) else ""
            status = {"silent": COLLECT_SECONDS, "state": state}
        if rank in self._left:
            leave = self._left[rank]
            return {**status, "left": {"status": leave["status"], "seconds": now - leave["moment"]}}
        return status

    def _answer(self, ask: Message, statuses: dict[int, dict[str, Any]]) -> None:
        missing = {
            rank: statuses[rank]
            for rank in hang_report.parse_ranges(ask["needs"])
            if statuses[rank].get("sequences", {}).get(ask["group"], -1) < ask["sequence"]
        }
        self._actions.tell(
            ask["rank"],
            {
                "kind": "answer",
                "number": ask["number"],
                "missing": hang_report.ranges(missing),
                "table": hang_report.table(missing, self._hosts),
            },
        )

    # -- aborting the job ----------------------------------------------------------------------------------------

    def _end_by_leavers(self, culprits: list[int], statuses: dict[int, dict[str, Any]], now: float) -> None:
        first = culprits[0]
        phrase = "has exited, but other ranks wait" if len(culprits) == 1 else "have exited, but other ranks wait"
        pronoun = "it" if len(culprits) == 1 else "them"
        status = self._left[first]["status"]
        text = f"{self._name(culprits)} {phrase} for {pronoun}; aborting the job"
        self._end(f"[mpicomm] {text}\n{hang_report.table(statuses, self._hosts)}", now + _END_SECONDS, now, status or 1)

    def _end_by_deadline(self, ask: Message, statuses: dict[int, dict[str, Any]], now: float) -> None:
        what = hang_report.operation(ask["what"])
        text = f"{self._name([ask['rank']])} timed out after {ask['timeout']:g} s in {what}; aborting the job"
        table = hang_report.table(statuses, self._hosts)
        self._end(f"[mpicomm] {text}\n{table}\n{ask['files']}", now + _END_SECONDS, now, 1)

    def _prepare_cause(self, rank: int, what: str, now: float) -> None:
        if not self.is_ending:
            self._end(f"[mpicomm] {self._name([rank])} {what}", now + _LAUNCHER_SECONDS, now, 1)

    def _name(self, ranks: list[int]) -> str:
        hosts = sorted({self._hosts[rank] for rank in ranks})
        return f"{hang_report.called(ranks)} of {self.size} on {', '.join(hosts[:4])}{' ...' if len(hosts) > 4 else ''}"

    def _end(self, text: str, end_at: float, now: float, status: int) -> None:
        self._status = status
        if self._actions.claim():
            self._actions.speak(text)
            self._prepare_end(end_at, files=True)
        else:
            self._prepare_end(now + _TELLER_SECONDS, files=False)  # another rank reports the cause and aborts

    def _prepare_end(self, end_at: float, *, files: bool) -> None:
        if self._end_at is None:
            self._end_at = end_at
            self._actions.tell_all({"kind": "ending", "files": files})


def _distinct(waits: Iterable[Message]) -> set[tuple[str, str, int | None, int | None]]:
    """Return the distinct waits; thousands of ranks usually wait for the same ranks."""
    return {
        (wait["needs"], wait["group"], wait["sequence"], wait["rank"] if wait["sequence"] is None else None)
        for wait in waits
    }
