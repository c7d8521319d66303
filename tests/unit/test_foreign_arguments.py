"""Arguments of other libraries are answered with those of the trainer, which all exist."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from mpicomm.training import foreign_arguments, precision
from mpicomm.training.trainer import Trainer

FUNCTIONS: dict[str, Any] = {
    "Trainer": Trainer.__init__,
    "fit": Trainer.fit,
    "evaluate": Trainer.evaluate,
    "predict": Trainer.predict,
}


def parameters(name: str) -> set[str]:
    return set(inspect.signature(FUNCTIONS[name]).parameters) - {"self"}


def answered(method: str, **given: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        FUNCTIONS[method](object(), **given)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("Trainer", {"max_epochs": 3}, "TypeError: Trainer has no argument 'max_epochs'.\nUse fit(epochs=...)."),
        ("fit", {"max_epochs": 3}, "TypeError: fit has no argument 'max_epochs'.\nUse fit(epochs=...)."),
        (
            "Trainer",
            {"accumulate_grad_batches": 2},
            "TypeError: Trainer has no argument 'accumulate_grad_batches'.\nUse Trainer(grad_accum_steps=...).",
        ),
        (
            "Trainer",
            {"precision": "bf16-mixed"},
            "ValueError: Trainer does not know precision='bf16-mixed'.\nUse precision=\"bf16\".",
        ),
        ("Trainer", {"precision": 16}, 'ValueError: Trainer does not know precision=16.\nUse precision="fp16".'),
        ("Trainer", {"batchsize": 8}, "TypeError: Trainer has no argument 'batchsize'.\nUse Trainer(batch_size=...)."),
        ("Trainer", {"epochs": 8}, "TypeError: Trainer has no argument 'epochs'.\nUse fit(epochs=...)."),
        ("evaluate", {"xyz": 1}, "TypeError: evaluate has no argument 'xyz'.\nUse one of data, metrics, shard."),
    ],
)
def test_an_argument_of_another_library_is_answered(method: str, given: dict[str, Any], message: str) -> None:
    assert answered(method, **given) == message


def test_no_name_of_the_table_is_an_argument() -> None:
    known = set().union(*map(parameters, FUNCTIONS))
    assert foreign_arguments.ARGUMENTS.keys() & known == set()


@pytest.mark.parametrize("name", foreign_arguments.ARGUMENTS)
def test_the_arguments_of_the_answers_exist(name: str) -> None:
    remedy = foreign_arguments.ARGUMENTS[name]
    for method, argument in re.findall(r"\b(Trainer|fit|evaluate|predict)\((\w+)=", remedy):
        assert argument in parameters(method)


@pytest.mark.parametrize("key", foreign_arguments.VALUES, ids=str)
def test_the_values_of_the_answers_exist(key: tuple[str, Any]) -> None:
    for name, value in re.findall(r'(\w+)="(\w+)"', foreign_arguments.VALUES[key]):
        known = {"precision": precision._DTYPES, "strategy": ("ddp", "fsdp")}[name]
        assert value in known
        assert key[1] not in known
