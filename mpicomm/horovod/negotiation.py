"""The negotiation of a process set: which submissions are ready on all ranks.

Tensors are matched by name, in any order. All ranks hold the same state, because all of them process the same messages
in the same order; there is no coordinator. A round is collective. A rank takes part in a round when it has pending
submissions: an operation cannot start before its last rank has submitted it, so that a round that waits for a rank
without submissions delays nothing. A round has one or two exchanges:

1. An all-reduce (bitwise AND) of one bit for each name in the cache: whether the rank has submitted it, with the
   arguments that the ranks have agreed on before. In a steady state this is all.
2. If a rank has a submission that is not in the cache: an all-gather of the descriptions of these submissions.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from mpicomm.horovod.submission import ALLREDUCE, BARRIER, JOIN, Signature, Submission
from mpicomm.horovod.variables import Variables

_NOTHING_TO_DESCRIBE, _STAYS_OPEN = 1, 2  # flags in the first word, which a rank clears for all
_FLAG_BITS = 64  # the first word has the flags, the following ones a bit for each name in the cache
_WITH_JOIN = {ALLREDUCE, BARRIER, JOIN}
_STALLED = "mpicomm: stalled tensors: some ranks have submitted these names, other ranks have not:"
_STALL_REMEDY = "Submit every name on all ranks of its process set, or call hvd.join() on ranks without further data."


class Exchange(Protocol):
    """The communication between the ranks of the process set."""

    def bitwise_and(self, value: int, num_words: int) -> int:
        """Return the AND of the values, of 64 * num_words bits, of all ranks (collective)."""

    def all_gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks (collective)."""


@dataclasses.dataclass(slots=True)
class Ready:
    """An operation that is ready on all ranks."""

    name: str
    signature: Signature
    submission: Submission | None
    """This rank's submission; None if this rank has joined without it."""

    error: str = ""
    """The reason, equal on all ranks, for which the operation must fail."""

    last_joined: int = -1
    """The result of a join: the last rank that joined."""


@dataclasses.dataclass
class Announcement:
    """A name that some ranks have described, while others have not."""

    start: float
    """When the first rank submitted it, on the monotonic clock of this rank."""

    signatures: dict[int, Signature] = dataclasses.field(default_factory=dict)
    is_cacheable: bool = True


@dataclasses.dataclass(slots=True)
class _Slot:
    name: str
    signature: Signature
    last_round: int = 0


class Negotiation:
    """The state of the negotiation on one rank."""

    def __init__(
        self, exchange: Exchange, rank: int, ranks: Sequence[int], cache_capacity: int, describe_after: float
    ) -> None:
        """Start without submissions.

        Args:
            rank: This rank in the process set.
            ranks: The ranks of the set in the job.
            describe_after: Seconds after which a pending submission in the cache is described to all ranks, so that
                they can report it; 0 for never.
        """
        self._exchange, self._rank, self._ranks = exchange, rank, ranks
        self._capacity, self._describe_after = cache_capacity, describe_after
        self._round = 0
        self._pending: dict[str, Submission] = {}  # of this rank
        self._bits = 0  # those among them that are in the cache, by slot
        self._oldest_bit = 0.0  # a time before which none of these was submitted
        self._to_describe: list[Submission] = []
        # The following is equal on all ranks.
        self._slots: list[_Slot | None] = []
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = []
        self.announced: dict[str, Announcement] = {}
        self._joined: dict[int, None] = {}

    def run_round(self, new: list[Submission], *, is_closing: bool) -> tuple[list[Ready], bool]:
        """Return the operations that are ready, in the same order on all ranks, and whether a rank is closing the set.

        Args:
            new: The submissions since the previous round.
            is_closing: Whether this rank closes the process set.
        """
        self._round += 1
        # 1. the bits of this rank
        for submission in new:
            self._pending[submission.name] = submission
            slot = self._slot_of.get(submission.name)
            if slot is None or self._slots[slot].signature != submission.signature:  # type: ignore[union-attr]
                self._to_describe.append(submission)
                continue
            if not self._bits:
                self._oldest_bit = submission.start
            self._bits |= 1 << slot
        if self._describe_after and self._bits and time.monotonic() - self._oldest_bit > self._describe_after:
            self._describe_old()
        bits = (1 << len(self._slots)) - 1 if self._rank in self._joined else self._bits
        flags = _NOTHING_TO_DESCRIBE * (not self._to_describe) + _STAYS_OPEN * (not is_closing)
        # 2. the bits of all ranks
        num_words = 1 + (len(self._slots) + 63) // 64
        agreed = self._exchange.bitwise_and(bits << _FLAG_BITS | flags, num_words)
        ready = self._take_cached(agreed >> _FLAG_BITS)
        # 3. the descriptions of all ranks
        if not agreed & _NOTHING_TO_DESCRIBE:
            self._exchange_descriptions()
            ready += self._take_announced()
        return ready, not agreed & _STAYS_OPEN

    def _describe_old(self) -> None:
        """Describe the pending submissions in the cache, whose ranks other ranks do not know."""
        for slot in _ones(self._bits):
            self._to_describe.append(self._pending[self._slots[slot].name])  # type: ignore[union-attr]
        self._bits = 0

    # -- the cache -------------------------------------------------------------------------------------------------

    def _take_cached(self, bits: int) -> list[Ready]:
        """Return the operations of the slots that all ranks have submitted."""
        self._bits &= ~bits
        ready = []
        for index in _ones(bits):
            slot = self._slots[index]
            assert slot is not None  # at least one rank has not joined, and has set this bit for its submission
            slot.last_round = self._round
            ready.append(self._ready(slot.name, slot.signature))
        return ready

    def _ready(self, name: str, signature: Signature, error: str = "") -> Ready:
        if self._joined and signature.kind not in _WITH_JOIN and not error:
            joined = [self._ranks[rank] for rank in self._joined]
            error = (
                f"{signature.kind} is not supported while ranks {joined} have joined.\n"
                f"Call hvd.join() on all ranks before it, or use allreduce (sparse_as_dense=True in an optimizer)."
            )
        return Ready(name, signature, self._pending.pop(name, None), error and f"{name}: {error}")

    def _remember(self, name: str, signature: Signature) -> None:
        if not self._free:
            if len(self._slots) < self._capacity:
                self._free.append(len(self._slots))
                self._slots.append(None)
            else:  # every rank forgets the same name: the one that was ready least recently
                self._forget(min(filter(None, self._slots), key=lambda slot: slot.last_round).name)
        index = self._free.pop()
        self._slots[index] = _Slot(name, signature, self._round)
        self._slot_of[name] = index

    def _forget(self, name: str) -> None:
        """Remove a name from the cache; a pending submission of this rank is described in the next round."""
        index = self._slot_of.pop(name)
        self._slots[index] = None
        self._free.append(index)
        if self._bits >> index & 1:
            self._bits &= ~(1 << index)
            self._to_describe.append(self._pending[name])

    # -- descriptions ----------------------------------------------------------------------------------------------

    def _exchange_descriptions(self) -> None:
        now = time.monotonic()
        descriptions = [
            [submission.name, now - submission.start, submission.is_cacheable, submission.signature.to_json()]
            for submission in self._to_describe
        ]
        self._to_describe = []  # `_forget` may add submissions, for the next round
        for rank, text in enumerate(self._exchange.all_gather_text(json.dumps(descriptions))):
            for name, waited, is_cacheable, fields in json.loads(text):
                signature = Signature.from_json(fields)
                if signature.kind == JOIN:
                    self._joined[rank] = None
                    continue
                if name in self._slot_of:
                    self._forget(name)
                announcement = self.announced.setdefault(name, Announcement(now - waited))
                announcement.start = min(announcement.start, now - waited)
                announcement.is_cacheable = is_cacheable
                announcement.signatures[rank] = signature

    def missing(self, announcement: Announcement) -> list[int]:
        """Return the ranks in the job that an announced operation waits for."""
        present = announcement.signatures.keys() | self._joined.keys()
        return [rank_in_job for rank, rank_in_job in enumerate(self._ranks) if rank not in present]

    def _take_announced(self) -> list[Ready]:
        """Return the operations that all ranks have described."""
        ready = []
        complete = [name for name, announcement in self.announced.items() if not self.missing(announcement)]
        for name in complete:
            announcement = self.announced.pop(name)
            signature = announcement.signatures[min(announcement.signatures)]
            ready.append(self._ready(name, signature, self._difference(announcement.signatures)))
            if not ready[-1].error and announcement.is_cacheable and self._capacity:
                self._remember(name, signature)
        if len(self._joined) == len(self._ranks):
            last = next(reversed(self._joined))
            self._joined.clear()
            ready.append(Ready(JOIN, Signature(JOIN), self._pending.pop(JOIN), last_joined=last))
        return ready

    def _difference(self, signatures: dict[int, Signature]) -> str:
        """Return how the arguments of the ranks differ; empty if they are equal."""
        first, *others = sorted(signatures)
        for rank in others:
            if signatures[rank] != signatures[first]:
                difference, *values = signatures[first].difference(signatures[rank])
                return (
                    f"{difference}: rank {self._ranks[first]} has {values[0]}, rank {self._ranks[rank]} has "
                    f"{values[1]}.\nPass equal arguments under one name on all ranks."
                )
        return ""


def _ones(bits: int) -> Iterator[int]:
    """Yield the positions of the ones, in ascending order."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class StallCheck:
    """Checks after each round how long names have waited. All ranks hold the same names, so one rank reports them."""

    def __init__(self, negotiation: Negotiation, variables: Variables, *, is_reporter: bool) -> None:
        self._negotiation, self._is_reporter = negotiation, is_reporter
        self._is_enabled = variables.stall_check_seconds > 0
        # A round may be as late as the next heartbeat, and the report must not be.
        self._report_after = variables.stall_check_seconds - variables.heartbeat_seconds
        self._shutdown_after = variables.stall_shutdown_seconds
        self._reported: dict[str, float] = {}

    def report_stalls(self) -> str:
        """Report the names that have waited for longer than the limit.

        Returns:
            The reason to shut down if a name has waited for HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, otherwise "".
        """
        if not self._is_enabled:
            return ""
        announced, now = self._negotiation.announced, time.monotonic()
        self._reported = {name: reported for name, reported in self._reported.items() if name in announced}
        lines = []
        for name, announcement in announced.items():
            if now - max(announcement.start, self._reported.get(name, 0.0)) >= self._report_after:
                self._reported[name] = now
                lines.append(
                    f"  {name}: waiting {now - announcement.start:.1f} s for ranks {self._missing(announcement)}"
                )
        if lines and self._is_reporter:
            _write("\n".join([_STALLED, *lines, _STALL_REMEDY]))
        for name, announcement in announced.items():
            waited = now - announcement.start
            if self._shutdown_after and waited >= self._shutdown_after:
                return (
                    f"{name} waited {waited:.0f} s for ranks {self._missing(announcement)}.\n"
                    f"Submit it on all ranks, or raise HOROVOD_STALL_SHUTDOWN_TIME_SECONDS."
                )
        return ""

    def _missing(self, announcement: Announcement) -> str:
        return ", ".join(map(str, self._negotiation.missing(announcement)))


def _write(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
