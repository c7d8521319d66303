"""Every command in the README and the reference is run, here or by another test, or is a make target that CI runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import documents
from tests.docs.documents import REFERENCE
from tests.examples.test_examples import run
from tests.examples.test_quick_start import COMMANDS as OF_THE_QUICK_START
from tests.launching import ROOT

README = ROOT / "README.md"
COMMANDS = [command.line for path in (README, REFERENCE) for command in documents.read(path).commands()]
# `.ci/run` itself runs these, before or around this test.
DONE_BY_CI = {"make demo", "make test"}
OTHERS = [command for command in COMMANDS if command not in DONE_BY_CI | set(OF_THE_QUICK_START)]


@pytest.mark.parametrize("command", OTHERS)
def test_a_command_works(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(command)
    assert outcome.status == 0, outcome
    assert outcome.stdout, outcome


def test_ci_runs_the_make_targets() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert set(COMMANDS) >= DONE_BY_CI
    for command in DONE_BY_CI:
        assert command in ci
