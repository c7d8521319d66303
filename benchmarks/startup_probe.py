"""A rank of a measured start: after the first all_reduce, rank 0 prints the time of each of its steps.

Run as `python -m benchmarks.startup_probe mpicomm`, or with `gloo` for the code that torchrun's users write.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time


def main() -> None:
    """Run the steps, and print their times on rank 0."""
    # 1. run the steps of a start
    laps = {"begin": time.perf_counter()}
    import torch
    import torch.distributed as dist

    laps["import torch"] = time.perf_counter()
    if sys.argv[1] == "mpicomm":
        from mpicomm import mpi
        from mpicomm.job.bootstrap import bootstrap
        from mpicomm.launch import detect

        mpi.initialize(detect.detect(os.environ).local_size)
        laps["MPI_Init"] = time.perf_counter()
        bootstrap(device="cpu")  # as the program with Gloo
        laps["bootstrap"] = time.perf_counter()
    else:
        dist.init_process_group("gloo")
        laps["init_process_group"] = time.perf_counter()
    dist.all_reduce(torch.ones(1))
    laps["first all_reduce"] = time.perf_counter()
    # 2. print the seconds of each step, a line of JSON for `benchmarks.startup`
    if dist.get_rank() == 0:
        moments = list(laps.values())
        steps = [after - before for before, after in itertools.pairwise(moments)]
        seconds = dict(zip(list(laps)[1:], steps, strict=True))
        print(json.dumps({"seconds": seconds, "size": dist.get_world_size()}), flush=True)
    if sys.argv[1] != "mpicomm":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
