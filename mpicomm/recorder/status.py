"""The state of a rank in reports: its operations, its resources, or why it does not answer."""

from __future__ import annotations

from typing import TypeAlias

from mpicomm.json_messages import Message


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

    @property
    def longest(self) -> OperationInfo | None:
        """The operation in which the rank has been longest; None if it is in no operation."""
        return max(self.running, key=lambda operation: operation.seconds or 0.0, default=None)


class NotResponding(Message):
    """The report of a hub in place of the status of a rank that does not answer."""

    seconds: float
    state: str


class ExitedRank(Message):
    """Rank 0's report in place of the status of a rank that has exited."""

    status: int | None  # None at the end of its program
    seconds: float  # since its exit

    @property
    def manner(self) -> str:
        """How the rank exited, for messages."""
        return "at the end of its program" if self.status is None else f"with status {self.status}"


Status: TypeAlias = RankStatus | NotResponding | ExitedRank


class Crash(Message):
    """A signal ends the process of the sender, and this is its last message (`signals.catch_crashes`)."""

    signal: str  # its name
    line: str  # the last line of Python, as faulthandler prints it; empty if unknown
