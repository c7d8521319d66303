"""Scripts that import Horovod run unchanged: `mpicomm run --horovod` and `python -m mpicomm.horovod`."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mpicomm import horovod as hvd
from mpicomm import mpi
from mpicomm.horovod import __main__, context
from tests.launching import ROOT, Outcome, run_alone, run_command, run_ranks

RUN = (sys.executable, "-m", "mpicomm", "run", "--horovod")
RANKS = 2

# Uses the modules that scripts import, in the rank and in the processes of a DataLoader, which inherit only sys.path.
# In `loop`, an operation fails on all ranks, and then the program asks twice for a new start, the second time without
# sync.
SCRIPT = """
import importlib.util

import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch import elastic, mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import Average, allreduce, rank
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index, int(hvd.is_initialized())


def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def check():
    hvd.init()
    assert horovod.torch is hvd and hvd.elastic is elastic and horovod.common.exceptions
    assert importlib.util.find_spec('horovod.torch') is not None
    assert Compression is hvd.Compression and TorchState is hvd.elastic.TorchState
    assert mpi_ops.allreduce is allreduce and rank() == hvd.rank()
    assert horovod.common.exceptions.__all__ == ["HorovodInternalError", "HostsUpdatedInterrupt"]
    assert not hasattr(hvd.compression, "allreduce") and not hasattr(hvd.elastic.sampler, "State")
    print("version", horovod.__version__.split(".")[0])
    print("sum", int(allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum, name="named")))
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    print("loaded", [[int(each) for each in batch] for batch in loader])
    print(error_of(lambda: __import__("horovod.tensorflow")))
    print(error_of(lambda: horovod.run(check, np=2)))


def loop():
    calls, resets = [], []
    state = elastic.TorchState(step=0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @elastic.run
    def train(state, until):
        calls.append(state.step)
        while state.step < until:
            state.step += 1
            hvd.allreduce(torch.ones(1), name=f"step.{state.step}")
            if state.step in (2, 5):
                state.commit()
            if state.step == 3 and len(calls) == 1:
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="different shapes")
            if state.step == 4 and len(calls) == 2:
                raise HostsUpdatedInterrupt
            if state.step == 6 and len(calls) == 3:
                raise HostsUpdatedInterrupt(skip_sync=True)
        return "done"

    print(train(state, until=7), calls, resets)

    @elastic.run
    def fails(state):
        calls.append("fails")
        hvd.allreduce(torch.ones(1 + hvd.rank()), name="different shapes")

    calls.clear()
    print(error_of(lambda: fails(state)), calls)


if __name__ == "__main__":
    check()
    loop()
"""


@pytest.mark.each_mpi
def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    script, timeline = tmp_path / "script.py", tmp_path / "timeline.json"
    script.write_text(SCRIPT)
    options = ["-np", str(RANKS), "--timeline-filename", str(timeline), "--tag-output"]
    outcome = run_command([*RUN, *options, "python", "-W", "ignore", str(script)])
    assert outcome.status == 0, outcome
    for expected in (
        "version 0",
        f"sum {RANKS * (RANKS + 1) // 2}",
        "loaded [[0, 0], [1, 0]]",
        "ModuleNotFoundError: mpicomm.horovod has no horovod.tensorflow: it supports horovod.torch only.",
        "NotImplementedError: horovod.run starts processes itself, which mpicomm.horovod does not support.",
    ):
        assert sum(line.endswith(expected) for line in outcome.stdout.splitlines()) == RANKS, (expected, outcome)
    # commits at steps 2 and 5; with skip_sync the state is not sent again
    assert outcome.stdout.count(f"done [0, 2, 2, 6] {[RANKS] * 3}") == RANKS, outcome
    assert len(re.findall(r"HorovodInternalError: .*shapes differ.* \['fails', 'fails'\]", outcome.stdout)) == RANKS
    assert f"mpicomm run: horovodrun's -np {RANKS} is -n {RANKS}\n" in outcome.stderr
    names = {event["name"] for event in json.loads(timeline.read_text()) if event.get("ph") == "B"}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= names


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a directory with another package `horovod`."""
    package = tmp_path / "site" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the installed package was imported')")
    return package


def alone(arguments: list[str], directory: Path) -> Outcome:
    """Run `python -m mpicomm.horovod` with a directory of modules."""
    path = os.pathsep.join([str(directory), str(ROOT)])
    return run_alone(["-m", "mpicomm.horovod", *arguments], env={"PYTHONPATH": path})


def test_an_installed_horovod_is_reported_and_not_used(tmp_path: Path, installed: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 'beside'")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside, horovod.torch as hvd\nprint(hvd.init.__module__, beside.VALUE, sys.argv)")
    outcome = alone([str(script), "--x", "-m"], installed.parent)
    assert outcome.stdout == f"mpicomm.horovod.context beside {[str(script), '--x', '-m']}\n", outcome
    assert f"is installed in {installed}. This program uses mpicomm.horovod in its place." in outcome.stderr
    assert "without --horovod and without -m mpicomm.horovod" in outcome.stderr


def test_a_module_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import sys, horovod.torch as hvd\nprint(__name__, hvd.__name__, sys.argv[1:])")
    outcome = alone(["-m", "module", "-v"], tmp_path)
    assert outcome.stdout == "__main__ horovod.torch ['-v']\n", outcome
    assert "is installed" not in outcome.stderr


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["-m"], 2), (["--help"], 0), (["-x"], 2)], ids=str)
def test_a_missing_program_gets_the_usage(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(arguments) == status
    assert "usage: python -m mpicomm.horovod SCRIPT.py|-m MODULE" in capsys.readouterr().err


# -- failures --------------------------------------------------------------------------------------------------------

# In every step the parameter grows by the mean of 1. Rank 0 and then rank 2 are killed between two commits.
KILLED = """
import os, signal
import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(1000))
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0, worlds=[])
KILLS = [(12, 0), (23, 2)]  # in each world, the step in which a rank is killed


@hvd.elastic.run
def train(state):
    state.worlds = [*state.worlds, hvd.size()]
    state.commit()
    while state.step < 30:
        optimizer.zero_grad()
        loss = -model(torch.ones(1, 1)).sum()
        if (state.step, hvd.rank()) == dict(enumerate(KILLS)).get(len(state.worlds) - 1):
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        sampler.record_batch(state.step, 1)
        state.step += 1
        if state.step % 5 == 0:
            state.commit()
    return hvd.allgather_object((model.weight.item(), state.step, state.worlds, sampler.processed_num))


found = train(state)
if hvd.rank() == 0:
    print("end", hvd.size(), found)
"""


@pytest.mark.skipif("Open MPI" not in mpi.library().vendor, reason="needs ULFM")
def test_training_continues_after_ranks_were_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    outcome = run_command([*RUN, "-np", "5", "--spares", "1", "--min-np", "2", str(script)])
    assert outcome.status == 0, outcome
    sizes = [4, 4, 3]  # the spare takes the place of the first rank that is killed
    processed = 10 * sum(sizes)  # 10 steps of each world are committed
    assert outcome.stdout == f"end 3 {[(30.0, 30, sizes, processed)] * 3}\n", outcome


# A round of the negotiation fails on rank 1 alone: the other ranks wait in it.
FAILS_ON_ONE_RANK = """
import horovod.torch as hvd
import torch
from mpicomm.horovod.group_calls import GroupCalls

hvd.init()
state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, starts=0)
bitwise_and = GroupCalls.bitwise_and

def fail(calls, value, num_words):
    GroupCalls.bitwise_and = bitwise_and
    raise MemoryError("no memory for the words")

@hvd.elastic.run
def train(state):
    state.starts += 1
    state.commit()
    if hvd.rank() == 1 and state.starts == 1:
        GroupCalls.bitwise_and = fail
    return hvd.allreduce(torch.ones(1) * state.starts, op=hvd.Sum).item()

total = train(state)
if hvd.rank() == 0:
    print("end", state.starts, total)
"""


@pytest.mark.skipif("Open MPI" not in mpi.library().vendor, reason="needs ULFM")
def test_training_continues_on_all_ranks_after_a_round_failed_on_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS_ON_ONE_RANK)
    outcome = run_command([*RUN, "-np", "3", "--min-np", "2", str(script)])
    assert (outcome.status, outcome.stdout) == (0, "end 2 6.0\n"), outcome
    for rank in range(3):
        assert f"[mpicomm] rank {rank} of 3 on " in outcome.stderr, outcome
    assert outcome.stderr.count("continuing from the last commit after an error:\n") == 3, outcome
    assert "MemoryError: no memory for the words" in outcome.stderr, outcome
    assert outcome.stderr.count("cannot be used any more: it was aborted on rank 1.") >= 2, outcome


def test_a_job_without_recovery_ends_after_a_round_failed_on_one(tmp_path: Path) -> None:
    """The other ranks wait in MPI, which cannot end their calls."""
    script = tmp_path / "script.py"
    script.write_text(FAILS_ON_ONE_RANK)
    outcome = run_command([*RUN, "-np", "2", str(script)])
    assert outcome.status == 1, outcome
    assert "rank 1 of 2 on " in outcome.stderr, outcome
    assert "MemoryError: no memory for the words" in outcome.stderr, outcome


@pytest.mark.parametrize(
    ("environ", "options"),
    [
        ({}, {}),
        ({"HOROVOD_ELASTIC": "0"}, {}),
        ({"HOROVOD_ELASTIC": "1"}, {"on_failure": "recover", "min_ranks": 1}),
        ({"HOROVOD_ELASTIC": "1", "HOROVOD_ELASTIC_MIN_NP": "3"}, {"on_failure": "recover", "min_ranks": 3}),
    ],
    ids=str,
)
def test_variables_select_recovery(environ: dict, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def bootstrap(**given: Any) -> None:
        found.append(given)
        raise KeyboardInterrupt  # no job is formed

    monkeypatch.setattr(context.bootstrap, "bootstrap", bootstrap)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt):
        hvd.init()
    assert found == [{"comm": None, **options}]


@pytest.mark.parametrize("number", ["0", "two"])
def test_the_least_number_of_ranks_is_checked(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setenv("HOROVOD_ELASTIC_MIN_NP", number)
    with pytest.raises(ValueError, match=f"HOROVOD_ELASTIC_MIN_NP must be a positive integer, got {number}"):
        hvd.init()


LOWER_THREAD_LEVEL = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
import mpicomm.horovod as hvd
hvd.init()
"""


def test_a_lower_thread_level_is_an_error_on_every_rank() -> None:
    outcome = run_ranks(2, LOWER_THREAD_LEVEL)
    assert outcome.status != 0, outcome
    assert (
        "LaunchError: init: the operations of Horovod need the MPI thread level MPI_THREAD_MULTIPLE" in outcome.stderr
    )


def test_invalid_process_sets_leave_horovod_uninitialized() -> None:
    code = """
import torch, mpicomm.horovod as hvd
for ranks in [0], [1]:
    try:
        hvd.init(process_sets=[hvd.ProcessSet(ranks)])
    except ValueError as error:
        print(str(error).splitlines()[0], hvd.is_initialized())
hvd.init()
print(hvd.allreduce(torch.ones(1)).item())
"""
    outcome = run_alone(["-c", code])
    assert outcome.status == 0, outcome
    first, second, third = outcome.stdout.splitlines()
    assert first.startswith("init: process_sets[0] has the ranks of an earlier set: ")
    assert first.endswith(" False")
    assert second == "process set: ranks must be different ranks from 0 to 0, got [1]. False"
    assert third == "1.0"
