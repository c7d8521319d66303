"""The flight recorder: a rank's last operations, and the lines of the program that called them."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mpicomm
from mpicomm.recorder import dump, flight_recorder, stream_queue
from mpicomm.recorder.flight_recorder import RING, Group, Operation
from mpicomm.recorder.stream_queue import StreamQueue
from tests.time_limits import scaled

HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def empty_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the recorder to its state at the start of a process."""
    monkeypatch.setattr(flight_recorder, "_ring", [None] * RING)
    monkeypatch.setattr(flight_recorder, "_running", {})
    monkeypatch.setattr(flight_recorder, "_numbers", itertools.count())
    monkeypatch.setattr(flight_recorder, "_groups", {})
    monkeypatch.setattr(stream_queue, "_queues", [])
    monkeypatch.setattr(flight_recorder, "_inner_files", set())
    monkeypatch.setattr(flight_recorder, "_users_files", set())


def group_of(name: str = "0", ranks: tuple[int, ...] = (0, 1, 2, 3), *, is_world: bool = True) -> Group:
    return Group(name, ranks, 1800.0, is_world=is_world)


def note(
    group: Group,
    name: str = "all_reduce",
    peer: int | None = None,
    *,
    is_message: bool = False,
    is_running: bool = True,
) -> Operation:
    """Record a call whose caller is the caller of this function."""
    return flight_recorder.note(group, name, torch.float32, 1024, peer, is_message, is_running, inner_frames=2)


def line_here() -> int:
    frame = flight_recorder._getframe(1)
    return frame.f_lineno


# -- the ring buffer -------------------------------------------------------------------------------------------------


def test_nothing_was_called() -> None:
    assert (
        flight_recorder.recorded(),
        flight_recorder.running(),
        flight_recorder.last(),
        flight_recorder.sequences(),
    ) == ([], [], None, {})


@pytest.mark.parametrize("calls", [1, RING - 1, RING, RING + 1, 3 * RING + 7])
def test_the_last_operations_are_remembered(calls: int) -> None:
    group = group_of()
    for _ in range(calls):
        note(group).finish()
    assert [each.number for each in flight_recorder.recorded()] == list(range(max(0, calls - RING), calls))
    last = flight_recorder.last()
    assert (last.number, last.sequence) == (calls - 1, calls)


def test_an_operation_that_runs_is_known_though_the_ring_has_dropped_it() -> None:
    group = group_of()
    first = note(group)
    for _ in range(RING):
        note(group).finish()
    assert flight_recorder.running() == [first]


def test_threads_call_at_the_same_time() -> None:
    group = group_of()

    def call() -> None:
        for _ in range(100):
            note(group).finish()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds; with the default of 5 ms each thread ends before the next one runs
    try:
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert [each.number for each in flight_recorder.recorded()] == list(range(800))
    assert sorted(each.sequence for each in flight_recorder.recorded()) == list(range(1, 801))


# -- groups ----------------------------------------------------------------------------------------------------------


def test_each_group_counts_its_collectives() -> None:
    world, half = group_of(), group_of("1", (0, 2), is_world=False)
    assert [note(world).sequence, note(half).sequence, note(world).sequence] == [1, 1, 2]
    assert flight_recorder.sequences() == {"0": 2, "1": 1}


def test_groups_that_were_closed_long_ago_are_forgotten() -> None:
    world = group_of()
    for number in range(1, 1000):
        group_of(str(number)).is_closed = True
    group_of("1000")
    by_group = flight_recorder.sequences()
    assert len(by_group) <= flight_recorder._CLOSED_GROUPS + 2
    assert {"0", "999", "1000"} <= by_group.keys()
    assert not world.is_closed


def test_a_group_of_the_same_name_takes_the_place_of_the_former() -> None:
    former = group_of("1")
    note(former)
    again = group_of("1")
    assert flight_recorder.sequences() == {"1": 0}
    flight_recorder.break_group("1", "rank 2 gave up")
    assert (former.broken, again.broken) == ("", "rank 2 gave up")


def test_the_first_cause_of_a_group_stays() -> None:
    group = group_of()
    flight_recorder.break_group("1", "unknown")
    flight_recorder.break_group("0", "first")
    flight_recorder.break_group("0", "second")
    assert group.broken == "first"


def test_the_default_group_is_reported_with_any_number_of_groups() -> None:
    world = group_of()
    note(world).finish()
    others = [group_of(str(number)) for number in range(1, 1000)]
    assert len(others) == 999
    assert flight_recorder.sequences().get("0") == 1


def test_operations_are_numbered_as_they_begin() -> None:
    group = group_of()
    queued, running = note(group, is_running=False), note(group)
    assert (queued.sequence, running.sequence) == (None, 1)
    assert flight_recorder.has_open_collectives()
    queued.begin()
    assert (queued.sequence, group.sequence) == (2, 2)
    queued.pause()
    queued.begin()
    assert (queued.sequence, group.sequence) == (2, 2)


def test_messages_are_not_counted() -> None:
    group = group_of()
    running, queued = (note(group, "recv", 1, is_message=True, is_running=each) for each in (True, False))
    queued.begin()
    assert (running.sequence, queued.sequence, queued.needs, group.sequence) == (None, None, [1], 0)


# -- operations ------------------------------------------------------------------------------------------------------


def test_an_operation_runs_until_it_is_finished() -> None:
    operation = note(group_of(), is_running=False)
    assert (operation.start, operation.end, flight_recorder.running()) == (None, None, [])
    operation.begin()
    assert operation.start is not None
    assert flight_recorder.running() == [operation]
    operation.finish()
    assert operation.called_at <= operation.start <= operation.end
    assert flight_recorder.running() == []
    operation.finish()  # another thread may call it a second time


def test_no_rank_waits_for_a_paused_operation() -> None:
    operation = note(group_of())
    operation.pause()
    assert (flight_recorder.running(), operation.end) == ([], None)
    assert flight_recorder.has_open_collectives()
    operation.begin()
    assert flight_recorder.running() == [operation]


@pytest.mark.parametrize("is_message", [True, False])
def test_only_collectives_keep_a_program_from_its_end(is_message: bool) -> None:
    operation = note(group_of(), peer=1, is_message=is_message)
    assert flight_recorder.has_open_collectives() is not is_message
    operation.finish()
    assert not flight_recorder.has_open_collectives()


def test_the_ranks_that_an_operation_needs() -> None:
    group = group_of("1", (4, 2, 9), is_world=False)
    assert note(group).needs == [4, 2, 9]
    assert note(group, "broadcast", 1).needs == [4, 2, 9]
    assert note(group, "recv", 1, is_message=True).needs == [2]
    assert note(group, "recv", None, is_message=True).needs == [4, 2, 9]


def test_an_operation_is_described_to_others() -> None:
    operation = note(group_of("1", (4, 5, 6, 9), is_world=False), "broadcast", 3)
    now = operation.called_at + 31.0
    line = line_here() - 2
    described = vars(operation.describe(now))
    assert described == {
        "number": operation.number,
        "name": "broadcast",
        "group": "1",
        "members": "4-6, 9",
        "sequence": 1,
        "is_message": False,
        "dtype": "float32",
        "count": 1024,
        "peer": 9,
        "where": f"{HERE}:{line} (test_an_operation_is_described_to_others)",
        "called": 31.0,
        "seconds": 31.0,
        "is_over": False,
    }
    assert json.loads(json.dumps(described)) == described


def test_an_operation_of_the_whole_job_names_no_members() -> None:
    assert note(group_of()).describe(0.0).members == ""


def test_a_completed_operation_has_its_duration() -> None:
    operation = note(group_of())
    operation.finish()
    described = operation.describe(operation.end + 100)
    assert (described.is_over, described.seconds) == (True, round(operation.end - operation.start, 6))


# -- source lines ----------------------------------------------------------------------------------------------------


def function_of(source: str, file: str) -> Callable[..., Any]:
    """Return the function `call` of a program with this source and file name."""
    module = types.ModuleType("program")
    exec(compile(source, file, "exec"), module.__dict__)
    function: Callable[..., Any] = module.call
    return function


def direct(group: Group) -> Operation:
    """Record a call whose caller is the frame above."""
    return flight_recorder.note(group, "barrier", None, 0, None, False, True, inner_frames=2)


def recorder_of_cpp(group: Group) -> Operation:
    """Record a call from a thread without a frame of the user's program."""
    return flight_recorder.note(group, "barrier", None, 0, None, False, True, inner_frames=2)


def test_the_callers_line_is_found() -> None:
    operation, line = note(group_of()), line_here()
    assert operation.where == f"{HERE}:{line} (test_the_callers_line_is_found)"


def test_a_module_has_no_function() -> None:
    namespace: dict[str, Any] = {"note": direct, "group": group_of()}
    exec(compile("\n\noperation = note(group)\n", "/home/user/train.py", "exec"), namespace)
    assert namespace["operation"].where == "train.py:3"


@pytest.mark.parametrize("package", ["mpicomm", "torch", "frozen", "threading", "contextlib", "typing_extensions"])
def test_frames_of_packages_are_passed_over(package: str) -> None:
    file = {
        "mpicomm": str(Path(mpicomm.__file__).parent / "backend" / "new.py"),
        "torch": str(Path(torch.__file__).parent / "distributed" / "new.py"),
        "frozen": "<frozen runpy>",
    }.get(package) or sys.modules[package].__file__
    inner = function_of(
        "def call(note, group, deep):\n    return call(note, group, deep - 1) if deep else note(group)", file
    )
    for deep in (0, 1, 20):
        operation, line = inner(direct, group_of(), deep), line_here()
        assert operation.where == f"{HERE}:{line} (test_frames_of_packages_are_passed_over)"


def test_the_user_is_the_first_above_the_packages() -> None:
    inner = function_of("def call(f, *args):\n    return f(*args)", str(Path(mpicomm.__file__).parent / "new.py"))
    users = function_of("def call(inner, *args):\n    return inner(*args)", "/home/user/model.py")
    assert inner(users, inner, direct, group_of()).where == "model.py:2 (call)"


def test_a_program_that_is_named_like_a_package_is_the_users() -> None:
    users = function_of("def call(note, group):\n    return note(group)", "/home/user/torch/train.py")
    assert users(direct, group_of()).where == "train.py:2 (call)"


def test_the_examples_are_the_users() -> None:
    example = str(Path(mpicomm.__file__).parent / "examples" / "new.py")
    users = function_of("def call(note, group):\n    return note(group)", example)
    assert users(direct, group_of()).where == "new.py:2 (call)"


def test_a_call_of_cpp_is_where_the_main_thread_is() -> None:
    inner = function_of("def call(note, group, found):\n    found.append(note(group))", threading.__file__)
    found: list[Operation] = []
    thread = threading.Thread(target=inner, args=(recorder_of_cpp, group_of(), found))
    thread.start()
    thread.join()
    line = line_here()
    assert found[0].code is None
    assert found[0].where == f"{HERE}:{line + 2} (test_a_call_of_cpp_is_where_the_main_thread_is)"


def test_a_call_over_several_lines_is_at_its_first() -> None:
    line = line_here() + 1
    operation = note(
        group_of(),
        "broadcast",
        1,
        is_message=False,
    )
    assert operation.where == f"{HERE}:{line} (test_a_call_over_several_lines_is_at_its_first)"


@pytest.mark.parametrize("lines", [1, 255, 256, 257, 1000, 70_000])
def test_the_line_is_found_in_a_long_function(lines: int) -> None:
    source = "def call(note, group):\n" + "    x = 1\n" * lines + "    y = note(group)\n    x = 2\n    return y\n"
    operation = function_of(source, "/home/user/train.py")(direct, group_of())
    assert operation.where == f"train.py:{lines + 2} (call)"


def test_a_thread_that_calls_operations_is_noticed() -> None:
    group, is_noted, may_end = group_of(), threading.Event(), threading.Event()

    def call() -> None:
        note(group).finish()
        is_noted.set()
        may_end.wait(scaled(10))

    note(group).finish()
    thread = threading.Thread(target=call)
    thread.start()
    assert is_noted.wait(scaled(10))
    assert flight_recorder.is_used_by_a_thread()
    may_end.set()
    thread.join()
    assert not flight_recorder.is_used_by_a_thread()


def test_a_thread_is_noticed_that_calls_from_where_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "_call_sites", {})
    functions: dict[str, Any] = {"note": flight_recorder.note, "group": group_of()}
    of_torch = "def wrapper(): note(group, 'barrier', None, 0, None, False, False)\ndef barrier(): wrapper()"
    exec(compile(of_torch, "<frozen torch>", "exec"), functions)
    used: list[bool] = []

    def serve() -> None:
        functions["barrier"]()
        used.append(flight_recorder.is_used_by(threading.current_thread()))

    for _ in range(2):
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        thread.join()
        flight_recorder._callers.clear()
    assert len(flight_recorder._call_sites) == 1
    assert used == [True, True]


def test_a_thread_with_the_number_of_one_that_ended_is_another() -> None:
    group, idents, used = group_of(), set[int](), list[bool]()

    def call() -> None:
        idents.add(threading.get_ident())
        note(group).finish()

    def watch() -> None:
        if threading.get_ident() in idents:
            used.append(flight_recorder.is_used_by(threading.current_thread()))

    for target in [call, watch] * 100:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join()
        if used:
            break
    assert used == [False]


# -- streams ---------------------------------------------------------------------------------------------------------


class Work:
    """The object that an inner backend returns for an operation."""

    def __init__(self) -> None:
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over


def stream_of(group: flight_recorder.Group) -> StreamQueue:
    return StreamQueue(group, lambda _device: None)


def start(stream: StreamQueue, works: list[Work], number: int) -> list[Operation]:
    operations = []
    for _ in range(number):
        operation = stream.note("all_reduce", None, 1, False)
        works.append(Work())
        stream.started(operation, works[-1].is_completed)
        operations.append(operation)
    return operations


def test_operations_on_a_stream_end_one_after_the_other() -> None:
    stream, works = stream_of(group_of()), list[Work]()
    operations = start(stream, works, 3)
    stream_queue.refresh_all()
    assert flight_recorder.running() == operations[:1]
    works[0].is_over = True
    stream_queue.refresh_all()
    assert flight_recorder.running() == operations[1:2]
    works[1].is_over = works[2].is_over = True
    stream_queue.refresh_all()
    assert flight_recorder.running() == []
    assert all(each.end for each in operations)
    (later,) = start(stream, works, 1)
    stream_queue.refresh_all()
    assert flight_recorder.running() == [later]
    works[3].is_over = True
    stream_queue.refresh_all()
    assert flight_recorder.running() == []


def test_the_wait_for_earlier_operations_of_a_stream_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(flight_recorder, "monotonic", lambda: now)
    stream, works = stream_of(group_of()), list[Work]()
    operations = start(stream, works, 3)
    assert [each.start for each in operations] == [100, None, None]
    assert [each.sequence for each in operations] == [1, 2, 3]
    now = 160.0
    works[1].is_over = True
    stream_queue.refresh_all()
    assert operations[2].start == 160
    assert flight_recorder.running() == operations[2:]
    assert [each.sequence for each in operations] == [1, 2, 3]


def test_a_thread_is_prepared_before_it_polls_a_stream() -> None:
    calls: list[str] = []
    stream = StreamQueue(group_of(), lambda device: calls.append(f"prepare {device}"))
    stream.device = "device"
    stream_queue.refresh_all()
    assert calls == []  # the program may not use its GPU
    stream.started(stream.note("all_reduce", None, 1, False), lambda: calls.append("poll") or True)
    stream_queue.refresh_all()
    assert calls == ["prepare device", "poll"]


def test_the_operations_of_a_gpu_that_failed_are_over() -> None:
    def prepare(_device: object) -> None:
        raise RuntimeError("the GPU has failed")

    stream = StreamQueue(group_of(), prepare)
    stream.started(stream.note("all_reduce", None, 1, False), lambda: False)
    stream_queue.refresh_all()  # an error would end the checks of all groups
    assert flight_recorder.running() == []


def test_a_work_that_fails_is_over() -> None:
    stream = stream_of(group_of())
    stream.started(stream.note("all_reduce", None, 1, False), FailedWork().is_completed)
    stream_queue.refresh_all()
    assert flight_recorder.running() == []


class FailedWork:
    def is_completed(self) -> bool:
        raise RuntimeError("NCCL error")


def test_few_works_of_a_stream_are_kept() -> None:
    stream, works = stream_of(group_of()), list[Work]()
    start(stream, works, 1000)
    alive = weakref.WeakSet(works)
    first, last = works[0], works[-1]
    works.clear()
    gc.collect()
    assert len(alive) <= stream_queue._HELD_ENDS + 1
    assert {first, last} <= set(alive)
    assert len(flight_recorder.running()) == 1
    last.is_over = True
    stream_queue.refresh_all()
    assert flight_recorder.running() == []
    del first, last
    gc.collect()
    assert len(alive) == 0


def test_a_stream_that_is_not_read_does_not_grow() -> None:
    stream, works = stream_of(group_of()), list[Work]()
    operations = start(stream, works, RING + 10)
    assert flight_recorder.running() == operations[10:11]
    works[-1].is_over = True
    stream_queue.refresh_all()
    assert flight_recorder.running() == []


def test_a_stream_that_is_closed_is_forgotten_with_all_that_was_open() -> None:
    stream, other, works = stream_of(group_of()), stream_of(group_of("1")), list[Work]()
    start(stream, works, 3)
    (running,) = start(other, works, 1)
    stream.close()
    stream.close()
    assert flight_recorder.running() == [running]
    alive = weakref.ref(stream)
    del stream
    gc.collect()
    assert alive() is None
    stream_queue.refresh_all()


def test_operations_start_while_the_watchdog_reads() -> None:
    stream, may_end = stream_of(group_of()), threading.Event()

    def look() -> None:
        while not may_end.is_set():
            stream.refresh()

    watching = threading.Thread(target=look)
    watching.start()
    for _ in range(2000):
        stream.started(stream.note("all_reduce", None, 1, False), (work := Work()).is_completed)
        work.is_over = True
    may_end.set()
    watching.join()
    stream.refresh()
    assert flight_recorder.running() == []
    assert all(each.end for each in flight_recorder.recorded())


# -- dump files ------------------------------------------------------------------------------------------------------


def test_a_rank_writes_its_operations_and_stacks(tmp_path: Path) -> None:
    group = group_of()
    note(group).finish()
    note(group, "broadcast", 2)
    note(group, is_running=False)
    before = time.time()
    path = dump.write(tmp_path / "new" / "folder", 3, {"size": 4, "host": "alpha"})
    assert path == tmp_path / "new" / "folder" / "rank-3.json"
    assert {each.name for each in path.parent.iterdir()} == {"fr_trace_rank_3", "rank-3.json", "rank-3.stacks.txt"}
    written = json.loads(path.read_text())
    assert (written["rank"], written["size"], written["host"]) == (3, 4, "alpha")
    assert before <= written["written"] <= time.time()
    over, running, queued = written["operations"]
    assert [each["number"] for each in written["operations"]] == [0, 1, 2]
    assert [each["is_over"] for each in written["operations"]] == [True, False, False]
    assert over["called"] <= over["start"] <= over["end"] <= written["written"]
    assert before - 60 < running["called"] == running["start"] <= written["written"]
    assert (running["name"], running["peer"], running["end"]) == ("broadcast", 2, None)
    assert (queued["start"], queued["end"], queued["seconds"]) == (None, None, None)
    assert "test_a_rank_writes_its_operations_and_stacks" in (path.parent / "rank-3.stacks.txt").read_text()


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"file{os.sep}folder"):
        dump.write(tmp_path / "file" / "folder", 0, {})


# -- the rate of bytes -----------------------------------------------------------------------------------------------


def completed(group: Group, count: int, called: float, end: float | None) -> None:
    operation = flight_recorder.note(group, "all_reduce", torch.float64, count, None, False, True)
    operation.called_at, operation.end = called, end


def test_the_rate_counts_the_bytes_of_operations_that_ended_lately() -> None:
    group, now, window = group_of(), 1000.0, flight_recorder._RATE_SECONDS
    assert flight_recorder.bytes_per_second(now) == 0.0
    completed(group, 1000, now - 2 * window, now - window - 0.5)  # too long ago
    completed(group, 30, now - 2 * window, now - 1)
    completed(group, 7, now - 3, now)
    completed(group, 5000, now - 1, None)  # still running
    flight_recorder.note(group, "barrier", None, 0, None, False, True).finish()
    assert flight_recorder.bytes_per_second(now) == pytest.approx((30 + 7) * 8 / window)


def test_the_rate_covers_the_time_since_the_oldest_operation() -> None:
    group, now = group_of(), 1000.0
    completed(group, 100, now - 2, now - 1)
    assert flight_recorder.bytes_per_second(now) == pytest.approx(100 * 8 / 2)
    for _ in range(RING):  # a full buffer covers less than the usual time
        completed(group, 10, now - 0.5, now - 0.25)
    assert flight_recorder.bytes_per_second(now) == pytest.approx(RING * 10 * 8 / 0.5)
    assert flight_recorder.bytes_per_second(now + 60) == 0.0  # nothing has completed since
