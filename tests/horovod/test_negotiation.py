"""The negotiation without MPI: the ranks are threads of one process, which exchange values through memory."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpicomm.horovod.negotiation import Negotiation, Ready
from mpicomm.horovod.submission import ALLGATHER, ALLREDUCE, BARRIER, JOIN, Layout, Signature, Submission
from tests.time_limits import scaled

RANKS = (1, 4, 6)  # in the job
SIZE = len(RANKS)
MOST_ROUNDS = 2000


class MemoryExchange:
    """Exchanges values between the threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=scaled(60))
        self._values: list[Any] = [None] * size
        self.num_texts = 0

    def of_rank(self, rank: int) -> Any:
        """Return the exchange of one rank."""
        outer = self

        class OfRank:
            def bitwise_and(self, value: int, num_words: int) -> int:
                assert value < 1 << 64 * num_words
                result = -1
                for each in outer.gather(rank, value):
                    result &= each
                return result

            def all_gather_text(self, text: str) -> list[str]:
                outer.num_texts += rank == 0
                return outer.gather(rank, text)

        return OfRank()

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def abort(self) -> None:
        """End the waits of the other threads."""
        self._barrier.abort()


def on_ranks(
    run: Callable[[int, Negotiation], Any], capacity: int = 8, describe_after: float = 0.0
) -> tuple[list[Any], MemoryExchange]:
    """Return the results of a function on all ranks."""
    exchange = MemoryExchange(SIZE)
    results: list[Any] = [None] * SIZE
    errors: list[Exception] = []

    def run_rank(rank: int) -> None:
        try:
            results[rank] = run(rank, Negotiation(exchange.of_rank(rank), rank, RANKS, capacity, describe_after))
        except Exception as error:  # noqa: BLE001  raised below
            errors.append(error)
            exchange.abort()

    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(120))
        assert not thread.is_alive(), "the ranks did not end"
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results, exchange


def submission(name: str, length: int = 1) -> Submission:
    return Submission(name, Signature(ALLREDUCE, (Layout(torch.float32, (length,), "cpu"),)))


def rounds(negotiation: Negotiation, *steps: list[Submission]) -> list[list[str]]:
    """Return the names that are ready in each round."""
    return [[each.name for each in negotiation.run_round(list(new), is_closing=False)[0]] for new in steps]


def test_a_name_is_ready_when_the_last_rank_submits_it() -> None:
    def run(rank: int, negotiation: Negotiation) -> list[list[str]]:
        steps: list[list[Submission]] = [[], [], []]
        steps[rank].append(submission("a"))
        steps[(rank + 1) % SIZE].append(submission("b"))
        return rounds(negotiation, *steps, [submission("b"), submission("a")])

    results, _ = on_ranks(run)
    assert results == [[[], [], ["a", "b"], ["a", "b"]]] * SIZE


def test_a_cached_round_exchanges_no_descriptions() -> None:
    def run(rank: int, negotiation: Negotiation) -> list[list[str]]:
        names = ["a", "b", "c"]
        return rounds(negotiation, *[[submission(name) for name in names[rank:] + names[:rank]] for _ in range(5)])

    results, exchange = on_ranks(run)
    assert exchange.num_texts == 1
    assert [set(each) for each in results[0]] == [{"a", "b", "c"}] * 5
    assert results == [results[0]] * SIZE


def test_the_missing_ranks_are_known_on_all_ranks() -> None:
    def run(rank: int, negotiation: Negotiation) -> list[int]:
        rounds(negotiation, [submission("a")] if rank != 1 else [])
        return negotiation.missing(negotiation.announced["a"])

    assert on_ranks(run)[0] == [[RANKS[1]]] * SIZE


@pytest.mark.parametrize("age", [0.0, 100.0])
def test_the_missing_ranks_of_a_cached_operation_are_known_after_some_time(age: float) -> None:
    def run(rank: int, negotiation: Negotiation) -> tuple[list[list[str]], list[list[int]], float]:
        names = rounds(negotiation, [submission("a"), submission("b")])
        first, second = submission("a"), submission("b")
        first.start -= age
        names += rounds(negotiation, [] if rank == 1 else [first, second])
        missing = [negotiation.missing(announcement) for announcement in negotiation.announced.values()]
        start = min((announcement.start for announcement in negotiation.announced.values()), default=first.start)
        names += rounds(negotiation, [submission("b"), submission("a")] if rank == 1 else [])
        return names, missing, abs(start - first.start)

    results, exchange = on_ranks(run, describe_after=60.0)
    for names, missing, error in results:
        assert names == [["a", "b"], [], ["a", "b"]]
        assert missing == ([[4], [4]] if age else [])
        assert error < 50.0
    assert exchange.num_texts == (3 if age else 1)


def test_the_name_that_was_ready_least_recently_leaves_a_full_cache() -> None:
    def run(_: int, negotiation: Negotiation) -> list[list[str]]:
        return rounds(negotiation, *[[submission(name)] for name in "abacab"])

    results, exchange = on_ranks(run, capacity=2)
    assert results == [[["a"], ["b"], ["a"], ["c"], ["a"], ["b"]]] * SIZE
    assert exchange.num_texts == 4  # of a, b and c, and again of b, which c has replaced


def test_a_submission_that_is_not_cacheable_is_described_each_time() -> None:
    def run(_: int, negotiation: Negotiation) -> list[list[str]]:
        return rounds(negotiation, *[[Submission("a", Signature(ALLREDUCE), is_cacheable=False)] for _ in range(3)])

    results, exchange = on_ranks(run)
    assert results == [[["a"]] * 3] * SIZE
    assert exchange.num_texts == 3


def test_a_closing_rank_is_known_on_all_ranks() -> None:
    def run(rank: int, negotiation: Negotiation) -> list[bool]:
        return [negotiation.run_round([], is_closing=rank == 2 and number == 1)[1] for number in range(2)]

    assert on_ranks(run)[0] == [[False, True]] * SIZE


def test_ranks_that_have_joined_take_part_without_a_submission() -> None:
    def run(rank: int, negotiation: Negotiation) -> list[Any]:
        join = Submission(JOIN, Signature(JOIN), is_cacheable=False)
        ready: list[Ready] = []
        for number in range(4):
            new = [join] if number == rank else [submission("a")] if number < rank else []
            ready += negotiation.run_round(new, is_closing=False)[0]
        assert [each.error for each in ready] == [""] * 3
        return [(each.name, each.submission is not None, each.last_joined) for each in ready]

    results, _ = on_ranks(run)
    # Rank 0 joins in round 0, rank 1 in round 1, rank 2 in round 2: "a" is ready without them.
    assert results[0] == [("a", False, -1), ("a", False, -1), (JOIN, True, 2)]
    assert results[1] == [("a", True, -1), ("a", False, -1), (JOIN, True, 2)]
    assert results[2] == [("a", True, -1), ("a", True, -1), (JOIN, True, 2)]


@pytest.mark.parametrize("is_cached", [False, True])
def test_an_operation_without_zeros_is_an_error_after_a_join(is_cached: bool) -> None:
    def run(rank: int, negotiation: Negotiation) -> list[str]:
        def gather() -> Submission:
            return Submission("g", Signature(ALLGATHER))

        if is_cached:
            negotiation.run_round([gather()], is_closing=False)
        join = Submission(JOIN, Signature(JOIN), is_cacheable=False)
        negotiation.run_round([join] if rank == 1 else [], is_closing=False)
        ready, _ = negotiation.run_round([] if rank == 1 else [gather()], is_closing=False)
        return [each.error for each in ready]

    results, _ = on_ranks(run)
    assert results == [results[0]] * SIZE
    assert len(results[0]) == 1
    assert results[0][0].startswith("g: allgather is not supported while ranks [4] have joined.\n")


@pytest.mark.parametrize("capacity", [0, 1, 3, 64])
@pytest.mark.parametrize("seed", range(3))
def test_random_sequences(capacity: int, seed: int) -> None:
    """All ranks agree on every operation, whatever the order, the rounds and the changes of shape."""
    shared = random.Random(seed)
    lengths = [[shared.randint(1, 2) for _ in range(6)] for _ in range(40)]  # per step and name, equal on all ranks

    def run(rank: int, negotiation: Negotiation) -> list[tuple[str, int, str]]:
        own = random.Random(f"{seed} {rank}")
        waiting = [(step, index) for step in range(40) for index in range(6)]
        pending: set[int] = set()
        seen = []
        for number in itertools.count():
            assert number < MOST_ROUNDS, f"pending: {sorted(pending)}"
            new = []
            # a rank submits a random number of names, of which none is pending and each is in the order of its steps
            for _ in range(own.randint(0, 4)):
                free = {index for _, index in waiting} - pending
                if not free:
                    break
                index = own.choice(sorted(free))
                step = next(step for step, each in waiting if each == index)
                waiting.remove((step, index))
                pending.add(index)
                new.append(submission(f"name {index}", lengths[step][index]))
            for each in negotiation.run_round(new, is_closing=False)[0]:
                pending.discard(int(each.name.split()[1]))
                assert each.submission is not None
                assert each.submission.signature == each.signature
                seen.append((each.name, each.signature.layouts[0].shape[0], each.error))
            # ranks leave the loop in the same round
            if all(negotiation._exchange.all_gather_text("" if waiting or pending else "done")):
                break
        return seen

    results, _ = on_ranks(run, capacity)
    assert results == [results[0]] * SIZE
    assert [error for *_, error in results[0] if error] == []
    for index in range(6):
        expected = [lengths[step][index] for step in range(40)]
        assert [length for name, length, _ in results[0] if name == f"name {index}"] == expected


def test_an_error_leaves_the_name_usable() -> None:
    def run(rank: int, negotiation: Negotiation) -> list[str]:
        ready = []
        for lengths in ([1, 2, 1], [4, 4, 4], [4, 4, 5], [4, 4, 4]):
            new = [submission("a", lengths[rank])]
            found = negotiation.run_round(new, is_closing=False)[0]
            # another round if a name has just left the cache
            ready += found or negotiation.run_round([], is_closing=False)[0]
        return [each.error for each in ready]

    results, _ = on_ranks(run)
    assert results == [results[0]] * SIZE
    first, second, third, fourth = results[0]
    assert first.startswith("a: the tensor shapes differ: rank 1 has (1), rank 4 has (2).\n")
    assert third.startswith("a: the tensor shapes differ: rank 1 has (4), rank 6 has (5).\n")
    assert second == fourth == ""


def test_a_barrier_in_the_cache() -> None:
    def run(_: int, negotiation: Negotiation) -> list[list[str]]:
        return rounds(negotiation, *[[Submission(BARRIER, Signature(BARRIER))] for _ in range(3)])

    results, exchange = on_ranks(run)
    assert results == [[[BARRIER]] * 3] * SIZE
    assert exchange.num_texts == 1
