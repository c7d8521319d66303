"""The commands of docs/installing.md, in an environment that has the packages of this one as site packages."""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from mpicomm import mpi
from tests.docs import documents
from tests.launching import ROOT, run_command

DOCUMENT = documents.read(ROOT / "docs" / "installing.md")
COMMANDS = DOCUMENT.commands()
# Commands that need a cluster, an index that CI cannot reach, or minutes: `make compat-system` compiles mpi4py.
ELSEWHERE = re.compile(
    r"module load .*|which mpicc|srun .*|pip install --no-cache-dir --no-binary mpi4py mpi4py|.*--index-url.*"
)
MAKES_ENVIRONMENT = "python3 -m venv --system-site-packages venv"
GENERATED = (".*", "venv", "build", "dist", "*.egg-info", "__pycache__", "mpicomm-dumps")


def elsewhere() -> list[str]:
    """Return the commands of the blocks with the mark `elsewhere`."""
    return [each.line for console in DOCUMENT.consoles() if console[0].mark == "elsewhere" for each in console]


def test_commands_that_are_not_run_cannot_run_here() -> None:
    assert [line for line in elsewhere() if not ELSEWHERE.fullmatch(line)] == []


@pytest.fixture(name="checkout")
def _checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "checkout"
    shutil.copytree(ROOT, path, symlinks=True, ignore=shutil.ignore_patterns(*GENERATED))
    monkeypatch.chdir(path)
    return path


def test_the_commands_work_and_keep_the_sites_torch(checkout: Path) -> None:
    lines = [each.line for each in COMMANDS if each.line not in elsewhere()]
    assert lines.count(MAKES_ENVIRONMENT) == 1
    # --system-site-packages adds the interpreter's packages; this adds the packages of this environment to them.
    (checkout / "site.pth").write_text(sysconfig.get_path("purelib") + "\n")
    lines.insert(lines.index(MAKES_ENVIRONMENT) + 1, "cp site.pth venv/lib/python3*/site-packages")
    shown = "cd venv; python -c 'import torch, mpicomm; print(torch.__file__, mpicomm.__file__)'"
    script = "\n".join(["set -e", *lines, shown])
    libraries = Path(mpi.library().path).parent  # like an environment module does
    environ = ["PYTHONPATH=", f"PATH={Path(sys.executable).parent}:/usr/bin:/bin", f"LD_LIBRARY_PATH={libraries}"]
    outcome = run_command(["env", *environ, "bash", "-c", script], timeout=300)
    assert outcome.status == 0, str(outcome)
    torch, mpicomm = outcome.stdout.splitlines()[-1].split()
    assert torch.startswith(sysconfig.get_path("purelib")), "torch was installed again"
    assert mpicomm.startswith(str(checkout / "venv")), outcome
