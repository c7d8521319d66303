"""The addresses on which rank 0 may listen, and the proof that rank 0 itself answers."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mpicomm import host_info, mpi, topology
from mpicomm.errors import LaunchError, RendezvousError
from mpicomm.job import interfaces, rendezvous, torchrun_job
from mpicomm.job.start_request import StartRequest
from mpicomm.launch import detect
from tests.time_limits import scaled

TOKEN = bytes(range(16))
NAME = "rank0.cluster"


@contextlib.contextmanager
def server_that_sends(*parts: bytes, pause: float = 0.0) -> Iterator[tuple[str, int]]:
    """Answer one caller with these bytes, piece by piece, and close the connection."""

    def answer() -> None:
        with contextlib.suppress(OSError):  # no caller connected, or the caller has disconnected
            connection, _ = listener.accept()
            with connection:
                for part in parts:
                    connection.sendall(part)
                    time.sleep(pause)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(scaled(5))
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listener.getsockname()[:2]
        finally:
            thread.join()


@contextlib.contextmanager
def rank_0(token: bytes, listeners: int = 1) -> Iterator[list[tuple[str, int]]]:
    """Answer every caller with the token, as rank 0 does."""
    done = threading.Event()
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(listeners)]
        thread = threading.Thread(target=rendezvous._serve_probes, args=(sockets, token, done))
        thread.start()
        try:
            yield [each.getsockname()[:2] for each in sockets]
        finally:
            done.set()
            thread.join()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Replace the addresses to which host names resolve; all other names are unknown."""
    known: dict[str, list[str]] = {}

    def resolve(name: str, *args: object, **kwargs: object) -> list[tuple[object, ...]]:
        if name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return known


# -- proof of identity -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callers", [1, 8])
def test_rank_0_replies_to_all_on_every_address(callers: int) -> None:
    with rank_0(TOKEN, listeners=3) as places:
        received: list[bool] = []
        calls = [
            threading.Thread(target=lambda place=place: received.append(rendezvous.can_reach(place, TOKEN)))
            for place in places
            for _ in range(callers)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
    assert received == [True] * callers * 3


def test_a_reply_may_arrive_in_pieces() -> None:
    with server_that_sends(*[bytes([byte]) for byte in TOKEN], pause=0.01) as place:
        assert rendezvous.can_reach(place, TOKEN)


@pytest.mark.parametrize(
    "answer", [TOKEN[::-1], TOKEN[:-1], b"", b"HTTP/1.1 400 Bad Request"], ids=["other", "short", "nothing", "web"]
)
def test_another_server_is_not_rank_0(answer: bytes) -> None:
    with server_that_sends(answer) as place:
        assert not rendezvous.can_reach(place, TOKEN)


def test_an_address_without_a_listener() -> None:
    with socket.socket() as bound:  # bound but not listening: no other process can take the port meanwhile
        bound.bind(("127.0.0.1", 0))
        start = time.monotonic()
        assert not rendezvous.can_reach(bound.getsockname(), TOKEN, seconds=100.0)
        assert time.monotonic() - start < scaled(5)


def test_a_silent_server_is_not_awaited_for_long() -> None:
    pause = scaled(2)
    with server_that_sends(b"", pause=pause) as place:
        start = time.monotonic()
        assert not rendezvous.can_reach(place, TOKEN, seconds=0.2)
        assert time.monotonic() - start < 0.75 * pause


class ThreeRanks:
    """The communicator of three ranks on three nodes, on rank 1: rank 2 does not reach the first address."""

    rank = 1

    def allgather(self, mine: list[bool]) -> list[list[bool]]:
        return [[True, True], mine, [False, True]]


def test_a_place_is_chosen_that_every_node_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", (5.0,))  # one round
    where = topology.from_nodes(1, "abc", "abc")
    with rank_0(TOKEN, listeners=2) as places:
        assert rendezvous._find_reachable_address(ThreeRanks(), where, [], places, TOKEN) == 1
    nowhere = pytest.raises(RendezvousError, match="has no address that every node can reach")
    with rank_0(TOKEN) as (near,), server_that_sends(TOKEN[::-1]) as strange, nowhere:
        rendezvous._find_reachable_address(ThreeRanks(), where, [], [near, strange], TOKEN)


def test_a_place_that_all_nodes_do_not_reach_is_shown_with_those_that_do_not() -> None:
    where = topology.from_nodes(0, "abc", "abc")
    message = rendezvous._describe_unreachable(
        [("10.0.0.1", 1), ("10.1.0.1", 2)], [[True, True], [True, False], [False, True]], where
    )
    assert "rank 0 on a has no address" in message
    assert "10.0.0.1: not reached from c\n" in message
    assert "10.1.0.1: not reached from b\n" in message
    assert "MASTER_ADDR" in message
    assert "MPICOMM_INTERFACE" in message


# -- port, address and interface that the user sets --------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1", "29500", "65535", " 29500", "29500 "])
def test_a_port_is_a_number(text: str) -> None:
    assert rendezvous._given_port({"MASTER_PORT": text}) == int(text)


@pytest.mark.parametrize("environ", [{}, {"MASTER_PORT": ""}, {"MASTER_PORT": "0"}])
def test_without_a_port_any_will_do(environ: dict[str, str]) -> None:
    assert rendezvous._given_port(environ) == 0


@pytest.mark.parametrize("text", ["http", "-1", "65536", "29500.0", "0x50", "tcp://29500", "²"])
def test_an_invalid_port_is_refused_with_and_without_mpi(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = f"^MASTER_PORT must be a number from 1 to 65535, got '{text}'.\n"
    with pytest.raises(LaunchError, match=f"{message}Correct it, or unset it."):
        rendezvous._given_port({"MASTER_PORT": text})
    with pytest.raises(LaunchError, match=f"{message}Set MASTER_PORT to a free port of rank 0's host, on all ranks."):
        check_under_torchrun(text, monkeypatch)


def test_torchrun_needs_a_port_that_is_not_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"^MASTER_PORT must be a number from 1 to 65535, got '0'\.\nSet MASTER_PORT"):
        check_under_torchrun("0", monkeypatch)
    check_under_torchrun(" 29511", monkeypatch)  # torch accepts it, too


def check_under_torchrun(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    launch = detect.detect({"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    torchrun_job._check(StartRequest(), launch)


@pytest.mark.parametrize(("of_rank", "is_used"), [("a 1", False), ("a 2", True), ("b 1", True), (None, True)])
def test_the_address_of_the_store_of_a_rank_that_started_this_process_is_not_used(
    of_rank: str | None, is_used: bool
) -> None:
    environ = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    marked = environ if of_rank is None else {**environ, "_MPICOMM_RANK_STORE": of_rank}
    assert (rendezvous.environ_of_user(marked).items() >= environ.items()) == is_used


def test_no_address_is_requested() -> None:
    assert rendezvous._given_addresses({}, None, num_nodes=2) == []
    assert rendezvous._given_addresses({"MASTER_ADDR": ""}, "", num_nodes=2) == []


def test_a_name_resolves_to_its_addresses(names: dict[str, list[str]]) -> None:
    names[NAME] = ["10.0.0.1", "10.1.0.1", "10.0.0.1"]
    assert rendezvous._given_addresses({"MASTER_ADDR": NAME}, None, num_nodes=2) == ["10.0.0.1", "10.1.0.1"]


def test_a_name_without_addresses_is_refused(names: dict[str, list[str]]) -> None:
    with pytest.raises(LaunchError, match=f"^MASTER_ADDR={NAME} cannot be resolved on {socket.gethostname()}"):
        rendezvous._given_addresses({"MASTER_ADDR": NAME}, None, num_nodes=1)


@pytest.mark.parametrize("text", [".cluster", "a" * 64])
def test_an_invalid_name_is_refused(text: str) -> None:
    """Python's codec for host names raises an error of its own."""
    with pytest.raises(LaunchError, match="cannot be resolved"):
        rendezvous._given_addresses({"MASTER_ADDR": text}, None, num_nodes=1)


def test_loopback_is_no_address_for_several_nodes(names: dict[str, list[str]]) -> None:
    """Debian resolves a machine's own name to a loopback address."""
    names[NAME] = ["127.0.1.1"]
    assert rendezvous._given_addresses({"MASTER_ADDR": NAME}, None, num_nodes=1) == ["127.0.1.1"]
    assert rendezvous._given_addresses({"MASTER_ADDR": NAME}, None, num_nodes=2) == []


def test_an_interface_has_a_name_or_an_address() -> None:
    name, address = next(each for each in interfaces.listed() if each[1] == "127.0.0.1")
    assert address in rendezvous._given_addresses({}, name, num_nodes=1)
    assert rendezvous._given_addresses({}, address, num_nodes=1) == [address]


def test_an_unknown_interface_is_refused_with_those_that_exist() -> None:
    with pytest.raises(LaunchError, match=r"^MPICOMM_INTERFACE=nosuch0 is not an interface") as caught:
        rendezvous._given_addresses({}, "nosuch0", num_nodes=1)
    assert socket.gethostname() in str(caught.value)
    assert all(f"{name} ({address})" in str(caught.value) for name, address in interfaces.listed())


def test_an_address_is_preferred_to_an_interface() -> None:
    assert rendezvous._given_addresses({"MASTER_ADDR": "127.0.0.1"}, "nosuch0", num_nodes=1) == ["127.0.0.1"]


# -- listening -------------------------------------------------------------------------------------------------------


def test_one_node_listens_on_loopback_only() -> None:
    listeners = rendezvous._listen(1, {}, None)
    try:
        addresses = [listener.getsockname()[0] for listener in listeners]
        assert addresses[0] == "127.0.0.1"
        assert set(addresses) <= {"127.0.0.1", "::1"}
    finally:
        for listener in listeners:
            listener.close()


def test_several_nodes_never_listen_on_loopback(names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal interfaces, those to whose address the host's name resolves are first."""
    addresses = ["127.0.0.1", "10.0.0.1", "10.1.0.1", "::1", "fd00::1"]
    monkeypatch.setattr(interfaces, "listed", lambda: [(f"if{i}", each) for i, each in enumerate(addresses)])
    assert interfaces.own_addresses() == ["10.0.0.1", "10.1.0.1", "fd00::1"]
    names[socket.gethostname()] = ["127.0.1.1", "10.1.0.1"]
    assert interfaces.own_addresses() == ["10.1.0.1", "10.0.0.1", "fd00::1"]


# Name, address and speed (0: not in sysfs) of the interfaces of three types of nodes, in the order of `listed`.
SLINGSHOT = [("lo", "127.0.0.1", 0), ("bond0", "10.115.0.9", 1000), ("hsn0", "10.150.0.9", 200000)]
SLINGSHOT += [("hsn1", "10.150.1.9", 200000), ("lo", "::1", 0), ("hsn0", "fd00::9", 200000)]
INFINIBAND = [("eno1", "10.2.0.7", 25000), ("docker0", "172.17.0.1", 0)]
INFINIBAND += [("ib0", "10.9.0.7", 0), ("ibs5", "10.9.1.7", 0)]
ETHERNET = [("eno1", "192.168.0.5", 1000), ("ens3f0", "10.8.0.5", 100000), ("tun0", "10.0.0.5", 10)]


@pytest.mark.parametrize(
    ("of_node", "named", "expected"),
    [
        (SLINGSHOT, ["10.115.0.9"], ["10.150.0.9", "10.150.1.9", "fd00::9", "10.115.0.9"]),
        (SLINGSHOT, ["10.150.1.9"], ["10.150.1.9", "10.150.0.9", "fd00::9", "10.115.0.9"]),
        (INFINIBAND, ["10.2.0.7"], ["10.9.0.7", "10.9.1.7", "10.2.0.7", "172.17.0.1"]),
        (INFINIBAND + SLINGSHOT[2:3], [], ["10.150.0.9", "10.9.0.7", "10.9.1.7", "10.2.0.7", "172.17.0.1"]),
        (ETHERNET, ["192.168.0.5"], ["10.8.0.5", "192.168.0.5", "10.0.0.5"]),
    ],
    ids=["Slingshot", "Slingshot, named", "InfiniBand", "both", "Ethernet"],
)
def test_the_fastest_network_is_first(
    of_node: list[tuple[str, str, int]], named: list[str], expected: list[str]
) -> None:
    speeds = {name: speed for name, _, speed in of_node}
    assert interfaces.by_speed([(name, address) for name, address, _ in of_node], speeds, named) == expected


@pytest.mark.parametrize(
    ("name", "speed"),
    [
        ("eno1", 25000), ("eno2", 0), ("ib0", 0), ("bond0", 50000), ("eno1.7", 25000), ("br0", 25000),
        ("veth1", 0), ("docker0", 0), ("tun0", 0), ("missing", 0),
    ],
)  # fmt: skip
def test_the_speed_of_devices_but_not_that_of_virtual_interfaces(tmp_path: Path, name: str, speed: int) -> None:
    texts = {"eno1": "25000", "eno2": "-1", "bond0": "50000", "eno1.7": "25000"}
    texts |= dict.fromkeys(("br0", "veth1", "docker0", "tun0"), "10000")  # as Linux reports them
    for interface, text in {**texts, "ib0": ""}.items():
        (tmp_path / "sys/class/net" / interface).mkdir(parents=True)
        (tmp_path / "sys/class/net" / interface / "speed").write_text(f"{text}\n")
    parts = ("eno1/device", "eno2/device", "ib0/device", "bond0/bonding", "eno1.7/lower_eno1", "br0/bridge")
    for part in (
        *parts,
        "br0/lower_veth1",
        "br0/lower_eno1",
        "docker0/bridge",
        "docker0/lower_veth1",
        "tun0/tun_flags",
    ):
        (tmp_path / "sys/class/net" / part).mkdir()
    assert host_info.megabits_of_interface(name, tmp_path) == speed


def test_a_port_in_use_is_refused_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with pytest.raises(LaunchError, match=f"127.0.0.1 port {port}: Address already in use"):
            rendezvous._listen(1, environ, None)


def test_an_address_of_another_host_is_refused_with_the_reason() -> None:
    with pytest.raises(LaunchError, match=r"203\.0\.113\.1 port 0: Cannot assign requested address"):
        rendezvous._listen(2, {"MASTER_ADDR": "203.0.113.1"}, None)  # reserved for documentation by RFC 5737


def test_rank_0_that_cannot_reach_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.agreement, "run_on_rank_0", lambda _comm, call: call())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        rendezvous._check_own_connection(listener, "127.0.0.1", port)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):  # the store gets no connection of the check
            listener.accept()
        listener.close()
        with pytest.raises(RendezvousError, match=f"its own address 127.0.0.1 port {port}: .* refused"):
            rendezvous.open_store(
                mpi.api().COMM_SELF,
                cast(topology.Topology, SimpleNamespace(num_nodes=1)),
                [listener],
                [("127.0.0.1", port)],
                b"",
                datetime.timedelta(seconds=1),
            )
