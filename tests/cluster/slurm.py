"""Slurm on virtual hosts: munged and slurmctld run on the machine itself, and one slurmd on each host."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import subprocess

from tests.cluster import hosts, processes
from tests.cluster.layout import LOGIN, ClusterError, Layout
from tests.time_limits import scaled

CONTROLLER, MUNGE = "slurmctld", "munged"
_START_SECONDS = 30.0
_COMMAND_SECONDS = 30.0

# Slurm runs without systemd, cgroups and a database. A comment precedes each setting that is not self-explanatory.
_CONF = """\
ClusterName=mpicomm
SlurmctldHost={machine}({login})
SlurmctldPort={port}
SlurmdPort=26818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job may not start again before its credential has expired, which takes two minutes by default.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/state/slurmctld.pid
SlurmdPidFile={directory}/spool/%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
# task/affinity refuses more tasks on a node than the machine has cores.
TaskPlugin=task/none
TaskProlog={directory}/bin/task-prolog
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# The nodes below have the declared properties, regardless of the hardware that slurmd finds.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=10000,bf_interval=2
SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=10
KillWait=5
ReturnToService=2
JobRequeue=1
# What cannot be had is refused at once; else it would wait for ever.
EnforcePartLimits=ALL
MinJobAge=600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
"""


def up(layout: Layout) -> None:
    """Start munged and slurmctld, and slurmd on every host; return when all nodes are idle."""
    _write_conf(layout)
    _start_munge(layout)
    log = layout.directory / "log" / "slurmctld.log"
    with hosts.explained_by(log):
        hosts.start(layout, CONTROLLER, ["slurmctld", "-D"], layout.directory / "log" / "slurmctld.out")
        processes.wait_for_answer(
            layout, CONTROLLER, lambda: "is UP" in _query(layout, "scontrol", "ping"), _START_SECONDS
        )
    for name in layout.names:
        start_slurmd(layout, name)
    with hosts.explained_by(log):
        wait_idle(layout)


def down(layout: Layout) -> None:
    """Stop slurmctld and munged on the machine itself; each slurmd ends with its host."""
    processes.stop(layout, CONTROLLER)
    processes.stop(layout, MUNGE)


def start_slurmd(layout: Layout, name: str) -> None:
    """Start slurmd on a host, as its init system would."""
    spool = layout.directory / "spool" / name
    spool.mkdir(parents=True, exist_ok=True)
    command = hosts.log_in(layout, name, [f"SLURM_CONF={layout.slurm_conf}", "slurmd"])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=scaled(_COMMAND_SECONDS))
    with hosts.explained_by(layout.directory / "log" / f"slurmd-{name}.log"):
        if done.returncode:
            raise ClusterError(f"slurmd does not start on {name}. {done.stdout}{done.stderr}")


def wait_idle(layout: Layout, seconds: float = _START_SECONDS) -> None:
    """Wait until Slurm reports every node as idle."""
    processes.wait_until(lambda: _states(layout) == ["idle"] * layout.nodes, seconds, "all nodes are idle")


def _states(layout: Layout) -> list[str]:
    return _query(layout, "sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()


def _query(layout: Layout, *command: str) -> str:
    """Return the output of a Slurm command; an empty string if it fails."""
    environ = {**os.environ, "SLURM_CONF": str(layout.slurm_conf)}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=scaled(_COMMAND_SECONDS)
    )
    return done.stdout if done.returncode == 0 else ""


def _write_conf(layout: Layout) -> None:
    gres = f" Gres=gpu:{layout.gpus}" if layout.gpus else ""
    features = f"CPUs={layout.cpus} RealMemory=16000{gres} State=UNKNOWN"
    text = _CONF.format(
        machine=socket.gethostname(),
        login=layout.address(LOGIN),
        port=layout.controller_port,
        directory=layout.directory,
        nodes="\n".join(f"NodeName={name} NodeAddr={layout.address(name)} {features}" for name in layout.names),
    )
    layout.slurm_conf.write_text(text)
    (layout.directory / "state").mkdir(exist_ok=True)
    _write_task_prolog(layout)
    devices = "".join(f"Name=gpu File={each} Flags=nvidia_gpu_env\n" for each in _make_gpus(layout))
    (layout.directory / "gres.conf").write_text(devices)


def _write_task_prolog(layout: Layout) -> None:
    """Write the TaskProlog program, whose output sets the site's variables in every task."""
    path = layout.directory / "bin" / "task-prolog"
    exports = "".join(f"echo export {name}={value}\n" for name, value in layout.site_environ.items())
    path.write_text(f"#!/bin/sh\n{exports}")
    path.chmod(0o755)


def _make_gpus(layout: Layout) -> list[str]:
    """Create the devices that Slurm treats as GPUs: it requires character devices, but never opens them."""
    folder = layout.directory / "dev"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"nvidia{index}" for index in range(layout.gpus)]
    for path in paths:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    return [str(path) for path in paths]


def _start_munge(layout: Layout) -> None:
    directory = layout.directory
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    socket_path = directory / "munge.socket"
    command = ["munged", "--foreground", f"--key-file={key}", f"--socket={socket_path}"]
    command += [f"--pid-file={directory}/munged.pid", f"--seed-file={directory}/munged.seed"]
    command += [f"--log-file={directory}/log/munged.log"]
    log = directory / "log" / "munged.out"
    with hosts.explained_by(log):
        hosts.start(layout, MUNGE, command, log)
        probe = ["munge", "--no-input", f"--socket={socket_path}"]
        processes.wait_for_answer(layout, MUNGE, lambda: _succeeds(probe), _START_SECONDS)


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False, timeout=scaled(_COMMAND_SECONDS)).returncode == 0
