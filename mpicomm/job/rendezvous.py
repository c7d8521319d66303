"""Rendezvous: rank 0 binds the sockets of the job's store; the plan of the job has their addresses.

The bound socket becomes the store's, so no other process can take its port in between. With several nodes, a rank of
every node has connected to the address before, and has received a token that only rank 0 can send.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import ipaddress
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from mpicomm import agreement, open_files
from mpicomm.arguments import PORT
from mpicomm.errors import LaunchError, MpicommError, RendezvousError, raised_on_all_ranks
from mpicomm.job import interfaces
from mpicomm.settings import STORE_OF_RANK
from mpicomm.topology import Topology

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

Endpoint = tuple[str, int]
"""An address and a port."""

_BACKLOG = 4096  # pending connections, so that all ranks of a large job may connect at once
_CONNECT_SECONDS = (0.5, 5.0)  # two rounds: with a network that drops packets, most starts need only the short one


def environ_of_user(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without MASTER_ADDR and MASTER_PORT if a rank that started this process has set them."""
    if environ.get(STORE_OF_RANK) != f"{environ.get('MASTER_ADDR')} {environ.get('MASTER_PORT')}":
        return environ
    return {name: value for name, value in environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}


def listen(topology: Topology, environ: Mapping[str, str], interface: str | None) -> list[socket.socket]:
    """Listen on rank 0 for the connections of the job's store.

    The address is MASTER_ADDR if it is set, loopback on a single node, otherwise each of this host's addresses, the
    fastest network first.

    Args:
        environ: The environment of rank 0.
        interface: Name or address of the interface to listen on; None to choose one.

    Raises:
        LaunchError: If this rank cannot listen on MASTER_ADDR, MASTER_PORT or the interface, or its limit of open files
            is too low for the connections of all ranks.
        RendezvousError: On an unexpected error.
    """
    with _as_rendezvous_error():
        open_files.require_on_rank_0(topology)
        return _listen(topology.num_nodes, environ, interface)


def open_store(
    comm: Intracomm,
    topology: Topology,
    listeners: list[socket.socket],
    endpoints: Sequence[Endpoint],
    token: bytes,
    timeout: datetime.timedelta,
    connect_limit: datetime.timedelta | None = None,
) -> tuple[dist.Store, str, int]:
    """Open the job's store on rank 0 and connect every rank to it (collective).

    With several nodes, the store listens at the first address at which every node reaches rank 0.

    Args:
        listeners: The sockets on which rank 0 listens; empty on other ranks.
        endpoints: Their addresses and ports.
        token: Random bytes with which rank 0 proves its identity.
        timeout: The timeout of the store's operations.
        connect_limit: The timeout of the connection to the store; None for that of its operations.

    Returns:
        The store, and the address and the port at which it listens.

    Raises:
        RendezvousError: On every rank, if no address of rank 0 is reachable from every node, or the store cannot be
            opened.
    """
    chosen = 0 if topology.num_nodes == 1 else _find_reachable_address(comm, topology, listeners, endpoints, token)
    address, port = endpoints[chosen]
    store: dist.Store | None = None

    def serve() -> None:
        nonlocal store
        for listener in listeners[:chosen] + listeners[chosen + 1 :]:
            listener.close()
        with _as_rendezvous_error():
            _check_own_connection(listeners[chosen], address, port)
            store = dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=listeners[chosen].detach(),
                multi_tenant=True,  # init_process_group("env://") on rank 0 then shares this server
            )

    agreement.run_on_rank_0(comm, serve)
    if store is None:
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=connect_limit or timeout)
        store.set_timeout(timeout)
    return store, address, port


@contextlib.contextmanager
def _as_rendezvous_error() -> Iterator[None]:
    """Raise a RendezvousError for an unexpected error, since the other ranks wait for the result."""
    try:
        yield
    except MpicommError:
        raise
    except Exception as error:
        raise RendezvousError(
            f"rank 0 could not open the job's store: {error}\n"
            f"Set MASTER_ADDR to an address of that host and MASTER_PORT to a free port, or unset both."
        ) from error


def _check_own_connection(listener: socket.socket, address: str, port: int) -> None:
    """Check that rank 0 reaches itself: torch tries it until the timeout, and prints a C++ stack at each attempt.

    Raises:
        RendezvousError: If it cannot connect.
    """
    try:
        connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS[-1])
        with connection, contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
    except OSError as error:
        raise RendezvousError(
            f"rank 0 on {socket.gethostname()} cannot connect to its own address {address} port {port}: {error}.\n"
            f"Check that the loopback interface is up (ip link show lo), and that no firewall blocks it."
        ) from None


def _listen(num_nodes: int, environ: Mapping[str, str], interface: str | None) -> list[socket.socket]:
    port = _given_port(environ)
    listeners, errors = [], []
    for address in offered_addresses(environ, interface, num_nodes):
        try:
            # create_server sets SO_REUSEADDR: the port of MASTER_PORT may be in TIME_WAIT since the previous job.
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listeners.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
        except OSError as error:
            name = environ.get("MASTER_ADDR") or address
            asked = "" if name == address else f" (MASTER_ADDR={name})"
            errors.append(f"{address}{asked} port {port}: {os.strerror(error.errno or 0)}")
    if not listeners:
        raise LaunchError(
            f"rank 0 on {socket.gethostname()} cannot listen on any address: "
            f"{'; '.join(errors) or 'no network interface is up'}.\n"
            f"Set MASTER_ADDR to an address of that host and MASTER_PORT to a free port, or unset both."
        )
    return listeners


def offered_addresses(environ: Mapping[str, str], interface: str | None, num_nodes: int) -> list[str]:
    """Return the addresses of this host at which rank 0 of a job on so many nodes listens, as `listen` describes them.

    Raises:
        LaunchError: If MASTER_ADDR or the interface is not one of this host.
    """
    wanted = _given_addresses(environ, interface, num_nodes)
    return wanted or (["127.0.0.1", "::1"] if num_nodes == 1 else interfaces.own_addresses())


def _given_port(environ: Mapping[str, str]) -> int:
    text = environ.get("MASTER_PORT") or "0"
    return 0 if text == "0" else int(PORT.read(text, "MASTER_PORT"))  # 0, for any port, is not documented


def _given_addresses(environ: Mapping[str, str], interface: str | None, num_nodes: int) -> list[str]:
    """Return the addresses of MASTER_ADDR or of the requested interface; empty if neither is usable or set."""
    if name := environ.get("MASTER_ADDR"):
        try:
            addresses = interfaces.addresses_of(name)
        except (OSError, UnicodeError) as error:
            raise LaunchError(
                f"MASTER_ADDR={name} cannot be resolved on {socket.gethostname()}: {error}.\n"
                f"Set it to an address of rank 0's host, or unset it to let mpicomm choose one."
            ) from None
        # Debian's /etc/hosts maps a machine's own name to a loopback address, which other nodes cannot reach.
        if num_nodes > 1 and all(ipaddress.ip_address(address).is_loopback for address in addresses):
            return []
        return addresses
    if interface:
        matching = [address for name, address in interfaces.listed() if interface in (name, address)]
        if not matching:
            have = ", ".join(f"{name} ({address})" for name, address in interfaces.listed())
            raise LaunchError(
                f"MPICOMM_INTERFACE={interface} is not an interface of rank 0's host {socket.gethostname()}.\n"
                f"Set it to one of {have}, or unset it."
            )
        return matching
    return []


def _find_reachable_address(
    comm: Intracomm, topology: Topology, listeners: list[socket.socket], endpoints: Sequence[Endpoint], token: bytes
) -> int:
    """Return the index of the first address at which every node reaches rank 0 (collective).

    Rank 0 answers each connection with the token, which it has broadcast by MPI: a connection alone may have reached
    another machine with the same private address.
    """
    # 1. rank 0 answers connections on a thread
    done = threading.Event()
    answering = threading.Thread(target=_serve_probes, args=(listeners, token, done), name="mpicomm-rendezvous")
    if comm.rank == 0:
        answering.start()
    # 2. one rank of every other node tries all addresses
    is_asking = topology.local_rank == 0 and comm.rank != 0
    for seconds in _CONNECT_SECONDS:
        by_rank = comm.allgather(
            _reachable_from_here(endpoints, token, seconds) if is_asking else [True] * len(endpoints)
        )
        common = [index for index, received in enumerate(zip(*by_rank, strict=True)) if all(received)]
        if common:
            break
    done.set()
    if comm.rank == 0:
        answering.join()
    if not common:
        raise raised_on_all_ranks(RendezvousError(_describe_unreachable(endpoints, by_rank, topology)))
    return common[0]


def _reachable_from_here(endpoints: Sequence[Endpoint], token: bytes, seconds: float) -> list[bool]:
    """Return for every address whether rank 0 answers there."""
    with concurrent.futures.ThreadPoolExecutor(len(endpoints)) as pool:
        return list(pool.map(lambda endpoint: can_reach(endpoint, token, seconds), endpoints))


def _serve_probes(listeners: list[socket.socket], token: bytes, done: threading.Event) -> None:
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        while not done.is_set():
            for key, _ in selector.select(timeout=0.05):
                assert isinstance(key.fileobj, socket.socket)
                with contextlib.suppress(OSError):  # the peer may have closed the connection
                    connection, _ = key.fileobj.accept()
                    with connection:
                        connection.sendall(token)


def can_reach(endpoint: Endpoint, token: bytes, seconds: float = _CONNECT_SECONDS[-1]) -> bool:
    """Return whether the listener at `endpoint` answers with `token` within `seconds`."""
    try:
        with socket.create_connection(endpoint, timeout=seconds) as connection:
            deadline = time.monotonic() + seconds
            answer = b""
            while len(answer) < len(token) and time.monotonic() < deadline:
                part = connection.recv(len(token) - len(answer))
                if not part:
                    break
                answer += part
    except OSError:
        return False
    return secrets.compare_digest(answer, token)


def _describe_unreachable(endpoints: Sequence[Endpoint], by_rank: list[list[bool]], topology: Topology) -> str:
    lines = []
    for index, (address, _) in enumerate(endpoints):
        unreachable = sorted({topology.hosts[rank] for rank, received in enumerate(by_rank) if not received[index]})
        lines.append(
            f"  {address}: not reached from {', '.join(unreachable[:8])}{' ...' if len(unreachable) > 8 else ''}"
        )
    return (
        f"rank 0 on {topology.hosts[0]} has no address that every node can reach.\n"
        + "\n".join(lines)
        + "\nSet MASTER_ADDR (or MPICOMM_INTERFACE) to the network that all nodes share, and open it in the firewall."
    )
