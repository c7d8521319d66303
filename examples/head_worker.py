"""Head and workers: rank 0 distributes independent tasks of different duration to the other ranks of one job.

The same number of tasks for each rank would not balance the load: some numbers are factored in microseconds, others
take milliseconds. So rank 0 keeps the task list, and a rank that completes a task gets the next one.
`mpi4py.futures` implements this on `world.comm`, with the interface of Python's own executors. All ranks run this file,
so a task may call any function in it; afterwards all ranks continue together. With one rank, that rank runs the tasks
itself. Workers poll for tasks once per millisecond, so they are idle between tasks that are much shorter than that.

One number is invalid on purpose: its task raises an exception, which rank 0 receives; all other tasks complete.
`--tasks N` sets the number of tasks.

    $ mpirun -n 4 python -m mpicomm.examples.head_worker
    task 500 failed: ValueError: 0 has no prime factors
    999 of 1000 tasks done: 37 primes, the last is 1000000000997
    a task took 0.009 to 347.856 ms
    workers: 3, busy 66.7% of the time
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from concurrent.futures import Future

import torch.distributed as dist

import mpicomm

FIRST = 10**12  # the tasks factor the numbers from here on


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a task."""

    factors: list[int]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description="Distribute tasks of different duration.")
    parser.add_argument("--tasks", type=int, default=1000)
    tasks = parser.parse_args().tasks
    world = mpicomm.bootstrap()
    if world.comm is None:
        raise SystemExit("this example needs MPI; start it with `mpirun -n 4 python -m mpicomm.examples.head_worker`")

    numbers = [FIRST + task for task in range(tasks)]
    if numbers:
        numbers[tasks // 2] = 0  # has no prime factors
    start = time.perf_counter()
    futures = hand_out(world, numbers)
    if world.rank == 0:
        report(numbers, futures, workers=max(1, world.size - 1), seconds=time.perf_counter() - start)
    dist.barrier()  # all ranks have left the executor and continue together


def hand_out(world: mpicomm.World, numbers: list[int]) -> list[Future[Answer]]:
    """Return the futures in the order of the numbers on rank 0, and an empty list on the others (collective)."""
    from mpi4py.futures import MPICommExecutor  # after bootstrap(), which initialises MPI

    with MPICommExecutor(world.comm, root=0) as executor:
        if executor is None:
            return []  # a worker gets here when all tasks are done
        # Not executor.map(): it raises the first exception and loses the results after it.
        submit = executor.submit  # type: ignore[attr-defined]  # the type stub lacks the type of `executor`
        return [submit(work, number) for number in numbers]  # the block ends when the last one is done


def report(numbers: list[int], futures: list[Future[Answer]], workers: int, seconds: float) -> None:
    """Print the results of the tasks, and the utilisation of the workers."""
    answers = []
    for task, (number, future) in enumerate(zip(numbers, futures, strict=True)):
        if error := future.exception():
            print(f"task {task} failed: {type(error).__name__}: {error}")
        else:
            answers.append((number, future.result()))
    primes = [number for number, answer in answers if answer.factors == [number]]
    print(f"{len(answers)} of {len(futures)} tasks done: {len(primes)} primes, the last is {max(primes, default=None)}")
    times = [answer.seconds for _, answer in answers] or [0.0]
    print(f"a task took {1000 * min(times):.3f} to {1000 * max(times):.3f} ms")
    print(f"workers: {workers}, busy {sum(times) / (workers * seconds):.1%} of the time", flush=True)


def work(number: int) -> Answer:
    """Run one task; the workers call this."""
    start = time.perf_counter()
    factors = prime_factors(number)
    return Answer(factors, time.perf_counter() - start)


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number in ascending order."""
    if number < 1:
        raise ValueError(f"{number} has no prime factors")
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        else:
            divisor += 1 if divisor == 2 else 2
    return factors + [number] * (number > 1)


if __name__ == "__main__":
    main()
