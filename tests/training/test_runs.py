"""Runs in separate jobs that are killed, resumed on other numbers of ranks, or stopped by a bad loss."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path

from tests.launching import run_ranks
from tests.training import kills
from tests.training.job import EPOCHS, POINTS, SAMPLES

JOB = ["-m", "tests.training.job"]


def test_a_run_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    """Each start is killed at another point of saving."""
    shorter = ["--epochs", "5"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for directory in (whole, broken):
        directory.mkdir()
    kills.run_to_the_end(whole, 2, *shorter)
    for point in POINTS:
        before = kills.newest(broken)
        outcome = run_ranks(2, [*JOB, str(broken), *shorter, "--kill", f"{point}:{3 if point == 'removing' else 2}"])
        assert outcome.status != 0, outcome
        assert kills.starts(broken)[-1] == before
    before = kills.newest(broken)
    kills.run_to_the_end(broken, 2, *shorter)
    assert kills.starts(broken)[-1] == before > 0
    assert kills.final(broken) == kills.final(whole)


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
import sys, time, torch, mpicomm
from torch import nn
from torch.utils.data import TensorDataset
from mpicomm.training.checkpoint import Checkpoints
world = mpicomm.bootstrap("mpi")
store = Checkpoints._store
Checkpoints._store = lambda *args: time.sleep(0.3) or store(*args)  # a save is in progress when the next step fails
x = torch.ones(64, 4)
x[37] = torch.nan
model = nn.Linear(4, 2)
trainer = mpicomm.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy,
    batch_size=4, checkpoint_dir=sys.argv[1], save_every=1, progress="none",
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


SAVES_WITH_ANOTHER_BACKEND = """
import collections, sys, threading
import torch
import torch.distributed as dist
import mpicomm
from torch.utils.data import TensorDataset

calls = collections.Counter()

class Recording(dist.ProcessGroup):
    '''Stands in for a backend whose operations must not come from two threads, as NCCL's.'''

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)

    _device_types = [torch.device("cpu")]
    group_name = ""

    def _set_group_name(self, name):
        self.group_name = name

    def getBackendName(self):
        return "recording"

def recorded(name):
    def method(self, *args, **kwargs):
        calls["checkpoint" in threading.current_thread().name] += 1
        return getattr(self.inner, name)(*args, **kwargs)
    return method

NAMES = ("allreduce", "broadcast", "allgather", "_allgather_base", "gather", "scatter", "reduce", "barrier")
for name in NAMES + ("all_gather_single",):
    setattr(Recording, name, recorded(name))

dist.Backend.register_backend("recording", Recording, devices=["cpu"])
world = mpicomm.bootstrap(None)
dist.init_process_group("recording")
model = torch.nn.Linear(2, 1)
data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
optimizer = torch.optim.Adam(model.parameters())
trainer = mpicomm.Trainer(
    model, optimizer, torch.nn.functional.mse_loss,
    batch_size=1, save_every=1, checkpoint_dir=sys.argv[1], progress="none",
)
trainer.fit(data, 1)
sys.stdout.write(f"main {calls[False] > 0}, saving {calls[True]}\\n")
"""


def test_checkpoints_use_a_group_of_their_own_on_the_host(tmp_path: Path) -> None:
    """Training and saving call operations from two threads, in an order that differs between ranks."""
    program = tmp_path / "train.py"
    program.write_text(SAVES_WITH_ANOTHER_BACKEND)
    outcome = run_ranks(2, [str(program), str(tmp_path / "run")])
    assert outcome.status == 0, outcome
    assert outcome.stdout.splitlines() == ["main True, saving 0"] * 2, outcome
    assert kills.newest(tmp_path / "run") == 4
