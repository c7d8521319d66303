"""The socket on which `mpicomm run` listens for rank 0 of the jobs that it has started, and their reports.

It also answers the observers of these jobs (`mpicomm top`): rank 0 may be on another host.

A launch usually forms one job. It forms none if the program never calls `bootstrap()`, one after the other if the
program calls `shutdown()` and `bootstrap()` again, and several at a time with `bootstrap(comm=...)`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Mapping

from mpicomm.cli.env_store import EnvStore
from mpicomm.job import interfaces
from mpicomm.json_messages import Message
from mpicomm.launch import request
from mpicomm.recorder import hang_report, rank_text
from mpicomm.recorder.status import Crash
from mpicomm.settings import HOST_TIMEOUT
from mpicomm.watchdog import job_files, observers
from mpicomm.watchdog.channel import SUPERVISOR
from mpicomm.watchdog.connection import Connection, Server
from mpicomm.watchdog.observers import Observers
from mpicomm.watchdog.parent_link import Parent
from mpicomm.watchdog.protocol import (
    JobFailed,
    JobStarted,
    RankFinished,
    StatusComplete,
    StatusRefused,
    StatusReport,
    StatusRequest,
    StopAnswered,
    StopAsked,
)

_TOKEN_BYTES = 16


class Job:
    """The reports of rank 0 of one job."""

    def __init__(self, hosts: Mapping[str, str], name: str = "", *, recovers: bool = False) -> None:
        """Create the record.

        Args:
            hosts: The ranks of every host, as text.
            name: The name of the job, the same after each recovery.
            recovers: Whether the job may continue with another rank 0.
        """
        self.name = name
        self.is_replaced = False
        """Whether ranks have failed, and the others continue as another job of the same name."""

        self._recovers = recovers
        self._hosts = {rank: host for host, text in hosts.items() for rank in rank_text.parse_ranges(text)}
        self._finished: set[int] = set()
        self._failed: set[int] = set()
        self.cause = ""
        """Why the job was aborted, if rank 0 reported it."""
        self._failed_first: list[int] = []

        self._is_host_lost = False  # of rank 0
        self.is_connected = True
        self.observers: Observers | None = None
        self._reports: list[Message] = []  # the part of the answer for the observers that has arrived

        self.answers: dict[int, bool] = {}
        """By signal: whether the program handles it, if rank 0 has answered the last question about it."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._hosts)

    @property
    def is_finished(self) -> bool:
        """Whether every rank has reached its orderly end, or the ranks continue as another job."""
        return self.is_replaced or len(self._finished) == len(self._hosts)

    @property
    def has_failed(self) -> bool:
        """Whether the job is being aborted, or rank 0 has ended before all ranks had reached their orderly end."""
        return bool(self.cause) or not (self.is_connected or self.is_finished or self._recovers)

    def receive(self, message: Message) -> None:
        """Record a message of rank 0."""
        match message:
            case RankFinished():
                self._finished.add(message.rank)
                if message.has_failed:
                    self._failed.add(message.rank)
            case JobFailed() if not self.cause:
                self.cause, self._failed_first = message.cause, rank_text.parse_ranges(message.ranks)
            case Crash() if not (self._recovers or self.cause):
                self._failed_first = [0]
                self.cause = f"{self._name([0])} died: {hang_report.cause_of_loss('', message)}"
            case StopAnswered():
                self.answers[message.signal] = message.is_handled
            case StatusReport():
                self._reports.append(message)
            case StatusComplete() | StatusRefused():
                if self.observers is not None:
                    self.observers.answer([*self._reports, message])
                self._reports = []

    @property
    def failed_hosts(self) -> list[str]:
        """The hosts of the ranks that failed first; empty if they are unknown, as when rank 0 is killed."""
        return list(dict.fromkeys(self._hosts[rank] for rank in self._failed_first))

    def close_observers(self) -> None:
        """Disconnect all observers, and remove the job's file."""
        if self.observers is not None:
            self.observers.close()
            self.observers = None

    @property
    def may_have_lost_host(self) -> bool:
        """Whether a job that continues after failures of ranks has ended for no other known reason."""
        return self._recovers and not self.is_finished and (self._is_host_lost or not self.cause)

    def lose_rank_0(self, lost: str) -> None:
        """Record that the connection to rank 0 has ended, and why."""
        self.is_connected = False
        self.close_observers()
        if hang_report.is_unreachable(lost) and not self.is_finished:
            self._is_host_lost = True
            self.cause = self.cause or f"{self._name([0])} died: {hang_report.cause_of_loss(lost)}"

    def describe_end(self) -> str:
        """Return which ranks have not reached their orderly end: `ranks 2, 3 of 4 on node4 did not reach ...`."""
        failed = f"{self._name(self._failed)} failed, and " if self._failed else ""
        left = self._name(self._hosts.keys() - self._finished)
        return f"{failed}{left} did not reach the end of the program"

    def _name(self, ranks: Iterable[int]) -> str:
        return rank_text.full_name(sorted(ranks), [self._hosts[rank] for rank in sorted(self._hosts)])


class JobListener:
    """Accepts the connections of rank 0; has no thread of its own."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        is_local: bool,
        has_store: bool = False,
        ranks: int | None = None,
        host_timeout: int = HOST_TIMEOUT,
    ) -> None:
        """Listen.

        Args:
            selector: Its caller calls the data of each key with the mask of its event.
            is_local: Whether all ranks are on this host.
            has_store: Whether ranks may connect by `init_process_group("env://")`.
            ranks: The number of ranks; None if it is not known.
            host_timeout: Seconds after which the connection to a host that does not answer is lost.

        Raises:
            OSError: If no port is free.
        """
        self.jobs: list[Job] = []
        self._started = time.time()
        self._selector = selector
        self._waiting: set[Connection] = set()  # authenticated, but no job has started
        self._of: dict[Connection, Job] = {}
        addresses = ([] if is_local else interfaces.own_addresses()) or ["127.0.0.1"]
        listener = _listen(is_local=is_local)
        self.store = EnvStore(selector, _listen(is_local=is_local)) if has_store else None
        port, store_port = listener.getsockname()[1], 0 if self.store is None else self.store.port
        token = secrets.token_bytes(_TOKEN_BYTES)
        self.parent = Parent(tuple(addresses), port, token, store_port, ranks or 0, has_terminal=os.isatty(1))
        self._server = Server(selector, listener, self.parent.token, SUPERVISOR, (0,), self._admit, host_timeout)

    @property
    def is_connected(self) -> bool:
        """Whether rank 0 of a job is connected."""
        return bool(self._of)

    @property
    def has_formed_job(self) -> bool:
        """Whether the ranks have formed a job, by `bootstrap()` or by `init_process_group("env://")`."""
        return bool(self.jobs) or (self.store is not None and self.store.is_used)

    def ask_to_stop(self, number: int) -> None:
        """Ask all connected jobs to stop, as if the program had received the signal; forget earlier answers."""
        for connection, job in self._of.items():
            job.answers.pop(number, None)
            connection.send(StopAsked(number))

    def close_expired(self) -> None:
        """Close the connections whose time for the authentication has passed; call it regularly."""
        self._server.close_expired()
        if self.store is not None:
            self.store.check()
        for job in self._of.values():
            if job.observers is not None:
                job.observers.close_expired()

    def close(self) -> None:
        """Stop listening, and close all connections: jobs that have not finished abort."""
        self._server.close()
        if self.store is not None:
            self.store.close()
        for connection in [*self._waiting, *self._of]:
            self._drop(connection)

    def _admit(self, connection: Connection, messages: list[Message]) -> None:
        self._waiting.add(connection)
        connection.watch(self._selector, self._receive)
        self._receive(connection, messages, "")

    def _receive(self, connection: Connection, messages: list[Message], lost: str) -> None:
        for message in messages:
            if isinstance(message, JobStarted) and connection in self._waiting:
                self._waiting.remove(connection)
                self._start_job(connection, message)
            elif connection in self._of:
                self._of[connection].receive(message)
        if lost:
            self._drop(connection, lost)

    def _start_job(self, connection: Connection, message: JobStarted) -> None:
        for job in self.jobs:
            if message.name and job.name == message.name:
                job.is_replaced = True
                job.close_observers()
        job = Job(message.hosts, message.name, recovers=message.recovers)
        job.observers = observers.open_for(
            self._selector,
            job_files.new(message.name, job.size, request.this_program(), self._started),
            lambda: connection.send(StatusRequest()),
        )
        self._of[connection] = job
        self.jobs.append(job)

    def _drop(self, connection: Connection, lost: str = "") -> None:
        self._waiting.discard(connection)
        if (job := self._of.pop(connection, None)) is not None:
            job.lose_rank_0(lost)
        connection.close()


def _listen(*, is_local: bool) -> socket.socket:
    if is_local:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be disabled
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
