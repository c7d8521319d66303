"""The README's quick start, as a new user types it: in a fresh checkout, environment and home directory."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import documents
from tests.examples.test_examples import form
from tests.launching import ROOT, Outcome, almost_empty_environment, run_command

README = documents.read(ROOT / "README.md")
COMMANDS = [
    command.line
    for section in README.sections
    if section.title == "Quick start"
    for console in section.consoles()
    for command in console
    if command.mark != "elsewhere"
]
SHOWN = next(block.text for block in README.sections[0].blocks if block.language == "text")
FIRST = "mpicomm run -n 2 train.py"
ENVIRONMENT = ("python3 -m venv venv", ". venv/bin/activate")
GENERATED = (".*", "venv", "build", "dist", "*.egg-info", "__pycache__", "runs", "mpicomm-dumps")
OF_PIP = re.compile(r"PIP_.*|.*_proxy|.*_PROXY|SSL_.*|.*_CA_BUNDLE")


@pytest.fixture(name="checkout")
def _checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy this checkout, add the README's files, and make the copy the working directory."""
    path = tmp_path / "checkout"
    shutil.copytree(ROOT, path, symlinks=True, ignore=shutil.ignore_patterns(*GENERATED))
    for name, text in README.files().items():
        (path / name).write_text(text)
    monkeypatch.chdir(path)
    yield path
    shutil.rmtree(path)  # pytest keeps files of old runs, and torch is large


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a new user: a home directory, the programs of the system, and how pip gets packages."""
    python = Path(getattr(sys, "_base_executable", sys.executable)).parent
    own = {name: value for name, value in os.environ.items() if OF_PIP.fullmatch(name)}
    own |= {"HOME": str(home), "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin"}
    config = Path.home() / ".config" / "pip" / "pip.conf"
    if config.exists():
        own.setdefault("PIP_CONFIG_FILE", str(config))
    return own


def typed(commands: list[str], home: Path) -> Outcome:
    """Run commands in one shell until one fails, without the variables that let other tests run MPI on any machine."""
    script = "\n".join(["set -e", *[f"echo '$ {each}'\n{each}" for each in commands]])
    own = environment(home) | {"PIP_CACHE_DIR": pip_cache()}
    dropped = [word for name in almost_empty_environment().keys() - own.keys() for word in ("-u", name)]
    added = [f"{name}={value}" for name, value in own.items()]
    return run_command(["env", *dropped, *added, "bash", "-c", script], timeout=600)


def pip_cache() -> str:
    return os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))


def test_the_quick_start_works_as_typed(checkout: Path, tmp_path: Path) -> None:
    assert COMMANDS[-1] == FIRST
    # CI cannot reach PyTorch's index; its own index has torch without CUDA.
    version = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    examples_need = "python -c 'import sklearn'"
    outcome = typed([*ENVIRONMENT, f"pip install {version}", *COMMANDS, examples_need], tmp_path)
    assert outcome.status == 0, outcome
    printed = outcome.stdout.partition(f"$ {FIRST}\n")[2].partition("$ ")[0]
    assert form(printed) == form(SHOWN), outcome
