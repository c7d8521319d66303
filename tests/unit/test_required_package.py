"""An adapter whose library is not installed, or too old, says which extra installs it."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest

from mpicomm.integrations.requirements import installed_by

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.mark.parametrize(
    ("adapter", "package"),
    [("dask", "distributed"), ("lightning", "lightning"), ("ray", "ray"), ("tensorflow", "tensorflow")],
)
def test_missing_package(adapter: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # an import of it then raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, f"mpicomm.integrations.{adapter}", raising=False)
    # For a missing package within another, Python names the submodule.
    expected = (
        rf"mpicomm.integrations.{adapter} requires the package {package}[.\w]*, which is not installed.\n"
        rf'Install it: pip install "mpicomm\[{adapter}\]"'
    )
    with pytest.raises(ModuleNotFoundError, match=rf"^{expected}$"):
        importlib.import_module(f"mpicomm.integrations.{adapter}")


@pytest.mark.parametrize("version", ["2.9.3", "2.51.2", "1.60.0"])
def test_ray_is_too_old(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    monkeypatch.delitem(sys.modules, "mpicomm.integrations.ray", raising=False)
    expected = rf"mpicomm.integrations.ray requires ray>=2.52, got ray {version}.\n"
    with pytest.raises(ImportError, match=rf'^{expected}Upgrade it: pip install "mpicomm\[ray\]"$'):
        importlib.import_module("mpicomm.integrations.ray")
    assert '"ray[train]>=2.52"' in PYPROJECT.read_text()


@pytest.mark.parametrize("version", ["2.52", "2.52.0", "2.60.0", "3.0"])
def test_a_version_that_is_not_too_old(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with installed_by("ray", "ray>=2.52"):
        pass
