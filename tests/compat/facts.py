"""Print, as JSON, the machine and the versions that this environment loads: `python -m tests.compat.facts`."""

from __future__ import annotations

import importlib.metadata
import json
import sys

from mpicomm.bench import machine


def main() -> None:
    versions = {**machine.versions(), "NumPy": importlib.metadata.version("numpy")}
    if "manylinux" not in (importlib.metadata.distribution("mpi4py").read_text("WHEEL") or ""):
        versions["mpi4py"] += " (source)"
    json.dump({"machine": machine.of_this_host(), "versions": versions}, sys.stdout)


if __name__ == "__main__":
    main()
