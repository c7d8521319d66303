"""The attempts of `mpicomm run`: the first, and with `--max-restarts` further ones on the hosts that still answer."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Collection
from pathlib import Path

from mpicomm.cli import launching, stage_env
from mpicomm.cli.console import failed, print_message
from mpicomm.cli.supervisor import End
from mpicomm.errors import LaunchError
from mpicomm.launch import allocation, node_range
from mpicomm.launch.allocation import Host
from mpicomm.launch.node_range import NodeRange, TooFewHostsError
from mpicomm.launch.request import Request
from mpicomm.recorder.hang_report import HOST_REMEDY
from mpicomm.settings import PREFIX, STOPPED_STATUS

_REQUEUE_SECONDS = 20.0  # for scontrol; a controller that does not answer by then cannot requeue the job
_NO_JOB = (
    "no rank has called mpicomm.bootstrap(), or init_process_group() with the address that `mpicomm run` sets. If the "
    "program does not connect its processes in another way (mpi4py, an address of its own), each has run alone.\n"
    "For one job, call mpicomm.bootstrap() at the start of the program."
)


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """How often the ranks are started again, and on how many hosts."""

    max_restarts: int = 0
    nodes: NodeRange = dataclasses.field(default_factory=NodeRange)
    is_range_given: bool = False
    """Whether the user passed the range of hosts."""
    per_node: int | None = None
    """The user's number of ranks on each host."""
    excludes_failed: bool = False
    """Whether a restart leaves out the host on which a rank failed first."""

    @property
    def selects_hosts(self) -> bool:
        """Whether the first attempt is on hosts that the user selects."""
        return self.is_range_given or self.per_node is not None


@dataclasses.dataclass(frozen=True)
class _Placement:
    """The hosts that attempts may use, and how ranks are started there."""

    hosts: tuple[Host, ...]
    """Empty if all ranks are on this host, or if the hosts do not matter."""
    is_step: bool
    policy: RestartPolicy

    def of(self, request: Request) -> Request:
        """Return the request on the first of the hosts.

        Raises:
            TooFewHostsError: If there are fewer than the policy requires.
        """
        nodes = self.policy.nodes
        nodes.check(len(self.hosts) or 1)
        return node_range.place(request, self.hosts[: nodes.most], is_step=self.is_step, per_node=self.policy.per_node)

    def without(self, failed: Collection[str]) -> _Placement:
        """Return the placement without the hosts on which ranks failed first, if the policy excludes them."""
        if not self.policy.excludes_failed:
            return self
        hosts = node_range.without(self.hosts, failed)
        excluded = ", ".join(host.name for host in self.hosts if host not in hosts)
        if not excluded:
            named = ", ".join(failed) or "it is not known on which host a rank failed first"
            print_message("run", f"--exclude-failed leaves out no host of the job: {named}")
            return self
        print_message(
            "run", f"leaving out {excluded}, on which a rank failed; {len(hosts)} of {len(self.hosts)} hosts are left"
        )
        self.policy.nodes.check(len(hosts))
        return dataclasses.replace(self, hosts=hosts)

    def answering(self, request: Request) -> _Placement:
        """Return the placement without the hosts on which no program can be started."""
        if len(self.hosts) < 2:  # this process runs on the only host, or can reach no other
            return self

        reasons = launching.try_on_hosts(request, self.hosts, launching.PROBE, os.environ, is_step=self.is_step)
        hosts = tuple(host for host, reason in reasons.items() if not reason)
        if len(hosts) < len(self.hosts):
            lost = ", ".join(host.name for host, reason in reasons.items() if reason)
            lines = "".join(f"\n  {host.name}: {reason}" for host, reason in reasons.items() if reason)
            print_message("run", f"no response from {lost}; {len(hosts)} of {len(self.hosts)} hosts are left{lines}")
            self.policy.nodes.check(len(hosts))
        return dataclasses.replace(self, hosts=hosts)


def run(request: Request, policy: RestartPolicy, grace: float) -> int:
    """Run a launch, and again after a failure as often as the policy allows; return the exit status.

    Raises:
        LaunchError: If the ranks cannot be started.
        MPINotFoundError: If there is no MPI library.
        OSError: If the launcher cannot be executed.
    """
    # 1. the first attempt
    placement = _placement(request, policy)
    attempt = _first(request, placement)
    start, end = stage_env.run(attempt, grace)
    # 2. restarts
    number = 0
    has_formed_job = end.has_formed_job
    while _is_failure(end) and has_formed_job and number < policy.max_restarts:
        number += 1
        why = "" if end.cause else f", since the launcher exited with status {end.status}"  # printed already
        print_message("run", f"restart {number} of {policy.max_restarts}{why}")
        try:
            before, placement = placement, placement.without(end.failed_hosts).answering(request)
            if placement != before:
                attempt = placement.of(request)
            start, end = stage_env.run(dataclasses.replace(attempt, appends_logs=True), grace)
        except LaunchError as error:
            if not (isinstance(error, TooFewHostsError) and _requeue(policy.max_restarts)):
                failed("run", error)
            return end.status
    if end.may_have_lost_host and not policy.max_restarts:
        print_message("run", f"if no rank has printed another cause, a host may have been lost.\n{HOST_REMEDY}")
    if _is_failure(end) and policy.max_restarts:
        why = (
            "--max-restarts has been reached"
            if has_formed_job
            else "the ranks did not complete mpicomm.bootstrap(), or init_process_group() with the address that "
            "`mpicomm run` sets"
        )
        print_message("run", f"not restarted: {why}")
    if not (end.status or has_formed_job) and end.stopped_by is None and start.ranks != 1 and _should_form_job(attempt):
        print_message("run", _NO_JOB)
    return end.status


def first(request: Request, policy: RestartPolicy) -> Request:
    """Return the request of the first attempt, on the hosts that the policy selects.

    Raises:
        LaunchError: If there are fewer hosts than the policy requires, or if the scheduler selects the hosts.
    """
    return _first(request, _placement(request, policy))


def _first(request: Request, placement: _Placement) -> Request:
    return placement.of(request) if placement.policy.selects_hosts else request


def _placement(request: Request, policy: RestartPolicy) -> _Placement:
    """Return the hosts of a request, for the first attempt and for all restarts."""
    if not policy.selects_hosts and not policy.max_restarts:
        return _Placement((), False, policy)
    job = launching.host_selecting_scheduler(request, os.environ)
    if job is not None and policy.selects_hosts:
        raise LaunchError(
            f"--nnodes and --nproc-per-node do not work in {job}, where the scheduler selects the hosts.\n"
            f"Use -n with the number of ranks, or request other nodes from the scheduler."
        )
    hosts, is_step = launching.hosts(request, os.environ)
    if policy.excludes_failed and len(hosts) < 2:
        place = job or f"a job of {len(hosts) or 1} host"
        raise LaunchError(
            f"--exclude-failed does not work in {place}: mpicomm run must select among two or more hosts.\n"
            f"Remove --exclude-failed, or pass --hosts, or allocate more nodes than --nnodes uses."
        )
    if policy.excludes_failed and (addresses := node_range.addresses(hosts)):
        raise LaunchError(
            f"--exclude-failed needs the names of the hosts, which ranks report, got {', '.join(addresses[:3])}.\n"
            f"Pass their names instead: the output of `hostname` on each."
        )
    selected = min(len(hosts), policy.nodes.most or len(hosts)) or 1
    return _Placement(node_range.with_capacity(hosts, selected, request.ranks), is_step, policy)


def _should_form_job(request: Request) -> bool:
    """Return whether this is a Python program, and whether bootstrap() would report its job."""
    is_python = Path(request.program[0]).name.startswith("python") and "mpi4py.futures" not in request.program
    is_reported = request.node is None and not {**os.environ, **request.variables}.get(f"{PREFIX}LAUNCHER")
    return is_python and is_reported


def _is_failure(end: End) -> bool:
    return end.status not in (0, STOPPED_STATUS) and end.stopped_by is None


def _requeue(max_restarts: int) -> bool:
    """Requeue the Slurm batch job in which this process runs, unless Slurm has restarted it too often already."""
    job = os.environ.get("SLURM_JOB_ID")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):  # the ID of the last job of an array is that of the array itself
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    if not job or allocation.requeues(os.environ) >= max_restarts:
        return False
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=_REQUEUE_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    if done.returncode == 0:
        print_message("run", f"too few hosts are left: Slurm requeues job {job}")
    return done.returncode == 0
