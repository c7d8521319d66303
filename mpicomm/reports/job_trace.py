"""The operations of all ranks on one time axis, from the dump files of a job, as a trace that Perfetto opens.

The trace is JSON in the trace event format of Chrome: a process is a rank, a thread holds operations of one group that
do not overlap.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mpicomm.recorder import rank_text

_FILES = "rank-*.json"
_FILE = re.compile(r"rank-(\d+)\.json")  # other names, such as that of a copy, are not those of dump files
_NULL = type(None)
_Types: TypeAlias = Mapping[str, tuple[type, ...]]
_FIELDS: _Types = {
    **dict.fromkeys(("rank", "size"), (int,)),
    **dict.fromkeys(("host", "clock"), (str,)),
    **dict.fromkeys(("written", "monotonic"), (int, float)),
    "offset": (dict, _NULL),
    "operations": (list,),
}
_OFFSET_FIELDS: _Types = dict.fromkeys(("seconds", "error"), (int, float))
_OPERATION_FIELDS: _Types = {
    **dict.fromkeys(("name", "group", "members", "dtype", "where"), (str,)),
    **dict.fromkeys(("is_message", "is_over"), (bool,)),
    **dict.fromkeys(("number", "count"), (int,)),
    **dict.fromkeys(("sequence", "peer", "nbytes", "tag", "message"), (int, _NULL)),
    "monotonic": (list,),
}
_MOMENTS = set(itertools.product((int, float), (int, float, _NULL), (int, float, _NULL)))
"""The types of the times of an operation: its call, its start and its end."""

WALL_CLOCK = "wall clock"
"""The clock of a rank whose difference to rank 0 was not measured."""

_NOT_ARRIVED, _NO_FILE = "not arrived", "no dump file"
_SHOWN_FIELDS = ("group", "sequence", "dtype", "count", "nbytes", "peer", "tag", "where", "number", "is_over")
_FROM_ROOT = {"broadcast", "scatter"}
_TO_ROOT = {"gather", "reduce"}

Key = tuple[str, str, int]
"""A collective: its group, the members of the group, and its sequence number in the group."""


@dataclasses.dataclass
class DumpedOperation:
    """An operation of one rank, in seconds on the clock of rank 0."""

    rank: int
    called: float
    start: float | None
    """When it began to run, or when the program began to wait for it."""

    end: float
    """When it ended; if it has not, when the rank wrote its file."""

    fields: dict[str, Any]
    """The fields of the dump file."""

    @property
    def is_message(self) -> bool:
        """Whether it is a message."""
        return bool(self.fields["is_message"])

    @property
    def is_over(self) -> bool:
        """Whether it had ended."""
        return bool(self.fields["is_over"])

    @property
    def key(self) -> Key | None:
        """The collective, the same on all ranks; None for a message and for a queued one."""
        sequence = self.fields["sequence"]
        return None if self.is_message or sequence is None else (self.fields["group"], self.fields["members"], sequence)


@dataclasses.dataclass
class RankDump:
    """The dump file of one rank."""

    rank: int
    size: int
    host: str
    clock: str
    """How its times were converted to the clock of rank 0: "same clock", "measured" or `WALL_CLOCK`."""

    error: float
    """The largest error of its times in seconds; 0 if unknown."""

    operations: list[DumpedOperation]


@dataclasses.dataclass
class RankWait:
    """The part of a collective in which a rank waited for others to call it."""

    operation: DumpedOperation
    start: float
    ranks: list[int]
    """The ranks that called it last, or had not called it."""

    end: float
    reason: str = ""
    """Why the wait has not ended; empty if it has."""


@dataclasses.dataclass
class MessageArrow:
    """A message, from the call of its send to the end of its receive."""

    send: DumpedOperation
    receive: DumpedOperation


def read(directory: Path) -> list[RankDump]:
    """Read the dump files of a job.

    Raises:
        OSError: If there are none, or one cannot be read.
        ValueError: If a file has another format, or the files are those of jobs of different sizes.
    """
    paths = files(directory)
    if not paths:
        raise FileNotFoundError(
            f"{directory} has no files {_FILES}.\nPass a job's directory, such as mpicomm-dumps/20261121-102043-33575."
        )
    contents = [_content(path, rank) for rank, path in paths.items()]
    for path, content in zip(paths.values(), contents, strict=True):
        if content["size"] != contents[0]["size"]:
            raise ValueError(
                f"{directory} has dump files of different jobs: {paths[contents[0]['rank']].name} is from a job of "
                f"{contents[0]['size']} ranks, {path.name} from one of {content['size']}.\nRemove the files of the "
                f"other job, and pass a directory of its own to each job's dump_flight_recorder()."
            )
    return [_rank_dump(content, contents) for content in contents]


def files(directory: Path) -> dict[int, Path]:
    """Return the dump files in a directory by rank, in the order of the ranks."""
    matches = ((_FILE.fullmatch(path.name), path) for path in directory.glob(_FILES))
    return dict(sorted((int(match[1]), path) for match, path in matches if match is not None))


def _content(path: Path, rank: int) -> dict[str, Any]:
    """Return the content of a rank's dump file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        _check_fields(content, _FIELDS)
        if content["offset"] is not None:
            _check_fields(content["offset"], _OFFSET_FIELDS)
        for operation in content["operations"]:
            _check_fields(operation, _OPERATION_FIELDS)
            if tuple(map(type, operation["monotonic"])) not in _MOMENTS:
                raise ValueError(f"'monotonic' has the value {operation['monotonic']}")
        if content["rank"] != rank or rank >= content["size"]:
            raise ValueError(f"it is that of rank {content['rank']} of {content['size']} ranks")
    except ValueError as error:
        raise ValueError(
            f"{path} is not a dump file of this version of mpicomm: {error}.\nRemove the file, or pass another job's "
            f"directory."
        ) from error
    return content


def _check_fields(values: Any, types: _Types) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, got {str(values)[:40]}")
    for name, expected in types.items():
        if name not in values:
            raise ValueError(f"no field {name!r}")
        if not isinstance(values[name], expected):
            raise ValueError(f"{name!r} has the value {str(values[name])[:40]}")


def _rank_dump(content: dict[str, Any], contents: Sequence[dict[str, Any]]) -> RankDump:
    # 1. the difference to the clock of rank 0
    offset, clock = _offset_and_source(content, contents)
    if offset is not None:
        shift, error = offset["seconds"], offset["error"]
    else:  # the wall clocks of the hosts
        base = min(contents, key=lambda other: other["rank"])
        shift, error = content["written"] - content["monotonic"] - base["written"] + base["monotonic"], 0.0
    # 2. the operations
    operations = []
    for fields in content["operations"]:
        called, start, end = (None if moment is None else moment + shift for moment in fields["monotonic"])
        assert called is not None
        end = max(called, content["monotonic"] + shift if end is None else end)
        operations.append(DumpedOperation(content["rank"], called, start, end, fields))
    return RankDump(content["rank"], content["size"], content["host"], clock, error, operations)


def _offset_and_source(
    content: dict[str, Any], contents: Sequence[dict[str, Any]]
) -> tuple[dict[str, float] | None, str]:
    """Return the offset of a rank's clock, its own or that of another rank with this clock, and how it was found."""
    same = [other for other in contents if other["clock"] and other["clock"] == content["clock"]]
    known = [other["offset"] for other in [content, *same] if other["offset"] is not None]
    if not known:
        return None, WALL_CLOCK
    best = min(known, key=lambda offset: offset["error"])
    return best, "measured" if best["error"] else "same clock"


def waits(dumps: Sequence[RankDump]) -> list[RankWait]:
    """Return the waits of ranks for other ranks that call a collective, or the other end of a message, later."""
    return [*_waits_in_collectives(dumps), *_waits_for_messages(dumps)]


def _waits_in_collectives(dumps: Sequence[RankDump]) -> list[RankWait]:
    # 1. the ranks that have called each collective, and the last collective of each rank
    calls: dict[Key, dict[int, DumpedOperation]] = collections.defaultdict(dict)
    last: collections.Counter[tuple[str, str, int]] = collections.Counter()  # by group, members and rank
    for operation in (operation for dump in dumps for operation in dump.operations):
        if (key := operation.key) is not None:
            calls[key][operation.rank] = operation
            member = (*key[:2], operation.rank)
            last[member] = max(last[member], key[2])
    # 2. the waits in each collective; the last call is unknown if the ring of a rank has dropped its call
    dumped = {dump.rank for dump in dumps}
    collected = []
    for (group, members, sequence), by_rank in calls.items():
        ranks = rank_text.parse_ranges(members) if members else range(dumps[0].size)
        others = [rank for rank in ranks if rank not in by_rank and last[group, members, rank] < sequence]
        absent = {rank: _NOT_ARRIVED if rank in dumped else _NO_FILE for rank in others}
        is_complete = all(rank in by_rank for rank in ranks if rank in dumped)
        newest = heapq.nlargest(2, by_rank.values(), key=_arrival) if is_complete else []
        waits_or_none = (_wait(operation, by_rank, newest, absent) for operation in by_rank.values())
        collected += [wait for wait in waits_or_none if wait is not None]
    return collected


def _wait(
    operation: DumpedOperation,
    by_rank: dict[int, DumpedOperation],
    newest: Sequence[DumpedOperation],
    absent: dict[int, str],
) -> RankWait | None:
    """Return the wait of a rank in a collective, if any.

    Args:
        operation: The rank's call.
        by_rank: The calls of all ranks.
        newest: The last two of these calls, of which at least one is that of another rank; empty if unknown.
        absent: The ranks that have not called it, with the reason.
    """
    if operation.start is None:
        return None
    # 1. the ranks whose call this rank needs
    name, root = operation.fields["name"], operation.fields["peer"]
    if name in _TO_ROOT and operation.rank != root:
        return None
    needs_root_only = name in _FROM_ROOT
    # 2. those that have not called it
    if not operation.is_over:
        for reason in (_NOT_ARRIVED, _NO_FILE):
            needed = {root: absent.get(root)} if needs_root_only else absent
            if missing := sorted(rank for rank in needed if needed[rank] == reason):
                return RankWait(operation, operation.start, missing, operation.end, reason)
    # 3. the last one that has
    calls = [by_rank[root]] if needs_root_only and root in by_rank else [] if needs_root_only else newest
    last = next((call for call in calls if call.rank != operation.rank), None)
    if last is None or _arrival(last) <= operation.start:
        return None
    return RankWait(operation, operation.start, [last.rank], min(_arrival(last), operation.end))


def _arrival(operation: DumpedOperation) -> float:
    return operation.end if operation.start is None else operation.start


def _waits_for_messages(dumps: Sequence[RankDump]) -> list[RankWait]:
    """Return the waits in `wait()` until the other rank has called its end of the message."""
    dumped = {dump.rank for dump in dumps}
    sends, receives = _messages(dumps)
    collected = []
    for ends, other_ends in ((sends, receives), (receives, sends)):
        for key, operation in ends.items():
            if operation.start is None:
                continue
            if (other := other_ends.get(key)) is not None:
                if other.called > operation.start:
                    collected.append(
                        RankWait(operation, operation.start, [other.rank], min(other.called, operation.end))
                    )
            elif not operation.is_over:
                peer = operation.fields["peer"]
                reason = _NOT_ARRIVED if peer in dumped else _NO_FILE
                collected.append(RankWait(operation, operation.start, [peer], operation.end, reason))
    return collected


def name_wait(wait: RankWait) -> str:
    """Return `wait for rank 2`, with the reason of a wait that has not ended."""
    others = rank_text.name_ranks(wait.ranks)
    return f"wait for {others}, {wait.reason}" if wait.reason else f"wait for {others}"


def arrows(dumps: Sequence[RankDump]) -> list[MessageArrow]:
    """Return the messages of which both ends are recorded, and which have been received."""
    sends, receives = _messages(dumps)
    return [MessageArrow(sends[key], receives[key]) for key in sends if key in receives and receives[key].is_over]


_Ends = dict[tuple[Any, ...], DumpedOperation]


def _messages(dumps: Sequence[RankDump]) -> tuple[_Ends, _Ends]:
    """Return sends and receives by group, sender, receiver, tag and number."""
    sends: _Ends = {}
    receives: _Ends = {}
    for operation in (operation for dump in dumps for operation in dump.operations if operation.is_message):
        fields = operation.fields
        if fields["message"] is None:  # from any rank, and not yet received
            continue
        is_send = fields["name"] == "send"
        source, target = (operation.rank, fields["peer"]) if is_send else (fields["peer"], operation.rank)
        ends = sends if is_send else receives
        ends[fields["group"], fields["members"], source, target, fields["tag"], fields["message"]] = operation
    return sends, receives


def trace(dumps: Sequence[RankDump]) -> dict[str, Any]:
    """Return the trace, an object for JSON."""
    start = min((operation.called for dump in dumps for operation in dump.operations), default=0.0)
    writer = _Writer(start)
    for dump in dumps:
        writer.add_rank(dump)
    for wait in waits(dumps):
        writer.add_wait(wait)
    for number, arrow in enumerate(sorted(arrows(dumps), key=lambda arrow: arrow.send.called), start=1):
        writer.add_arrow(number, arrow)
    clocks = {f"rank {dump.rank}": f"{dump.clock}, error up to {dump.error * 1e6:.1f} us" for dump in dumps}
    return {"traceEvents": writer.events, "displayTimeUnit": "ns", "otherData": {"producer": "mpicomm", **clocks}}


class _Writer:
    """Collects the events of a trace. Their times are whole nanoseconds, so that rounding keeps their nesting."""

    def __init__(self, start: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._start = start
        self._threads: dict[int, dict[str, int]] = {}  # process and thread by the id of an operation

    def add_rank(self, dump: RankDump) -> None:
        """Add the operations of a rank."""
        self._add_metadata("process_name", dump.rank, name=f"rank {dump.rank} on {dump.host}")
        self._add_metadata("process_sort_index", dump.rank, sort_index=dump.rank)
        for thread, (name, operations) in enumerate(assign_lanes(dump.operations), 1):
            self._add_metadata("thread_name", dump.rank, thread, name=name)
            self._add_metadata("thread_sort_index", dump.rank, thread, sort_index=thread)
            for operation in operations:
                self._threads[id(operation)] = {"pid": dump.rank, "tid": thread}
                self._add_operation(operation)

    def add_wait(self, wait: RankWait) -> None:
        """Add the wait for another rank, inside its operation."""
        start, end = self._time(wait.start), self._time(wait.end)
        self._add_slice(wait.operation, name_wait(wait), "wait", start, end, ranks=rank_text.name_ranks(wait.ranks))

    def add_arrow(self, number: int, arrow: MessageArrow) -> None:
        """Add an arrow from a send to the transfer of the message, the part of the receive after the send.

        Perfetto turns an arrow around that ends in a slice which began before the one in which it starts.
        """
        send, receive = arrow.send, arrow.receive
        start, end = self._time(send.called), self._time(receive.end)
        first = max(start + 1, self._time(receive.called))
        self._add_slice(receive, "transfer", "message", first, end, **{"from": f"rank {send.rank}"})
        common = {"name": "message", "cat": "message", "id": number}
        self.events.append({"ph": "s", **common, "ts": start / 1000, **self._threads[id(send)]})
        self.events.append({"ph": "f", "bp": "e", **common, "ts": (end - 1) / 1000, **self._threads[id(receive)]})

    def _add_operation(self, operation: DumpedOperation) -> None:
        fields = operation.fields
        shown = {name: fields[name] for name in _SHOWN_FIELDS if fields[name] not in (None, "")}
        category, called = "message" if operation.is_message else "collective", self._time(operation.called)
        self._add_slice(operation, fields["name"], category, called, self._time(operation.end), **shown)
        if not operation.is_message and operation.start is not None:
            self._add_slice(operation, "queued", "queue", called, self._time(operation.start))

    def _add_slice(
        self, operation: DumpedOperation, title: str, category: str, start: int, end: int, **arguments: Any
    ) -> None:
        """Add a slice from `start` to `end`, in nanoseconds, to the thread of an operation."""
        if end > start:
            times = {"ts": start / 1000, "dur": (end - start) / 1000}
            event = {
                "ph": "X",
                "name": title,
                "cat": category,
                **times,
                "args": arguments,
                **self._threads[id(operation)],
            }
            self.events.append(event)

    def _time(self, moment: float) -> int:
        return round((moment - self._start) * 1e9)

    def _add_metadata(self, kind: str, process: int, thread: int = 0, **arguments: Any) -> None:
        self.events.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments})


def assign_lanes(operations: Sequence[DumpedOperation]) -> Iterator[tuple[str, list[DumpedOperation]]]:
    """Distribute operations over lanes, in which they do not overlap; return the lanes with their names."""
    by_name: dict[str, list[list[DumpedOperation]]] = collections.defaultdict(list)
    for operation in sorted(operations, key=lambda operation: operation.called):
        group = f"group {operation.fields['group']}"
        lanes = by_name[f"messages of {group}" if operation.is_message else group]
        free = next((lane for lane in lanes if lane[-1].end <= operation.called), None)
        if free is None:
            lanes.append(free := [])
        free.append(operation)
    for name, lanes in sorted(by_name.items(), key=lambda item: (item[0].startswith("messages"), item[0])):
        for number, lane in enumerate(lanes, 1):
            yield name if number == 1 else f"{name} ({number})", lane
