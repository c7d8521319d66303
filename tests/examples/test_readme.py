"""Every command in the README and the reference is run, here or by another test, or is a make target that CI runs.

`make test` runs those of the README, `make test-full` also those of the reference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import documents
from tests.docs.documents import REFERENCE
from tests.examples.test_examples import run
from tests.examples.test_quick_start import COMMANDS as OF_THE_QUICK_START
from tests.launching import ROOT

# `.ci/run` itself runs these, before or around this test.
DONE_BY_CI = {"make demo", "make test"}


def commands(path: Path) -> list[str]:
    """Return the commands of a document that no other test runs."""
    lines = [command.line for command in documents.read(path).commands() if command.mark != "elsewhere"]
    return [line for line in lines if line not in DONE_BY_CI | set(OF_THE_QUICK_START)]


OF_THE_README = commands(ROOT / "README.md")


def check(command: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    outcome = run(command)
    assert outcome.status == 0, outcome
    assert outcome.stdout, outcome


@pytest.mark.parametrize("command", OF_THE_README)
def test_a_command_of_the_readme_works(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(command, tmp_path, monkeypatch)


@pytest.mark.parametrize("command", [line for line in commands(REFERENCE) if line not in OF_THE_README])
def test_a_command_of_the_reference_works(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(command, tmp_path, monkeypatch)


def test_ci_runs_the_make_targets() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert {command.line for command in documents.read(ROOT / "README.md").commands()} >= DONE_BY_CI
    for command in DONE_BY_CI:
        assert command in ci
