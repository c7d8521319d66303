"""Collective calls of the trainer that are run again after ranks have failed, in the world of the remaining ranks."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from mpicomm import agreement
from mpicomm.collective_ops import collectives
from mpicomm.errors import RankFailedError, TrainingError, raised_on_all_ranks
from mpicomm.job import recovery, session
from mpicomm.training import newest_state, randomness, state
from mpicomm.training.assembly import Assembly
from mpicomm.training.data import DataSource
from mpicomm.training.newest_state import Failure, RankState, Recovery
from mpicomm.training.preemption import Preempted
from mpicomm.training.shard_replicas import ShardReplicas
from mpicomm.watchdog import rank_failures

T = TypeVar("T")

_numbers = itertools.count()  # of the trainers of the program


class RecoveringCalls:
    """Runs the collective calls of a trainer. If ranks fail, recovers the world and runs the call again.

    A spare that joins runs the program from its start. The calls that the other ranks have completed then return their
    recorded results, so that the spare arrives at the call in which the other ranks are.
    """

    def __init__(self, parts: Assembly, replicas: ShardReplicas | None, seed: int) -> None:
        """Prepare the calls.

        Args:
            parts: The objects of the trainer, which are made again in each world.
            replicas: The copies of the shards of a sharded model, if it has any.
            seed: The seed of the run.
        """
        self.has_begun = False
        """Whether the run has started or resumed: from then on the newest state is in memory, not in a checkpoint."""

        self.first_size = session.current_world().size
        """The number of ranks at the start of the job."""

        self.last_step_at: float | None = None
        """The time at which this rank completed its last step, as of `time.time()`."""

        self.recovery: Recovery | None = None
        """The recoveries since the last step, if any."""

        self.has_lost_state = False
        """Whether a sharded model has lost its parameters, and no copies or checkpoint have restored them yet."""

        self._parts, self._replicas, self._seed = parts, replicas, seed
        self._number = next(_numbers)  # of this trainer in the program, from 0
        self._is_synchronized = False  # has the parameters that all ranks agreed on
        self._failures: list[Failure] = []  # since the last step
        self._results: list[Any] = []  # of the calls that all ranks have completed, in order
        self._started = 0  # calls of this process, of which a spare repeats those that have results

    def enter_world(self) -> None:
        """Assemble the trainer in the current world, or in the next one if ranks fail meanwhile (collective)."""
        _, failure = _attempted_by_all(self._enter_world)
        self._recover(failure)

    def run(self, call: Callable[[], T]) -> T:
        """Return the result of a collective call, which is run again after each recovery (collective)."""
        self._started += 1
        if self._started <= len(self._results):
            return cast("T", self._results[self._started - 1])
        while True:
            outcome, failure = _attempted_by_all(call)
            if failure is None:
                self._results.append(copy.deepcopy(outcome))
                return cast("T", outcome)
            self._recover(failure)

    def begin(self) -> None:
        """Note that the run has started or resumed, with a state of its own or from a checkpoint (on all ranks)."""
        self.has_begun, self.has_lost_state = True, False

    def check_state(self) -> None:
        """Check that the model has its parameters.

        Raises:
            TrainingError: On every rank, if a sharded model has lost its parameters.
        """
        if self.has_lost_state:
            raise raised_on_all_ranks(
                TrainingError(
                    "cannot continue after the failure: each rank had a part of the model, and there is no copy of the "
                    "failed rank's part.\n"
                    "Start the job again. Trainer continues from the newest checkpoint (checkpoint_dir, save_every) if "
                    "there is one, or from the copies of replicate_shards=True unless the next rank failed."
                )
            )

    def check_source(self, source: DataSource) -> None:
        """Check that the ranks of this world have all of the data.

        Raises:
            TrainingError: On every rank, if each rank has its own share of the data and there are fewer ranks than at
                the start.
        """
        size = self._parts.world.size
        if not source.is_shared and size != self.first_size:
            raise raised_on_all_ranks(
                TrainingError(
                    f"cannot continue on {size} of {self.first_size} ranks: each rank has its own share of the data, "
                    f"so the samples of the failed ranks are unknown.\n"
                    f"Start the job with spares (mpicomm run --spares), or let the ranks share the data (shard=True)."
                )
            )

    def seed_at(self, point: str, number: int) -> None:
        """Seed the generators for a point of the run, which may be repeated, or run by a spare."""
        randomness.seed_at(point, self._seed, number, self._parts.world.rank)

    def refresh_replicas(self, *, only_if_due: bool = False) -> None:
        """Refresh the copies of the shards, if the trainer has any (collective)."""
        if self._replicas is not None:
            self._replicas.refresh(self._parts, only_if_due=only_if_due)

    def count_step(self) -> None:
        """Note that this rank has completed a step."""
        self.last_step_at = time.time()
        self._failures.clear()
        self.recovery = None

    def _recover(self, failure: RankFailedError | None) -> None:
        """Enter the next world after a failure, and further ones if ranks fail meanwhile (collective)."""
        while failure is not None:
            self._failures.append(Failure(failure.ranks, failure.hosts, failure.reason, time.time()))
            recovery.recover()
            _, failure = _attempted_by_all(self._enter_world)

    def _enter_world(self) -> None:
        world = session.current_world()
        self._parts.assemble(world)
        if not self._parts.has_values and not self.has_begun:
            self.has_lost_state = True  # a failure before the run began: there are no copies of the parameters yet
        progress = (self.has_begun, *self._parts.position.progress) if self._is_synchronized else None
        has_joined = world.previous_rank is None
        held = () if self._replicas is None else self._replicas.held
        own = RankState(self._number, progress, self.last_step_at, tuple(self._failures), has_joined, held)
        newest = newest_state.find(collectives.all_gather_object(own))
        newest_state.send(newest, self._collect, self._load, world.device)
        if self._parts.is_sharded and (self.has_begun or self.has_lost_state):
            self.has_lost_state = self._replicas is None or not self._replicas.restore(
                self._parts, [rank_state.held for rank_state in newest.rank_states]
            )
            self.has_begun = self.has_begun and not self.has_lost_state
        if self._replicas is not None and not self.has_begun and not self.has_lost_state:
            self._replicas.refresh(self._parts, has_callbacks=False)
        self._is_synchronized = True
        self.recovery = newest.recovery(self._parts.position, world.size)

    def _collect(self) -> Any:
        return {
            "state": {} if self._parts.is_sharded else state.collect_replicated(self._parts),
            "has_begun": self.has_begun,
            "has_lost_state": self.has_lost_state,
            "first_size": self.first_size,
            "results": self._results,
        }

    def _load(self, content: Any) -> None:
        if not self._parts.is_sharded:
            state.load_replicated(self._parts, content["state"])
        self.has_begun, self.has_lost_state = content["has_begun"], content["has_lost_state"]
        self.first_size, self._results = content["first_size"], content["results"]


def _attempted_by_all(call: Callable[[], T]) -> tuple[T | None, RankFailedError | None]:
    """Return the result of a collective call, or the failure that has interrupted it on any rank (collective).

    A failure at the end of a call may interrupt it on some ranks only. The ranks on which it does take part in the
    agreement, too: otherwise the others would wait there for them, while they wait in `recover()`.

    Raises:
        Preempted: On every rank, if the call raises it.
    """
    comm, failures = session.current_world().comm, rank_failures.current()
    assert comm is not None
    preempted, result, failure = None, None, None
    try:
        result, failure = _attempted(call)
    except Preempted as caught:
        preempted = caught
    if not agreement.succeeded_on_all(comm, failure is None) and failure is None:
        assert failures is not None
        failures.wait_until_known()
        failure = failures.error()
    if preempted is not None and failure is None:
        raise preempted
    return result, failure


def _attempted(call: Callable[[], T]) -> tuple[T | None, RankFailedError | None]:
    """Return the result of a collective call, or the failure of ranks that has interrupted it.

    The error itself is released here: the frames of its traceback hold the wrapped model of the old world.
    """
    try:
        return call(), None
    except Exception as error:
        failure = error if isinstance(error, RankFailedError) else rank_failures.error_after(error)
        if failure is None:
            raise
    failure.__traceback__ = failure.__context__ = failure.__cause__ = None
    return None, failure
