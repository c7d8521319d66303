"""A cluster as a whole: up, and down until nothing of it is left."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster import hosts, packages, slurm
from tests.cluster import layout as layouts
from tests.cluster.layout import ClusterError, Layout


def up(layout: Layout) -> None:
    """Start a cluster; if that fails, leave nothing.

    Raises:
        ClusterError: If it cannot be started, with the reason.
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
    """End all of a cluster, also one that is half there, and remove its directory."""
    slurm.down(layout)
    hosts.down(layout)
    _remove(layout.directory)


def boot(layout: Layout, name: str) -> None:
    """Boot a host that was killed, and its slurmd."""
    hosts.boot(layout, name)
    slurm.start_slurmd(layout, name)


def find(number: int, directory: Path | None) -> Layout:
    """Return the cluster of that number, or in that directory.

    Raises:
        ClusterError: If there is none.
    """
    return layouts.load((directory or layouts.default_directory(number)).resolve())


def _remove(directory: Path) -> None:
    """Remove a directory, unless something is mounted in it: that would be removed too."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if inside := [path for path in mounted if Path(path).is_relative_to(directory)]:
        raise ClusterError(f"{', '.join(inside)} are mounted. Unmount them, then try again.")
    shutil.rmtree(directory)
