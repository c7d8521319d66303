"""The tables of figures in the documents equal those generated from the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import figures


@pytest.mark.parametrize("document", figures.DOCUMENTS, ids=lambda path: path.stem)
def test_tables_are_those_of_the_results(document: Path) -> None:
    text = document.read_text()
    assert figures.written(text) == text, "run `python -m tests.docs.figures`"
    assert "<!-- figures: " in text
