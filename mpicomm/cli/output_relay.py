"""Copies a stream of the launcher to that of this process, without the launcher's messages about a failed rank."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time

from mpicomm.launch.failure_messages import FailureMessageFilter, FailureMessages

_POLL_SECONDS = 0.2  # between checks whether the launcher has ended; the bytes of one message arrive within it
_HELD_SECONDS = 20.0  # until a message is printed because the job goes on; longer than a launcher takes to end


class OutputRelay:
    """A thread that copies one stream.

    A thread of its own, since writing blocks where a terminal is stopped (Ctrl-S), or the reader of a pipe is slow.
    """

    def __init__(self, messages: FailureMessages) -> None:
        self.stream = messages.stream
        """The file descriptor of the stream."""

        self._filter = FailureMessageFilter(messages)
        self._read, self.write_end = os.pipe()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        """Start copying, when the launcher has the other end."""
        os.close(self.write_end)
        self._thread.start()

    def finish(self, *, drops_messages: bool) -> None:
        """Copy what the launcher has written, after it has ended, and print its messages unless they are dropped."""
        self._has_ended.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._write(self._filter.release(also_held=not drops_messages))

    def _copy(self) -> None:
        held_since = None
        with contextlib.suppress(OSError):
            while True:
                is_ready = bool(select.select([self._read], [], [], _POLL_SECONDS)[0])
                data = os.read(self._read, 1 << 16) if is_ready else b""
                if data:
                    self._write(self._filter.add(data))
                elif is_ready or self._has_ended.is_set():
                    # A process that the launcher has left may keep the stream open.
                    break
                elif self._filter.is_undecided:
                    self._write(self._filter.release(also_held=False))
                if not self._filter.held:
                    held_since = None
                elif held_since is None:
                    held_since = time.monotonic()
                elif time.monotonic() - held_since > _HELD_SECONDS:
                    self._write(self._filter.release(also_held=True))
        # If nobody reads our output any more, the launcher must notice it, too.
        os.close(self._read)

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self.stream, data) :]
            except OSError as error:
                if error.errno != errno.ENOSPC:  # a full disk must not end the ranks
                    raise
                return
