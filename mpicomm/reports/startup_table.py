"""Table of startup benchmarks: seconds from the launch command to the end of the first all_reduce, by ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def table(rows: Sequence[Mapping[str, Any]], ours: str) -> Table:
    """Return the table, with one row for each number of ranks.

    Args:
        rows: The rows of `bench.startup.measure`.
        ours: The name of the launcher whose steps are shown, and with which the others are compared.
    """
    ways = list(dict.fromkeys(row["way"] for row in rows))
    by_number: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_number.setdefault(row["ranks"], {})[row["way"]] = row
    steps = list(rows[0]["steps"] if rows[0]["way"] == ours else {})
    found = Table(
        title="seconds from the launch command to the end of the first all_reduce, fastest start", title_justify="left"
    )
    for title in ("ranks", ours, *steps, *[way for way in ways if way != ours]):
        found.add_column(title, justify="right")
    for ranks, row in by_number.items():
        whole = row[ours]["seconds"]
        parts = [f"{row[ours]['steps'][step]:.3f}" for step in steps]
        others = [f"{row[way]['seconds']:.2f} ({row[way]['seconds'] / whole:.2f}x)" for way in ways if way != ours]
        found.add_row(str(ranks), f"{whole:.2f}", *parts, *others)
    return found
