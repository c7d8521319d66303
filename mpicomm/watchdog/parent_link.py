"""The connection between rank 0 of a job and `mpicomm run`, the parent of the launcher.

`mpicomm run` puts its addresses and a token into the variable MPICOMM_PARENT. Only rank 0 reads it and connects; both
ends authenticate each other with the token (`connection`). Rank 0 reports the start of the job and the end of every
rank; `mpicomm run` asks for a stop. If `mpicomm run` ends, the connection ends, and rank 0 aborts the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import MutableMapping

from mpicomm.settings import HOST_TIMEOUT, PARENT_VARIABLE
from mpicomm.watchdog import connection
from mpicomm.watchdog.connection import Connection
from mpicomm.watchdog.protocol import JobStarted, RankFinished

CONNECT_SECONDS = 5.0  # for `mpicomm run` to accept rank 0; the other ranks wait for it meanwhile

_address: str | None = None
"""The value of the variable, once `take_address` has removed it."""


@dataclasses.dataclass(frozen=True)
class Parent:
    """Where `mpicomm run` listens, and the token with which both ends authenticate each other."""

    addresses: tuple[str, ...]
    port: int
    token: bytes
    store_port: int = 0
    """Where it listens for `init_process_group("env://")`; 0 if it does not."""

    ranks: int = 0
    """The number of ranks; 0 if only the launcher knows it."""

    has_terminal: bool = False
    """Whether its output is shown on a terminal."""

    def __str__(self) -> str:
        numbers = f"{self.store_port}/{self.ranks}/{self.has_terminal:d}"
        return f"{','.join(self.addresses)}/{self.port}/{self.token.hex()}/{numbers}"

    @classmethod
    def parse(cls, text: str) -> Parent:
        """Return the parent that a value of the variable describes.

        Raises:
            ValueError: If the text has another form.
        """
        addresses, port, token, *numbers = text.split("/")
        store_port, ranks, has_terminal = map(int, numbers)
        return cls(tuple(addresses.split(",")), int(port), bytes.fromhex(token), store_port, ranks, bool(has_terminal))


def take_address(environ: MutableMapping[str, str]) -> str | None:
    """Return the value of the variable, and remove it: a child process that forms a job of its own must not connect.

    A later call in the same process returns the same value.
    """
    global _address  # noqa: PLW0603
    _address = environ.pop(PARENT_VARIABLE, "") or _address
    return _address


def report_end(parent: Parent, name: str) -> None:
    """Report to `mpicomm run` that the ranks of a job of this name that are left have finished.

    `mpicomm run` waits for another rank 0 of this name when it loses the last one, and learns the name and the ranks of
    a world only from `JobStarted`. So this rank, whatever its number was, reports a world of one rank, which has
    finished.

    Raises:
        OSError: If `mpicomm run` cannot be reached.
    """
    to_parent = connect(parent)
    for message in (JobStarted({"": "0"}, name, recovers=True), RankFinished(0)):
        to_parent.send(message)
    to_parent.close()


def connect(parent: Parent, host_timeout: int = HOST_TIMEOUT, seconds: float = CONNECT_SECONDS) -> Connection:
    """Connect rank 0 to `mpicomm run`: to all its addresses at once, since some may not be reachable from here.

    Raises:
        OSError: If no address accepts the connection within `seconds`.
    """
    answers: queue.SimpleQueue[Connection | OSError | ValueError] = queue.SimpleQueue()

    def attempt(address: str) -> None:
        try:
            answers.put(connection.connect(address, parent.port, parent.token, 0, seconds, host_timeout))
        except (OSError, ValueError) as error:
            answers.put(error)

    for address in parent.addresses:
        threading.Thread(target=attempt, args=(address,), daemon=True).start()
    errors = []
    for _ in parent.addresses:
        with contextlib.suppress(queue.Empty):
            answer = answers.get(timeout=2 * seconds)
            if isinstance(answer, Connection):
                return answer  # the other connections send no message, and `mpicomm run` ignores them
            errors.append(str(answer))
    raise OSError("; ".join(dict.fromkeys(errors)) or "timed out")
