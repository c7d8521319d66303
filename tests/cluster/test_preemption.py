"""A run of the trainer that Slurm stops and starts again ends as one that was left alone, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster import processes
from tests.cluster.running import SECONDS, Cluster, Flavour, quoted

NODES = 2
SCRIPT = """
srun --mpi=pmix {python} -m tests.training.job {directory} --epochs 4 --pause 0.05
status=$?
echo "status $status"
if [ $status -eq 85 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""


def submit(cluster: Cluster, python: Path) -> Path:
    directory = cluster.folder()
    lines = SCRIPT.format(python=quoted(python), directory=quoted(directory))
    options = [f"-N{NODES}", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    folder = cluster.submit("learn.sh", *options, lines=lines)
    (folder / "run").symlink_to(directory)
    return folder


def finals(folder: Path) -> list[dict[str, object]]:
    """Return what every rank has at the end: a digest of parameters and optimizer, and the figures of all epochs."""
    return [json.loads((folder / "run" / f"final-{rank}.json").read_text()) for rank in range(NODES)]


def test_requeued_by_its_script(cluster: Cluster, open_mpi: Flavour) -> None:
    calm = submit(cluster, open_mpi.python)
    stopped = submit(cluster, open_mpi.python)
    job = (stopped / "job").read_text()
    figures = stopped / "run" / "metrics.jsonl"
    processes.wait_until(lambda: figures.exists() and figures.stat().st_size, SECONDS, "the run has made some steps")
    outcome = cluster.run("scancel", "--signal=USR1", job)
    assert outcome.status == 0, outcome
    assert cluster.finish(calm).splitlines()[-1] == "status 0"
    said = cluster.finish(stopped)
    assert [line for line in said.splitlines() if line.startswith("status")] == ["status 85", "status 0"], said
    about = cluster.run("scontrol", "show", "job", job).stdout
    assert "JobState=COMPLETED" in about
    assert "Restarts=1" in about
    assert [each["digest"] for each in finals(stopped)] == [each["digest"] for each in finals(calm)]
    assert [each["step"] for each in finals(stopped)] == [each["step"] for each in finals(calm)]
