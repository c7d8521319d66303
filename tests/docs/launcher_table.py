"""The table of launchers' variables in docs/reference.md, generated from `mpicomm.launch.known_launchers`.

`python -m tests.docs.launcher_table` prints it, `python -m tests.docs.launcher_table --write` writes it there.
"""

from __future__ import annotations

import sys

from mpicomm.launch import allocation, known_launchers
from mpicomm.launch.known_launchers import Launcher
from tests.docs.documents import REFERENCE, with_table

# The rows, and the field of both `World` and `Launcher` that contains the value.
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
    "PyTorch, `torchrun`": known_launchers.TORCHRUN,
    "Slurm: `srun`": known_launchers.SLURM,
    "Open MPI: `mpirun`": known_launchers.OPEN_MPI,
    "MPICH, Intel MPI: `mpiexec` (PMI)": known_launchers.PMI,
    "PBS on Cray: `mpiexec` (PALS)": known_launchers.PALS,
    "Flux: `flux run`": known_launchers.FLUX,
}
# PBS and LSF themselves describe the job, not its processes.
PBS = {
    "size": f"the lines of the file `{allocation.PBS_HOSTS}`",
    "num_nodes": "the different lines of that file",
}
LSF = {"size": f"the slots in `{allocation.LSF_HOSTS}`", "num_nodes": "the hosts in it"}
NOTHING = "-"


def text() -> str:
    head = ["", "`World`", *COLUMNS, "PBS: the job", "LSF: the job"]
    rows = [
        [fact, f"`{name}`", *(_cell(getattr(each, name)) for each in COLUMNS.values()), *_of_job(name)]
        for fact, name in FACTS.items()
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def inserted(document: str) -> str:
    """Return a document with the table inserted at its markers."""
    return with_table(document, "launcher_table", text())


def _of_job(fact: str) -> tuple[str, str]:
    return PBS.get(fact, NOTHING), LSF.get(fact, NOTHING)


def _cell(variable: str | None) -> str:
    return f"`{variable}`" if variable else NOTHING


if __name__ == "__main__":
    if "--write" in sys.argv:
        REFERENCE.write_text(inserted(REFERENCE.read_text()))
    else:
        print(text(), end="")
