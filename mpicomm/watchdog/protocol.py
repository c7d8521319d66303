"""The messages of the out-of-band channel: frozen dataclasses, sent as JSON objects that name their class.

Ranks report to rank 0 (`coordinator.Coordinator`) through their hubs; rank 0 sends its messages back the same way.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # Python has it since 3.11

    def dataclass_transform(**_arguments: bool) -> Callable[[type], type]:
        """Do nothing: only type checkers use the decorator."""
        return lambda kind: kind


HEARTBEAT_SECONDS = 1.0
LONGEST_GAP = 2 * HEARTBEAT_SECONDS
"""The most seconds between two checks of a watchdog that count towards a deadline."""

COLLECT_SECONDS = 4.0
"""Time limit for the ranks' status reports. Hubs use a shorter one, to report ranks that do not answer them."""

_CLASS = "$class"  # the key of the class in a JSON object
_classes: dict[str, type[Message]] = {}


@dataclass_transform(frozen_default=True)
class Message:
    """The base class of all messages, and of the values in them. Each subclass becomes a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
        _classes[cls.__name__] = cls


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


class Crash(Message):
    """A signal ends the process of the sender, and this is its last message (`signals.catch_crashes`)."""

    signal: str  # its name
    line: str  # the last line of Python, as faulthandler prints it; empty if unknown


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


class OperationInfo(Message):
    """The fields of an operation for reports and dump files (`flight_recorder.Operation.describe`)."""

    number: int
    name: str
    group: str
    members: str  # the ranks of the group; empty for all ranks of the job
    sequence: int | None
    is_message: bool
    dtype: str
    count: int
    peer: int | None  # as a rank of the job
    where: str
    called: float  # seconds since the call
    seconds: float | None  # since the operation started
    is_over: bool


class Usage(Message):
    """The throughput and memory of a rank. `mpicomm top` shows them; hang reports do not need them."""

    bytes_per_second: float  # of the operations that have completed lately (`flight_recorder.bytes_per_second`)
    memory: int  # resident set size in bytes
    gpu_memory: int | None = None  # bytes in use on the rank's GPU, by all processes
    gpu_memory_total: int | None = None
    gpu_utilization: int | None = None  # percent of the time in which a kernel ran


class RankStatus(Message):
    """The operations of a rank, and where its main thread is."""

    running: list[OperationInfo]
    last: OperationInfo | None
    main: str
    sequences: dict[str, int]  # by group: the number of collectives called
    usage: Usage | None = None  # if `CollectStatus` asks for it


class NotResponding(Message):
    """The report of a hub in place of the status of a rank that does not answer."""

    seconds: float
    state: str


class ExitedRank(Message):
    """Rank 0's report in place of the status of a rank that has exited."""

    status: int | None  # None at the end of its program
    seconds: float  # since its exit


Status: TypeAlias = RankStatus | NotResponding | ExitedRank


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


class RankDied(FromRank):
    """The rank's hub has lost its connection."""

    lost: str  # why, as the kernel or `connection` describes it
    crash: Crash | None  # its last message, if a signal has ended its process that it could report itself


class RankFailed(FromRank):
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


# -- between rank 0 and `mpicomm run` ----------------------------------------------------------------------------------


class JobStarted(Message):
    """The job has been formed, or continues after a failure; `hosts` has each host's ranks (`hang_report.ranges`)."""

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
    """All reports have been sent; `hosts` has each host's ranks (`hang_report.ranges`)."""

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


class RanksFailed(Message):
    """Ranks have failed, and the others continue without them; by rank, as text: why it failed.

    Rank 0 sends it, and every hub whose connection to rank 0 is lost.
    """

    reasons: dict[str, str]


class AllExited(Message):
    """Every rank has reported its exit; `is_stuck` if one of them has an operation that may never end."""

    is_stuck: bool


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


# -- JSON --------------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    return json.dumps(message, default=_to_object, separators=(",", ":")).encode()


def decode(text: bytes) -> Message | None:
    """Return the message of a JSON text; None for an object that is not a message, or whose fields are not valid.

    Raises:
        ValueError: If the text is not a JSON object.
        RecursionError: If it is nested too deeply.
    """
    try:
        value = json.loads(text, object_hook=_from_object)
    except (KeyError, TypeError):  # unknown class; missing, unknown or invalid field
        return None
    if not isinstance(value, (Message, dict)):
        raise ValueError("not a JSON object")
    return value if isinstance(value, Message) else None


def _to_object(message: Message) -> dict[str, Any]:
    return {_CLASS: type(message).__name__, **vars(message)}


def _from_object(values: dict[str, Any]) -> Message | dict[str, Any]:
    if _CLASS not in values:  # the sequences by group
        return values
    name = values.pop(_CLASS)
    for field, is_valid in _validators(name).items():
        if not is_valid(values[field]):
            raise TypeError(field)
    return _classes[name](**values)


@functools.cache
def _validators(name: str) -> dict[str, Callable[[Any], bool]]:
    """Return, by field, a function that returns whether a value has the type of the field."""
    return {field: _validator(hint) for field, hint in get_type_hints(_classes[name]).items()}


def _validator(hint: Any) -> Callable[[Any], bool]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is list:
        is_valid = _validator(arguments[0])
        return lambda value: isinstance(value, list) and all(map(is_valid, value))
    if origin is dict:  # its keys are strings, as in all JSON
        is_valid = _validator(arguments[1])
        return lambda value: isinstance(value, dict) and all(map(is_valid, value.values()))
    accepted = arguments or (hint,)  # the arguments of a union
    if float in accepted:
        accepted = (*accepted, int)
    return lambda value: isinstance(value, accepted)
