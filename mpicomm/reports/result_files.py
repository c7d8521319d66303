"""Files of results: written as JSON, or rows as CSV, and read for comparison."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]

_REQUIRED = {  # by the field that only one kind of row has; earlier versions did not write the other fields
    "operation": ("operation", "dtype", "in_place", "nbytes", "backend", "us"),
    "strategy": ("model", "strategy", "backend", "ms"),
    "tokens_per_s": ("model", "backend", "tokens_per_s"),
}
_TEXTS = ("operation", "dtype", "backend", "model", "strategy")


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
        kinds = [kind for kind in _REQUIRED if any(kind in row for row in results["rows"])]
        for row in results["rows"]:
            for name in _REQUIRED[kinds[0] if kinds else "tokens_per_s"]:
                if not isinstance(row[name], str if name in _TEXTS else (int, float)):
                    raise TypeError(f"{name!r} has the value {str(row[name])[:40]}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} was not written by `mpicomm bench --json`: {type(error).__name__}: {error}.\n"
            f"Pass a file that this command wrote."
        ) from error
    return results


def read_operations(path: Path) -> dict[str, Any]:
    """Return the content of a file that `mpicomm bench --json` wrote for operations.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file has another format.
    """
    results = read_benchmark(path)
    if not is_of_operations(results["rows"]):
        raise ValueError(f"{path} has no operations.\nPass a file of `mpicomm bench`, without ddp or decode.")
    return results


def is_of_operations(rows: Rows) -> bool:
    """Return whether these are rows of operations, of which there may be none: all may be refused."""
    return all("operation" in row for row in rows)


def key_of(row: Mapping[str, Any]) -> tuple[tuple[str, str, bool], int, str]:
    """Return the unique key of a row of `mpicomm bench` within a run: kind, size in bytes and backend."""
    return kind_of(row), row["nbytes"], row["backend"]


def kind_of(row: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Return the operation, the dtype and whether it is in place. Each kind has its own table or plot."""
    return row["operation"], row["dtype"], row["in_place"]
