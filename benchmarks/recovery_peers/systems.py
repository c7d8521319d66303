"""The commands that start the compared systems, each with four processes on this machine."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.recovery_peers.killed_job import PROCESSES, Commands

MPICOMM = "mpicomm"
LIGHTHOUSE = ("--min_replicas", str(PROCESSES - 1))
"""Options of the lighthouse in all cases: the remaining replicas form a quorum, and half of them do not."""

# --timeout is that of torchft's train_ddp.py, as is --gloo-timeout in "Gloo 5 s". The options of the lighthouse in
# "Gloo 5 s" are those that torchft's README recommends; a heartbeat is sent every 100 ms.
_QUORUM = ("--join_timeout_ms", "10000", "--quorum_tick_ms")
TORCHFT: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "torchft, default timeouts": ((), ()),
    "torchft, Gloo 5 s": ((*_QUORUM, "100"), ("--timeout", "30", "--gloo-timeout", "5")),
    "torchft, Gloo and heartbeat 1 s": (
        (*_QUORUM, "10", "--heartbeat_timeout_ms", "1000"),
        ("--timeout", "30", "--gloo-timeout", "1"),
    ),
    "torchft, Gloo and heartbeat 0.3 s": (
        (*_QUORUM, "10", "--heartbeat_timeout_ms", "300"),
        ("--timeout", "30", "--gloo-timeout", "0.3"),
    ),
}
"""The options of the lighthouse and of the replicas that differ from torchft's defaults."""


def all_systems(torchft_python: Path | None) -> dict[str, Commands]:
    """Return the systems by name: mpicomm, and torchft with several timeouts if there is an interpreter with it."""
    found: dict[str, Commands] = {MPICOMM: _mpicomm}
    if torchft_python is not None:
        for name, (lighthouse, replica) in TORCHFT.items():
            found[name] = functools.partial(_torchft, torchft_python, lighthouse, replica)
    return found


def _mpicomm(directory: Path, limit: int) -> Sequence[Sequence[object]]:
    program = ["-m", "benchmarks.recovery_peers.mpicomm_rank", directory, limit]
    return [[sys.executable, "-m", "mpicomm", "run", "-n", PROCESSES, "--fault-tolerant", *program]]


def _torchft(
    python: Path, lighthouse: Sequence[str], replica: Sequence[str], directory: Path, limit: int
) -> Sequence[Sequence[object]]:
    """Return the commands of a lighthouse, and of replica groups of one process each."""
    address = f"127.0.0.1:{_free_port()}"
    program = [python, "-m", "benchmarks.recovery_peers.torchft_replica", directory, limit]
    return [
        [python.with_name("torchft_lighthouse"), "--bind", address, *LIGHTHOUSE, *lighthouse],
        *([*program, number, f"http://{address}", *replica] for number in range(PROCESSES)),
    ]


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
    return port
