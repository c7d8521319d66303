"""Links between the documents point to existing files and headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import ROOT

DOCUMENTS = sorted(path for folder in (".", "docs", "benchmarks") for path in (ROOT / folder).glob("*.md"))
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]*)#?([^):]*)\)")


def anchors(path: Path) -> set[str]:
    """Return the names of headings in links."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_point_to_files_and_headings(path: Path) -> None:
    for target, anchor in _LINK.findall(_CODE.sub("", path.read_text())):
        to = (path.parent / target).resolve() if target else path
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), f"{target}#{anchor}"
