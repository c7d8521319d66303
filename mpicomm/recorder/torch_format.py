"""The recorded operations in the format of torch's flight recorder, which PyTorch's analyser `torchfrtrace` reads.

The analyser matches the entries of the ranks by group and sequence number. It accepts only the names of torch's own
backends, and expects every member of a group to take part in each message of the group. The operations are therefore
labelled `gloo:`, and the messages from one rank to another with one tag are those of a group of these two ranks.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from mpicomm.recorder import flight_recorder
from mpicomm.recorder.flight_recorder import Group, Operation

FILE = "fr_trace_rank_{rank}"
"""The name of a rank's file. The analyser reads the rank from the digits at its end."""

_VERSION = "2.10"  # that of torch 2.13
_LABEL = "gloo"

# The names in the analyser. Those of all_gather and reduce_scatter are names for which it does not compare the sizes of
# input and output, since the recorder has only one of them.
_NAMES = {
    "all_gather": "_all_gather_base",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "allgather": "_all_gather_base",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "destroy": "barrier",
    "gather": "gather",
    "new_group": "split",
    "recv": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter_single",
    "scatter": "scatter",
    "send": "send",
}
_ANY_SIZE = {"all_to_all", "gather", "scatter"}  # the number of elements may differ between ranks
_DTYPES = {  # torch's C++ names, where they are not those of Python
    "float16": "Half",
    "float32": "Float",
    "float64": "Double",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint8": "Byte",
}


def encoded(rank: int, operations: Sequence[Operation], now: float, wall: float) -> bytes:
    """Return the content of the file of a rank, a pickle of numbers, texts and containers of them."""
    return pickle.dumps(trace(rank, operations, now, wall))


def trace(rank: int, operations: Sequence[Operation], now: float, wall: float) -> dict[str, Any]:
    """Return the content of the file of a rank as an object.

    Args:
        rank: The rank in the job.
        operations: The recorded operations, oldest first.
        now: The present time on the clock of the operations.
        wall: The present time in seconds since the epoch.
    """
    groups = flight_recorder.groups()
    config = {group.name: _config(group.name, _description(group), group.ranks) for group in groups}
    entries = []
    for record, operation, sequence in _matchable(rank, operations, groups):
        group = _matching_group(rank, operation)
        config[group[0]] = _config(*group)
        entries.append(_entry(record, operation, sequence, group, wall - now))
    return {"version": _VERSION, "pg_config": config, "pg_status": {}, "comm_lib_version": "", "entries": entries}


def _matchable(rank: int, operations: Sequence[Operation], groups: Sequence[Group]) -> list[tuple[int, Operation, int]]:
    """Return the operations that the analyser can match, each with its record number and its sequence number."""
    found = []
    for record, each, sequence in _numbered(operations, groups):
        is_to_itself = each.is_message and each.needs == [rank]
        if each.name in _NAMES and not is_to_itself and not (each.is_message and each.peer is None):
            found.append((record, each, sequence))
    return found


def _numbered(operations: Sequence[Operation], groups: Sequence[Group]) -> Iterator[tuple[int, Operation, int]]:
    """Return the operations of these groups with their record and sequence numbers.

    Ring buffers begin at different operations. The analyser therefore drops the entries whose record number is below
    the first one of another rank, so these numbers must mean the same on all ranks: they count the collectives of the
    group of all ranks.
    """
    operations = [each for each in operations if any(each.group is group for group in groups)]
    # 1. the first record number
    worlds = [group for group in groups if group.is_world]
    known = [each.sequence - 1 for each in operations if each.group.is_world and each.sequence is not None]
    first = record = max(0, min(known, default=max((group.sequence for group in worlds), default=0)))
    has_dropped = bool(operations) and operations[0].number > 0
    is_whole = not has_dropped or max(known, default=-1) < first  # operations with the first number may be dropped
    # 2. the numbers of each operation
    queued: Counter[str] = Counter()
    for each in operations:
        sequence = each.message if each.is_message else each.sequence
        if sequence is None and not each.is_message:  # it gets its number when it runs, after those before it
            queued[each.group.name] += 1
            sequence = each.group.sequence + queued[each.group.name]
        if each.group.is_world and each.sequence is not None:
            record = max(record, each.sequence)
        if sequence is not None and (is_whole or record > first):
            yield record, each, sequence


def _matching_group(rank: int, operation: Operation) -> tuple[str, str, Sequence[int]]:
    """Return name, description and members of the group in which the analyser matches an operation."""
    group = operation.group
    if not operation.is_message:
        return group.name, _description(group), group.ranks
    (peer,) = operation.needs
    source, target = (rank, peer) if operation.name == "send" else (peer, rank)
    tag = f" tag {operation.tag}" if operation.tag else ""
    return f"{group.name} {source}->{target}{tag}", "messages", sorted((source, target))


def _description(group: Group) -> str:
    return "default_pg" if group.is_world else "undefined"  # as in torch


def _config(name: str, description: str, ranks: Sequence[int]) -> dict[str, str]:
    return {"name": name, "desc": description, "ranks": str(list(ranks))}


def _entry(
    record: int, operation: Operation, sequence: int, group: tuple[str, str, Sequence[int]], epoch: float
) -> dict[str, Any]:
    """Return an entry.

    Args:
        epoch: The seconds to add to the clock of the operations for seconds since the epoch.
    """
    name, description, ranks = group
    dtypes = [] if operation.dtype is None else [_dtype(operation)]
    sizes = [] if operation.dtype is None else [[] if operation.name in _ANY_SIZE else [operation.count]]
    moments = (operation.called_at, operation.start, operation.end)
    created, started, completed = (None if each is None else int((each + epoch) * 1e9) for each in moments)
    return {
        "record_id": record,
        "pg_id": 0,
        "process_group": (name, description),
        "collective_seq_id": sequence,
        "p2p_seq_id": sequence if operation.is_message else 0,
        "op_id": operation.number,
        "profiling_name": f"{_LABEL}:{_NAMES[operation.name]}{_direction(operation, ranks)}",
        "time_created_ns": created,
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": completed,
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
        "state": "completed" if completed else "started" if started else "scheduled",
        "retired": completed is not None,
        "timeout_ms": int((operation.limit or operation.group.timeout) * 1000),
        "is_p2p": operation.is_message,
        "frames": [] if operation.code is None else [_frame(operation)],
    }


def _direction(operation: Operation, ranks: Sequence[int]) -> str:
    """Return the direction of a message between the two members of its group."""
    if not operation.is_message:
        return ""
    (peer,) = (ranks.index(each) for each in operation.needs)
    return f" {1 - peer}->{peer}" if operation.name == "send" else f" {1 - peer}<-{peer}"


def _dtype(operation: Operation) -> str:
    name = str(operation.dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def _frame(operation: Operation) -> dict[str, Any]:
    assert operation.code is not None
    line = flight_recorder.number_of_line(operation.code, operation.instruction)
    return {"name": operation.code.co_name, "filename": operation.code.co_filename, "line": line}
