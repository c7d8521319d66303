"""Every command in the README is run, here or elsewhere, or is a make target that CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import documents
from tests.examples.test_examples import run, sessions
from tests.examples.test_quick_start import COMMANDS as OF_THE_QUICK_START
from tests.launching import ROOT

README = documents.read(ROOT / "README.md")
COMMANDS = [command.line for command in README.commands()]
# What these commands do is done by `.ci/run` itself, before or around this test.
DONE_BY_CI = {"make demo", "make test", ". .venv/bin/activate", "mpirun -n 4 pytest --with-mpi"}
# test_examples.py runs the commands of docstrings, and compares their output.
OF_DOCSTRINGS = {command for _, command, _ in sessions()}


def by_mpirun(command: str) -> str:
    """Return the command as docstrings have it; what `mpicomm run` starts is tested for itself."""
    command = re.sub(r"^mpicomm run -n (\d+) -m ", r"mpirun -n \1 python -m ", command)
    return re.sub(r"^mpicomm run -n (\d+) (\S+\.py)", r"mpirun -n \1 python \2", command)


LEFT = [
    each
    for each in COMMANDS
    if each not in DONE_BY_CI | set(OF_THE_QUICK_START) and by_mpirun(each) not in OF_DOCSTRINGS
]


@pytest.mark.parametrize("command", LEFT)
def test_a_command_works(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(command)
    assert outcome.status == 0, outcome
    assert outcome.stdout, outcome


def test_ci_does_what_the_rest_says() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for command in DONE_BY_CI:
        if command.startswith("make"):
            assert command in ci
    assert "pytest --with-mpi" in makefile
    assert set(COMMANDS) >= DONE_BY_CI


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README.path.read_text()):
        assert (ROOT / target).exists(), target
