"""Asks a running job for the status of its ranks, as an observer (`mpicomm.watchdog.observers`)."""

from __future__ import annotations

import dataclasses
import selectors
import time

from mpicomm.arguments import Deadline
from mpicomm.recorder import rank_text
from mpicomm.recorder.status import Status
from mpicomm.watchdog import connection
from mpicomm.watchdog.job_files import JobFile, ListedJob
from mpicomm.watchdog.observers import OBSERVER
from mpicomm.watchdog.protocol import COLLECT_SECONDS, StatusComplete, StatusRefused, StatusReport, StatusRequest

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 2 * COLLECT_SECONDS
_SECONDS_PER_RANK = 2e-3  # more for many ranks, whose status is collected less often
_POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """The status of all ranks of a job."""

    job: JobFile
    hosts: list[str]
    """The host of every rank."""

    statuses: list[Status]
    """The status of every rank."""

    seconds: float
    """From the request to the end of the answer."""


class JobObserver:
    """A connection to a running job."""

    def __init__(self, listed: ListedJob) -> None:
        """Connect.

        Raises:
            OSError: If the job has ended, does not answer, or refuses the token of its file.
        """
        self.job = listed.job
        try:
            sock = listed.connect(_CONNECT_SECONDS)
            token = bytes.fromhex(self.job.token)
            self._connection = connection.connect_over(sock, token, OBSERVER, _CONNECT_SECONDS)
        except (TimeoutError, BlockingIOError) as error:
            raise self._silence(_CONNECT_SECONDS) from error
        except (ConnectionError, FileNotFoundError) as error:
            raise ConnectionError(f"job {self.job.name} has ended, or refuses the token of {listed.path}") from error
        except ValueError as error:
            raise ConnectionError(f"{listed.path}: {error}") from error
        self._asked: float | None = None
        self._statuses: dict[int, Status] = {}

    def ask(self, interrupt: int | None = None) -> JobStatus | None:
        """Ask for the status of all ranks, unless a request is under way, and wait for the answer.

        Args:
            interrupt: A file descriptor that ends the wait when it becomes readable.

        Returns:
            The status; None if the wait was interrupted.

        Raises:
            ConnectionError: If the job has ended.
            OSError: If the job refuses the request, or does not answer.
        """
        if self._asked is None:
            self._asked = time.monotonic()
            self._statuses.clear()
            self._connection.send(StatusRequest())
        limit = _ANSWER_SECONDS + _SECONDS_PER_RANK * self.job.size
        deadline = Deadline(limit)
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            if interrupt is not None:
                selector.register(interrupt, selectors.EVENT_READ)
            while deadline.count_down() > 0:
                for key, _ in selector.select(_POLL_SECONDS):
                    if key.fileobj == interrupt:
                        return None
                if (status := self._receive()) is not None:
                    return status
        raise self._silence(limit)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _receive(self) -> JobStatus | None:
        messages, lost = self._connection.receive()
        for message in messages:
            match message:
                case StatusReport():
                    self._statuses[message.rank] = message.status
                case StatusRefused():
                    raise OSError(f"job {self.job.name} refuses the request: {message.reason}")
                case StatusComplete():
                    hosts = message.hosts.items()
                    host_of = {rank: host for host, ranks in hosts for rank in rank_text.parse_ranges(ranks)}
                    ranks = sorted(self._statuses)
                    statuses = [self._statuses[rank] for rank in ranks]
                    seconds = time.monotonic() - (self._asked or 0.0)
                    self._asked = None
                    return JobStatus(self.job, [host_of[rank] for rank in ranks], statuses, seconds)
        if lost:
            raise ConnectionError(
                f"job {self.job.name} has ended, or is recovering from a failure.\n"
                f"Run the command again to see whether it continues."
            )
        return None

    def _silence(self, seconds: float) -> OSError:
        state = self.job.state or f"process {self.job.pid} may be stopped"
        return TimeoutError(f"job {self.job.name} has not answered for {seconds:.0f} s: {state}")
