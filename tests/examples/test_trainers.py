"""The examples that train for longer: they learn, resume from their checkpoints, and measure the stated quantities."""

from __future__ import annotations

import re

import pytest

from mpicomm.examples import scaling
from tests.launching import Outcome, run_alone, run_ranks

RANKS = 2  # the docstrings' commands, which test_examples.py runs, train with four

SMALL = """
from mpicomm.examples import scaling
scaling.WIDTH, scaling.LAYERS, scaling.COUNTED = 32, 2, 3
scaling.main()
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # runs leave their checkpoints in the working directory


def held_out_loss(outcome: Outcome) -> float:
    return float(re.search(r"^held-out loss ([\d.]+)\.", outcome.stdout, re.MULTILINE)[1])


def written(outcome: Outcome) -> str:
    return outcome.stdout.partition("Generated text:")[2].strip()


# -- char_lm ---------------------------------------------------------------------------------------------------------


def test_char_lm_learns_and_a_second_start_reports_a_complete_run(tmp_path):
    command = ["-m", "mpicomm.examples.char_lm"]
    first = run_ranks(RANKS, command, timeout=300)
    assert first.status == 0, first
    assert held_out_loss(first) < 2.6, first
    assert "characters per second" in first.stdout, first
    assert written(first).startswith("def "), first
    assert any((tmp_path / "runs" / "char_lm").glob("step-*/COMPLETE"))
    second = run_ranks(RANKS, command)
    assert second.status == 0, second
    assert "the run is complete: 2 epochs" in second.stdout, second
    assert "characters per second" not in second.stdout, second
    assert held_out_loss(second) == held_out_loss(first)
    assert written(second) == written(first)


def test_char_lm_fails_if_it_has_not_learnt_and_resumes_with_more_epochs():
    command = ["-m", "mpicomm.examples.char_lm", "--characters", "10000", "--dir", "here", "--epochs"]
    first = run_ranks(RANKS, [*command, "1"])
    assert first.status != 0, first
    assert held_out_loss(first) > 2.6, first
    second = run_ranks(RANKS, [*command, "2"])
    assert "resuming from step 5: epoch 2" in second.stdout, second
    assert held_out_loss(second) < held_out_loss(first), second


# -- scaling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "numbers", "plot"), [(1, [1], []), (3, [1, 2, 3], ["--plot", "scaling.png"])])
def test_scaling_measures_powers_of_two_and_all_ranks_and_draws(size, numbers, plot, tmp_path):
    outcome = run_ranks(size, ["-c", SMALL, "--batch", "10", *plot])
    assert outcome.status == 0, outcome
    rows = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) *$", outcome.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == 2 * numbers, outcome
    assert all(float(each) > 0 for row in rows for each in row[1:3]), outcome
    assert all(row[3:] == ("1.00", "1.00") for row in rows if row[0] == "1"), outcome
    assert "strong: 10 samples in all" in outcome.stdout, outcome
    assert "weak: 10 samples per rank" in outcome.stdout, outcome
    if plot:
        assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("kind", "milliseconds"), [("strong", 25), ("weak", 100)])
def test_ideal_scaling_has_an_efficiency_of_one(kind, milliseconds):
    one, four = scaling.compare(kind, {1: 100, 4: milliseconds}, 8)
    assert one == (1, 100, 80, 1, 1)
    assert four == (4, milliseconds, 320, 4, 1)


def test_scaling_names_the_command_that_installs_matplotlib():
    code = f"import sys\nsys.modules['matplotlib'] = None\n{SMALL}"
    outcome = run_alone(["-c", code, "--plot", "scaling.png"])
    assert outcome.status != 0, outcome
    assert "pip install matplotlib" in outcome.stderr, outcome
    assert "samples in all" not in outcome.stdout, outcome
