"""The messages of the out-of-band channel.

Ranks report to rank 0 (`coordinator.Coordinator`) through their hubs; rank 0 sends its messages back the same way.
"""

from __future__ import annotations

from mpicomm.json_messages import Message
from mpicomm.recorder.status import Crash, OperationInfo, Status

HEARTBEAT_SECONDS = 1.0
LONGEST_GAP = 2 * HEARTBEAT_SECONDS
"""The most seconds between two checks of a watchdog that count towards a deadline."""

COLLECT_SECONDS = 4.0
"""Time limit for the ranks' status reports. Hubs use a shorter one, to report ranks that do not answer them."""

# -- between a hub and a rank that connects ----------------------------------------------------------------------------


class LocalProcess(Message):
    """A process, identified by its pid and its start time."""

    pid: int
    start_time: str = ""  # with its pid namespace: together with the pid they are unique on a host


class Challenge(Message):
    """The first message of a hub."""

    rank: int
    process: LocalProcess
    nonce: str


class Proof(Message):
    """The answer to a `Challenge`: the HMAC of its nonce and the rank with the job's token."""

    rank: int
    process: LocalProcess
    proof: str
    nonce: str


class Welcome(Message):
    """The hub has accepted a `Proof`; `proof` is the HMAC of that message's nonce."""

    proof: str


class Heartbeat(Message):
    """Sent by every rank to its hub once a second."""


class ClockProbe(Message):
    """A rank asks its hub for the time."""

    rank: int
    sent: float  # on the rank's clock


class ClockAnswer(Message):
    """The answer of the hub to a `ClockProbe`."""

    sent: float  # as in the probe
    now: float  # on the hub's clock
    clock: str  # its identity
    offset: float | None  # to add for the clock of rank 0; None if not yet measured
    error: float


# -- from a rank to rank 0 ---------------------------------------------------------------------------------------------


class FromRank(Message):
    """The base class of the messages of a rank to rank 0."""

    rank: int


class StatusReport(FromRank):
    """The answer to `CollectStatus`."""

    number: int
    status: Status


class OperationReport(FromRank):
    """The base class of messages about an operation that has not completed."""

    operation: OperationInfo
    needs: str  # the ranks that it needs to complete


class WaitStarted(OperationReport):
    """The rank has waited for longer than `rank_reports.WAIT_LIMIT`."""


class WaitEnded(FromRank):
    """An operation that the rank has reported has ended."""

    number: int


class MissingQuery(OperationReport):
    """The rank asks which ranks have not called a collective; rank 0 answers with `MissingAnswer`."""


class LateOperation(OperationReport):
    """The base class of requests for a report of all ranks."""

    timeout: float
    raises: bool  # TimeoutError at the timeout
    files: str  # the line of the report that names the dump files


class PossibleHang(LateOperation):
    """The operation has not passed its timeout."""


class TimedOut(LateOperation):
    """The operation has passed its timeout, so that rank 0 must abort the job."""


class RankExited(FromRank):
    """The rank calls no more operations; the fields are those of `Watchdog.leave`."""

    status: int | None
    is_stuck: bool
    waits: bool
    sends: bool
    sequences: dict[str, int]


class ExitingAtOnce(FromRank):
    """The rank is about to call `os._exit`."""

    status: int


class RankContinues(FromRank):
    """The rank continues in a next world, without the excluded ranks (`rank_text.ranges`), which have not failed."""

    excluded: str
    aborts: bool


class RankDied(FromRank):
    """The rank's hub has lost its connection."""

    lost: str  # why, as the kernel or `connection` describes it
    crash: Crash | None  # its last message, if a signal has ended its process that it could report itself


class RankAborts(FromRank):
    """The rank prints its error and aborts the job itself."""


class RankTerminated(FromRank):
    """SIGTERM ends the rank."""


class DumpFailed(FromRank):
    """The rank cannot write its dump files."""

    reason: str


class GroupBroken(Message):
    """A rank has stopped waiting in a group: no rank uses the group any more. Rank 0 sends it to all ranks."""

    group: str
    cause: str
    remedy: str = ""
    seconds: float = 0.0
    """The time in which operations of the group can complete."""


# -- between rank 0 and `mpicomm run` ----------------------------------------------------------------------------------


class JobStarted(Message):
    """The job has been formed, or continues after a failure; `hosts` has each host's ranks (`rank_text.ranges`)."""

    hosts: dict[str, str]
    name: str = ""
    """The same for the worlds of one job."""
    recovers: bool = False
    """Whether the job may continue with another rank 0."""


class RankFinished(Message):
    """A rank has reached its orderly end, or has failed in a job that continues without it."""

    rank: int
    has_failed: bool = False


class JobFailed(Message):
    """The job is about to be aborted."""

    cause: str
    ranks: str = ""
    """The ranks that failed first, as text (`rank_text.ranges`); empty if no rank is at fault, such as at a timeout."""


class StopAsked(Message):
    """`mpicomm run` has received a signal that asks the job to stop; rank 0 answers with `StopAnswered`."""

    signal: int


class StopAnswered(Message):
    """Whether the program handles a stop request, and so saves its state and exits by itself."""

    signal: int
    is_handled: bool


# -- between rank 0 and an observer (`mpicomm top`), directly or through `mpicomm run` ---------------------------------


class StatusRequest(Message):
    """An observer asks for the status of all ranks. The answer is a `StatusReport` per rank and `StatusComplete`."""


class StatusComplete(Message):
    """All reports have been sent; `hosts` has each host's ranks (`rank_text.ranges`)."""

    hosts: dict[str, str]


class StatusRefused(Message):
    """The observer gets no status; if it is one too many, it is disconnected."""

    reason: str


# -- from rank 0 to all ranks ------------------------------------------------------------------------------------------


class CollectStatus(Message):
    """Every rank answers with a `StatusReport`, with its `Usage` if `usage`, and writes its dump files if `files`."""

    number: int
    files: bool
    usage: bool = False


class ContinueWithout(Message):
    """Ranks have failed, and the others continue without them: `reasons` by rank, as text.

    Rank 0 sends it, and every hub whose connection to rank 0 is lost.
    """

    reasons: dict[str, str]


class AllExited(Message):
    """Every rank has reported its exit; `is_stuck` if one of them has an operation that may never end."""

    is_stuck: bool


class WorldShrunk(Message):
    """All other ranks continue in a next world, without the excluded ranks (`rank_text.ranges`).

    If `aborts`, operations with these do not complete.
    """

    excluded: str
    aborts: bool


class JobEnding(Message):
    """The job is about to be aborted."""

    files: bool


class RaiseSignal(Message):
    """Every rank raises a signal in its own process, if the program has a handler for it."""

    signal: int


# -- from rank 0 to one rank -------------------------------------------------------------------------------------------


class ToOneRank(Message):
    """The base class of messages that hubs forward to one rank."""

    to: int


class Acknowledgement(ToOneRank):
    """Rank 0 has received an `ExitingAtOnce` or a request."""


class MissingAnswer(ToOneRank):
    """The ranks that have not called a collective, and a table of where they are."""

    number: int
    ranks: str
    table: str
