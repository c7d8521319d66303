"""The example of docs/testing.md: `pytest --ranks 4` prints one report, in which a test has failed on one rank."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.docs import documents
from tests.launching import ROOT, background_job

DOCUMENT = documents.read(ROOT / "docs" / "testing.md")
PYTEST = [str(Path(sys.executable).with_name("pytest")), "-p", "no:cacheprovider"]


def test_the_command_prints_the_output_shown(tmp_path: Path) -> None:
    package = Path(shutil.copytree(ROOT / "examples" / "tested_package", tmp_path / "package"))
    for name, content in DOCUMENT.files().items():
        (package / name).write_text(content)
    (command,) = DOCUMENT.commands()
    program, *arguments = command.line.split()
    assert program == "pytest"
    with background_job([*PYTEST, *arguments, "--junitxml=report.xml"], cwd=package) as job:
        outcome = job.finish()
    assert outcome.status == 1, outcome
    lines = outcome.stdout.splitlines()
    assert [shown for shown in command.shown if not any(documents.is_like(shown, line) for line in lines)] == [], (
        outcome
    )
    assert (outcome.stdout + outcome.stderr).count("1 failed") == 1, outcome
    failed = ElementTree.parse(package / "report.xml").findall(".//testcase[failure]")
    assert [case.get("name") for case in failed] == ["test_rows_of_one_value"]


def test_the_tests_pass_in_one_process() -> None:
    with background_job([*PYTEST, "-q"], cwd=ROOT / "examples" / "tested_package") as job:
        outcome = job.finish()
    assert (outcome.status, "4 passed, 1 skipped" in outcome.stdout) == (0, True), outcome
