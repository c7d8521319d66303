"""Messages that wait for a device before MPI receives them: their order, the wait, and errors of the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from mpicomm import mpi
from mpicomm.backend.execution.message_work import Transfer
from mpicomm.backend.execution.pending_messages import PendingMessages
from mpicomm.backend.execution.posting_queue import PostingQueue
from mpicomm.devices import vendors


class Event:
    """An event of a device that reaches it when the test says so."""

    def __init__(self) -> None:
        self._is_reached = threading.Event()
        self.error: Exception | None = None

    def reach(self) -> None:
        self._is_reached.set()

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self._is_reached.is_set()

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        assert self._is_reached.wait(10)


class Message:
    def __init__(self, queue: PostingQueue) -> None:
        self._queue = queue
        self.error: Exception | None = None

    def start(self, post: Callable[[], Any]) -> None:
        assert self._queue.waiting, "a later message would be faster"
        try:
            post()
        except ValueError as error:
            self.error = error


def test_messages_keep_the_order_of_the_calls() -> None:
    queue, first, third, posted = PostingQueue(), Event(), Event(), []
    for number, event in enumerate((first, None, third)):
        queue.add(event, lambda number=number: posted.append(number), Message(queue))
    queue.post_ready()
    assert posted == []
    first.reach()
    queue.post_ready()
    assert posted == [0, 1]
    third.reach()
    queue.post_ready()
    assert posted == [0, 1, 2]
    assert not queue.waiting


def test_a_thread_that_waits_posts_all_messages() -> None:
    queue, event, posted = PostingQueue(), Event(), []
    queue.add(event, lambda: posted.append(event.query()), Message(queue))
    timer = threading.Timer(0.05, event.reach)
    timer.start()
    queue.post_all()
    timer.join()
    assert posted == [True]


def test_a_thread_that_posts_does_not_stop_another_one_that_does_not_wait() -> None:
    queue, event, posted = PostingQueue(), Event(), []
    queue.add(event, lambda: posted.append(1), Message(queue))
    waiting = threading.Thread(target=queue.post_all)
    waiting.start()
    queue.post_ready()
    assert posted == []
    event.reach()
    waiting.join()
    assert posted == [1]


@pytest.mark.parametrize("waits", [True, False])
def test_an_error_of_the_device_is_that_of_the_message(waits: bool) -> None:
    queue, event, posted = PostingQueue(), Event(), []
    message, event.error = Message(queue), ValueError("the kernel failed")
    queue.add(event, lambda: posted.append(1), message)
    (queue.post_all if waits else queue.post_ready)()
    assert posted == []
    assert message.error is event.error
    assert not queue.waiting


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """The calling thread captures a CUDA graph, in which queries of events and copies are not permitted."""
    state = Capture()
    monkeypatch.setattr(vendors, "vendor", lambda: state)
    return state


class Capture:
    is_running = True

    def is_capturing(self) -> bool:
        return self.is_running


def test_a_thread_that_captures_a_graph_queries_no_event(capture: Capture) -> None:
    queue, event, posted = PostingQueue(), Event(), []
    event.error = AssertionError("the query invalidates the capture")
    queue.add(event, lambda: posted.append(1), Message(queue))
    queue.post_ready()
    assert len(queue.waiting) == 1
    event.error, capture.is_running = None, False
    event.reach()
    queue.post_ready()
    assert posted == [1]


def test_a_thread_that_captures_a_graph_lets_the_poller_post(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poller thread may wait for the device, as often as it is woken."""
    monkeypatch.setattr(mpi, "has_thread_multiple", lambda: True)
    messages, event, posted = mock.Mock(unposted=PostingQueue()), Event(), []
    event.error = AssertionError("the query invalidates the capture")
    messages.unposted.add(event, lambda: posted.append(1), Message(messages.unposted))

    def rouse() -> None:
        event.error, capture.is_running = None, False  # the poller thread captures nothing
        event.reach()
        messages.unposted.post_ready()

    messages._get_poller.return_value.rouse = rouse
    messages._have_been_posted = lambda: PendingMessages._have_been_posted(messages)
    PendingMessages.post_all(messages)
    assert posted == [1]


def test_a_thread_that_captures_a_graph_completes_no_message(capture: Capture) -> None:
    """The copy of a received message would become a part of the graph."""
    copied: list[int] = []
    request = mock.Mock(Test=lambda _status: True)
    tensor = torch.empty(1, device="meta")
    transfer = Transfer(request, tensor, tensor, mock.Mock(), mock.Mock(), lambda _status: copied.append(1))
    assert not transfer.test()
    assert copied == []
    capture.is_running = False
    assert transfer.test()
    assert copied == [1]
