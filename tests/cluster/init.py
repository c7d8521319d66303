"""Process 1 of a virtual host: sets the host's name, mounts its file systems, then waits to be killed.

It execs `sleep infinity` with SIGCHLD ignored, so that the kernel itself reaps the orphans of the host.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.cluster import layout as layouts
from tests.cluster.layout import Layout


def main() -> None:
    directory, name = sys.argv[1:]
    layout = layouts.load(Path(directory))
    socket.sethostname(name)
    hostname = layout.directory / "etc" / f"{name}.hostname"
    hostname.write_text(f"{name}\n")
    mount("--bind", layout.directory / "etc" / f"{name}.hosts", "/etc/hosts")
    if Path("/etc/hostname").exists():
        mount("--bind", hostname, "/etc/hostname")
    mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    show_own_interfaces(layout, name)
    make_own_tmp(layout, name)
    (layout.directory / "etc" / f"{name}.ready").touch()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.execvp("sleep", ["sleep", "infinity"])


def show_own_interfaces(layout: Layout, name: str) -> None:
    """Mount a /sys of the host's own network, but keep the control groups below it, which slurmd needs."""
    groups = layout.directory / "etc" / f"{name}.cgroup"
    groups.mkdir(exist_ok=True)
    mount("--rbind", "/sys/fs/cgroup", groups)
    mount("-t", "sysfs", "sysfs", "/sys")
    mount("--move", groups, "/sys/fs/cgroup")


def make_own_tmp(layout: Layout, name: str) -> None:
    """Mount a /tmp in which only the shared directories are those of the machine.

    Processes on different hosts can have the same pid, and MPI libraries name files in /tmp by pid.
    """
    own = layout.directory / "tmp" / name
    own.mkdir(parents=True, exist_ok=True)
    own.chmod(0o1777)
    for path in (layout.directory, *layout.shared):
        if path.is_relative_to("/tmp"):
            place = own / path.relative_to("/tmp")
            place.mkdir(parents=True, exist_ok=True)
            mount("--bind", path, place)
    mount("--rbind", own, "/tmp")


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


if __name__ == "__main__":
    main()
