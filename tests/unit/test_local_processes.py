"""Processes of this host: their reported state, and the check that only the intended process is killed."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpicomm import host_info
from mpicomm.watchdog import local_processes
from mpicomm.watchdog.protocol import LocalProcess
from tests.time_limits import EVENT_SECONDS, scaled, wait_until


@pytest.fixture(name="process")
def _process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        process.kill()


def introduced(process: subprocess.Popen[bytes]) -> LocalProcess:
    return LocalProcess(process.pid, local_processes.start_time_of(process.pid))


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_process_is_killed(process: subprocess.Popen[bytes], is_stopped: bool) -> None:
    if is_stopped:
        process.send_signal(signal.SIGSTOP)
    local_processes.kill(introduced(process))
    assert process.wait(scaled(EVENT_SECONDS)) == -signal.SIGKILL


@pytest.mark.parametrize(
    "start_time",
    ["", "another moment", local_processes.start_time_of(os.getpid())],
    ids=["unknown", "no start_time", "of another process"],
)
def test_another_process_with_its_pid_is_not(process: subprocess.Popen[bytes], start_time: str) -> None:
    local_processes.kill(dataclasses.replace(introduced(process), start_time=start_time))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)


def test_one_that_has_ended_is_not(process: subprocess.Popen[bytes]) -> None:
    was = introduced(process)
    process.kill()
    process.wait(scaled(EVENT_SECONDS))
    local_processes.kill(was)
    assert local_processes.start_time_of(process.pid) == ""
    assert local_processes.state_of(process.pid) == ""


def test_births_differ(process: subprocess.Popen[bytes]) -> None:
    own = local_processes.this_process()
    assert own == LocalProcess(os.getpid(), local_processes.start_time_of(os.getpid()))
    moment, _, place = own.start_time.partition(" ")
    assert int(moment) <= time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    assert place == str(Path("/proc/self/ns/pid").readlink())
    assert introduced(process).start_time.endswith(place)


def test_a_stopped_process_is_reported_as_stopped(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: local_processes.is_stopped(process.pid), "the process is stopped")
    assert local_processes.state_of(process.pid) == (
        f"process {process.pid} is stopped by a signal (SIGSTOP); resume it with SIGCONT"
    )


def test_a_name_with_a_parenthesis_does_not_end_at_it(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("7 (a) b) S 1 7 7")
    assert host_info.process_stat(tmp_path) == ("a) b", ["S", "1", "7", "7"])
