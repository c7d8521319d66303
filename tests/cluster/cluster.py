"""Starts and stops a whole cluster; a stopped cluster leaves nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster import hosts, packages, slurm
from tests.cluster import layout as layouts
from tests.cluster.layout import ClusterError, Layout


def up(layout: Layout) -> None:
    """Start a cluster; if it fails to start, remove all of it.

    Raises:
        ClusterError: If the cluster cannot start, with the reason.
    """
    if reason := packages.problem():
        raise ClusterError(f"{reason}.")
    try:
        layout.directory.mkdir(mode=0o755)
    except FileExistsError:
        raise ClusterError(
            f"{layout.directory} exists: a cluster is up, or was not taken down.\n"
            f"Take it down: python -m tests.cluster --number {layout.number} down"
        ) from None
    for name in ("pids", "log", "etc", "tmp", "shared"):
        (layout.directory / name).mkdir()
    layout.save()
    try:
        hosts.up(layout)
        slurm.up(layout)
    except BaseException:
        down(layout)
        raise


def down(layout: Layout) -> None:
    """End all processes of a cluster, even of one that started only in part, and remove its directory."""
    slurm.down(layout)
    hosts.down(layout)
    _remove(layout.directory)


def boot(layout: Layout, name: str) -> None:
    """Boot a host that was killed, and start its slurmd."""
    hosts.boot(layout, name)
    slurm.start_slurmd(layout, name)


def find(number: int, directory: Path | None) -> Layout:
    """Return the cluster with this number, or in this directory.

    Raises:
        ClusterError: If it does not exist.
    """
    return layouts.load((directory or layouts.default_directory(number)).resolve())


def _remove(directory: Path) -> None:
    """Remove a directory, unless a mount point is in it: the mounted files would be removed, too."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if inside := [path for path in mounted if Path(path).is_relative_to(directory)]:
        raise ClusterError(f"{', '.join(inside)} are mounted. Unmount them, then try again.")
    shutil.rmtree(directory)
