"""docs/reference.md, docs/api.md and docs/examples.md list every public name, variable, error, command and example."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import mpicomm
from mpicomm import settings
from mpicomm.cli import main
from mpicomm.settings import Settings
from tests.docs.documents import REFERENCE
from tests.launching import ROOT

TEXT = REFERENCE.read_text()


def text_of(title: str) -> str:
    """Return the text below a heading."""
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", [name for name in mpicomm.__all__ if not name.startswith("__")])
def test_a_public_name_is_listed(name: str) -> None:
    value = getattr(mpicomm, name)
    is_error = inspect.isclass(value) and issubclass(value, mpicomm.MpicommError)
    assert f"`{name}`" in text_of("Errors" if is_error else "API overview")


def test_the_environment_variables_are_listed() -> None:
    shown = set(re.findall(rf"^\| `({settings.PREFIX}\w+)` \|", text_of("Environment variables"), re.MULTILINE))
    assert shown == {settings.PREFIX + field.name.upper() for field in dataclasses.fields(Settings)}


def test_the_fields_of_a_world_are_listed() -> None:
    assert [
        each.name for each in dataclasses.fields(mpicomm.World) if f"`{each.name}`" not in text_of("Bootstrap")
    ] == []


def test_the_commands_are_listed() -> None:
    names = [each.__name__.rpartition(".")[2] for each in main._SUBCOMMANDS]
    assert [name for name in names if f"`mpicomm {name}" not in text_of("Commands")] == []


def test_the_api_lists_the_public_names() -> None:
    listed = re.findall(r"^\.\. auto\w+:: mpicomm\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(mpicomm.__all__) - {"__version__"})


def test_the_examples_are_listed() -> None:
    text = (ROOT / "docs" / "examples.md").read_text()
    listed = re.findall(r"^```{literalinclude} \.\./examples/(\w+\.py)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.stem != "__init__")
