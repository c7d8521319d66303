"""Runs a document's snippets: `mpirun -n 2 python -m tests.docs.program docs/limitations.md`.

Each rank runs the sections for the number of ranks of the job and for the value of MPICOMM_DEBUG. Each section has its
own namespace; all run in the same job. Tracebacks name the document and its lines.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.docs import documents
from tests.docs.documents import Document, Section, Step


def main(path: Path) -> None:
    import mpicomm

    document = documents.read(path)
    in_debug_mode = os.environ.get("MPICOMM_DEBUG") == "1"
    for section in document.with_snippets(mpicomm.bootstrap(timeout=30).size, in_debug_mode=in_debug_mode):
        run(document, section)


def run(document: Document, section: Section) -> None:
    """Run the program of a section (collective)."""
    names: dict[str, object] = {"__name__": "__main__"}
    execute(document, document.start, names)
    for step in document.program(section):
        if step.raises:
            expect_failure(document, step, names)
        else:
            execute(document, step, names)


def execute(document: Document, step: Step, names: dict[str, object]) -> None:
    # Prepend blank lines, so that line numbers are those of the document.
    code = "\n" * (step.code.first_line - 1) + step.code.text
    exec(compile(code, str(document.path), "exec"), names)


def expect_failure(document: Document, step: Step, names: dict[str, object]) -> None:
    try:
        execute(document, step, names)
    except Exception as error:  # noqa: BLE001  the document shows the expected error
        real = f"{type(error).__name__}: {error}".splitlines()
        where = f"{document.path.name}:{step.code.first_line}"
        for shown in step.shown:
            assert any(documents.is_like(shown, line) for line in real), f"{where}: {shown!r} is not in {real}"
        assert step.shown, f"{where}: no message is shown"
    else:
        raise AssertionError(f"{document.path.name}:{step.code.first_line}: does not raise")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
