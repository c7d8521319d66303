"""Configuration of the documentation site: `make docs` builds it with Sphinx, MyST and Furo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.domains.python import PyXRefRole
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

import mpicomm

ROOT = Path(__file__).resolve().parent.parent

project = "mpicomm"
author = "The mpicomm authors"
copyright = author  # noqa: A001  Sphinx's name
release = version = mpicomm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["results"]
nitpicky = False
suppress_warnings = ["myst.header"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# The libraries of the adapters are not installed where the site is built.
autodoc_mock_imports = ["distributed", "lightning", "ray", "tensorflow"]
smartquotes = False  # would change the dashes of options in docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autoclass_content = "both"  # the arguments of the constructor with the class
napoleon_numpy_docstring = False
default_role = "py:name"  # `name` in a docstring
python_maximum_signature_line_length = 100  # longer ones have one argument per line
toc_object_entries_show_parents = "hide"

copybutton_prompt_text = "$ "  # of a console, the commands without their output

html_theme = "furo"
html_title = f"mpicomm {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["wide.css"]

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def _link_to_sources(_app: object, name: str, content: list[str]) -> None:
    """Show links to files outside `docs/`, which the site does not have, as file names."""
    page = (ROOT / "docs" / name).parent

    def shown(match: re.Match[str]) -> str:
        text, target = match[1], match[2].partition("#")[0]
        path = (page / target).resolve()
        in_site = path.suffix == ".md" and path.parent == ROOT / "docs"
        return match[0] if in_site else f"{text} (`{path.relative_to(ROOT)}`)"

    content[0] = _LINK.sub(shown, content[0])


class _Name(PyXRefRole):
    """`name` or `name()` in a docstring: a link if there is such an object, else code."""

    explicit_title_re = re.compile(r"(?!)")  # `file_<rank>` is no title with a target

    def process_link(self, env: Any, refnode: Any, is_explicit: bool, title: str, target: str) -> tuple[str, str]:
        return super().process_link(env, refnode, is_explicit, title, target.partition("(")[0])


def _read_returns(docstring: Any) -> list[tuple[str, str, list[str]]]:
    """Read the section "Returns:" as text. Napoleon takes what is before a colon in it as a type."""
    lines = docstring._dedent(docstring._consume_to_next_section())
    return [("", "", lines)] if lines else []


def _remove_return_type(_app: object, _domain: str, _kind: str, content: Any) -> None:
    """Remove the field "Return type" beside "Returns:", so that there is one line."""
    for fields in content.findall(nodes.field_list):
        by_name = {field[0].astext(): field for field in fields}
        if {"returns", "rtype"} <= by_name.keys():
            fields.remove(by_name["rtype"])


def _without_overloads(analyze: Any) -> Any:
    """Show one signature of an overloaded function, that of the implementation, which has all arguments."""

    def replacement(analyzer: ModuleAnalyzer) -> None:
        analyze(analyzer)
        analyzer.overloads = {}

    return replacement


def setup(app: Any) -> None:
    """Register the conversions."""
    ModuleAnalyzer.analyze = _without_overloads(ModuleAnalyzer.analyze)  # type: ignore[method-assign]
    GoogleDocstring._consume_returns_section = lambda self, **_: _read_returns(self)  # type: ignore[method-assign]
    app.add_role_to_domain("py", "name", _Name())
    app.connect("source-read", _link_to_sources)
    app.connect("object-description-transform", _remove_return_type, priority=900)  # after autodoc has added it
