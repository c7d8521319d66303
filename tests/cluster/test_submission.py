"""`mpicomm job slurm --submit`: follows a job of several hosts, and waits for jobs that are cancelled or go on."""

from __future__ import annotations

import os
import signal

from tests.cluster.running import Cluster, Flavour, places
from tests.launching import background_job

SLEEP = '{% extends "slurm.j2" %}{% block start %}\nsleep 200\n{% endblock %}'


def test_jobs_are_submitted_followed_and_cancelled(cluster: Cluster, open_mpi: Flavour) -> None:
    folder = cluster.folder()
    submit = [open_mpi.python, "-m", "mpicomm", "job", "slurm", "--submit", "--output", folder / "logs" / "%j.out"]
    program = ["--", open_mpi.python, "-m", "tests.cluster.place"]
    outcome = cluster.run(*submit, "--tail", "--nodes", 2, "--ranks-per-node", 2, "--mem", "1Gi", *program)
    assert outcome.status == 0, outcome
    job, _, output = outcome.stdout.partition("\n")
    assert output == (folder / "logs" / f"{job}.out").read_text(), outcome
    assert [(place["rank"], place["num_nodes"]) for place in places(output)] == [(rank, 2) for rank in range(4)]
    assert f"job {job} has completed; its output is in {folder}/logs/{job}.out\n" in outcome.stderr, outcome

    outcome = cluster.run(*submit, "--wait", "--nodes", 2, "--", "python", "-c", "import sys; sys.exit(7)")
    assert outcome.status == 7, outcome
    assert "has failed (FAILED (NonZeroExitCode), exit status 7); its output is in" in outcome.stderr, outcome

    template = folder / "sleep.j2"
    template.write_text(SLEEP)
    # Without the variables of the test, its check for leftover processes does not kill the job.
    sleep = [*submit, "--wait", "--template", template, "--directive=--export=NONE", "--", "sleep"]
    with background_job(list(map(str, sleep)), env=cluster.environ) as waiting:
        waiting.wait_until(lambda: ": RUNNING" in waiting.stderr(), "the job runs")
        os.kill(waiting.pid, signal.SIGINT)
        outcome = waiting.finish()
    job = outcome.stdout.strip()
    assert outcome.status == 130, outcome
    assert outcome.stderr.endswith(f"interrupted; job {job} continues; cancel it with: scancel {job}\n"), outcome
    assert cluster.run("squeue", "--noheader", "--format=%i %T", "--jobs", job).stdout == f"{job} RUNNING\n"

    with background_job(list(map(str, sleep)), env=cluster.environ) as waiting:
        waiting.wait_until(lambda: ": RUNNING" in waiting.stderr(), "the job runs")
        for each in (job, waiting.stdout().strip()):
            assert cluster.run("scancel", each).status == 0
        outcome = waiting.finish()
    assert outcome.status in (1, 143), outcome  # 1: before the script started
    assert "was cancelled (CANCELLED" in outcome.stderr, outcome
