"""Callbacks: functions of the user that the trainer calls at points of a run, with state that checkpoints contain."""

from __future__ import annotations

import collections
import contextlib
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from mpicomm.training.trainer import Trainer

C = TypeVar("C")


class Callback:
    """Base class of callbacks: override the methods that you need, and pass instances to `Trainer(callbacks=[...])`.

    The trainer calls the callbacks in the order of the list. It calls every hook except `on_exception` on all ranks, at
    the same point of the run and without a collective operation of its own, so a hook may call collective operations if
    it does so on all ranks. With `Trainer(on_failure="recover")`, a hook must not call any: after a failure the ranks
    would differ in whether they have completed it.

    An exception in a hook ends the job like any other exception. A step, an epoch or an evaluation that a resumed run
    does not repeat is not reported again. `on_fit_start`, `on_epoch_start`, `on_checkpoint` and `on_fit_end` can be
    called more than once for the same event if ranks fail or the job is killed.

    Example::

        class Progress(mpicomm.Callback):
            def on_epoch_end(self, trainer):
                if trainer.world.rank == 0:
                    print(trainer.position.history[-1])
    """

    measures_training = False
    """Whether `kept_checkpoints` are chosen by metrics of training; the default is by metrics of evaluations.

    The entry "model" of a kept checkpoint has the weights that were measured, which can differ; see `evaluating`.
    """

    def on_setup(self, trainer: Trainer) -> None:
        """Prepare for a run, before the state of a checkpoint is restored.

        Create the tensors of `state_dict` here: the trainer then restores into tensors of the same sharding.
        """

    def on_fit_start(self, trainer: Trainer) -> None:
        """The run starts, resumes, or continues after ranks have failed; its state is restored."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """The run has ended and its last checkpoint is complete; later changes of the state are not saved."""

    def on_epoch_start(self, trainer: Trainer) -> None:
        """An epoch starts; not called when a run resumes within an epoch."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """An epoch and its evaluation are complete, before its checkpoint: `trainer.position.history[-1]`."""

    def on_step_end(self, trainer: Trainer) -> None:
        """A step is complete, `trainer.position.step` of the run; `trainer.is_step_taken` is False if it is skipped."""

    def on_eval_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """An evaluation within `fit` is complete.

        Args:
            trainer: The trainer.
            metrics: `eval_loss`, `eval_samples` and those of the user, equal on all ranks.
        """

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """A checkpoint is complete on disk.

        Checkpoints are written in the background. This is called before the next one starts, or at the end of the
        run; in a resumed run, also for the checkpoint from which it resumed.

        Args:
            trainer: The trainer.
            path: The directory of the checkpoint.
        """

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """An exception, possibly `Preempted`, ends `fit` on this rank. Do not call collective operations.

        Args:
            trainer: The trainer.
            error: The exception, which is raised again.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: equal on all ranks, of objects that can be pickled, and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            state: The state.
        """

    def kept_checkpoints(self) -> Collection[str]:
        """Return the names of checkpoints that are kept in addition to the newest `keep_checkpoints`.

        They must be equal on all ranks: a save raises a `TrainingError` otherwise.
        """
        return ()

    def evaluating(self, trainer: Trainer) -> contextlib.AbstractContextManager[object]:  # noqa: ARG002
        """Return a context for evaluations and `export`, such as one that exchanges the weights of the model.

        Args:
            trainer: The trainer.
        """
        return contextlib.nullcontext()


class CallbackList:
    """The callbacks of a trainer, by name: the name of the class, with a number if there are several instances."""

    def __init__(self, callbacks: Iterable[Callback] | None = None) -> None:
        """Check and name the callbacks.

        Raises:
            TypeError: If `callbacks` is not an iterable of callbacks.
            ValueError: If the checkpoints that they keep would need different weights.
        """
        self._by_name: dict[str, Callback] = {}
        counts: collections.Counter[str] = collections.Counter()
        for callback in _checked(callbacks):
            kind = type(callback).__name__
            counts[kind] += 1
            self._by_name[kind if counts[kind] == 1 else f"{kind}-{counts[kind]}"] = callback
        self._keeping = {
            name: callback for name, callback in self._by_name.items() if _overrides(callback, "kept_checkpoints")
        }
        self._check_weights()

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._by_name.values())

    def call(self, trainer: Trainer, hook: Callable[..., None], *arguments: Any) -> None:
        """Call a hook of all callbacks, given as the method of `Callback`."""
        for callback in self:
            getattr(callback, hook.__name__)(trainer, *arguments)

    @contextlib.contextmanager
    def reporting_exceptions(self, trainer: Trainer) -> Iterator[None]:
        """Call `on_exception` of all callbacks for an exception in the block, which is raised again."""
        try:
            yield
        except BaseException as error:
            for callback in self:
                try:
                    callback.on_exception(trainer, error)
                except Exception as other:  # noqa: BLE001  the first error ends the run, and must not be replaced
                    problem = "".join(traceback.format_exception_only(other)).strip()
                    message = f"{type(callback).__name__}.on_exception failed: {problem}"
                    warnings.warn(message, RuntimeWarning, stacklevel=2)
            raise

    @contextlib.contextmanager
    def evaluating(self, trainer: Trainer) -> Iterator[None]:
        """Enter the contexts of all callbacks for an evaluation or an export."""
        with contextlib.ExitStack() as stack:
            for callback in self:
                stack.enter_context(callback.evaluating(trainer))
            yield

    @property
    def keeps_evaluated_weights(self) -> bool:
        """Whether the checkpoints that callbacks keep have the weights of evaluations instead of those of training."""
        return bool(self._exchanging) and any(not callback.measures_training for callback in self._keeping.values())

    @property
    def _exchanging(self) -> list[str]:
        return [name for name, callback in self._by_name.items() if _overrides(callback, "evaluating")]

    def _check_weights(self) -> None:
        of = {
            name: "training" if callback.measures_training else "evaluations"
            for name, callback in self._keeping.items()
        }
        if self._exchanging and len(set(of.values())) > 1:
            raise ValueError(
                f"callbacks must keep checkpoints by metrics of training only or of evaluations only, because "
                f"{self._exchanging[0]} evaluates other weights than those of training, got "
                f"{' and '.join(f'{name} ({metrics})' for name, metrics in of.items())}.\n"
                f"Monitor a metric of the same kind in each (measures_training), or omit one of these callbacks."
            )

    def kept_checkpoints(self) -> frozenset[str]:
        """Return the names of the checkpoints that callbacks keep."""
        return frozenset(name for callback in self for name in callback.kept_checkpoints())

    @property
    def keeping(self) -> list[str]:
        """The names of the callbacks that can keep checkpoints."""
        return list(self._keeping)

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of the callbacks by name; their tensors are not copies."""
        return {name: callback.state_dict() for name, callback in self._by_name.items()}

    def load(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore the states that `states` returned. A callback without a state starts anew."""
        for name in states.keys() - self._by_name.keys():
            message = f"the state of the callback {name!r} is not restored: this Trainer has no such callback."
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        for name, callback in self._by_name.items():
            if name in states:
                callback.load_state_dict(states[name])


def _overrides(callback: Callback, method: str) -> bool:
    return getattr(type(callback), method) is not getattr(Callback, method)


def _checked(callbacks: Any) -> list[Callback]:
    if callbacks is None:
        return []
    is_list = isinstance(callbacks, Iterable) and not isinstance(callbacks, (str, Mapping))
    listed = list(callbacks) if is_list else [callbacks]
    for callback in listed:
        if not is_list or not isinstance(callback, Callback):
            got = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise TypeError(
                f"callbacks must be a list of mpicomm.Callback instances, got {got}"
                f"{' in the list' if is_list else ''}.\n"
                f"Derive the class from mpicomm.Callback, and pass Trainer(callbacks=[instance])."
            )
    return listed
