"""The out-of-band channel over real sockets: messages, authentication, and detection of lost connections."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hmac
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpicomm import json_messages
from mpicomm.json_messages import Message
from mpicomm.recorder.status import Crash, NotResponding, OperationInfo, RankStatus, Usage
from mpicomm.watchdog import connection as connections
from mpicomm.watchdog import local_processes, protocol
from mpicomm.watchdog.channel import Channel, ChannelEvent
from mpicomm.watchdog.connection import Connection
from mpicomm.watchdog.protocol import CollectStatus, DumpFailed, GroupBroken, LocalProcess, RankAborts
from tests.time_limits import scaled

TOKEN = bytes(range(32))
NONCE = b"o" * 16  # of the ranks
HOST = "127.0.0.1"
SECONDS = scaled(20.0)  # time limit of each wait in these tests
LIMIT = connections._LIMIT
STRANGERS_LIMIT = connections._UNAUTHENTICATED_LIMIT


def pump(condition: Callable[[], Any], *polled: Channel) -> list[ChannelEvent]:
    """Poll channels until the condition holds, and return their events."""
    events: list[ChannelEvent] = []
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not so after {SECONDS} s; seen: {events}"
        for each in polled:
            events += each.poll(0.005)
    return events


def take(channel: Channel, number: int, *others: Channel) -> list[ChannelEvent]:
    """Poll a channel until it has returned `number` events; poll the other channels too, which must return none."""
    events: list[ChannelEvent] = []
    deadline = time.monotonic() + SECONDS
    while len(events) < number and time.monotonic() < deadline:
        events += channel.poll(0.005 if others else 0.05)
        for other in others:
            assert other.poll(0) == []
    assert len(events) == number
    return events


def message_of(size: int, number: int = 0) -> DumpFailed:
    """Return a message whose JSON text has `size` bytes."""
    return DumpFailed(number, "a" * (size - len(json_messages.encode(DumpFailed(number, "")))))


def frame(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


MESSAGE = RankAborts(7)
FRAME = frame(json_messages.encode(MESSAGE))


def numbers_of(messages: list[Any]) -> list[int]:
    return [message.number if isinstance(message, CollectStatus) else message.rank for message in messages]


def read_frame(sock: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack("!I", _exactly(sock, 4))
    values: dict[str, Any] = json.loads(_exactly(sock, length))
    return values


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        assert part, "the other side has hung up"
        parts += part
    return parts


def is_closed(sock: socket.socket) -> bool:
    """Return whether the peer has closed the connection; discard all data that it sent before."""
    while select.select([sock], [], [], 0)[0]:
        try:
            if not sock.recv(1 << 16):
                return True
        except ConnectionError:
            return True
    return False


def join(hub: Channel, port: int, ranks: list[int]) -> dict[int, Channel]:
    """Connect ranks to their hub, each on its own thread instead of a process."""
    children = {rank: Channel(rank, TOKEN) for rank in ranks}
    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as pool:
        joining = [pool.submit(child.connect, HOST, port, SECONDS) for child in children.values()]
        pump(lambda: all(each.done() for each in joining), hub)
        for each in joining:
            each.result()
    return children


def test_a_lost_host_is_noticed_after_the_configured_time() -> None:
    with contextlib.closing(Channel(0, TOKEN, 300)) as hub, contextlib.closing(Channel(1, TOKEN, 300)) as rank:
        port = hub.listen(HOST, {1})
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            joining = pool.submit(rank.connect, HOST, port, SECONDS)
            pump(joining.done, hub)
            joining.result()
        for end in (rank._up.socket, hub.children[1].socket):
            idle, interval, probes, unacknowledged = [
                end.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            ]
            assert idle + interval * probes == 300
            assert unacknowledged == 300_000


class Office:
    """A hub to which ranks connect one by one."""

    def __init__(self, *expected: int) -> None:
        self.hub = Channel(0, TOKEN)
        self.port = self.hub.listen(HOST, expected)
        self._sockets: list[socket.socket] = []

    def stranger(self) -> tuple[socket.socket, dict[str, Any]]:
        """Connect without sending anything, and return the socket and the hub's first message."""
        sock = self.call()
        pump(lambda: select.select([sock], [], [], 0)[0], self.hub)
        return sock, read_frame(sock)

    def call(self) -> socket.socket:
        sock = socket.create_connection((HOST, self.port), timeout=SECONDS)
        self._sockets.append(sock)
        return sock

    def raw(self, rank: int) -> socket.socket:
        """Connect as a rank without a `Channel`, so that the test can send arbitrary bytes."""
        sock, challenge = self.stranger()
        sock.sendall(frame(credentials(bytes.fromhex(challenge["nonce"]), rank)))
        pump(lambda: rank in self.hub.children, self.hub)
        assert read_frame(sock) == {"$class": "Welcome", "proof": proof_of(NONCE, "welcome")}
        return sock

    def refuses(self, sock: socket.socket) -> bool:
        """Return whether the hub closes an unauthenticated connection and reports no event."""
        return pump(lambda: is_closed(sock), self.hub) == []

    def close(self) -> None:
        self.hub.close()
        for sock in self._sockets:
            sock.close()


def proof_of(nonce: bytes, name: str, token: bytes = TOKEN) -> str:
    return hmac.digest(token, nonce + name.encode(), "sha256").hex()


def credentials(nonce: bytes, rank: int, token: bytes = TOKEN, own: bytes = NONCE) -> bytes:
    proof = proof_of(nonce, str(rank), token)
    return json_messages.encode(protocol.Proof(rank, LocalProcess(os.getpid()), proof, own.hex()))


def welcome(proof: dict[str, Any], token: bytes = TOKEN) -> bytes:
    """Return the frame with which a hub answers a proof."""
    return frame(json_messages.encode(protocol.Welcome(proof_of(bytes.fromhex(proof["nonce"]), "welcome", token))))


def change(text: bytes, **values: Any) -> dict[str, Any]:
    """Change values of the process in a proof."""
    proof: dict[str, Any] = json.loads(text)
    proof["process"] |= values
    return proof


@contextlib.contextmanager
def office(*expected: int) -> Iterator[Office]:
    with contextlib.closing(Office(*expected)) as opened:
        yield opened


@contextlib.contextmanager
def family(*ranks: int) -> Iterator[tuple[Channel, dict[int, Channel]]]:
    """Yield a hub and the channels of these ranks, all connected."""
    with office(*ranks) as opened:
        children = join(opened.hub, opened.port, list(ranks))
        try:
            yield opened.hub, children
        finally:
            for child in children.values():
                child.close()


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    """Yield two connected ends, both marked as trusted."""
    with socket.create_server((HOST, 0)) as listener:
        ends = Connection(socket.create_connection(listener.getsockname()[:2])), Connection(listener.accept()[0])
    for end in ends:
        end.is_trusted = True
    yield ends
    for end in ends:
        end.close()


def receive_all(sender: Connection, receiver: Connection, number: int) -> tuple[list[Message], str]:
    """Transfer messages until the receiver has `number` of them or the connection is lost."""
    messages: list[Message] = []
    lost = ""
    deadline = time.monotonic() + SECONDS
    while len(messages) < number and not lost and time.monotonic() < deadline:
        sender.flush()
        more, lost = receiver.receive()
        messages += more
    return messages, lost


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [LIMIT + 1, 3 * LIMIT])
def test_a_message_over_the_limit_ends_the_connection(pair: tuple[Connection, Connection], size: int) -> None:
    here, there = pair
    here.send(MESSAGE)
    here.send(message_of(size))
    messages, lost = receive_all(here, there, 2)
    assert messages == [MESSAGE]
    assert lost == f"sent a message of {size} bytes, the limit is {LIMIT}"


def test_an_unauthenticated_connection_may_send_only_short_messages(pair: tuple[Connection, Connection]) -> None:
    here, there = pair
    there.is_trusted = False
    here.send(message_of(STRANGERS_LIMIT))
    assert receive_all(here, there, 1) == ([message_of(STRANGERS_LIMIT)], "")
    here.send(message_of(STRANGERS_LIMIT + 1))
    assert receive_all(here, there, 1) == (
        [],
        f"sent a message of {STRANGERS_LIMIT + 1} bytes, the limit is {STRANGERS_LIMIT}",
    )


def test_a_connection_that_was_reset_is_lost(pair: tuple[Connection, Connection]) -> None:
    here, there = pair
    here.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    here.close()
    messages, lost = receive_all(here, there, 1)
    assert messages == []
    assert lost
    there.send(MESSAGE)  # has no effect


GARBAGE = {
    "garbage": b"\xff\xfe\xfd\xfc" * 8,
    "a web server": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "invalid JSON": frame(b"{'a': 1}"),
    "bytes that are no text": frame(b'{"a": "\xff\xff"}'),
    "an empty message": frame(b""),
    "a list": frame(b"[1, 2]"),
    "a number": frame(b"7"),
    "null": frame(b"null"),
    "deep nesting": frame(b'{"a":' + b"[" * 500_000),
    "deep nesting that is valid": frame(b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
    "a number of many digits": frame(b'{"a":' + b"1" * 10_000 + b"}"),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_sender_of_garbage_is_lost_and_the_others_continue(garbage: bytes) -> None:
    with office(1, 2) as opened:
        raw, (other,) = opened.raw(1), join(opened.hub, opened.port, [2]).values()
        with contextlib.closing(other):
            sending = threading.Thread(target=_send, args=(raw, garbage))
            sending.start()
            (event,) = pump(lambda: 1 not in opened.hub.children, opened.hub)
            sending.join()
            assert event.rank == 1
            assert event.lost.startswith("sent ")
            assert pump(lambda: is_closed(raw), opened.hub) == []
            other.send_up(RankAborts(2))
            assert take(opened.hub, 1) == [ChannelEvent(2, RankAborts(2))]
            opened.hub.send_down(MESSAGE)
            assert take(other, 1) == [ChannelEvent(None, MESSAGE)]


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the peer may close the connection before it has received all data
        sock.sendall(data)


@pytest.mark.parametrize("part", [b"\0", FRAME[:-1], FRAME[:7]])
def test_half_a_message_is_none(part: bytes) -> None:
    with office(1, 2) as opened:
        raw, other = opened.raw(1), opened.raw(2)
        raw.sendall(part)
        assert opened.hub.poll(0.1) == []
        raw.close()
        assert take(opened.hub, 1) == [ChannelEvent(1, lost="closed")]
        other.sendall(FRAME)
        assert take(opened.hub, 1) == [ChannelEvent(2, MESSAGE)]


INVALID = {
    "an object of no class": b"{}",
    "an unknown class": b'{"$class": "Recollect", "number": 1}',
    "a class that is a list": b'{"$class": [], "number": 1}',
    "a field is missing": b'{"$class": "CollectStatus", "number": 1}',
    "a field too many": b'{"$class": "CollectStatus", "number": 1, "files": true, "more": 1}',
    "a field of another type": b'{"$class": "CollectStatus", "number": "1", "files": true}',
    "a status of another type": b'{"$class": "StatusReport", "number": 1, "rank": 1, "status": {}}',
    "a list of another type": (
        b'{"$class": "RankStatus", "running": [7], "last": null, "main": "", "sequences": {}, "usage": null}'
    ),
    "an object of another type": (
        b'{"$class": "RankStatus", "running": [], "last": null, "main": "", "sequences": {"0": "7"}, "usage": null}'
    ),
}


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID.keys())
def test_a_message_that_is_not_valid_is_dropped(text: bytes) -> None:
    with office(1) as opened:
        opened.raw(1).sendall(frame(text) + FRAME)
        assert take(opened.hub, 1) == [ChannelEvent(1, MESSAGE)]


def test_messages_arrive_as_they_were_sent() -> None:
    operation = OperationInfo(7, "send", "0", "", None, True, "", 0, 3, "a.py:1", 1.5, None, False)
    for status in (
        RankStatus([operation], None, "a.py:2", {"0": 7, "": -1}),
        RankStatus([], operation, "", {}),
        NotResponding(4, ""),
    ):
        message = protocol.StatusReport(2, 1, status)
        assert json_messages.decode(json_messages.encode(message)) == message
    for answer in (protocol.Acknowledgement(3), protocol.MissingAnswer(3, 1, "0-2", "table"), GroupBroken("0", "é\n")):
        assert json_messages.decode(json_messages.encode(answer)) == answer


def test_default_values_are_valid() -> None:
    """The receiver drops a message with a field of another type."""
    process = protocol.LocalProcess(7)
    usage = Usage(1.5, 2**30)
    died, started, finished = protocol.RankDied(1, "closed", None), protocol.JobStarted({}), protocol.RankFinished(1)
    collect = CollectStatus(1, files=True)
    for message in (process, usage, RankStatus([], None, "", {}), died, started, finished, collect):
        assert json_messages.decode(json_messages.encode(message)) == message
    assert (usage.gpu_memory, usage.gpu_memory_total, usage.gpu_utilization) == (None, None, None)
    assert (process.start_time, started.name) == ("", "")
    assert not any([started.recovers, finished.has_failed, collect.usage])


def test_a_text_that_is_not_an_object_is_an_error() -> None:
    for text in (b"7", b"[]", b'"CollectStatus"', b"{"):
        with pytest.raises(ValueError):  # noqa: PT011  of json, whose text varies
            json_messages.decode(text)


# -- hubs and children -----------------------------------------------------------------------------------------------


def test_messages_go_both_ways_in_order() -> None:
    with family(1, 2, 5) as (hub, children):
        for number in range(100):
            hub.send_down(CollectStatus(number, files=False))
            hub.send_to(5, protocol.MissingAnswer(5, number, "", ""))
            for child in children.values():
                child.send_up(CollectStatus(number, files=True))
        received = take(hub, 300)
        for rank, child in children.items():
            assert numbers_of([event.message for event in received if event.rank == rank]) == list(range(100))
            answers = [event.message for event in take(child, 200 if rank == 5 else 100)]
            assert [message for message in answers if isinstance(message, CollectStatus)] == [
                CollectStatus(number, files=False) for number in range(100)
            ]


def test_both_ends_authenticate() -> None:
    with family(1, 2) as (hub, children):
        own = local_processes.this_process()
        assert hub.processes == {1: own, 2: own}
        assert [child.processes for child in children.values()] == [{0: own}] * 2


def test_a_process_that_crashes_is_lost_at_once() -> None:
    """Before its connection ends, and after its earlier messages."""
    crash = Crash("SIGSEGV", 'File "a.py", line 1 in f')
    with family(1) as (hub, children):
        children[1].send_up(MESSAGE)
        children[1].send_up(crash)
        assert take(hub, 2) == [ChannelEvent(1, MESSAGE), ChannelEvent(1, lost="crashed", crash=crash)]
        assert not hub.children
        assert children[1].poll(0.1) == []  # to its threads that run on, rank 0 does not seem to be dead


def test_no_closed_connection_reports_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    reporting: set[Connection] = set()
    monkeypatch.setattr(
        connections,
        "_allow_crash_report",
        lambda end, is_allowed: reporting.add(end) if is_allowed else reporting.discard(end),
    )
    with family(1, 2) as (hub, children):
        assert reporting == {*hub.children.values(), *(child._up for child in children.values())}
        hub.send_down(MESSAGE)
        assert len(reporting) == 4
    assert not reporting


def test_large_messages_go_both_ways_at_once() -> None:
    with family(1, 2) as (hub, children):
        hub.send_down(message_of(LIMIT))
        for child in children.values():
            child.send_up(message_of(LIMIT))
        events = {None: 0, 1: 0, 2: 0}
        deadline = time.monotonic() + SECONDS
        while sum(events.values()) < 4 and time.monotonic() < deadline:
            for channel in (hub, *children.values()):
                for event in channel.poll(0.005):
                    assert event.message == message_of(LIMIT)
                    events[event.rank] += 1
        assert events == {None: 2, 1: 1, 2: 1}


def test_nothing_is_sent_to_an_absent_rank() -> None:
    with contextlib.closing(Channel(3, TOKEN)) as alone:
        alone.send_up(MESSAGE)
        alone.send_to(7, MESSAGE)
        alone.send_down(MESSAGE)
        assert alone.poll(0) == []


def test_the_parent_forwards_answers_to_observers(pair: tuple[Connection, Connection]) -> None:
    """`mpicomm run` has the observers of the jobs that it starts."""
    answers = [protocol.StatusReport(0, 1, NotResponding(4.0, "")), protocol.StatusComplete({"node0": "0"})]
    with contextlib.closing(Channel(0, TOKEN)) as alone:
        alone.attach_parent(pair[0])
        alone.answer_observers(answers)
        assert receive_all(*pair, 2) == (answers, "")


def test_a_child_that_does_not_read_blocks_no_other_rank() -> None:
    with office(1, 2) as opened:
        deaf, (other,) = opened.raw(1), join(opened.hub, opened.port, [2]).values()
        with contextlib.closing(other):
            start = time.monotonic()
            for number in range(100):
                opened.hub.send_down(message_of(200_000, number))
            assert time.monotonic() - start < SECONDS / 2
            assert opened.hub.children[1].has_outgoing
            received = take(other, 100, opened.hub)
            assert numbers_of([event.message for event in received]) == list(range(100))
            assert opened.hub.children[1].has_outgoing
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                reading = pool.submit(lambda: [read_frame(deaf)["rank"] for _ in range(100)])
                pump(reading.done, opened.hub)
                assert reading.result() == list(range(100))
            assert not opened.hub.children[1].has_outgoing


def test_writability_is_not_polled_without_outgoing_messages() -> None:
    with family(1) as (hub, children):
        hub.send_down(MESSAGE)
        take(children[1], 1)
        start = time.monotonic()
        assert hub.poll(0.2) == []
        assert time.monotonic() - start > 0.15


def test_another_thread_wakes_poll() -> None:
    with family(1) as (hub, _):
        waker = threading.Timer(0.1, hub.wake)
        waker.start()
        start = time.monotonic()
        assert hub.poll(SECONDS) == []
        assert time.monotonic() - start < SECONDS / 2
        waker.join()
        assert hub.take_woken() == b"\0"


def test_frequent_wakeups_do_not_block() -> None:
    with contextlib.closing(Channel(0, TOKEN)) as alone:
        for _ in range(100_000):
            alone.wake()
        pump(lambda: not select.select([alone._woken], [], [], 0)[0], alone)
        assert alone.take_woken().count(b"\0") > 100
    alone.wake()  # closed: no thread waits in poll()


# -- authentication --------------------------------------------------------------------------------------------------


def altered(nonce: bytes, /, **values: Any) -> bytes:
    """Return valid credentials of rank 1 with other values."""
    return json.dumps({**json.loads(credentials(nonce, 1)), **values}).encode()


STRANGERS: dict[str, Callable[[bytes], bytes]] = {
    "sends_no_proof": lambda nonce: json.dumps({"$class": "Proof", "hello": nonce.hex()}).encode(),
    "sends_a_wrong_proof": lambda nonce: json_messages.encode(MESSAGE),
    "lies_about_the_token": lambda nonce: credentials(nonce, 1, TOKEN[::-1]),
    "lies_about_the_rank": lambda nonce: json.dumps({**json.loads(credentials(nonce, 2)), "rank": 1}).encode(),
    "repeats_an_old_proof": lambda nonce: credentials(bytes(len(nonce)), 1),
    "is_not_expected": lambda nonce: credentials(nonce, 7),
    "has_no_pid": lambda nonce: altered(nonce, process={"$class": "LocalProcess", "start_time": ""}),
    "has_a_birth_that_is_a_number": lambda nonce: json.dumps(change(credentials(nonce, 1), start_time=7)).encode(),
    "has_a_rank_that_is_a_list": lambda nonce: altered(nonce, rank=[1]),
    "has_a_proof_that_is_a_number": lambda nonce: altered(nonce, proof=7),
    "has_a_nonce_that_is_too_long": lambda nonce: credentials(nonce, 1, own=bytes(17)),
    "has_a_nonce_that_is_too_short": lambda nonce: credentials(nonce, 1, own=bytes(15)),
    "has_a_nonce_that_is_no_number": lambda nonce: altered(nonce, nonce="nonce"),
    "has_a_proof_of_other_letters": lambda nonce: altered(nonce, proof="é" * 64),
    "sends_too_much": lambda nonce: credentials(nonce, 1).ljust(STRANGERS_LIMIT + 1),
}


@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_dropped_and_the_rank_still_gets_in(make: Callable[[bytes], bytes]) -> None:
    with office(1) as opened:
        stranger, challenge = opened.stranger()
        stranger.sendall(frame(make(bytes.fromhex(challenge["nonce"]))))
        assert opened.refuses(stranger)
        assert opened.hub.children == {}
        opened.raw(1)


def test_every_caller_has_to_prove_something_else_and_does_not_get_the_token() -> None:
    with office(1, 2) as opened:
        nonces = {opened.stranger()[1]["nonce"] for _ in range(20)}
        assert len(nonces) == 20
        assert {len(bytes.fromhex(nonce)) for nonce in nonces} == {len(NONCE)}
        _, challenge = opened.stranger()
        assert set(challenge) == {"$class", "nonce", "rank", "process"}
        assert TOKEN.hex() not in challenge.values()


def test_a_rank_sends_its_proof_and_not_the_token() -> None:
    nonce = b"n" * len(NONCE)
    challenge = protocol.Challenge(0, LocalProcess(1), nonce.hex())
    with socket.create_server((HOST, 0)) as listener, contextlib.closing(Channel(1, TOKEN)) as rank:
        listener.settimeout(SECONDS)
        connecting = threading.Thread(target=rank.connect, args=(*listener.getsockname(), SECONDS))
        connecting.start()
        hub, _ = listener.accept()
        with hub:
            hub.settimeout(SECONDS)
            hub.sendall(frame(json_messages.encode(challenge)))
            sent = read_frame(hub)
            hub.sendall(welcome(sent))
            connecting.join()
            rank.close()
            assert hub.recv(1) == b"", "something follows the proof"
    own = bytes.fromhex(sent["nonce"])
    assert len(own) == len(nonce)
    assert sent == change(credentials(nonce, 1, own=own), start_time=local_processes.this_process().start_time)


WITHOUT_TOKEN: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "lacks_the_token": lambda proof: welcome(proof, bytes(32)),
    "returns_the_proof_of_the_rank": lambda proof: frame(json_messages.encode(protocol.Welcome(proof["proof"]))),
    "sends_something_else": lambda _: FRAME,
    "sends_a_proof_of_other_letters": lambda _: frame(json_messages.encode(protocol.Welcome("é" * 64))),
}


@pytest.mark.parametrize("answer", WITHOUT_TOKEN.values(), ids=WITHOUT_TOKEN.keys())
def test_a_rank_refuses_a_hub_without_the_token(answer: Callable[[dict[str, Any]], bytes]) -> None:
    with socket.create_server((HOST, 0)) as listener, contextlib.closing(Channel(1, TOKEN)) as rank:

        def pretend() -> None:
            hub, _ = listener.accept()
            with hub:
                hub.settimeout(SECONDS)
                hub.sendall(frame(json_messages.encode(protocol.Challenge(0, LocalProcess(7), NONCE.hex()))))
                hub.sendall(answer(read_frame(hub)))
                assert hub.recv(1) == b"", "the rank stays connected"

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pretending = pool.submit(pretend)
            with pytest.raises(ValueError, match=r"token of the job|expected a welcome"):
                rank.connect(*listener.getsockname(), SECONDS)
            pretending.result()
        assert rank.poll(0) == []


def test_a_rank_gets_in_once() -> None:
    with office(1, 2) as opened:
        first = opened.raw(1)
        second, challenge = opened.stranger()
        second.sendall(frame(credentials(bytes.fromhex(challenge["nonce"]), 1)))
        assert opened.refuses(second)
        first.sendall(FRAME)
        assert take(opened.hub, 1) == [ChannelEvent(1, MESSAGE)]


def test_a_lost_rank_cannot_connect_again() -> None:
    with office(1, 2) as opened:
        opened.raw(1).close()
        assert take(opened.hub, 1) == [ChannelEvent(1, lost="closed")]
        again, challenge = opened.stranger()
        again.sendall(frame(credentials(bytes.fromhex(challenge["nonce"]), 1)))
        assert opened.refuses(again)


def test_a_rank_may_send_messages_right_after_its_proof() -> None:
    with office(1) as opened:
        eager, challenge = opened.stranger()
        eager.sendall(frame(credentials(bytes.fromhex(challenge["nonce"]), 1)) + FRAME)
        assert take(opened.hub, 1) == [ChannelEvent(1, MESSAGE)]


def test_a_silent_connection_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_AUTHENTICATION_SECONDS", scaled(0.3))
    with office(1) as opened:
        silent, _ = opened.stranger()
        slow, _ = opened.stranger()
        slow.sendall(b"\0\0")
        start = time.monotonic()
        assert opened.refuses(silent)
        assert opened.refuses(slow)
        assert time.monotonic() - start < SECONDS / 2
        assert opened.hub._server._pending == {}
        real = opened.raw(1)
        time.sleep(scaled(0.5))
        assert opened.hub.poll(0.1) == []  # an authenticated rank stays connected
        assert not is_closed(real)


def test_a_connection_that_is_closed_at_once_is_forgotten() -> None:
    with office(1) as opened:
        for _ in range(20):
            opened.call().close()
        server = opened.hub._server
        pump(lambda: not server._pending and not select.select([server._listener], [], [], 0)[0], opened.hub)
        opened.raw(1)


def test_real_ranks_get_in_among_many_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_AUTHENTICATION_SECONDS", scaled(1.0))
    ranks = list(range(1, 9))
    with office(*ranks) as opened, contextlib.ExitStack() as stack:

        def flood(first: int) -> list[socket.socket | None]:
            return [_stranger(opened.port, GARBAGE["a web server"] if n % 2 else b"") for n in range(first, first + 50)]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            flooding = [pool.submit(flood, first) for first in range(0, 200, 50)]
            concurrent.futures.wait(flooding[:2])  # unauthenticated connections that wait before those of the ranks
            children = join(opened.hub, opened.port, ranks)
            for child in children.values():
                stack.callback(child.close)
            strangers = [sock for each in flooding for sock in each.result()]
        for sock in strangers:
            if sock is not None:
                stack.callback(sock.close)
        assert sorted(opened.hub.children) == ranks
        pump(lambda: not opened.hub._server._pending, opened.hub)
        for child in children.values():
            child.send_up(MESSAGE)
        assert sorted(event.rank or 0 for event in take(opened.hub, 8)) == ranks


def _stranger(port: int, text: bytes) -> socket.socket | None:
    try:
        sock = socket.create_connection((HOST, port), timeout=SECONDS)
    except ConnectionError:  # all ranks are connected: the hub no longer listens
        return None
    _send(sock, text)
    return sock


def test_the_listening_socket_is_closed_after_the_last_rank() -> None:
    with office(1, 2) as opened:
        opened.raw(1)
        opened.call()
        opened.raw(2)
        with pytest.raises(ConnectionRefusedError):
            opened.call()


def test_a_refused_rank_gets_an_error_at_once() -> None:
    with office(1) as opened, contextlib.closing(Channel(2, TOKEN)) as child:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            joining = pool.submit(child.connect, HOST, opened.port, SECONDS)
            pump(joining.done, opened.hub)
            with pytest.raises(ConnectionError, match="the other end closed the connection"):
                joining.result()
        child.send_up(MESSAGE)  # has no effect without a connection


def test_messages_right_after_the_welcome_are_received() -> None:
    with socket.create_server((HOST, 0)) as listener, contextlib.closing(Channel(1, TOKEN)) as child:

        def take_in() -> socket.socket:
            sock = listener.accept()[0]
            sock.sendall(frame(json_messages.encode(protocol.Challenge(0, LocalProcess(7), "00" * 16))))
            sock.sendall(welcome(read_frame(sock)) + FRAME)
            return sock

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            hub = pool.submit(take_in)
            child.connect(HOST, listener.getsockname()[1], SECONDS)
            with hub.result():
                assert child.poll(0.5) == [ChannelEvent(None, MESSAGE)]


# -- lost connections ------------------------------------------------------------------------------------------------


def test_the_hub_notices_which_child_is_lost() -> None:
    with family(1, 2, 3) as (hub, children):
        children[2].send_up(MESSAGE)
        children[2].close()
        assert take(hub, 2) == [ChannelEvent(2, MESSAGE), ChannelEvent(2, lost="closed")]
        assert sorted(hub.children) == [1, 3]
        hub.send_to(2, MESSAGE)
        hub.send_down(MESSAGE)
        assert [take(children[rank], 1) for rank in (1, 3)] == [[ChannelEvent(None, MESSAGE)]] * 2


def test_a_child_notices_that_its_hub_is_lost() -> None:
    with family(1) as (hub, children):
        hub.send_down(MESSAGE)
        hub.close()
        assert take(children[1], 2) == [ChannelEvent(None, MESSAGE), ChannelEvent(None, lost="closed")]
        children[1].send_up(MESSAGE)
        assert children[1].poll(0.1) == []


def test_a_loss_is_noticed_while_many_messages_are_queued() -> None:
    with office(1) as opened:
        raw = opened.raw(1)
        for _ in range(20):
            opened.hub.send_down(message_of(LIMIT))
        raw.close()
        (event,) = take(opened.hub, 1)
        assert event.rank == 1
        assert event.lost
        assert opened.hub.children == {}


def descriptors() -> dict[str, str]:
    """Return the open descriptors of this process, except the one used to list them."""
    links = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  Path.iterdir would do the same
        with contextlib.suppress(OSError):
            links[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return links


def test_close_closes_all_descriptors() -> None:
    before = descriptors()
    with office(1, 2, 3) as opened:
        children = join(opened.hub, opened.port, [1, 2])
        opened.stranger()
        assert len(descriptors()) > len(before)
        for child in children.values():
            child.close()
    assert descriptors() == before


def test_a_hub_that_does_not_answer_is_not_waited_for_long() -> None:
    before, start = descriptors(), time.monotonic()
    with socket.create_server((HOST, 0)) as listener, contextlib.closing(Channel(1, TOKEN)) as child:
        with pytest.raises(TimeoutError, match="timed out waiting for an answer"):
            child.connect(HOST, listener.getsockname()[1], 0.3)
        assert time.monotonic() - start < SECONDS / 2
    assert descriptors() == before


# -- forked children -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forked(in_child: Callable[[], Any]) -> Iterator[None]:
    """Fork a child that calls `in_child` and then lives until the end of the block."""
    ready, is_ready = os.pipe()
    end, ends = os.pipe()
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.close(ends)
            in_child()
            os.write(is_ready, b"1")
            os.read(end, 1)
        os._exit(0)
    os.close(end)
    os.close(is_ready)
    try:
        assert os.read(ready, 1) == b"1", "the child has failed"
        yield
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the child did not live so long"
    finally:
        os.close(ends)
        os.close(ready)
        os.waitpid(pid, 0)


def test_a_forked_child_that_forgets_does_not_disturb_the_channel() -> None:
    with family(1, 2) as (hub, children), forked(hub.close_after_fork):
        hub.send_down(MESSAGE)
        assert [take(child, 1) for child in children.values()] == [[ChannelEvent(None, MESSAGE)]] * 2
        children[1].send_up(MESSAGE)
        assert take(hub, 1) == [ChannelEvent(1, MESSAGE)]
        hub.wake()
        assert hub.poll(SECONDS) == []
        assert hub.take_woken() == b"\0"


def test_a_hub_that_listens_still_does_after_a_child_forgot() -> None:
    with office(1) as opened, forked(opened.hub.close_after_fork):
        opened.raw(1)


def test_a_forked_child_that_forgets_does_not_hide_the_end_of_a_rank() -> None:
    with family(1) as (hub, children), forked(children[1].close_after_fork):
        children[1].close()
        assert take(hub, 1) == [ChannelEvent(1, lost="closed")]


def test_forgetting_closes_all_descriptors_in_the_child() -> None:
    before = set(descriptors().values())
    with family(1) as (hub, children):

        def forget() -> None:
            hub.close_after_fork()
            children[1].close_after_fork()
            left = {link for link in set(descriptors().values()) - before if not link.startswith("pipe:")}
            assert not left

        with forked(forget):
            pass
