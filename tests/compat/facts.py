"""Print, as JSON, the machine and the versions that this environment loads: `python -m tests.compat.facts`."""

from __future__ import annotations

import importlib.metadata
import json
import sys

from mpicomm import job_info


def main() -> None:
    versions = job_info.versions()
    del versions["mpicomm"]  # that of this checkout
    versions["NumPy"] = versions.pop("numpy")
    if "manylinux" not in (importlib.metadata.distribution("mpi4py").read_text("WHEEL") or ""):
        versions["mpi4py"] += " (source)"
    json.dump({"machine": job_info.machine(), "versions": versions}, sys.stdout)


if __name__ == "__main__":
    main()
