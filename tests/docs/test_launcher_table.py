"""The table of launchers' variables in docs/reference.md matches the package's tables and the launchers."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

import mpicomm
from mpicomm.launch.known_launchers import OPEN_MPI, PMI, TORCHRUN, Launcher
from tests.docs import launcher_table
from tests.docs.documents import REFERENCE
from tests.launching import Outcome, run_command, run_ranks

SIZE = 2
# This program prints the environment, one line per rank.
PROGRAM = "import json, os, sys; sys.stdout.write(json.dumps(dict(os.environ)) + chr(10))"


def test_the_reference_has_the_table() -> None:
    reference = REFERENCE.read_text()
    assert reference == launcher_table.inserted(reference), "python -m tests.docs.launcher_table --write"


def test_its_rows_are_fields_of_a_world() -> None:
    fields = {field.name for field in dataclasses.fields(mpicomm.World)}
    assert set(launcher_table.FACTS.values()) <= fields


def test_it_has_all_variables() -> None:
    table = launcher_table.text()
    for launcher in launcher_table.COLUMNS.values():
        assert [variable for variable in launcher.variables() if f"`{variable}`" not in table] == []


@pytest.mark.each_mpi
def test_this_mpi_sets_the_variables_in_the_table() -> None:
    outcome = run_ranks(SIZE, PROGRAM)
    environ = json.loads(outcome.stdout.splitlines()[0])
    check(outcome, OPEN_MPI if OPEN_MPI.rank in environ else PMI)


def test_torchrun_sets_the_variables_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)]
    outcome = run_command([*torchrun, str(tmp_path / "program.py")])
    environs = check(outcome, TORCHRUN)
    assert all(environ[TORCHRUN.master_addr] and int(environ[TORCHRUN.master_port]) for environ in environs)


def check(outcome: Outcome, launcher: Launcher) -> list[dict[str, str]]:
    """Compare the environment of the ranks of one node with the launcher's variables in the table."""
    assert outcome.status == 0, outcome
    environs = [json.loads(line) for line in outcome.stdout.splitlines()]
    found = {
        fact: sorted(environ[variable] for environ in environs)
        for fact in ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")
        if (variable := getattr(launcher, fact))
    }
    expected = {
        "rank": ["0", "1"],
        "size": ["2", "2"],
        "local_rank": ["0", "1"],
        "local_size": ["2", "2"],
        "node_rank": ["0", "0"],
        "num_nodes": ["1", "1"],
    }
    assert found == {fact: expected[fact] for fact in found}
    return environs
