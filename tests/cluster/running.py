"""Helpers of the tests: run commands with each MPI, submit jobs, and inspect the processes on the hosts."""

from __future__ import annotations

import dataclasses
import json
import shlex
import uuid
from pathlib import Path
from typing import Any

from tests.cluster import cluster as clusters
from tests.cluster import hosts, processes, slurm
from tests.cluster.layout import ROOT, Layout
from tests.launching import Outcome, run_command

SECONDS = 240.0  # starting a few ranks takes 5 s on an idle machine


@dataclasses.dataclass(frozen=True)
class Flavour:
    """An MPI, and the Python of the environment from which the tests start ranks with it."""

    vendor: str
    python: Path

    @property
    def srun_type(self) -> str:
        """The argument of `srun --mpi=` for this MPI."""
        return "pmix" if self.vendor == "Open MPI" else "pmi2"

    @property
    def mpiexec(self) -> list[str]:
        """Its launcher, without process binding: the hosts may have more ranks than the machine has cores."""
        options = ["--bind-to", "none"] if self.vendor == "Open MPI" else []
        return [str(self.python.parent / "mpiexec"), *options]

    def keep(self, name: str) -> list[str]:
        """Return the option with which its launcher exports a variable to other hosts; MPICH's launcher exports all."""
        return ["-x", name] if self.vendor == "Open MPI" else []


class Cluster:
    """The cluster that the tests share, with the operations that they need."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def environ(self) -> dict[str, str]:
        """The variables that a user of the cluster exports."""
        agent = str(self.layout.agent)
        return {
            "SLURM_CONF": str(self.layout.slurm_conf),
            "PRTE_MCA_plm_ssh_agent": agent,
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": agent,
        }

    def run(self, *command: object, timeout: float = SECONDS) -> Outcome:
        """Run a command on the machine itself, like a user on the login node."""
        return run_command(list(map(str, command)), env=self.environ, timeout=timeout)

    def shell(self, text: str, timeout: float = SECONDS) -> Outcome:
        """Run shell commands on the machine itself."""
        return self.run("bash", "-c", text, timeout=timeout)

    def submit(self, name: str, *options: str, lines: str) -> Path:
        """Submit a batch script, and return the job's directory, which receives its output."""
        folder = self.folder()
        script = folder / name
        script.write_text(f"#!/bin/bash\ncd {ROOT}\n{lines}\n")
        outcome = self.run("sbatch", "--parsable", f"--output={folder}/%a.out", f"--chdir={folder}", *options, script)
        assert outcome.status == 0, outcome
        (folder / "job").write_text(outcome.stdout.strip())
        return folder

    def finish(self, folder: Path, timeout: float = SECONDS) -> str:
        """Wait for a job that `submit` started, and return the output of its tasks."""
        job = (folder / "job").read_text()
        processes.wait_until(lambda: not self._queue("--jobs", job), timeout, f"job {job} ends: {self._output(folder)}")
        return self._output(folder)

    def folder(self) -> Path:
        """Create a directory that all hosts share."""
        path = self.layout.scratch / uuid.uuid4().hex[:8]
        path.mkdir()
        return path

    def settle(self) -> None:
        """Cancel leftover jobs, boot and reconnect every host, and wait until all nodes are idle."""
        for job in self._queue():
            self.run("scancel", "--signal=KILL", "--full", job)
            self.run("scancel", job)
        for name in self.layout.names:
            if processes.pid_of(self.layout, name) is None:
                clusters.boot(self.layout, name)
            hosts.mend(self.layout, name)
        slurm.wait_idle(self.layout, 60)

    def job_processes(self) -> dict[int, str]:
        """Return the processes on the hosts except slurmd, by pid."""
        found = {}
        for name in self.layout.names:
            for pid, line in hosts.processes_on(self.layout, name).items():
                if line.strip() != "slurmd":
                    found[pid] = f"{name}: {line}"
        return found

    def _queue(self, *options: str) -> list[str]:
        outcome = self.run("squeue", "--noheader", "--format=%i", *options)
        return outcome.stdout.split()

    @staticmethod
    def _output(folder: Path) -> str:
        return "".join(path.read_text() for path in sorted(folder.glob("*.out")))


def places(outcome: Outcome | str) -> list[dict[str, Any]]:
    """Return the output of the ranks of `tests.cluster.place`, sorted by label and rank."""
    text = outcome if isinstance(outcome, str) else outcome.stdout
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda place: (place["label"], place["rank"]))


def quoted(*words: object) -> str:
    """Return words as one quoted command line for a shell."""
    return shlex.join(map(str, words))
