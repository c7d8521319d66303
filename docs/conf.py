"""Configuration of the documentation site: `make docs` builds it with Sphinx, MyST and Furo."""

from __future__ import annotations

import re
from pathlib import Path

import mpicomm

ROOT = Path(__file__).resolve().parent.parent

project = "mpicomm"
author = "The mpicomm authors"
copyright = author  # noqa: A001  Sphinx's name
release = version = mpicomm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
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
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"mpicomm {release}"
html_theme_options = {"navigation_with_keys": True}

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


def setup(app: object) -> None:
    """Register the conversion of links."""
    app.connect("source-read", _link_to_sources)  # type: ignore[attr-defined]
