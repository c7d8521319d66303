"""The queue of a group, when signal handlers raise exceptions in the thread that runs it."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import signal
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpicomm import mpi
from mpicomm.backend.execution import future_callbacks, work, worker_thread
from mpicomm.backend.execution.work import QueuedWork
from mpicomm.backend.execution.worker_thread import Worker
from tests.time_limits import scaled

FILES = {module.__file__ for module in (worker_thread, work)}
# Called by the interpreter itself, between two instructions: a Python function would run the handler within itself.
_trip = ctypes.PyDLL(None).PyErr_SetInterrupt
_trip.argtypes, _trip.restype = [ctypes.py_object] * 3, None


class InterruptingTrace:
    """Lets SIGINT arrive before one of the instructions of the worker's code that run on this thread."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.has_interrupted = False

    def __call__(self, frame: types.FrameType, event: str, argument: object) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if self.has_interrupted or frame.f_code.co_filename not in FILES:
            return None
        self._left -= event == "opcode"
        if self._left > 0:
            return self
        self.has_interrupted = True
        frame.f_trace = _trip
        return None  # keeps f_trace


@contextlib.contextmanager
def interrupting(count: int) -> Iterator[InterruptingTrace]:
    def interrupt(number: int, frame: types.FrameType | None) -> None:
        sys.settrace(None)
        while frame is not None:
            frame.f_trace, frame = None, frame.f_back
        raise KeyboardInterrupt

    trace = InterruptingTrace(count)
    before = sys.gettrace(), signal.signal(signal.SIGINT, interrupt)
    try:
        sys.settrace(trace)
        yield trace
    finally:
        sys.settrace(before[0])
        signal.signal(signal.SIGINT, before[1])


def is_interrupted(worker: Worker, count: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Wait for two jobs, interrupted before an instruction; return whether the wait had so many instructions."""
    runs: list[int] = []

    def call(number: int) -> None:
        operations[number].start = 1.0
        runs.append(number)

    operations = [SimpleNamespace(start=None) for _ in range(2)]
    queue = SimpleNamespace(run_queued_until=lambda of, may_block: worker.run_until_done(of), start_queued=lambda: None)
    works = [QueuedWork([torch.ones(1)], operation, queue) for operation in operations]
    futures = [each.get_future() for each in works]
    monkeypatch.setattr(worker._timer, "set", lambda _nanoseconds: None)  # the worker's thread comes later
    torch.set_flush_denormal(True)
    for number in range(2):
        worker.submit(lambda number=number: call(number), works[number])
    torch.set_flush_denormal(False)
    with contextlib.suppress(KeyboardInterrupt), interrupting(count) as trace:
        works[1].wait()
    assert not worker_thread._flushes_denormals()
    assert not future_callbacks.is_inside_callback()
    monkeypatch.undo()
    worker.wake_now()
    assert mpi.poll(lambda: worker.is_idle, scaled(5)), f"a job is lost, interrupted at instruction {count}"
    assert runs == [0, 1]
    assert all(future.done() for future in futures)
    assert all(isinstance(each.exception(), (KeyboardInterrupt, type(None))) for each in works)
    return trace.has_interrupted


def test_an_exception_of_a_signal_handler_loses_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, count = Worker("test", collections.deque()), 1
    while is_interrupted(worker, count, monkeypatch):
        count += 1
    worker.stop()
    assert count > 200
