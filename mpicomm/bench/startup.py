"""Time from the command to the end of the first all_reduce of the ranks, and the time of each step."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpicomm.errors import LaunchError
from mpicomm.launch.request import Start

LAUNCH = "launch"  # from the command to the first line of rank 0's program
_IMPORT = "import time; t = time.perf_counter(); import mpicomm; print(time.perf_counter() - t)"
_TERM_SECONDS = 5.0
_ERROR_TAIL = 2000  # characters of the error output in the message of a failed start


@dataclasses.dataclass(frozen=True)
class Sample:
    """One start."""

    seconds: float
    """Seconds from the command to the result of rank 0."""
    steps: dict[str, float]
    """Seconds of each step of rank 0; their sum is `seconds`."""


def probe(kind: str) -> tuple[str, ...]:
    """Return the command of the measured program; `startup_probe` describes its argument."""
    return (sys.executable, "-m", "mpicomm.bench.startup_probe", kind)


def measure(
    starts: Iterable[tuple[int, str]], ways: Mapping[str, Callable[[int], Start]], *, limit: float
) -> list[dict[str, Any]]:
    """Start ranks, and return the figures of each number of ranks and launcher.

    Args:
        starts: The number of ranks and the launcher of each start.
        ways: Functions that build the launch of `probe` on a number of ranks, by the launcher's name.
        limit: Timeout of a start in seconds.

    Raises:
        LaunchError: If the ranks fail to start, or a start times out.
    """
    samples: dict[tuple[int, str], list[Sample]] = {}
    for ranks, way in starts:
        samples.setdefault((ranks, way), []).append(sample_of(ways[way](ranks), ranks, limit))
    return [{"ranks": ranks, "way": way, **_figures(each)} for (ranks, way), each in samples.items()]


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the steps of the fastest start, and the median; in seconds."""
    fastest = min(samples, key=lambda sample: sample.seconds)
    return {
        "seconds": round(fastest.seconds, 3),
        "median": round(statistics.median(sample.seconds for sample in samples), 3),
        "steps": {name: round(seconds, 4) for name, seconds in fastest.steps.items()},
    }


def sample_of(start: Start, ranks: int, limit: float) -> Sample:
    """Start ranks, and wait until they have communicated and exited.

    Raises:
        LaunchError: If they fail, or exceed the timeout of `limit` seconds.
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
            start_new_session=True,  # to kill its child processes with it
        )
        timer = threading.Timer(limit, _end, (job,))
        timer.start()
        try:
            reported, seconds = _probe_result(job, begin)
            status = job.wait()
        finally:
            timer.cancel()
            _end(job)
        if status or reported is None or reported["size"] != ranks:
            errors.seek(0)
            raise LaunchError(_failure(start, ranks, reported, status, time.perf_counter() - begin, errors.read()))
    steps = reported["seconds"]
    return Sample(seconds, {LAUNCH: seconds - sum(steps.values()), **steps})


def import_seconds(rounds: int) -> float:
    """Return the seconds of `import mpicomm` in a new process, the minimum of the rounds."""
    command = [sys.executable, "-c", _IMPORT]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(rounds)]
    return min(map(float, found))


def _probe_result(job: subprocess.Popen[str], begin: float) -> tuple[dict[str, Any] | None, float]:
    """Return the result of rank 0 and its time; the launcher may write other lines to the same stream."""
    assert job.stdout is not None
    found, seconds = None, 0.0
    for line in job.stdout:
        if found is None and line.startswith('{"seconds"'):
            found, seconds = json.loads(line), time.perf_counter() - begin
    return found, seconds


def _end(job: subprocess.Popen[str]) -> None:
    """Terminate the launcher and its processes, if they have not exited."""
    if job.poll() is None:
        job.terminate()  # launchers terminate their ranks, which are in sessions of their own
        try:
            job.wait(_TERM_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)


def _failure(
    start: Start, ranks: int, reported: dict[str, Any] | None, status: int, seconds: float, errors: str
) -> str:
    what = f"exit status {status}" if reported is None or status else f"got {reported['size']} ranks"
    return (
        f"starting {ranks} ranks failed after {seconds:.0f} s: {what}.\n"
        f"Reproduce it with: {start.shown(os.environ)}\n{errors[-_ERROR_TAIL:]}"
    )
