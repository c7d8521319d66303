"""If a program calls `init_process_group` before `bootstrap()`, the error names the call to delete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_alone, run_ranks

SIZE = 2
OWN_GROUP = """
import json, os, sys
import torch.distributed as dist
import mpicomm

rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
# init_process_group() in a comment does not count
"""
EACH_BACKEND = """
for backend in ("mpi", "auto", "gloo", None):
    try:
        mpicomm.bootstrap(backend, abort_on_error=False)
    except mpicomm.LaunchError as error:
        sys.stdout.write(json.dumps([rank, backend, str(error)]) + "\\n")
mpicomm.bootstrap("gloo")
"""

CALLS = {"mpi": "bootstrap('mpi')", "auto": "bootstrap()", "gloo": "bootstrap('gloo')", None: "bootstrap()"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def message(program: Path, call: str) -> str:
    line = 1 + OWN_GROUP.splitlines().index(
        'dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)'
    )
    return (
        f"torch.distributed is already initialized (backend gloo, 2 ranks), by init_process_group() at "
        f"{program}:{line}, before mpicomm.bootstrap().\n"
        f"Delete that call of init_process_group(): mpicomm.{call} initializes torch.distributed itself.\n"
        f"Or, to keep the call, put mpicomm.bootstrap(backend=None) before it."
    )


def test_every_rank_reports_which_call_to_delete(program: Path, tmp_path: Path) -> None:
    program.write_text(OWN_GROUP + EACH_BACKEND)
    outcome = run_ranks(SIZE, [str(program), f"file://{tmp_path}/meeting"])
    errors = sorted(map(json.loads, outcome.stdout.splitlines()), key=str)
    expected = [[rank, each, message(program, CALLS[each])] for rank in range(SIZE) for each in CALLS]
    assert errors == sorted(expected, key=str), outcome
    assert outcome.status != 0, outcome
    assert outcome.stderr.count(f"mpicomm.LaunchError: {message(program, CALLS['gloo'])}\n") == 1, outcome
    assert "Traceback" not in outcome.stderr, outcome


def test_ranks_of_torchrun_report_it_too(program: Path, tmp_path: Path) -> None:
    program.write_text(OWN_GROUP + "mpicomm.bootstrap()\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)]
    outcome = run_alone([*torchrun, str(program), f"file://{tmp_path}/meeting"])
    assert outcome.status != 0, outcome
    assert message(program, CALLS["auto"]).splitlines()[0] in outcome.stderr, outcome
