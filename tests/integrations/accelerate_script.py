"""accelerate's own test, which `accelerate test` runs, after bootstrap()."""

from __future__ import annotations

from accelerate.test_utils.scripts import test_script

import mpicomm


def skip():
    print("Skipped because it expects two processes", flush=True)


if __name__ == "__main__":
    world = mpicomm.bootstrap(timeout=120)
    if world.size > 2:  # it splits two rows, and expects a row on each rank; it also fails under torchrun with Gloo
        test_script.test_split_between_processes_tensor = skip
    test_script.main()
    print(f"rank {world.rank} of {world.size} has passed\n", end="", flush=True)
