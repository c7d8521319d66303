"""Counts the lines of code of the package and the tests: `python -m tests.size`.

A line of code is a line of a statement: not a comment, a docstring or a blank line.
"""

from __future__ import annotations

import ast
import collections
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.launching import ROOT

_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_OTHER_PARTS = {"training", "horovod", "integrations", "bench", "doctor", "reports", "cli"}
"""Folders of the package that are not its core."""


def main() -> None:
    for folder in ("mpicomm", "benchmarks", "examples", "tests"):
        counts = {path: lines_of_code(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))}
        print(f"{folder}: {sum(counts.values()):,} lines of code in {len(counts)} modules")
        if folder == "mpicomm":
            _print_parts(counts)


def lines_of_code(source: str) -> int:
    """Return the number of lines of code of a module."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - set(_docstring_lines(ast.parse(source))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of all strings that are statements, of which some document attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _print_parts(counts: dict[Path, int]) -> None:
    parts: collections.Counter[str] = collections.Counter()
    for path, count in counts.items():
        names = path.relative_to(ROOT / "mpicomm").parts
        parts[names[0] if len(names) > 1 else "(modules)"] += count
    for part, count in sorted(parts.items()):
        print(f"    {part:16} {count:6,}")
    print(f"    {'core':16} {sum(count for part, count in parts.items() if part not in _OTHER_PARTS):6,}")


if __name__ == "__main__":
    main()
