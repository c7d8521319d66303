"""What a cluster is to be: how many hosts, which addresses, which paths. Kept in its directory, for later commands."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGIN = "login"
"""What the hosts call the machine itself, where slurmctld runs and where people type srun."""

_FILE = "cluster.json"


class ClusterError(Exception):
    """Something about the cluster is not as it must be; the text says what to do."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One cluster; its number keeps it apart from others on the machine."""

    number: int
    directory: Path
    nodes: int = 4
    cpus: int = 4
    gpus: int = 2
    loopback_names: bool = False
    """Whether a host's own name stands for 127.0.1.1 in its /etc/hosts, as Debian has it."""

    shared: tuple[Path, ...] = ()
    """Directories that every host sees at the same path; all outside /tmp are anyway."""

    @property
    def names(self) -> list[str]:
        """The hosts."""
        return [f"node{index}" for index in range(1, self.nodes + 1)]

    @property
    def link(self) -> str:
        """The machine's own interface on the cluster's network."""
        return f"cluster{self.number}"

    @property
    def controller_port(self) -> int:
        """Where slurmctld listens; slurmd's port is on hosts of its own."""
        return 26800 + self.number

    @property
    def scratch(self) -> Path:
        """A directory that all hosts share, for what jobs write."""
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
        """Return a host's address on the network that all share."""
        return f"10.219.{self.number}.{1 if name == LOGIN else 10 + self.index(name)}"

    def ipv6_address(self, name: str) -> str:
        """Return a host's other address on that network."""
        return f"fd19:219:{self.number:x}::{10 + self.index(name):x}"

    @property
    def site_environ(self) -> dict[str, str]:
        """What the site sets for every login and every task.

        Open MPI takes each interface that is up for one that leads to the others, and dies of the first that does not.
        """
        return {"OMPI_MCA_btl_tcp_if_include": f"10.219.{self.number}.0/24"}

    def lonely_address(self, name: str) -> str:
        """Return a host's address on its first network, which leads nowhere."""
        return f"172.30.{self.index(name)}.1"

    def index(self, name: str) -> int:
        """Return the number of a host.

        Raises:
            ClusterError: If there is no such host.
        """
        if name not in self.names:
            raise ClusterError(f"there is no host {name}; there are {', '.join(self.names)}.")
        return self.names.index(name) + 1

    def save(self) -> None:
        """Write this to the cluster's directory."""
        (self.directory / _FILE).write_text(json.dumps(dataclasses.asdict(self), default=str))


def default_directory(number: int) -> Path:
    """Return where a cluster keeps everything, unless told otherwise."""
    return Path(tempfile.gettempdir(), f"mpicomm-cluster-{number}")


def load(directory: Path) -> Layout:
    """Read what `Layout.save` wrote.

    Raises:
        ClusterError: If no cluster is there.
    """
    path = directory / _FILE
    if not path.exists():
        raise ClusterError(f"no cluster is up in {directory}.\nStart one: python -m tests.cluster up")
    fields = json.loads(path.read_text())
    fields["directory"] = Path(fields["directory"])
    fields["shared"] = tuple(map(Path, fields["shared"]))
    return Layout(**fields)


def paths_to_share() -> tuple[Path, ...]:
    """Return the directories without which no host could run this checkout in these environments."""
    environments = [ROOT / ".venv", ROOT / ".venv-mpich", Path(os.environ.get("OTHER_MPI_ENV") or ROOT)]
    paths = [ROOT, Path(sys.prefix), Path(sys.base_prefix), *environments]
    return tuple(dict.fromkeys(path.resolve() for path in paths if path.exists()))
