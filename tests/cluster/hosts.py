"""Virtual hosts: each is a process 1 with its own network, UTS, IPC, mount and PID namespaces, and nothing else.

No part of a host has a name in the machine's file system or lists: when its process 1 is killed, the kernel removes the
whole host. The same holds for the switch between the hosts, which is a bridge in another network namespace.

A host has two networks. eth0 is listed first and reaches no other host; all hosts share the network of eth1.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.cluster import processes
from tests.cluster.layout import LOGIN, ROOT, ClusterError, Layout
from tests.time_limits import scaled

SWITCH = "switch"
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_BOOT_SECONDS = 20.0
# The environment that sshd gives a command: a job must not depend on the variables of the user who started it.
_LOGIN_ENVIRON = {
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}


def up(layout: Layout) -> None:
    """Start the network and boot every host."""
    _write_agent(layout)
    _start_switch(layout)
    for name in layout.names:
        boot(layout, name)


def down(layout: Layout) -> None:
    """Kill every host and stop the network, even if only some of them exist."""
    for name in processes.recorded(layout):
        if name.startswith("node"):
            processes.stop(layout, name, signal.SIGKILL)
    processes.stop(layout, SWITCH)
    # The kernel removes namespaces asynchronously.
    processes.wait_until(lambda: not Path("/sys/class/net", layout.link).exists(), 20, f"{layout.link} is gone")


def boot(layout: Layout, name: str) -> None:
    """Start a host's process 1, and connect it to the network."""
    layout.index(name)
    if processes.pid_of(layout, name) is not None:
        raise ClusterError(f"{name} is up.")
    ready = layout.directory / "etc" / f"{name}.ready"
    ready.unlink(missing_ok=True)
    write_names(layout, name)
    log = layout.directory / "log" / f"{name}.boot"
    command = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--", sys.executable]
    command += ["-m", "tests.cluster.init", str(layout.directory), name]
    unshare = start(layout, f"{name}.unshare", command, log)
    with explained_by(log):
        processes.wait_until(
            lambda: ready.exists() or unshare.poll() is not None, _BOOT_SECONDS, f"{name} has its file systems"
        )
        if not ready.exists():
            raise ClusterError(f"{name} did not boot.")
    pid = processes.child_of(unshare.pid)
    assert pid is not None
    processes.record(layout, name, pid)
    try:
        _connect(layout, name, pid)
    except ClusterError:
        kill(layout, name)  # otherwise, a host without a complete network would count as up
        raise


def kill(layout: Layout, name: str) -> None:
    """Kill all processes of a host at once. The kernel still closes their connections, which other hosts detect."""
    layout.index(name)
    processes.stop(layout, name, signal.SIGKILL)


def cut(layout: Layout, name: str) -> None:
    """Disconnect a host from the network: the host and its processes continue, but are unreachable."""
    _set_cable(layout, name, "down")


def mend(layout: Layout, name: str) -> None:
    """Reconnect a host to the network."""
    _set_cable(layout, name, "up")


def enter(layout: Layout, name: str) -> list[str]:
    """Return a command prefix that runs the rest of the command on a host.

    Raises:
        ClusterError: If the host is down.
    """
    layout.index(name)
    if (pid := processes.pid_of(layout, name)) is None:
        raise ClusterError(f"{name} is down.\nBoot it: python -m tests.cluster boot {name}")
    return ["nsenter", f"--target={pid}", *_NAMESPACES, "--"]


def log_in(layout: Layout, name: str, words: list[str]) -> list[str]:
    """Return a command that is equivalent to `ssh NAME WORDS`: a shell on the host runs the words in a new environment.

    Raises:
        ClusterError: If the host is down.
    """
    environ = [f"{key}={value}" for key, value in (_LOGIN_ENVIRON | layout.site_environ).items()]
    return [*enter(layout, name), "env", "-i", "--chdir=/root", *environ, "/bin/bash", "-c", " ".join(words)]


def processes_on(layout: Layout, name: str) -> dict[int, str]:
    """Return the processes of a host except process 1, as command lines by pid (in the machine's PID namespace)."""
    first = processes.pid_of(layout, name)
    if first is None:
        return {}
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has exited
            if int(path.name) != first and (path / "ns/pid").readlink() == Path(f"/proc/{first}/ns/pid").readlink():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return {pid: line for pid, line in found.items() if line and processes.started(pid)}


def write_names(layout: Layout, name: str, *, loopback: bool = False) -> None:
    """Write a host's /etc/hosts, which the host reads again for each look-up.

    Args:
        loopback: Whether its own name resolves to 127.0.1.1, as on Debian.
    """
    lines = ["127.0.0.1 localhost", f"{layout.address(LOGIN)} {LOGIN} {socket.gethostname()}"]
    addresses = {other: layout.address(other) for other in layout.names}
    if loopback:
        addresses[name] = "127.0.1.1"
    lines += [f"{address} {other}" for other, address in addresses.items()]
    path = layout.directory / "etc" / f"{name}.hosts"
    path.write_text("".join(f"{line}\n" for line in lines))


def start(layout: Layout, name: str, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one, and record it."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**_LOGIN_ENVIRON, "PYTHONDONTWRITEBYTECODE": "1", "SLURM_CONF": str(layout.slurm_conf)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    processes.record(layout, name, process.pid)
    return process


class explained_by(contextlib.ContextDecorator):  # noqa: N801  it is used as a statement
    """Append the last lines of a log to the message of each ClusterError that the block raises."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ClusterError) and self.log.exists():
            last = self.log.read_text(errors="replace").splitlines()[-8:]
            raise ClusterError("\n".join([f"{error}\nThe end of {self.log}:", *last])) from None


def _start_switch(layout: Layout) -> None:
    switch = start(layout, SWITCH, ["unshare", "--net", "--", "sleep", "infinity"], layout.directory / "log" / SWITCH)
    own = Path("/proc/self/ns/net").readlink()
    processes.wait_until(
        lambda: Path(f"/proc/{switch.pid}/ns/net").readlink() != own, 10, "the switch has its namespace"
    )
    _ip("link add br0 type bridge", "link set br0 up", within=switch.pid)
    _ip(
        f"link add {layout.link} type veth peer name {LOGIN} netns {switch.pid}",
        f"addr add {layout.address(LOGIN)}/24 dev {layout.link}",
        f"link set {layout.link} up",
    )
    _ip(f"link set {LOGIN} master br0 up", within=switch.pid)


def _connect(layout: Layout, name: str, pid: int) -> None:
    switch = processes.pid_of(layout, SWITCH)
    assert switch is not None
    # A bridge without ports is an interface that is up but reaches no other host, like Docker's on many hosts.
    _ip("link set lo up", "link add eth0 type bridge", within=pid)
    _ip(f"addr add {layout.lonely_address(name)}/24 dev eth0", "link set eth0 up", within=pid)
    _unplug(switch, name)
    _ip(f"link add {name} type veth peer name eth1 netns {pid}", f"link set {name} master br0 up", within=switch)
    by_ipv6 = f"addr add {layout.ipv6_address(name)}/64 dev eth1 nodad"
    _ip(f"addr add {layout.address(name)}/24 dev eth1", by_ipv6, "link set eth1 up", within=pid)


def _unplug(switch: int, name: str) -> None:
    """Remove the link of a host that has ended: by itself, the kernel takes seconds to remove it."""
    command = ["nsenter", f"--target={switch}", "--net", "ip", "link", "delete", name]
    subprocess.run(command, capture_output=True, check=False, timeout=scaled(30))  # fails if the link does not exist


def _set_cable(layout: Layout, name: str, state: str) -> None:
    enter(layout, name)
    switch = processes.pid_of(layout, SWITCH)
    assert switch is not None
    _ip(f"link set {name} {state}", within=switch)


def _ip(*lines: str, within: int | None = None) -> None:
    """Run commands of `ip` in the network namespace of process `within`, by default in the machine's."""
    command = ["ip", "-batch", "-"] if within is None else ["nsenter", f"--target={within}", "--net", "ip", "-b", "-"]
    done = subprocess.run(
        command, input="\n".join(lines), text=True, capture_output=True, check=False, timeout=scaled(30)
    )
    if done.returncode:
        raise ClusterError(f"ip cannot do `{'; '.join(lines)}`: {done.stderr.strip()}")


def _write_agent(layout: Layout) -> None:
    layout.agent.parent.mkdir(exist_ok=True)
    command = shlex.join([sys.executable, "-m", "tests.cluster", "--directory", str(layout.directory), "ssh"])
    path = shlex.quote(str(ROOT))
    layout.agent.write_text(f'#!/bin/sh\nPYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1 exec {command} -- "$@"\n')
    layout.agent.chmod(0o755)
