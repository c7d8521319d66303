"""The layout of a cluster: its hosts, addresses and paths. Later commands read it from the cluster's directory."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGIN = "login"
"""The hosts' name for the machine itself, which runs slurmctld and on which users call srun."""

_INTEL_MPI = [os.environ.get("INTEL_MPI_ENV"), *sorted(map(str, ROOT.glob(".venv-compat/*-intel")))]
INTEL_MPI_ENV = next((Path(each) for each in _INTEL_MPI if each), None)
"""The virtual environment with Intel MPI, if there is one."""

_FILE = "cluster.json"


class ClusterError(Exception):
    """The cluster is not in the required state; the message gives the remedy."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One cluster; its number distinguishes it from other clusters on the machine."""

    number: int
    directory: Path
    nodes: int = 4
    cpus: int = 4
    gpus: int = 2
    shared: tuple[Path, ...] = ()
    """Directories that every host sees at the same path. Hosts share all directories outside /tmp anyway."""

    @property
    def names(self) -> list[str]:
        return [f"node{index}" for index in range(1, self.nodes + 1)]

    @property
    def link(self) -> str:
        """The machine's own interface on the cluster's network."""
        return f"cluster{self.number}"

    @property
    def controller_port(self) -> int:
        """The port of slurmctld. The port of slurmd is the same in all clusters, which have separate hosts."""
        return 26800 + self.number

    @property
    def scratch(self) -> Path:
        """A directory that all hosts share, for the output of jobs."""
        return self.directory / "shared"

    @property
    def agent(self) -> Path:
        """A program that takes ssh's arguments and runs a command on a host."""
        return self.directory / "bin" / "ssh"

    @property
    def slurm_conf(self) -> Path:
        """Slurm's configuration, for SLURM_CONF."""
        return self.directory / "slurm.conf"

    def address(self, name: str) -> str:
        """Return a host's address on the network that all hosts share."""
        return f"10.219.{self.number}.{1 if name == LOGIN else 10 + self.index(name)}"

    def ipv6_address(self, name: str) -> str:
        """Return a host's IPv6 address on that network."""
        return f"fd19:219:{self.number:x}::{10 + self.index(name):x}"

    @property
    def site_environ(self) -> dict[str, str]:
        """The variables that the site sets for every login and every task.

        Open MPI assumes that every interface that is up reaches the other hosts, and fails at the first that does not.
        """
        return {"OMPI_MCA_btl_tcp_if_include": f"10.219.{self.number}.0/24"}

    def lonely_address(self, name: str) -> str:
        """Return a host's address on its first network, which reaches no other host."""
        return f"172.30.{self.index(name)}.1"

    def index(self, name: str) -> int:
        """Return the number of a host, from 1 on.

        Raises:
            ClusterError: If the cluster has no such host.
        """
        if name not in self.names:
            raise ClusterError(f"there is no host {name}; there are {', '.join(self.names)}.")
        return self.names.index(name) + 1

    def save(self) -> None:
        """Write the layout to the cluster's directory."""
        (self.directory / _FILE).write_text(json.dumps(dataclasses.asdict(self), default=str))


def default_directory(number: int) -> Path:
    return Path(tempfile.gettempdir(), f"mpicomm-cluster-{number}")


def load(directory: Path) -> Layout:
    """Read the layout that `Layout.save` wrote.

    Raises:
        ClusterError: If the directory contains no cluster.
    """
    path = directory / _FILE
    if not path.exists():
        raise ClusterError(f"no cluster is up in {directory}.\nStart one: python -m tests.cluster up")
    fields = json.loads(path.read_text())
    fields["directory"] = Path(fields["directory"])
    fields["shared"] = tuple(map(Path, fields["shared"]))
    return Layout(**fields)


def paths_to_share() -> tuple[Path, ...]:
    """Return the directories that a host needs to run this checkout in the environments of both MPIs."""
    environments = [ROOT / ".venv", ROOT / ".venv-mpich", Path(os.environ.get("OTHER_MPI_ENV") or ROOT)]
    paths = [ROOT, Path(sys.prefix), Path(sys.base_prefix), *environments, INTEL_MPI_ENV or ROOT]
    return tuple(dict.fromkeys(path.resolve() for path in paths if path.exists()))
