"""accelerate's own test, which `accelerate test` runs, after bootstrap()."""

from __future__ import annotations

from accelerate.test_utils.scripts import test_script

import mpicomm

if __name__ == "__main__":
    world = mpicomm.bootstrap(timeout=120)
    test_script.main()
    print(f"rank {world.rank} of {world.size} has passed\n", end="", flush=True)
