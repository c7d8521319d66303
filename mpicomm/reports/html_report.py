"""Tables and plots as an HTML page without references to other files."""

from __future__ import annotations

import base64
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report."""

    title: str
    tables: Sequence[Table]
    """The tables, as the terminal shows them."""

    notes: Sequence[str] = ()
    """Lines of text below the tables."""

    warnings: Sequence[str] = ()
    figure: Figure | None = None


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the page of a report. The only section of a page has the page's title."""
    parts = [_section(section, has_title=len(sections) > 1) for section in sections]
    return fill("report.html", {"TITLE": html.escape(title), "SECTIONS": "\n".join(parts)})


def _section(section: Section, *, has_title: bool) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"] if has_title else []
    parts += map(table, section.tables)
    parts += [f"<p>{html.escape(note)}</p>" for note in (*section.notes, *section.warnings)]
    return "\n".join(parts if section.figure is None else [*parts, _image(section.figure)])


def table(shown: Table) -> str:
    """Return a table as HTML."""
    classes = [' class="number"' if column.justify == "right" else "" for column in shown.columns]
    head = [f"<th{kind}>{_text(column.header)}</th>" for kind, column in zip(classes, shown.columns, strict=True)]
    rows = zip(*[column.cells for column in shown.columns], strict=True)
    body = [[f"<td{kind}>{_text(cell)}</td>" for kind, cell in zip(classes, row, strict=True)] for row in rows]
    lines = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in [head, *body])
    title = f"<h3>{_text(shown.title)}</h3>\n" if shown.title else ""
    return f"{title}<div><table>\n{lines}\n</table></div>"


def _text(value: object) -> str:
    return html.escape(str(value)).replace("\n", "<br>")


def _image(figure: Figure) -> str:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    return f'<img alt="plot of the values" src="data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}">'
