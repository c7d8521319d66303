"""A rank of a start that is measured: rank 0 says, once the ranks have talked, how long each of its steps took.

Run as `python -m mpicomm.bench.startup_probe mpicomm`, or `gloo` for what torchrun's users write.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time


def main() -> None:
    """Take each step, and say what it took."""
    laps = {"begin": time.perf_counter()}
    import torch
    import torch.distributed as dist

    laps["import torch"] = time.perf_counter()
    if sys.argv[1] == "mpicomm":
        from mpicomm import mpi, runtime
        from mpicomm.launch import detect

        mpi.initialize(detect.detect(os.environ).local_size)
        laps["MPI_Init"] = time.perf_counter()
        runtime.bootstrap()
        laps["bootstrap"] = time.perf_counter()
    else:
        dist.init_process_group("gloo")
        laps["init_process_group"] = time.perf_counter()
    dist.all_reduce(torch.ones(1))
    laps["first all_reduce"] = time.perf_counter()
    if dist.get_rank() == 0:
        moments = list(laps.values())
        steps = [after - before for before, after in itertools.pairwise(moments)]
        seconds = dict(zip(list(laps)[1:], steps, strict=True))
        print(json.dumps({"seconds": seconds, "size": dist.get_world_size()}), flush=True)
    if sys.argv[1] != "mpicomm":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
