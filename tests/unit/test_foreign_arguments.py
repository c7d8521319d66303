"""Arguments of other libraries are answered with those of the trainer, which all exist."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from mpicomm.training import foreign_arguments, training_step
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


SIMILAR = {
    "fit(epochs=...)": ["max_epochs", "num_epochs", "n_epochs"],
    "fit(limit_batches=...)": ["limit_train_batches", "limit_val_batches"],
    "fit(train_data=...)": ["train_dataloaders", "train_dataloader", "train_dataset", "train_loader"],
    "fit(eval_data=...)": ["val_dataloaders", "val_dataloader", "val_data", "validation_data", "eval_dataset"],
    "Trainer(grad_accum_steps=...)": ["gradient_accumulation_steps"],
    "Trainer(max_grad_norm=...)": ["clip_grad_norm"],
    "Trainer(loss_fn=...)": ["loss"],
    "Trainer(scheduler=...)": ["lr_scheduler"],
    "Trainer(optimizer=...)": ["optimizers"],
    "Trainer(num_workers=...)": ["dataloader_num_workers"],
    "Trainer(log_every=...)": ["log_every_n_steps"],
    "evaluate(metrics=...)": ["metric"],
}


@pytest.mark.parametrize(("answer", "name"), [(answer, name) for answer, names in SIMILAR.items() for name in names])
def test_an_argument_with_a_similar_name_needs_no_row(answer: str, name: str) -> None:
    assert name not in foreign_arguments.REMEDIES
    assert answered("evaluate", **{name: 1}) == f"TypeError: evaluate has no argument {name!r}.\nUse {answer}."


def test_no_name_of_the_table_is_an_argument() -> None:
    known = set().union(*map(parameters, FUNCTIONS))
    assert foreign_arguments.REMEDIES.keys() & known == set()
    assert {name.partition("=")[0] for name in foreign_arguments.REMEDIES if "=" in name} <= known


@pytest.mark.parametrize("name", foreign_arguments.REMEDIES)
def test_the_arguments_of_the_answers_exist(name: str) -> None:
    remedy = foreign_arguments.REMEDIES[name]
    for method, argument in re.findall(r"\b(Trainer|fit|evaluate|predict)\((\w+)=", remedy):
        assert argument in parameters(method)


@pytest.mark.parametrize("key", [name for name in foreign_arguments.REMEDIES if "=" in name])
def test_the_values_of_the_answers_exist(key: str) -> None:
    for name, value in re.findall(r'(\w+)="(\w+)"', foreign_arguments.REMEDIES[key]):
        known = {"precision": training_step._DTYPES, "strategy": ("ddp", "fsdp")}[name]
        assert value in known
        assert key not in {f"{name}={valid!r}" for valid in known}
