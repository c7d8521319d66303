"""A trainer that Slurm stops and requeues produces the same result as an uninterrupted one, bit by bit.

`mpicomm job` writes the job scripts. All jobs run at the same time, since they mostly wait.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cluster.layout import ROOT
from tests.cluster.running import Cluster, Flavour

NODES = 2
LIMIT = 480.0
# Slurm checks the time limit every 30 s and may send the signal 30 s early: 65 to 95 s after the start. On a busy
# machine the ranks take 40 s to start; a signal before they handle it would end them. The trainer also queries the
# remaining time, and exits after half of it.
WARNED = ["--time", "3", "--signal", "USR1@85"]
REASON = re.compile(r"SIGUSR1|\d+ s remaining in the allocation")
LONG = ["--time", "30"]
Jobs = dict[str, Path]
"""The directories of the jobs, by name."""


def submit(cluster: Cluster, python: Path, options: list[str], pause: float) -> Path:
    """Submit the trainer with a script that requeues it; each batch takes `pause` seconds longer."""
    folder = cluster.folder()
    program = ["--", python, "-m", "tests.training.job", folder / "run", "--epochs", 4, "--pause", pause]
    program += ["--progress", "lines"]
    job = ["--nodes", NODES, "--ranks-per-node", 1, "--requeue", "--output", folder / "0.out", *options, *program]
    outcome = cluster.run(python, "-m", "mpicomm", "job", "slurm", "-o", folder / "learn.sh", *job)
    assert outcome.status == 0, outcome
    outcome = cluster.run("sbatch", "--parsable", f"--chdir={ROOT}", folder / "learn.sh")
    assert outcome.status == 0, outcome
    (folder / "job").write_text(outcome.stdout.strip())
    return folder


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, open_mpi: Flavour) -> Jobs:
    """Run all jobs until each has ended in its own way."""
    found = {
        "left alone": submit(cluster, open_mpi.python, LONG, 0.02),
        "warned of the time limit": submit(cluster, open_mpi.python, WARNED, 2.4),
    }
    step = f"srun --mpi=pmix {open_mpi.python} -m tests.cluster.loop {cluster.folder() / 'begun'}"
    found["out of time"] = cluster.submit("loop.sh", f"-N{NODES}", "--time=1", lines=step)
    for folder in found.values():
        cluster.finish(folder, LIMIT)
    return found


def about(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Return the fields of `scontrol show job`."""
    properties = cluster.run("scontrol", "show", "job", (folder / "job").read_text()).stdout
    return dict(word.split("=", 1) for word in properties.split() if "=" in word)


def finals(folder: Path) -> list[dict[str, object]]:
    """Return the final state of every rank: a digest of parameters and optimizer, and the figures of all epochs."""
    return [json.loads((folder / "run" / f"final-{rank}.json").read_text()) for rank in range(NODES)]


def test_left_alone(cluster: Cluster, jobs: Jobs) -> None:
    properties = about(cluster, jobs["left alone"])
    assert (properties["JobState"], properties["Restarts"]) == ("COMPLETED", "0"), jobs["left alone"]


def test_requeued_by_its_script(cluster: Cluster, jobs: Jobs) -> None:
    requeued = jobs["warned of the time limit"]
    properties = about(cluster, requeued)
    output = (requeued / "0.out").read_text()
    assert properties["JobState"] == "COMPLETED", output
    assert int(properties["Restarts"]) >= 1, output
    assert output.count("pids ") == int(properties["Restarts"]) + 1, output
    assert len(REASON.findall(output)) >= 1, output
    assert output.count("Exited with exit code 85") == int(properties["Restarts"]) * NODES, output
    calm = finals(jobs["left alone"])
    for key in ("digest", "step"):
        assert [each[key] for each in finals(requeued)] == [each[key] for each in calm], key


def test_a_job_that_is_out_of_time(cluster: Cluster, jobs: Jobs) -> None:
    """The ranks report no cause other than Slurm's. As after every test, a fixture checks that no process is left."""
    properties = about(cluster, jobs["out of time"])
    output = "".join(path.read_text() for path in jobs["out of time"].glob("*.out"))
    assert properties["JobState"] == "TIMEOUT", output
    assert "DUE TO TIME LIMIT" in output, output
    assert "[mpicomm]" not in output, output
    assert "came through" not in output, output
