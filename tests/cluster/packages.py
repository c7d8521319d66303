"""The requirements of a cluster on this machine, and their installation."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from tests.cluster.layout import ClusterError
from tests.time_limits import scaled

# No other package depends on libpmix2: Slurm's pmix plugin loads it on demand.
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "munge", "libpmix2", "iproute2", "util-linux", "openssh-server"),
    "bubblewrap",
)
COMMANDS = (
    *("slurmctld", "slurmd", "srun", "munged", "munge", "ip", "nsenter", "unshare", "mount", "sshd", "ssh-keygen"),
    "bwrap",
)
INSTALL = "python -m tests.cluster install"
_APT = ("apt-get", "-o", "DPkg::Lock::Timeout=300")
_APT_SECONDS = 600


def problem() -> str | None:
    """Return the reason why this machine cannot run a cluster; None if it can."""
    if os.geteuid() != 0:
        return "a cluster needs root, for namespaces, addresses and Slurm's own daemons"
    if missing := missing_commands():
        return f"no {', '.join(missing)} here; `{INSTALL}` installs them where there is apt-get"
    return _problem_with_namespaces()


def missing_commands() -> list[str]:
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    return [command for command in COMMANDS if shutil.which(command, path=path) is None]


def install() -> None:
    """Install the missing packages with apt-get.

    Raises:
        ClusterError: If the installation fails, with the reason.
    """
    if missing_commands() or not _pmix_library().exists():
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise ClusterError(f"installing {', '.join(PACKAGES)} needs root and apt-get.")
        _apt("update", "-qq")
        _apt("install", "-qq", "-y", "--no-install-recommends", *PACKAGES)
    link = _pmix_library().with_name("libpmix.so")
    if not link.exists():
        link.symlink_to(_pmix_library().name)  # the plugin loads this name, which only a development package provides


def _problem_with_namespaces() -> str | None:
    attempt = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--"]
    attempt += ["ip", "link", "add", "br0", "type", "bridge"]
    done = subprocess.run(attempt, capture_output=True, text=True, check=False, timeout=scaled(30))
    return f"no namespaces with a network of their own here: {done.stderr.strip()}" if done.returncode else None


def _pmix_library() -> Path:
    return Path(f"/usr/lib/{platform.machine()}-linux-gnu/pmix2/lib/libpmix.so.2")


def _apt(*arguments: str) -> None:
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            [*_APT, *arguments], env=environ, capture_output=True, text=True, check=False, timeout=_APT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"apt-get {arguments[0]} took more than {_APT_SECONDS} s.") from None
    if done.returncode:
        raise ClusterError(f"apt-get {arguments[0]} failed:\n{done.stderr.strip()[-1000:]}")
