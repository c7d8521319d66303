"""The examples that train for longer: that they learn, go on where they were, and measure what they say."""

from __future__ import annotations

import re

import pytest

from mpicomm.examples import scaling
from tests.launching import Outcome, run_alone, run_ranks

GATHERING = """
import torch, mpicomm
from torch.distributed.fsdp import fully_shard
from mpicomm.examples import char_lm, fsdp
world = mpicomm.bootstrap()
torch.manual_seed(0)
text = char_lm.Text("def f(x): return x")
model = char_lm.Model(len(text.characters))
before = {name: each.detach().clone() for name, each in model.named_parameters()}
fully_shard(model)
here, whole = fsdp.bytes_held(model)
assert whole == sum(each.nbytes for each in before.values())
assert 0 < here < whole
copy = fsdp.gathered(world, model, text)
assert (copy is None) == (world.rank != 0)
if copy is not None:
    after = dict(copy.named_parameters())
    assert all(torch.equal(each, after[name]) for name, each in before.items())
"""

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
    return outcome.stdout.partition("it writes:" if "Gathered" in outcome.stdout else "It writes:")[2].strip()


# -- char_lm ---------------------------------------------------------------------------------------------------------


def test_char_lm_learns_and_a_second_start_says_that_it_is_complete(tmp_path):
    command = ["-m", "mpicomm.examples.char_lm", "--epochs", "2"]
    first = run_ranks(4, command, timeout=180)
    assert first.status == 0, first
    assert held_out_loss(first) < 2.6, first
    assert "characters per second" in first.stdout, first
    assert written(first).startswith("def "), first
    assert any((tmp_path / "runs" / "char_lm").glob("step-*/COMPLETE"))
    second = run_ranks(4, command, timeout=120)
    assert second.status == 0, second
    assert "the run is complete: 2 epochs" in second.stdout, second
    assert "characters per second" not in second.stdout, second
    assert held_out_loss(second) == held_out_loss(first)
    assert written(second) == written(first)


def test_char_lm_fails_if_it_has_not_learnt_and_goes_on_with_more_epochs():
    command = ["-m", "mpicomm.examples.char_lm", "--characters", "10000", "--dir", "here", "--epochs"]
    first = run_ranks(4, [*command, "1"], timeout=120)
    assert first.status != 0, first
    assert held_out_loss(first) > 2.6, first
    second = run_ranks(4, [*command, "2"], timeout=120)
    assert "going on from step 3: epoch 2" in second.stdout, second
    assert held_out_loss(second) < held_out_loss(first), second


# -- fsdp ------------------------------------------------------------------------------------------------------------


def test_fsdp_learns_in_parts_that_are_the_whole():
    outcome = run_ranks(4, ["-m", "mpicomm.examples.fsdp", "--epochs", "2"], timeout=180)
    assert outcome.status == 0, outcome
    parts = re.findall(r"^rank (\d) holds ([\d,]+) of ([\d,]+) bytes$", outcome.stdout, re.MULTILINE)
    assert sorted(int(rank) for rank, _, _ in parts) == [0, 1, 2, 3], outcome
    (whole,) = {int(each.replace(",", "")) for _, _, each in parts}
    held = [int(each.replace(",", "")) for _, each, _ in parts]
    assert sum(held) == whole, outcome
    assert max(held) < 0.3 * whole, outcome
    assert held_out_loss(outcome) < 2.6, outcome
    assert written(outcome).startswith("def "), outcome


def test_fsdp_gathers_what_was_spread_out():
    outcome = run_ranks(3, GATHERING)
    assert outcome.status == 0, outcome


# -- scaling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "numbers"), [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4])])
def test_scaling_measures_powers_of_two_and_all_ranks(size, numbers):
    outcome = run_ranks(size, ["-c", SMALL, "--batch", "10"])
    assert outcome.status == 0, outcome
    rows = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) *$", outcome.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == 2 * numbers, outcome
    assert all(float(each) > 0 for row in rows for each in row[1:3]), outcome
    assert all(row[3:] == ("1.00", "1.00") for row in rows if row[0] == "1"), outcome
    assert "strong: 10 samples in all" in outcome.stdout, outcome
    assert "weak: 10 samples per rank" in outcome.stdout, outcome


@pytest.mark.parametrize(("kind", "milliseconds"), [("strong", 25), ("weak", 100)])
def test_what_is_ideal_has_an_efficiency_of_one(kind, milliseconds):
    one, four = scaling.compare(kind, {1: 100, 4: milliseconds}, 8)
    assert one == (1, 100, 80, 1, 1)
    assert four == (4, milliseconds, 320, 4, 1)


def test_scaling_draws(tmp_path):
    pytest.importorskip("matplotlib")
    outcome = run_ranks(2, ["-c", SMALL, "--plot", "scaling.png"], timeout=120)
    assert outcome.status == 0, outcome
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_scaling_says_how_to_get_matplotlib():
    code = f"import sys\nsys.modules['matplotlib'] = None\n{SMALL}"
    outcome = run_alone(["-c", code, "--plot", "scaling.png"])
    assert outcome.status != 0, outcome
    assert 'pip install "mpicomm[plot]"' in outcome.stderr, outcome
    assert "samples in all" not in outcome.stdout, outcome
