"""The pods of an MPIJob on the hosts of a cluster, with the files and variables that the MPI operator writes.

The names, files and variables are those of mpi-operator v0.8 (`pkg/controller/mpi_job_controller.go`): one pod runs the
launcher, and each of the others runs sshd. The launcher is on the first host and has no rank.
"""

from __future__ import annotations

import dataclasses
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster import hosts, processes
from tests.cluster.layout import ROOT, Layout
from tests.cluster.pod import PORT
from tests.launching import Outcome, run_command
from tests.time_limits import scaled

LAUNCHER = "pi-launcher"
_WORKERS = 3
_DOMAIN = "pi.default.svc"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

VARIABLES = {
    "Open MPI": {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": "{slots}",
    },
    "Intel MPI": {
        "I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o ConnectionAttempts=10",
        "I_MPI_PERHOST": "{slots}",
    },
    "MPICH": {
        "HYDRA_HOST_FILE": "/etc/mpi/hostfile",
        "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10",
    },
}
"""The variables of the launcher for each `mpiImplementation`."""


@dataclasses.dataclass(frozen=True)
class Pods:
    """The pods of one job."""

    layout: Layout
    folder: Path
    vendor: str
    """The `mpiImplementation` of the job."""
    slots: int = 1
    """The number of ranks of each worker."""
    user: int = 0
    """The uid of the containers."""

    @property
    def names(self) -> list[str]:
        """The names of the workers."""
        return [f"pi-worker-{index}" for index in range(_WORKERS)]

    def up(self, sshd: Sequence[str] = ("/usr/sbin/sshd", "-De")) -> None:
        """Start sshd in every worker; the default command is the operator's."""
        self.write_files()
        for name in self.names:
            words = hosts.enter(self.layout, self._host(name)) + self._command(name, *sshd)
            started = hosts.start(self.layout, f"{name}.unshare", words, self.folder / f"{name}.log")
            with hosts.explained_by(self.folder / f"{name}.log"):
                processes.wait_until(lambda name=name: self._listens(name), 20, f"sshd of {name} listens")
            pid = processes.child_of(started.pid)
            assert pid is not None
            processes.record(self.layout, name, pid)

    def down(self) -> None:
        """Kill the workers."""
        for name in self.names:
            processes.stop(self.layout, name, signal.SIGKILL)

    def launch(self, *command: object, environ: Mapping[str, str], timeout: float = 120) -> Outcome:
        """Run a command as the launcher.

        Args:
            environ: The variables of the container.
        """
        operator = {key: value.format(slots=self.slots) for key, value in VARIABLES[self.vendor].items()}
        variables = {
            "PATH": _PATH,
            "HOME": "/home/mpiuser" if self.user else "/root",
            "HOSTNAME": LAUNCHER,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            **environ,
            "K_MPI_JOB_ROLE": "launcher",
            **operator,
            "NVIDIA_VISIBLE_DEVICES": "",
            "NVIDIA_DRIVER_CAPABILITIES": "",
        }
        shown = shlex.join(f"{name}={value}" for name, value in variables.items())
        # run_command finds the processes of the job by TESTS_JOB.
        shell = ["sh", "-c", f'exec env -i "TESTS_JOB=$TESTS_JOB" {shown} "$@"', "sh", *map(str, command)]
        words = hosts.enter(self.layout, self._host(LAUNCHER)) + self._command(LAUNCHER, *shell)
        return run_command(words, timeout=timeout)

    def write_names(self, name: str) -> None:
        """Write the names that a pod can resolve: the workers have a search domain, the launcher has none."""
        lines = ["127.0.0.1 localhost"]
        for each in (LAUNCHER, *self.names):
            short = f" {each}" if each == name or name != LAUNCHER else ""
            lines.append(f"{self.layout.address(self._host(each))} {each}.{_DOMAIN}{short}")
        (self.folder / f"{name}.hosts").write_text("".join(f"{line}\n" for line in lines))

    def write_files(self) -> None:
        """Write the files that the operator mounts."""
        keys, files = self.folder / "ssh", self.folder / f"{LAUNCHER}.mpi"
        keys.mkdir()
        files.mkdir()
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(keys / "id_rsa")]
        subprocess.run(command, check=True, timeout=scaled(30))
        (keys / "authorized_keys").write_text((keys / "id_rsa.pub").read_text())
        form = "{}.{} slots={}\n" if self.vendor == "Open MPI" else "{}.{}:{}\n"
        lines = [form.format(name, _DOMAIN, self.slots) for name in self.names]
        (files / "hostfile").write_text("".join(lines))
        for name in (LAUNCHER, *self.names):
            self.write_names(name)

    def _command(self, name: str, *words: str) -> list[str]:
        arguments = [str(self.folder), name, str(self.user), "env", "--unset=PYTHONPATH", *words]
        python = ["env", f"PYTHONPATH={ROOT}", "PYTHONDONTWRITEBYTECODE=1", sys.executable, "-m", "tests.cluster.pod"]
        return ["unshare", "--uts", "--mount", "--", *python, *arguments]

    def _host(self, name: str) -> str:
        return "node1" if name == LAUNCHER else f"node{2 + self.names.index(name)}"

    def _listens(self, name: str) -> bool:
        words = [*hosts.enter(self.layout, self._host(name)), "bash", "-c", f"</dev/tcp/127.0.0.1/{PORT}"]
        return subprocess.run(words, capture_output=True, check=False, timeout=scaled(30)).returncode == 0
