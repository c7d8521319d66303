"""An adapter whose library is not installed says which extra installs it."""

from __future__ import annotations

import importlib
import sys

import pytest


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
