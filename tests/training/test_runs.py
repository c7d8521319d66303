"""Runs that are killed, asked to leave, moved to other numbers of ranks, or spoilt: as jobs of their own."""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.training import kills
from tests.training.job import EPOCHS, POINTS, SAMPLES

JOB = ["-m", "tests.training.job"]


def test_a_run_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    """At every point in turn; `python -m tests.training` does more of that, and at random moments."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for directory in (whole, broken):
        directory.mkdir()
    kills.run_to_the_end(whole, 2)
    for point in POINTS:
        before = kills.newest(broken)
        outcome = run_ranks(2, [*JOB, str(broken), "--kill", f"{point}:{3 if point == 'removing' else 2}"])
        assert outcome.status != 0, outcome
        assert kills.starts(broken)[-1] == before
    before = kills.newest(broken)
    kills.run_to_the_end(broken, 2)
    assert kills.starts(broken)[-1] == before > 0
    assert kills.final(broken) == kills.final(whole)


@pytest.mark.parametrize(("number", "slow"), [(signal.SIGUSR1, 2), (signal.SIGUSR1, 1), (signal.SIGTERM, -1)])
def test_a_signal_to_one_rank(tmp_path: Path, number: signal.Signals, slow: int) -> None:
    """All leave together with status 85, also while others wait in a collective for that rank, or it for another."""
    job = kills.start(
        tmp_path, 4, "--pause", "0.3" if slow >= 0 else "0.05", "--pause-on", str(slow), "--show", "lines"
    )
    assert job.stdout is not None
    while "pids" not in (line := job.stdout.readline()):
        assert line, "ended before it began"
    pids = [int(each) for each in re.findall(r"\d+", line.partition("pids")[2])]
    while not (tmp_path / "metrics.jsonl").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(pids[2], number)
    output = kills.finish(job)
    assert job.returncode == 85, output
    assert f"{number.name} on rank 2: leaving at step {kills.newest(tmp_path)} with a checkpoint" in output
    entries = [json.loads(line) for line in kills.whole_lines(tmp_path / "metrics.jsonl")]
    assert entries[-1]["event"] == "preempted"
    assert entries[-1]["why"] == f"{number.name} on rank 2"


def test_a_run_moves_to_other_numbers_of_ranks(tmp_path: Path) -> None:
    for ranks, step in ((4, 6), (2, 15), (3, 0)):
        outcome = run_ranks(ranks, [*JOB, str(tmp_path), "--record", "--leave-at", str(step)])
        assert outcome.status == (85 if step else 0), outcome
    taken = collections.defaultdict(list)
    for path in tmp_path.glob("taken-*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            taken[entry["epoch"]] += entry["indices"]
    assert set(taken) == set(range(EPOCHS))
    assert all(sorted(indices) == list(range(SAMPLES)) for indices in taken.values())
    history = json.loads((tmp_path / "final-0.json").read_text())["history"]
    assert [each["samples"] for each in history] == [SAMPLES] * EPOCHS
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]


SPOILT = """
import sys, torch, mpicomm
from torch import nn
from torch.utils.data import TensorDataset
world = mpicomm.bootstrap("mpi", timeout=60)
x = torch.ones(64, 4)
x[37] = torch.nan
model = nn.Linear(4, 2)
trainer = mpicomm.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy,
    batch_size=4, checkpoint_dir=sys.argv[1], save_every=1, show="none",
)
trainer.fit(TensorDataset(x, torch.zeros(64, dtype=torch.long)), 1)
"""


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    outcome = run_ranks(2, ["-c", SPOILT, str(tmp_path)])
    assert outcome.status not in (0, 85), outcome
    (line,) = [line for line in outcome.stderr.splitlines() if "the loss of step" in line]
    found = re.search(r"the loss of step (\d) is nan on rank (\d), for the samples (.*)\.", line)
    assert found, line
    assert "37" in found[3].split(", ")
    assert len(found[3].split(", ")) == 4
    assert kills.newest(tmp_path) == int(found[1])
