"""The table of systems in docs/launching.md, generated from tests/centres.json.

`python -m tests.docs.centre_table` prints it, `python -m tests.docs.centre_table --write` writes it there.
"""

from __future__ import annotations

import sys

from tests.centres import CENTRES
from tests.docs.documents import LAUNCHING, with_table

HEAD = ("system", "page", "launcher of the page", "`mpicomm job`", "run on")


def text() -> str:
    rows = [
        (
            centre.system,
            f"[{centre.date}]({centre.page})",
            f"`{centre.launch}`",
            f"`mpicomm job {centre.scheduler} {centre.job}`",
            centre.run_on,
        )
        for centre in CENTRES
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in (HEAD, ["---"] * len(HEAD), *rows))


def inserted(document: str) -> str:
    """Return a document with the table inserted at its markers."""
    return with_table(document, "centre_table", text())


if __name__ == "__main__":
    if "--write" in sys.argv:
        LAUNCHING.write_text(inserted(LAUNCHING.read_text()))
    else:
        print(text(), end="")
