"""The documents' snippets and commands run, and print the output shown.

`tests.docs.documents` describes the comments in a document.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs import documents
from tests.docs.documents import DOCUMENTS, LIMITATIONS, Command
from tests.examples.test_examples import form
from tests.launching import PROGRAMS, Outcome, run_command, run_ranks

READ = {path.name: documents.read(path) for path in DOCUMENTS}
each_document = pytest.mark.parametrize("name", READ)
OF_CLUSTERS = {"srun", "sbatch", "squeue", "scancel", "qsub"}
SETTING = re.compile(r"(\w+)=(\S+)")


# -- snippets --------------------------------------------------------------------------------------------------------


def jobs() -> list[object]:
    """Return the combinations of document, number of ranks and debug mode of all sections."""
    sections = [(name, each) for name, document in READ.items() for each in document.sections if each.snippets()]
    ways = {(name, each.ranks, each.in_debug_mode) for name, each in sections}
    # limitations.md shows the behaviour of the MPI library.
    each_mpi = {LIMITATIONS.name: pytest.mark.each_mpi}
    return [pytest.param(*way, marks=each_mpi.get(way[0], ())) for way in sorted(ways)]


@pytest.mark.parametrize(("name", "ranks", "in_debug_mode"), jobs())
def test_the_snippets_work_as_described(name: str, ranks: int, in_debug_mode: bool) -> None:
    document = READ[name]
    sections = document.with_snippets(ranks, in_debug_mode=in_debug_mode)
    steps = [step for section in sections for step in document.program(section)]
    env = {"MPICOMM_DEBUG": "1"} if in_debug_mode else {}
    outcome = run_ranks(ranks, ["-m", "tests.docs.program", str(document.path)], env=env)
    assert outcome.status == 0, outcome
    shown = [line for step in steps if not step.raises for line in step.shown]
    assert sorted(outcome.stdout.splitlines()) == sorted(shown), outcome
    assert "Warning" not in outcome.stderr, outcome


# -- commands --------------------------------------------------------------------------------------------------------


def consoles(*, elsewhere: bool) -> list[tuple[str, list[Command]]]:
    """Return pairs of a document and the commands of one of its blocks."""
    found = [(name, console) for name, each in READ.items() for console in each.consoles()]
    return [(name, console) for name, console in found if (console[0].mark == "elsewhere") == elsewhere]


def run(line: str) -> Outcome:
    """Run a command with the programs of this environment."""
    words = shlex.split(line)
    env = {}
    while setting := SETTING.fullmatch(words[0]):
        env[setting[1]] = setting[2]
        words = words[1:]
    to_run = words.index("--") if "--" in words else len(words)  # the words after it are only written into a script
    words = [each for word in words[:to_run] for each in PROGRAMS.get(word, [word])] + words[to_run:]
    return run_command(words, env=env)


@pytest.fixture
def files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the document's files into a new working directory."""
    for file, text in READ[name].files().items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "console"), [pytest.param(*each, id=each[1][0].line) for each in consoles(elsewhere=False)]
)
def test_the_commands_work_as_described(name: str, console: list[Command], files: None) -> None:
    for command in console:
        _check(command)


def _check(command: Command) -> None:
    outcome = run(command.line)
    if command.mark == "fails":
        assert outcome.status != 0, outcome
        real = (outcome.stdout + outcome.stderr).splitlines()
        for line in command.shown:
            assert any(documents.is_like(anywhere(line), each) for each in real), f"{line}\nis not in\n{outcome}"
    else:
        assert outcome.status == 0, outcome
        assert form(outcome.stdout) == form("\n".join(command.shown)), outcome


def anywhere(line: str) -> str:
    """Replace the parts of a shown line that differ between runs: host, directory, time, first rank."""
    line = re.sub(r"(rank \d+ of \d+ on) \S+", r"\1 ...", line)
    line = re.sub(r'File "/[^"]*/', 'File "...', line)
    return re.sub(r"\b(rank )?\d+ (s\b|has waited)", r"\1... \2", line)


def test_the_rest_needs_a_cluster() -> None:
    found = [(name, command) for name, console in consoles(elsewhere=True) for command in console]
    assert {command.line.split()[0] for _, command in found} <= OF_CLUSTERS
    for name, command in found:
        assert not command.shown, "output of a command that no test runs"
        if command.line.startswith(("sbatch", "qsub")):
            assert command.line.split()[1] in READ[name].files()


@each_document
def test_the_files_are_used(name: str) -> None:
    words = {word for command in READ[name].commands() for word in command.line.split()}
    assert set(READ[name].files()) <= words


@pytest.mark.parametrize(
    ("file", "text"),
    [(file, text) for each in READ.values() for file, text in each.files().items() if not file.endswith(".py")],
)
def test_the_job_scripts_are_scripts(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    assert text.startswith("#!/bin/bash\n")
    outcome = run_command(["bash", "-n", str(tmp_path / file)])
    assert (outcome.status, outcome.stderr) == (0, ""), outcome
    lines = text.splitlines()
    # Slurm and PBS read directives up to the first command, and PBS takes a comment after a directive as part of it.
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [number for number, line in enumerate(lines) if line.startswith(("#SBATCH -", "#PBS -"))]
    assert directives
    assert max(directives) < first_command
    assert not [lines[number] for number in directives if "#" in lines[number][1:]]
