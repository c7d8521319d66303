"""The C library in an installation of the package by pip."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomm import native
from mpicomm.native import c_library

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(c_library.load() is None, reason="there is no C compiler")
def test_the_remedy_of_a_missing_library_builds_it(tmp_path: Path) -> None:
    """Pip keeps the wheel that it has built from an archive, also if that contains no library."""
    source, target = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ROOT / "mpicomm", source / "mpicomm", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    environ = {**os.environ, "PIP_CACHE_DIR": str(tmp_path / "cache")}
    build = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    options = ["--no-index", "--no-build-isolation", "--no-compile", f"--find-links={source / 'dist'}"]
    options += ["--upgrade", f"--target={target}"]  # which pip otherwise leaves as it is

    def install(words: list[str], **variables: str) -> bool:
        command = [sys.executable, "-m", *words, *options]
        subprocess.run(command, env={**environ, **variables}, cwd=tmp_path, check=True, capture_output=True)
        return (target / "mpicomm" / "native" / "hot_path.abi3.so").exists()

    assert not install(["pip", "install", "--no-deps", "mpicomm"], CC="/bin/false")
    assert install(shlex.split(native.LIBRARY_REMEDY.partition(": ")[2].rstrip(".")))
