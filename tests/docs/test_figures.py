"""The tables of figures in the documents equal those generated from the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs import figures
from tests.failures import __main__ as failures
from tests.failures import analyser, ways


@pytest.mark.parametrize("document", figures.DOCUMENTS, ids=lambda path: path.stem)
def test_tables_are_those_of_the_results(document: Path) -> None:
    text = document.read_text()
    assert figures.written(text) == text, "run `python -m tests.docs.figures`"
    assert "<!-- figures: " in text


@pytest.mark.parametrize("status", [1, None])
def test_a_part_that_failed_or_timed_out_is_not_good(
    status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {
        "devices": {"names": ["GPU"]},
        "versions": {"torch": "2.11", "Open MPI": "5"},
        "date": "today",
        "parts": {"first": {"statuses": [0]}, "second": {"statuses": [0, status]}},
    }
    (tmp_path / "gpu-tests-x.json").write_text(json.dumps(result))
    monkeypatch.setattr(figures, "_RESULTS", tmp_path)
    assert "| 1 of 2 parts |" in figures._gpus()


def test_the_verdicts_of_the_analyser_are_those_of_the_results() -> None:
    assert failures.PAGE.read_text().endswith(failures.analysis()), "run `python -m tests.failures analyse`"


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_the_analyser_names_the_ranks_that_mpicomm_names(mpi: str) -> None:
    tables = {each["title"].rpartition(" ")[0]: each for each in json.loads(failures.MPI4PY.read_text())[:2]}
    verdicts = json.loads((analyser.RESULTS / f"torchfrtrace-{mpi}.json").read_text())
    rows = {row["way"]: row["with"] for row in tables[verdicts["machine"]["mpi"].rpartition(" ")[0]]["rows"]}
    assert verdicts["rows"].keys() == rows.keys()
    hangs = {way for way in rows if ways.BY_NAME[way].when in (ways.DEADLINE, ways.WAIT_LIMIT)}
    assert {way: verdicts["rows"][way]["ranks"] for way in hangs} == {way: rows[way]["named"] for way in hangs}
    others = [each for way, each in verdicts["rows"].items() if way not in hangs and each["dumped"]]
    assert all(2 in each["ranks"] for each in others)
