"""`print_rank_0` and `RankFilter`: before and after bootstrap(), and in a process without a job."""

from __future__ import annotations

import io
import logging
import types

import pytest

import mpicomm
from mpicomm.job import session

VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "RANK", "SLURM_PROCID")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(session, "_current", None)


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, when: str) -> None:
    """Make this process a rank, as the launcher's variables or the World of bootstrap() report it."""
    if when == "before bootstrap":
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    elif when == "after bootstrap":
        monkeypatch.setenv("RANK", "7")  # left over: the World decides
        monkeypatch.setattr(session, "_current", types.SimpleNamespace(world=types.SimpleNamespace(rank=rank)))


TIMES = [(0, "without a job"), *[(rank, f"{when} bootstrap") for when in ("before", "after") for rank in range(3)]]


@pytest.mark.parametrize(("rank", "when"), TIMES)
def test_only_rank_0_prints(
    rank: int, when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    be_rank(monkeypatch, rank, when)
    mpicomm.print_rank_0("loss", 0.5, sep="=", end="!")
    assert capsys.readouterr().out == ("loss=0.5!" if rank == 0 else "")


@pytest.mark.parametrize(("rank", "when"), TIMES)
def test_records_of_other_ranks_pass_if_they_are_errors(rank: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(monkeypatch, rank, when)
    written = {}
    for name, ranks in (("first", (0,)), ("some", (1, 2)), ("all", None)):
        written[name] = io.StringIO()
        handler = logging.StreamHandler(written[name])
        handler.addFilter(mpicomm.RankFilter(ranks))
        handler.setFormatter(logging.Formatter("[rank%(rank)d] %(message)s"))
        for level in (logging.INFO, logging.ERROR):
            handler.handle(logging.makeLogRecord({"msg": logging.getLevelName(level), "levelno": level}))
    lines = {name: stream.getvalue().splitlines() for name, stream in written.items()}
    both, error = [f"[rank{rank}] INFO", f"[rank{rank}] ERROR"], [f"[rank{rank}] ERROR"]
    assert lines == {"first": both if rank == 0 else error, "some": both if rank in (1, 2) else error, "all": both}
