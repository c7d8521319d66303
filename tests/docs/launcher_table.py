"""The guide's table of launchers' variables, made of the tables in `mpicomm.launch.detect`.

`python -m tests.docs.launcher_table` prints it, `python -m tests.docs.launcher_table --write` puts it into the guide.
"""

from __future__ import annotations

import re
import sys

from mpicomm.launch import detect
from mpicomm.launch.detect import Launcher
from tests.docs.documents import GUIDE

BEGIN = "<!-- made by python -m tests.docs.launcher_table --write -->"
END = "<!-- end of what is made -->"

# What there is to know, and what both `World` and `Launcher` call it.
FACTS = {
    "rank": "rank",
    "world size": "size",
    "local rank": "local_rank",
    "local world size": "local_size",
    "node rank": "node_rank",
    "number of nodes": "num_nodes",
    "master address": "master_addr",
    "master port": "master_port",
}
COLUMNS: dict[str, Launcher] = {
    "PyTorch, `torchrun`": detect.TORCHRUN,
    "Slurm: `srun`": detect.SLURM,
    "Open MPI: `mpirun`": detect.OPEN_MPI,
    "MPICH, Intel MPI: `mpiexec` (PMI)": detect.PMI,
    "PBS on Cray: `mpiexec` (PALS)": detect.PALS,
}
# PBS itself describes the job, not a process of it.
PBS = {
    "size": f"the lines of the file `{detect.PBS_HOSTS}`",
    "num_nodes": "the different lines of that file",
}
NOTHING = "-"


def text() -> str:
    """Return the table."""
    head = ["", "`World`", *COLUMNS, "PBS: the job"]
    rows = [
        [fact, f"`{name}`", *(_cell(getattr(each, name)) for each in COLUMNS.values()), PBS.get(name, NOTHING)]
        for fact, name in FACTS.items()
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def inserted(document: str) -> str:
    """Return a document with the table in its place."""
    pattern = f"{re.escape(BEGIN)}\n.*{re.escape(END)}\n"
    assert len(re.findall(pattern, document, re.DOTALL)) == 1
    return re.sub(pattern, lambda _: f"{BEGIN}\n\n{text()}\n{END}\n", document, flags=re.DOTALL)


def _cell(variable: str | None) -> str:
    return f"`{variable}`" if variable else NOTHING


if __name__ == "__main__":
    if "--write" in sys.argv:
        GUIDE.write_text(inserted(GUIDE.read_text()))
    else:
        print(text(), end="")
