"""Files of results: written as JSON, or rows as CSV, and read for comparison."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def write(path: Path, results: Any) -> None:
    """Write a results file.

    Raises:
        OSError: If the file cannot be written.
    """
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def write_csv(path: Path, rows: Rows) -> None:
    """Write rows, with their names in the first line.

    Raises:
        OSError: If the file cannot be written.
    """
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def read_benchmark(path: Path) -> dict[str, Any]:
    """Return the content of a file that `mpicomm bench --json` wrote.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file has another format.
    """
    try:
        results: dict[str, Any] = json.loads(path.read_text())
        for row in results["rows"]:
            row["backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} was not written by `mpicomm bench --json`: {error!r}.\nPass a file that this command wrote."
        ) from error
    return results


def read_operations(path: Path) -> Rows:
    """Return the rows of a file that `mpicomm bench --json` wrote for operations.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file has another format.
    """
    rows: Rows = read_benchmark(path)["rows"]
    try:
        for row in rows:
            key_of(row)
    except KeyError as error:
        raise ValueError(f"{path} has no operations: {error!r}.\nPass a file of `mpicomm bench`.") from error
    return rows


def key_of(row: Mapping[str, Any]) -> tuple[tuple[str, str, bool], int, str]:
    """Return the unique key of a row of `mpicomm bench` within a run: kind, size in bytes and backend."""
    return kind_of(row), row["nbytes"], row["backend"]


def kind_of(row: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Return the operation, the dtype and whether it is in place. Each kind has its own table or plot."""
    return row["operation"], row["dtype"], row["in_place"]
