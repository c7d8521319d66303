"""Engines of ipyparallel are ranks, in a notebook whose own kernel is a job of one rank."""

from __future__ import annotations

import sys

from tests.launching import run_command

PACKAGES = ("ipyparallel", "nbclient", "ipykernel")
RANKS = 2
CELLS = [
    f"""
    import ipyparallel as ipp
    cluster = ipp.Cluster(engines="mpi", n={RANKS}, log_level=40)
    rc = cluster.start_and_connect_sync()
    def start():
        import mpicomm
        return mpicomm.bootstrap().size
    def total(fails):
        import mpicomm, torch
        world = mpicomm.bootstrap()
        if fails and world.rank == 1:
            raise ValueError("an error on rank 1")
        tensor = torch.tensor([world.rank + 1])
        if not fails:
            torch.distributed.all_reduce(tensor)
        return tensor.item()
    """,
    "print('sizes', rc[:].apply_sync(start))",
    "print('sums', rc[:].apply_sync(total, False))",
    """
    try:
        rc[:].apply_sync(total, True)
    except ipp.error.CompositeError as error:
        print("error", [kind for kind, *_ in error.elist])
    """,
    "print('sums', rc[:].apply_sync(total, False))",
    "import mpicomm; print('kernel', mpicomm.bootstrap().size)",
    "cluster.stop_cluster_sync()",
]
NOTEBOOK = f"""
import textwrap
import nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in {CELLS!r}]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
for cell in notebook.cells:
    print("".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout"), end="")
"""


def test_engines_of_a_notebook_are_ranks() -> None:
    outcome = run_command([sys.executable, "-c", NOTEBOOK])
    assert outcome.status == 0, outcome
    shown = [line for line in outcome.stdout.splitlines() if line.startswith(("sizes", "sums", "error", "kernel"))]
    sums = f"sums {[RANKS * (RANKS + 1) // 2] * RANKS}"
    assert shown == [f"sizes {[RANKS] * RANKS}", sums, "error ['ValueError']", sums, "kernel 1"], outcome
