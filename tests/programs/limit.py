"""The time limit: a program that exceeds it aborts the job, after every rank has printed its current position."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from mpicomm import mpi

_HERE = str(Path(__file__).parent)
_PATIENCE = 3.0  # seconds for the other ranks to print their positions


class Limit:
    """Monitors one program after another on a separate thread."""

    def __init__(self, rank: int, seconds: float) -> None:
        self._rank = rank
        self._seconds = seconds
        self._changed = threading.Condition()
        self._title = ""
        self._deadline = 0.0
        self._where: Callable[[], str] = str
        threading.Thread(target=self._run, name="mpicomm-tests-limit", daemon=True).start()

    @contextlib.contextmanager
    def over(self, title: str, where: Callable[[], str]) -> Iterator[None]:
        """Abort the job if the block exceeds the limit.

        Args:
            where: Returns the position in the program, printed in addition to the current lines of its threads.
        """
        with self._changed:
            self._title, self._where, self._deadline = title, where, time.monotonic() + self._seconds
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._title = ""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._title)
                title, remaining = self._title, self._deadline - time.monotonic()
            if remaining <= 0:
                self._end(title)
            time.sleep(max(0.01, min(remaining, 0.2)))

    def _end(self, title: str) -> None:
        lines = "".join(f"\n    {line}" for line in _lines_of_threads())
        text = f"[rank {self._rank}] {title} did not end within {self._seconds:g} s: {self._where()}{lines}\n"
        os.write(2, text.encode())
        time.sleep(_PATIENCE)
        mpi.job_comm().Abort(1)


def _lines_of_threads() -> list[str]:
    """Return the innermost line of a program on the stack of each thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        stack = [each for each in traceback.extract_stack(frame) if _is_program(each.filename)]
        if stack and ident != threading.get_ident():
            last = stack[-1]
            lines.append(f"{names.get(ident)}: {Path(last.filename).name}:{last.lineno} ({last.name}): {last.line}")
    return lines


def _is_program(file: str) -> bool:
    return file.startswith(_HERE) and Path(file).stem not in {"limit", "both"}
