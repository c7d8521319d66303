"""A Ray cluster on the nodes of the job: the head on rank 0's node, one raylet per node."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpicomm import arguments
from mpicomm.arguments import Deadline
from mpicomm.collective_ops.collectives import all_gather_object, broadcast_object
from mpicomm.errors import MpicommError
from mpicomm.integrations import serving
from mpicomm.integrations.requirements import installed_by, require_world
from mpicomm.job.session import World
from mpicomm.launch import environment

with installed_by("ray", "ray>=2.52"):  # the first with authentication by a token
    import ray
    from ray._raylet import Config

_OPTIONS = arguments.Expected(
    "a sequence of str",
    lambda value: (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(word, str) for word in value)
    ),
    remedy='Pass a list of options, such as ["--num-gpus=4"].',
)
_REMEDY = "Correct the options, or let the hosts connect to all ports of each other (firewall)."
_PAUSE_SECONDS = 0.1  # between two looks at the output of `ray start`, which takes seconds
_SHOWN_LINES = 15  # the last lines of the output of `ray start` in an error
_ADDRESS = re.compile(r"--address='([^']+)'")
_STARTED = "Ray runtime started"

# With port 0 each server binds a free port itself, so that jobs of one machine do not take each other's.
_SERVERS = ("node-manager", "object-manager", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
_PORTS = [f"--{name}-port=0" for name in (*_SERVERS, "min-worker", "max-worker", "metrics-export")]
_HEAD = ["--head", "--port=0", "--include-dashboard=false"]

# A process that reads until this rank has ended, by whatever cause, or has closed the pipe. It is in a session of its
# own, since a launcher may kill the process group of a rank. `ray start` has a session, too, in which all processes of
# Ray remain: otherwise its workers continue for some seconds. A zombie still counts, so repetition is limited.
_GUARD = """
import os, shutil, signal, sys, time
session, directory = int(sys.argv[1]), sys.argv[2]
sys.stdin.buffer.read()
for _ in range(100):
    left = 0
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
                left += 1
        except OSError:
            pass
    if not left:
        break
    time.sleep(0.02)
shutil.rmtree(directory, ignore_errors=True)
"""


@contextlib.contextmanager
def cluster(world: World, *, options: Sequence[str] = ()) -> Iterator[str]:
    """Run a Ray cluster on the nodes of the job during the block (collective).

    Rank 0 is connected to it (`ray.init`) and drives it; the other ranks wait at the end of the block until rank 0 has
    left it. They may call `ray.init(address)` themselves, and must have ended their work before rank 0 leaves. Ray's
    processes end with the block, and when the job is killed. A random token of the job authenticates all connections.

    Args:
        world: The World that `bootstrap` returned.
        options: Further options of `ray start` on each node, such as `["--num-gpus=4"]`. By default Ray gets the cores
            of the node's ranks.

    Yields:
        The address of the cluster.

    Raises:
        TypeError: If an argument is of a wrong type.
        MpicommError: On every rank, if Ray is connected already, `ray start` fails on a node, or takes longer than
            300 s or 80 % of the timeout of `bootstrap`. Also on the other ranks, if rank 0 leaves the block with an
            exception and handles it; otherwise the exception ends the job.
    """
    require_world(world)
    _OPTIONS.check(options, "options")
    serving.start_on_all_ranks(world, _check_unconnected, _REMEDY)
    _require_token()
    cores = _cores_of_node(world)
    nodes: list[_Node] = []

    def start_node(is_here: bool, arguments: Sequence[str]) -> None:
        def start() -> None:
            if is_here:
                nodes.append(_Node(world, cores, [*arguments, *_PORTS, f"--num-cpus={len(cores)}"], options))

        serving.start_on_all_ranks(world, start, _REMEDY)

    def connect() -> None:
        if world.rank == 0:
            # Without RAY_ADDRESS, parts of Ray Train look for the machine's only cluster, and fail if it has more.
            ray.init(address=address, runtime_env={"env_vars": {"RAY_ADDRESS": address}})

    try:
        start_node(world.rank == 0, _HEAD)
        address = broadcast_object(nodes[0].address if nodes else "")
        start_node(world.local_rank == 0 and world.rank != 0, [f"--address={address}"])
        serving.start_on_all_ranks(world, connect, _REMEDY)
        with serving.until_rank_0_leaves(world):
            try:
                yield address
            finally:
                ray.shutdown()  # also after an exception: Ray's excepthook would report it to the cluster, and fail
    finally:
        ray.shutdown()
        for node in nodes:
            node.close()


def _check_unconnected() -> None:
    if ray.is_initialized():
        raise MpicommError(
            "Ray is connected to a cluster already, but cluster() starts one of its own.\n"
            "Remove the call of ray.init(), or call ray.shutdown() before cluster()."
        )


class _Node:
    """Ray's processes on one node, which end with this process."""

    def __init__(self, world: World, cores: set[int], arguments: Sequence[str], options: Sequence[str]) -> None:
        """Start them, and wait until they run.

        Raises:
            MpicommError: If `ray start` fails, or takes longer than `serving.start_seconds()`.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="ray-"))
        self._log = self._directory / "start.log"
        host = serving.own_address(world)
        fixed = ["--block", f"--node-ip-address={host}", f"--temp-dir={self._directory}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *fixed, *arguments, *options]
        with self._log.open("wb") as log, _on_cores(cores):
            self._process = subprocess.Popen(
                command,
                env={**environment.without_job(os.environ), "RAY_USAGE_STATS_ENABLED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(self._process.pid), str(self._directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._wait_until_started(options)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The address of the cluster, which `ray start --head` prints."""
        match = _ADDRESS.search(self._log.read_text(errors="replace"))
        assert match is not None
        return match[1]

    def close(self) -> None:
        """End Ray's processes on this node, and remove their files."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._process.wait()
        self._guard.wait()

    def _wait_until_started(self, options: Sequence[str]) -> None:
        deadline = Deadline(serving.start_seconds())
        while _STARTED not in (printed := self._log.read_text(errors="replace")):
            has_ended = self._process.poll() is not None
            if has_ended or deadline.count_down() < 0:
                status = f"exited with status {self._process.returncode}"
                problem = status if has_ended else f"timed out after {deadline.seconds:g} s"
                lines = "\n".join(f"  {line}" for line in printed.splitlines()[-_SHOWN_LINES:])
                raise MpicommError(
                    f"`ray start` with options={list(options)} {problem}; its last lines:\n{lines}\n"
                    f"Correct the options, or run `{shlex.join(['ray', 'start', '--head', *options])}` on that host to "
                    f"see the whole output."
                )
            time.sleep(_PAUSE_SECONDS)


@functools.cache  # Ray keeps the first token that it reads
def _require_token() -> None:
    """Let Ray's processes authenticate each other by a random token of the job (collective)."""
    os.environ["RAY_AUTH_TOKEN"] = broadcast_object(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")  # reads the mode again, as Ray's own functions do: Ray has read it at its import


def _cores_of_node(world: World) -> set[int]:
    """Return the cores of this node's ranks (collective); a rank may be bound to one of them."""
    by_rank = all_gather_object(os.sched_getaffinity(0))
    return set().union(*(cores for cores, node in zip(by_rank, world.nodes, strict=True) if node == world.node_rank))


@contextlib.contextmanager
def _on_cores(cores: set[int]) -> Iterator[None]:
    """Let the child processes that this thread starts use these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
