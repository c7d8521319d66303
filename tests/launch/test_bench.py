"""The command `mpicomm bench`, and `benchmarks.startup`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mpicomm import mpi
from mpicomm.reports import result_files
from tests.launching import refusal, run_alone

LIBRARY = mpi.library()
BENCH = ["-m", "mpicomm", "bench"]
STARTUP = ["-m", "benchmarks.startup"]


def test_starts_beside_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "startup.json"
    outcome = run_alone([*STARTUP, "--ranks", "2", "--rounds", "1", "--json", str(file)])
    assert outcome.status == 0, outcome
    assert all(word in outcome.stdout for word in ("MPI_Init", "torchrun + Gloo", "import mpicomm: ")), outcome
    found = json.loads(file.read_text())
    assert found["versions"][LIBRARY.vendor] == LIBRARY.version
    starts = found["starts"]
    assert [(each["ranks"], each["way"]) for each in starts] == [(2, "mpicomm"), (2, "torchrun + Gloo")]
    for each in starts:
        assert sum(each["steps"].values()) == pytest.approx(each["seconds"], abs=0.01), each
        assert min(each["steps"].values()) > 0, each
    assert list(starts[0]["steps"]) == ["launch", "import torch", "MPI_Init", "bootstrap", "first all_reduce"]


def test_a_failed_start_is_reported_with_its_command_and_output() -> None:
    outcome = run_alone([*STARTUP, "--ranks", "2", "--rounds", "1"], env={"MPICOMM_LAUNCHER": "nobody"})
    assert outcome.status == 2, outcome
    assert "benchmarks.startup: starting 2 ranks failed after" in outcome.stderr, outcome
    assert f"{LIBRARY.mpiexec} -n 2" in outcome.stderr, outcome
    assert "MPICOMM_LAUNCHER must be one of single, mpi, torchrun, slurm, got 'nobody'" in outcome.stderr, outcome


def test_started_plainly_it_starts_ranks(tmp_path: Path) -> None:
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "csv", "png", "html")}
    old = tmp_path / "old.json"
    row = {"operation": "all_reduce", "dtype": "float32", "in_place": True, "nbytes": 4, "backend": "mpi", "us": 1e9}
    old.write_text(json.dumps({"ranks": 3, "rows": [row]}))
    bench = [*BENCH, "-n", "2", "--size", "4,1Ki", "--op", "all_reduce,broadcast", "--rounds", "2"]
    bench += ["--compare", str(old)]
    written = ["--json", str(files["json"]), "--csv", str(files["csv"]), "--plot", str(files["png"])]
    written += ["--html", str(files["html"])]
    outcome = run_alone([*bench, *written])
    assert outcome.status == 0, outcome
    assert "broadcast, float32, in place" in outcome.stdout, outcome
    assert "inputs: rewritten before each call" in outcome.stdout, outcome
    headings = ["size", "backend", "us", "p50", "p99", "GB/s", "bus", "wrong", "- mpi4py us", "/ mpi", "/ before"]
    shown = [re.split(r"  +", line.strip()) for line in outcome.stdout.splitlines() if "backend" in line]
    assert shown == [headings] * 2, "broken, or with escape codes"
    found = json.loads(files["json"].read_text())
    assert (found["ranks"], found["nodes"], found["refused"]) == (2, 1, {})
    difference = f"the runs differ in `ranks`: 3 in {old}, now 2."
    assert found["warnings"][-1] == difference
    assert f"mpicomm bench: warning: {difference}" in outcome.stderr, outcome
    assert [host["ranks"] for host in found["hosts"]] == [2]
    assert [(row["operation"], row["nbytes"], row["backend"], row["wrong"]) for row in found["rows"]] == [
        (name, size, backend, 0)
        for name in ("all_reduce", "broadcast")
        for size in (4, 1024)
        for backend in ("mpi", "gloo", "mpi4py")
    ]
    assert len(files["csv"].read_text().splitlines()) == 1 + len(found["rows"])
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    page = files["html"].read_text()
    assert all(f"<h3>{name}, float32, in place</h3>" in page for name in ("all_reduce", "broadcast")), page
    assert page.count('<img alt="plot of the values" src="data:image/png;base64,') == 1
    assert result_files.read_operations(files["json"]) == found, "--compare reads what --json writes"


def test_without_mpi_only_its_own_backends_are_measured() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "mpicomm", "bench"]
    outcome = run_alone([*torchrun, "--size", "4", "--rounds", "2", "--reuse-inputs"])
    assert outcome.status == 0, outcome
    assert " gloo " in outcome.stdout, outcome
    assert "inputs: zeros, not" in outcome.stdout, outcome
    outcome = run_alone([*torchrun, "--backend", "mpi,gloo"])
    assert outcome.status != 0, outcome
    assert outcome.stderr.count("mpicomm bench: torchrun started the ranks without MPI") == 1, outcome


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("decode --model huge", "unknown model huge; expected one of small, middle"),
        ("-n 0", "argument -n: expected a positive integer, got 0"),
        ("--op all_reduc", "unknown operation all_reduc; expected one of all_reduce, reduce,"),
        ("--backend mpi,mvapich", "unknown backend mvapich; expected one of mpi, gloo, nccl, xccl, mpi4py, mpi-async"),
        ("--dtype float8", "unknown dtype float8"),
        ("--size 4k", "'4k': expected a number of bytes, for example 4, 1Ki, 64Mi or 1Gi"),
        ("--size 1Mi:4", "1Mi:4: the first size is larger than the last"),
        ("--plot curves.pdf", "expected a .png file, got curves.pdf; use curves.png"),
        ("--compare nowhere.json", "No such file or directory: 'nowhere.json'"),
        ("--compare pyproject.toml", "pyproject.toml was not written by `mpicomm bench --json`"),
        ("--compare docs/results/faults.json", "docs/results/faults.json was not written by `mpicomm bench --json`"),
        ("--compare docs/results/ddp-2-openmpi.json", "ddp-2-openmpi.json has no operations.\nPass a file of `mpicomm"),
        ("--json nowhere/bench.json --size 4 -n 1", "cannot write nowhere/bench.json"),
    ],
)
def test_a_wrong_argument_is_an_error_before_the_start(
    arguments: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(["bench", *arguments.split()], capsys)
    assert text in error
    assert "mpiexec" not in error


def test_decoding(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    bench = [*BENCH, "decode", "-n", "2", "--model", "small", "--backend", "mpi,none", "--rounds", "1"]
    outcome = run_alone([*bench, "--json", str(file)])
    assert outcome.status == 0, outcome
    assert "tokens per second" in outcome.stdout, outcome
    rows = json.loads(file.read_text())["rows"]
    assert [(row["backend"], row["wrong"]) for row in rows] == [("one process", 0), ("mpi", 0), ("none", None)]
    assert all(row["tokens_per_s"] >= row["tokens_per_s_median"] > 0 for row in rows)


def test_steps_of_training(tmp_path: Path) -> None:
    file = tmp_path / "ddp.json"
    bench = [*BENCH, "ddp", "-n", "2", "--model", "small", "--strategy", "ddp,fsdp", "--rounds", "2"]
    outcome = run_alone([*bench, "--json", str(file)])
    assert outcome.status == 0, outcome
    assert "milliseconds per step" in outcome.stdout, outcome
    rows = json.loads(file.read_text())["rows"]
    assert [(row["strategy"], row["backend"], row["parameters"]) for row in rows] == [
        (strategy, backend, 2 * (128 * 128 + 128))
        for strategy in ("ddp", "fsdp")
        for backend in ("mpi", "gloo", "none")
    ]
    for row in rows:
        assert min(row["ms"], row["data_ms"]) > 0, row
        assert min(row["compute_ms"], row["communication_ms"]) >= 0, row
        assert row["data_ms"] + row["compute_ms"] + row["communication_ms"] == pytest.approx(row["ms"], abs=1e-3), row
