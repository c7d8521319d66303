"""Submits tensors by name in a random order on every rank, and checks the results.

mpirun -n 4 python -m tests.horovod.random_order 10000
"""

from __future__ import annotations

import random
import sys
import time

import torch

import mpicomm.horovod as hvd

_NAMES = 12


def run(rounds: int, seed: int = 7) -> None:
    """Submit all names in each round, in an order of this rank alone (collective).

    In one round of ten, the shapes of some names change on all ranks, so that names leave the cache.
    """
    own, shared = random.Random(f"{seed} {hvd.rank()}"), random.Random(seed)
    lengths = {f"tensor {index}": 1 + 7 * index for index in range(_NAMES)}
    total = sum(range(1, hvd.size() + 1))
    for number in range(rounds):
        if shared.random() < 0.1:
            for name in shared.sample(sorted(lengths), 3):
                lengths[name] = shared.randint(1, 200)
        order = sorted(lengths)
        own.shuffle(order)
        handles = {}
        for name in order:
            value = (number % 100 + lengths[name]) * (hvd.rank() + 1)
            handles[name] = hvd.allreduce_async_(torch.full((lengths[name],), float(value)), name=name, op=hvd.Sum)
        own.shuffle(order)
        for name in order:
            expected = torch.full((lengths[name],), float((number % 100 + lengths[name]) * total))
            assert torch.equal(hvd.synchronize(handles[name]), expected), f"round {number}: {name}"


def main() -> None:
    rounds = int(sys.argv[1])
    hvd.init()
    start = time.monotonic()
    run(rounds)
    if hvd.rank() == 0:
        print(f"{rounds} rounds of {_NAMES} tensors on {hvd.size()} ranks: correct, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
