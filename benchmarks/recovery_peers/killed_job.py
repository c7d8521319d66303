"""A job of one of the compared systems: start it, kill one of its processes, wait for the next steps."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PROCESSES = 4
STEPS_BEFORE = 20  # steps of all processes together before the kill
STEPS_AFTER = 5  # steps of the remaining processes after the kill
LONGEST_DELAY = 0.5  # seconds from the last of the steps before the kill to the kill
START_LIMIT = 180  # seconds, only to detect a job that does not start
_POLL = 0.1  # seconds; the processes record the times themselves
_TERM_SECONDS = 10.0  # after SIGTERM, for a launcher to end its ranks

Attempt = Mapping[str, Any]
"""An attempted step; `step_log.StepLog.write` describes its items."""

Commands = Callable[[Path, int], Sequence[Sequence[object]]]
"""Returns the commands that start a system, for a directory of logs and a limit in seconds of each process."""


def run(commands: Commands, killed: int, limit: int) -> dict[str, Any]:
    """Start a job, kill one of its processes, and return the result; see `result_of`.

    Args:
        commands: The system.
        killed: The rank of the process to kill.
        limit: Seconds in which the remaining processes must have completed `STEPS_AFTER` steps.

    Raises:
        TimeoutError: If the processes do not complete `STEPS_BEFORE` steps.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with _running(commands(directory, START_LIMIT + limit), directory):
            if not _wait_until(lambda: _is_ready(_attempts(directory)), START_LIMIT):
                raise TimeoutError(f"the job timed out after {START_LIMIT} s, before the kill:\n{_output(directory)}")
            time.sleep(random.uniform(0, LONGEST_DELAY))
            logs = _logs(directory)
            killed_at = time.monotonic()
            os.kill(_pid(logs.pop(killed)), signal.SIGKILL)

            def is_over() -> bool:
                remaining = [_read(log) for log in logs.values()]
                return _has_continued(remaining, killed_at) or not all(_is_running(_pid(log)) for log in logs.values())

            _wait_until(is_over, limit)
            ended = sorted(rank for rank, log in logs.items() if not _is_running(_pid(log)))
            result = result_of([_read(log) for log in logs.values()], killed_at, ended, limit)
            if result["problem"]:
                print(_output(directory), flush=True)
    return {"killed": killed, **result}


def result_of(
    remaining: Sequence[Sequence[Attempt]], killed_at: float, ended: Sequence[int] = (), limit: int = 0
) -> dict[str, Any]:
    """Return the result of a kill.

    `gap_s` is the time in seconds from the SIGKILL to the moment at which each remaining process has completed a step
    without the killed one; None if there is no such moment. `discarded` is the largest number of attempted steps that
    a process discarded meanwhile. `received` is the number of processes that received the state of another one.

    Args:
        remaining: The attempted steps of each remaining process.
        killed_at: The time of the SIGKILL.
        ended: The ranks of the other processes that have ended.
        limit: The seconds for which the benchmark waited.
    """
    firsts = [min((each["time"] for each in _applied(log, killed_at)), default=None) for log in remaining]
    times = [first for first in firsts if first is not None]
    if ended or len(times) < len(remaining):
        problem = f"processes {list(ended)} ended" if ended else f"no step within {limit} s"
        return {"gap_s": None, "discarded": None, "received": None, "problem": problem}
    next_at = max(times)
    meanwhile = [[each for each in log if killed_at < each["time"] <= next_at] for log in remaining]
    return {
        "gap_s": round(next_at - killed_at, 4),
        "discarded": max(sum(not each["applied"] for each in log) for log in meanwhile),
        "received": sum(any(each["received"] for each in log) for log in meanwhile),
        "problem": "",
    }


def _applied(log: Sequence[Attempt], killed_at: float) -> list[Attempt]:
    """Return the completed steps after the kill in a group without the killed process."""
    return [each for each in log if each["applied"] and each["size"] < PROCESSES and each["time"] > killed_at]


def _has_continued(remaining: Sequence[Sequence[Attempt]], killed_at: float) -> bool:
    return all(len(_applied(log, killed_at)) >= STEPS_AFTER for log in remaining)


def _is_ready(attempts: Mapping[int, Sequence[Attempt]]) -> bool:
    """Return whether all processes have completed enough steps together."""
    together = [sum(each["applied"] and each["size"] == PROCESSES for each in log) for log in attempts.values()]
    return len(together) == PROCESSES and min(together) >= STEPS_BEFORE


def _wait_until(done: Callable[[], bool], limit: float) -> bool:
    deadline = time.monotonic() + limit
    while not (is_done := done()) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return is_done


# -- processes and their logs ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(commands: Sequence[Sequence[object]], directory: Path) -> Iterator[None]:
    """Start commands; at the end terminate them, and kill the processes with a log that are left."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "MPICOMM_DUMP_DIR": "none"}
    with Path(directory, "output.txt").open("w") as output:
        started = [
            subprocess.Popen(
                [*map(str, command)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for command in commands
        ]
        try:
            yield
        finally:
            for process in started:
                process.terminate()
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TERM_SECONDS)
                process.kill()
                process.wait()
            for pid in filter(_is_running, map(_pid, _logs(directory).values())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _logs(directory: Path) -> dict[int, Path]:
    """Return the logs by rank; a log is named `<rank>-<process ID>.jsonl`."""
    return {int(path.name.partition("-")[0]): path for path in directory.glob("*.jsonl")}


def _pid(log: Path) -> int:
    return int(log.stem.partition("-")[2])


def _attempts(directory: Path) -> dict[int, list[Attempt]]:
    return {rank: _read(log) for rank, log in _logs(directory).items()}


def _read(log: Path) -> list[Attempt]:
    # The last line may be incomplete.
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


def _is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # a zombie has ended


def _output(directory: Path) -> str:
    """Return the end of the output of the job."""
    return Path(directory, "output.txt").read_text(errors="replace")[-4000:]
