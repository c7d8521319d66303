"""The extension module does not crash, and holds no lock, if a call of the C API of Python fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nodes
from tests.launching import run_ranks
from tests.time_limits import scaled

ROOT = Path(__file__).parents[2]
FOLDER = Path("mpicomm")
HEADER, PROGRAM = (Path(__file__).with_name(f"injected_errors.{ending}") for ending in ("h", "py"))
LEAST_CASES, LEAST_CALLS = 12, 20
SECONDS = 120.0


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package whose extension module lets calls fail."""
    nodes.require("slots")
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / FOLDER, root / FOLDER, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environ = {**os.environ, "CFLAGS": f"-include {HEADER}"}
    subprocess.run(command, cwd=root, env=environ, check=True, capture_output=True, timeout=scaled(SECONDS))
    return root


def test_every_call_of_python_may_fail(checkout: Path) -> None:
    path = {"PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)])}
    outcome = run_ranks(2, ["-W", "ignore", str(PROGRAM)], env=path)
    assert outcome.status == 0, outcome
    numbers = dict(re.findall(r"^(\w+) (\d+)$", outcome.stdout, re.MULTILINE))
    assert len(numbers) >= LEAST_CASES, outcome
    assert all(int(number) >= LEAST_CALLS for number in numbers.values()), numbers
