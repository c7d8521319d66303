"""A container of a pod on a virtual host: sets the pod's name, mounts the files that an operator mounts, then execs.

Usage: `python -m tests.cluster.pod FOLDER NAME UID COMMAND...`, in UTS and mount namespaces of its own.

FOLDER contains `ssh/`, the keys of the job; `NAME.hosts`, the names that the pod can resolve; and `NAME.mpi/`, the
directory /etc/mpi if the pod has one.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from tests.cluster.init import mount

PORT = 2222
"""The port of sshd in the images of the MPI operator."""

_WRITABLE = ("/etc", "/home", "/root", "/run")


def main() -> None:
    folder, name, user, *command = sys.argv[1:]
    make_writable(Path(folder, f"{name}.layers"))
    socket.sethostname(name)
    mount("--bind", Path(folder, f"{name}.hosts"), "/etc/hosts")
    if (files := Path(folder, f"{name}.mpi")).exists():
        shutil.copytree(files, "/etc/mpi")
    if user == "0":
        install_keys(Path(folder, "ssh"), Path("/root/.ssh"), 0o600, group=0)
        configure_ssh()
    else:
        add_user(int(user))
        install_keys(Path(folder, "ssh"), Path("/home/mpiuser/.ssh"), 0o640, group=int(user))
        command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *command]
    os.execvp(command[0], command)


def make_writable(layers: Path) -> None:
    """Mount overlays: what the pod writes to these directories disappears with it."""
    layers.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "tmpfs", layers)
    for directory in _WRITABLE:
        upper, work = (layers / f"{kind}{directory}" for kind in ("upper", "work"))
        upper.mkdir(parents=True)
        work.mkdir(parents=True)
        mount("-t", "overlay", "overlay", "-o", f"lowerdir={directory},upperdir={upper},workdir={work}", directory)


def install_keys(keys: Path, directory: Path, mode: int, *, group: int) -> None:
    """Copy the keys as root's files, like a mounted Secret."""
    shutil.copytree(keys, directory, dirs_exist_ok=True)
    directory.chmod(0o755)
    for path in directory.iterdir():
        os.chown(path, 0, group)
        path.chmod(mode)


def configure_ssh() -> None:
    """Configure ssh and sshd for root, as the images of the MPI operator do."""
    Path("/run/sshd").mkdir(exist_ok=True)
    options = f"Port {PORT}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
    Path("/etc/ssh/ssh_config.d/mpi.conf").write_text(options)
    Path("/etc/ssh/sshd_config.d/mpi.conf").write_text(f"Port {PORT}\nStrictModes no\n")


def add_user(user: int) -> None:
    """Add the user of an image that does not run as root. Python may be in root's home directory."""
    passwd = Path("/etc/passwd")
    others = [line for line in passwd.read_text().splitlines() if f":{user}:" not in line]
    passwd.write_text("\n".join([*others, f"mpiuser:x:{user}:{user}::/home/mpiuser:/bin/bash", ""]))
    Path("/home/mpiuser").mkdir()
    os.chown("/home/mpiuser", user, user)
    Path("/root").chmod(0o755)


if __name__ == "__main__":
    main()
