"""The pure parts of `python -m tests.conformance`: the combination of verdicts, and the text of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import page, results, verdicts
from tests.conformance.results import Results, Run
from tests.conformance.verdicts import FAIL, PASS, SKIP, Verdict

PASSED = Verdict(PASS)
NO_GPU = Verdict(SKIP, "Need at least 2 CUDA devices")
ONLY_MPI = Verdict(SKIP, "Only MPI supports all_to_all")
BROKEN = Verdict(FAIL, "ValueError: no | such thing")


@pytest.mark.parametrize(
    "reason", ["CUDA is not available.", "Need at least 1 CUDA device", "Need at least 4 CUDA devices"]
)
def test_a_test_that_needs_a_gpu_is_known_by_its_reason(reason: str) -> None:
    assert Verdict(SKIP, reason).needs_gpu
    assert not Verdict(FAIL, reason).needs_gpu


def test_one_rank_that_fails_fails_the_test() -> None:
    assert verdicts.of_ranks([PASSED, BROKEN, PASSED, BROKEN]) == Verdict(FAIL, f"rank 1, rank 3: {BROKEN.reason}")


def test_ranks_that_all_skip_skip_the_test() -> None:
    assert verdicts.of_ranks([NO_GPU, NO_GPU]) == NO_GPU


@pytest.mark.parametrize("other", [PASSED, ONLY_MPI])
def test_ranks_that_disagree_fail_the_test(other: Verdict) -> None:
    assert verdicts.of_ranks([NO_GPU, other]).outcome == FAIL


def test_a_test_passes_if_it_passes_under_one_label_and_fails_under_none() -> None:
    assert verdicts.of_labels({"mpicomm": ONLY_MPI, "mpi": PASSED, "gloo": ONLY_MPI}) == PASSED
    assert verdicts.of_labels({"mpicomm": PASSED, "mpi": PASSED, "gloo": BROKEN}).outcome == FAIL


RUN = Run(
    {
        "mpicomm": {"test_a": PASSED, "test_b": PASSED, "test_c": ONLY_MPI, "test_d": NO_GPU, "test_e": ONLY_MPI},
        "mpi": {"test_a": PASSED, "test_b": BROKEN, "test_c": ONLY_MPI, "test_d": NO_GPU, "test_e": PASSED},
    },
    {"test_a": PASSED, "test_b": PASSED, "test_c": PASSED, "test_d": NO_GPU, "test_e": ONLY_MPI},
    12.0,
)


ABOUT = {"date": "2026-01-01", "command": "a command", "cores": 2, "versions": {"Some MPI": "1.0"}}


def test_the_page_has_every_test() -> None:
    lines = page.text([Results("Some MPI", "cpu", ABOUT, {4: RUN})]).splitlines()
    assert "| Some MPI | 4 | **2 / 1 / 2** | 2 / 0 / 3 | 2 / 1 / 2 |  | 3 / 0 / 2 | 12 |" in lines
    assert "| `test_b` | Some MPI, 4 ranks | fail | pass | mpi: ValueError: no \\| such thing |" in lines
    assert "| `test_c` | skip | pass | Only MPI supports all_to_all |" in lines
    assert "| `test_e` | pass | skip |  |" in lines
    assert lines[-1] == "`test_d`"


def test_the_page_has_the_tests_on_accelerators_apart() -> None:
    on_device = Run({"nccl": {"test_a": PASSED, "test_b": BROKEN, "test_c": ONLY_MPI, "test_d": ONLY_MPI}}, {}, 3.0)
    measured = [Results("Some MPI", "cpu", ABOUT, {4: RUN}), Results("Some MPI", "cuda", ABOUT, {2: on_device})]
    before, _, section = page.text(measured).partition("## Tests of GPUs")
    lines = section.partition("## Every test")[0].splitlines()
    assert "cuda" not in before
    assert "- 2026-01-01, one machine with 2 cores, a GPU: Some MPI 1.0. `a command`" in lines
    assert "| cuda | Some MPI | 2 | **1 / 1 / 2** | 3 |" in lines
    assert "| `test_b` | cuda, Some MPI, 2 ranks | nccl: ValueError: no \\| such thing |" in lines
    assert "| Only MPI supports all_to_all | `test_c`, `test_d` |" in lines


def test_a_results_file_names_the_device(tmp_path: Path) -> None:
    measured = Results("Open MPI", "emulated", ABOUT, {4: RUN})
    assert measured.path().name == "conformance-emulated-openmpi.json"
    assert Results("Open MPI", "cpu", ABOUT, {}).path().name == "conformance-openmpi.json"
    measured.write(tmp_path / "results.json")
    assert results.read(tmp_path / "results.json") == measured
