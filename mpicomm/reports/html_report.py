"""Tables and a plot as an HTML page without references to other files."""

from __future__ import annotations

import base64
import html
import importlib.resources
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Return a template of this package, with the parts, which are HTML, in place of `@NAME@`."""
    text = importlib.resources.files("mpicomm.reports").joinpath(template).read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], text)


def page(title: str, tables: Sequence[Table], notes: Sequence[str] = (), figure: Figure | None = None) -> str:
    """Return the page.

    Args:
        title: The title.
        tables: The tables, as the terminal shows them.
        notes: Lines of text below the tables.
        figure: The plot, if any.
    """
    return fill(
        "report.html",
        {
            "TITLE": html.escape(title),
            "TABLES": "\n".join(map(_table, tables)),
            "NOTES": "\n".join(f"<p>{html.escape(note)}</p>" for note in notes),
            "FIGURE": "" if figure is None else _image(figure),
        },
    )


def _table(table: Table) -> str:
    classes = [' class="number"' if column.justify == "right" else "" for column in table.columns]
    head = [f"<th{kind}>{_text(column.header)}</th>" for kind, column in zip(classes, table.columns, strict=True)]
    rows = zip(*[column.cells for column in table.columns], strict=True)
    body = [[f"<td{kind}>{_text(cell)}</td>" for kind, cell in zip(classes, row, strict=True)] for row in rows]
    lines = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in [head, *body])
    return f"<h2>{_text(table.title or '')}</h2>\n<div><table>\n{lines}\n</table></div>"


def _text(value: object) -> str:
    return html.escape(str(value)).replace("\n", "<br>")


def _image(figure: Figure) -> str:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    return f'<img alt="plot of the values" src="data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}">'
