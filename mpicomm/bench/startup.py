"""How long it takes from the command until ranks have talked to each other, and which step takes how much of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpicomm.errors import LaunchError
from mpicomm.launch.request import Start

PROGRAM = "mpicomm.bench.startup_probe"
LAUNCH = "launch"  # from the command to the first line of rank 0's program
_IMPORT = "import time; t = time.perf_counter(); import mpicomm; print(time.perf_counter() - t)"
_TERM_SECONDS = 5.0
_LAST_WORDS = 2000  # characters of what a start that failed has written


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to start ranks."""

    name: str
    kind: str
    """What `startup_probe` is told."""
    start: Callable[[tuple[str, ...], int], Start]
    """From a program and a number of ranks to the start."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One start."""

    seconds: float
    """From the command to rank 0's words."""
    steps: dict[str, float]
    """The seconds of each step of rank 0's; they add up."""


def measure(
    ways: Sequence[Way],
    numbers: Sequence[int],
    rounds: int,
    *,
    limit: float,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Start every number of ranks in every way, in turn, and return the figures of each.

    Args:
        limit: The seconds that a start may take.
        said: Called with what begins.

    Raises:
        LaunchError: If ranks do not start, or not in time.
    """
    for ranks, way in itertools.product(numbers, ways):
        way.start(_program(way), ranks)  # what cannot be started is to be told before anything is
    samples: dict[tuple[int, str], list[Sample]] = {}
    for number in range(rounds):
        for ranks in numbers:
            for way in ways:
                on_progress(f"round {number + 1} of {rounds}: {ranks} ranks by {way.name}")
                sample = sample_of(way.start(_program(way), ranks), ranks, limit)
                samples.setdefault((ranks, way.name), []).append(sample)
    return [{"ranks": ranks, "way": name, **figures_of(each)} for (ranks, name), each in samples.items()]


def figures_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the fastest start, step by step, and the median; in seconds."""
    fastest = min(samples, key=lambda sample: sample.seconds)
    return {
        "seconds": round(fastest.seconds, 3),
        "median": round(statistics.median(sample.seconds for sample in samples), 3),
        "steps": {name: round(seconds, 4) for name, seconds in fastest.steps.items()},
    }


def sample_of(start: Start, ranks: int, limit: float) -> Sample:
    """Start ranks, and wait until they have talked and ended.

    Raises:
        LaunchError: If that does not happen within `limit` seconds.
    """
    with tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        job = subprocess.Popen(
            start.command,
            env=dict(start.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # so that what it starts can be ended with it
        )
        with _ended_after(job, limit):
            on_progress, seconds = _first_words(job, begin)
            status = job.wait()
        if status or on_progress is None or on_progress["size"] != ranks:
            errors.seek(0)
            raise LaunchError(_failure(start, ranks, on_progress, status, time.perf_counter() - begin, errors.read()))
    steps = on_progress["seconds"]
    return Sample(seconds, {LAUNCH: seconds - sum(steps.values()), **steps})


def import_seconds(rounds: int) -> float:
    """Return how long `import mpicomm` takes in a new process, the shortest of some rounds."""
    command = [sys.executable, "-c", _IMPORT]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(rounds)]
    return min(map(float, found))


def _program(way: Way) -> tuple[str, ...]:
    return (sys.executable, "-m", PROGRAM, way.kind)


def _first_words(job: subprocess.Popen[str], begin: float) -> tuple[dict[str, Any] | None, float]:
    """Return what rank 0 says and when; a launcher may write beside it."""
    assert job.stdout is not None
    found, seconds = None, 0.0
    for line in job.stdout:
        if found is None and line.startswith('{"seconds"'):
            found, seconds = json.loads(line), time.perf_counter() - begin
    return found, seconds


@contextlib.contextmanager
def _ended_after(job: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """End the launcher and what it started when the time is over, or when nobody waits for it any more."""
    timer = threading.Timer(seconds, _end, (job,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _end(job)


def _end(job: subprocess.Popen[str]) -> None:
    if job.poll() is None:
        job.terminate()  # launchers take their ranks along, which are in sessions of their own
        try:
            job.wait(_TERM_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)


def _failure(
    start: Start, ranks: int, on_progress: dict[str, Any] | None, status: int, seconds: float, errors: str
) -> str:
    what = f"status {status}" if on_progress is None or status else f"{on_progress['size']} ranks instead of {ranks}"
    command = start.shown(os.environ)
    return (
        f"a start of {ranks} ranks ended with {what} after {seconds:.0f} s.\nTry it: {command}\n{errors[-_LAST_WORDS:]}"
    )
