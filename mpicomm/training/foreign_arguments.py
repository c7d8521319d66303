"""Arguments that users know from Lightning, accelerate, Hugging Face and Keras: errors that name the one of `Trainer`.

No such name is accepted in place of another one: a script has one spelling.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LAUNCH = "Start the job with mpicomm run -n 4 script.py: there is one rank per process that the launcher starts"
_DEVICE = "Use mpicomm.bootstrap(device=...)"

ARGUMENTS = {
    # -- length of the run
    "max_epochs": "Use fit(epochs=...)",
    "num_epochs": "Use fit(epochs=...)",
    "num_train_epochs": "Use fit(epochs=...)",
    "n_epochs": "Use fit(epochs=...)",
    "fast_dev_run": "Use fit(limit_batches=...)",
    "limit_train_batches": "Use fit(limit_batches=...)",
    "limit_val_batches": "Use fit(limit_batches=...)",
    "val_check_interval": "Use fit(eval_every=...), in steps",
    "eval_steps": "Use fit(eval_every=...)",
    # -- batches and the step
    "accumulate_grad_batches": "Use Trainer(grad_accum_steps=...)",
    "gradient_accumulation_steps": "Use Trainer(grad_accum_steps=...)",
    "per_device_train_batch_size": "Use Trainer(batch_size=...), the batch size of each rank",
    "train_batch_size": "Use Trainer(batch_size=...), the batch size of each rank",
    "gradient_clip_val": "Use Trainer(max_grad_norm=...)",
    "gradient_clip_algorithm": "Use Trainer(max_grad_norm=...), which clips the norm of all gradients",
    "clip_grad_norm": "Use Trainer(max_grad_norm=...)",
    "clipnorm": "Use Trainer(max_grad_norm=...)",
    "loss": "Use Trainer(loss_fn=...)",
    "criterion": "Use Trainer(loss_fn=...)",
    "lr_scheduler": "Use Trainer(scheduler=...)",
    "optimizers": "Use Trainer(optimizer=...)",
    # -- precision and compilation
    "mixed_precision": 'Use Trainer(precision="bf16"), or "fp16"',
    "bf16": 'Use Trainer(precision="bf16")',
    "fp16": 'Use Trainer(precision="fp16")',
    "amp": 'Use Trainer(precision="bf16"), or "fp16"',
    "torch_compile": "Use Trainer(compile_model=True)",
    # -- processes and devices
    "devices": _LAUNCH,
    "num_nodes": _LAUNCH,
    "num_processes": _LAUNCH,
    "gpus": _LAUNCH,
    "accelerator": _DEVICE,
    "device": _DEVICE,
    "cpu": _DEVICE,
    "use_cpu": _DEVICE,
    "fsdp": 'Use Trainer(strategy="fsdp")',
    "ddp_find_unused_parameters": "Use Trainer(find_unused_parameters=True)",
    # -- data
    "train_dataloaders": "Use fit(train_data=...)",
    "train_dataloader": "Use fit(train_data=...)",
    "train_dataset": "Use fit(train_data=...)",
    "train_loader": "Use fit(train_data=...)",
    "val_dataloaders": "Use fit(eval_data=...)",
    "val_dataloader": "Use fit(eval_data=...)",
    "val_data": "Use fit(eval_data=...)",
    "validation_data": "Use fit(eval_data=...)",
    "eval_dataset": "Use fit(eval_data=...)",
    "test_dataloaders": "Use evaluate(data=...)",
    "dataloaders": "Use evaluate(data=...) or predict(data=...)",
    "compute_metrics": "Use fit(metrics={name: function})",
    "dataloader_num_workers": "Use Trainer(num_workers=...)",
    # -- checkpoints and reports
    "default_root_dir": "Use Trainer(checkpoint_dir=...)",
    "output_dir": "Use Trainer(checkpoint_dir=...)",
    "ckpt_path": "Use Trainer(checkpoint_dir=...): fit() resumes from its newest checkpoint",
    "resume_from_checkpoint": "Use Trainer(checkpoint_dir=...): fit() resumes from its newest checkpoint",
    "enable_checkpointing": "Use Trainer(checkpoint_dir=...); None disables checkpoints",
    "save_steps": "Use Trainer(save_every=...)",
    "save_total_limit": "Use Trainer(keep_checkpoints=...)",
    "log_every_n_steps": "Use Trainer(log_every=...)",
    "logging_steps": "Use Trainer(log_every=...)",
    "loggers": "Use Trainer(logger=...), which takes a list too",
    "log_with": "Use Trainer(logger=...)",
    "report_to": "Use Trainer(logger=...)",
    "enable_progress_bar": 'Use Trainer(progress="bar"), or "none"',
    "disable_tqdm": 'Use Trainer(progress="none")',
    "verbose": 'Use Trainer(progress="lines"), or "none"',
    "profiler": "Use Trainer(profile=range(10, 13)) for the steps 10, 11 and 12",
    # -- reproducibility and checks
    "benchmark": "Set torch.backends.cudnn.benchmark",
    "detect_anomaly": "Use torch.autograd.set_detect_anomaly(True)",
    "use_distributed_sampler": "Pass the dataset or a DataLoader to fit(train_data=...): the ranks share its samples",
}
"""The remedy for each argument of another library."""

VALUES: dict[tuple[str, Any], str] = {
    ("precision", "bf16-mixed"): 'precision="bf16"',
    ("precision", "bf16-true"): 'precision="bf16"',
    ("precision", "16-mixed"): 'precision="fp16"',
    ("precision", "16-true"): 'precision="fp16"',
    ("precision", "16"): 'precision="fp16"',
    ("precision", 16): 'precision="fp16"',
    ("precision", "32-true"): 'precision="float32"',
    ("precision", "32"): 'precision="float32"',
    ("precision", "fp32"): 'precision="float32"',
    ("precision", "no"): 'precision="float32"',
    ("precision", 32): 'precision="float32"',
    ("strategy", "auto"): 'strategy="ddp"',
    ("strategy", "fsdp2"): 'strategy="fsdp"',
    ("strategy", "ddp_find_unused_parameters_true"): 'strategy="ddp" and find_unused_parameters=True',
}
"""The replacement for each value of another library, by argument."""


_known: dict[str, list[str]] = {}
"""The arguments of each decorated method."""


def explained(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that answers unknown arguments of a method with the right ones.

    Args:
        what: The name of the method in messages.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = _known[what] = list(inspect.signature(function).parameters)[1:]  # without self

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name, value in kwargs.items():
                if name not in known:
                    _raise_unknown(what, name)
                if isinstance(value, (str, int)) and (name, value) in VALUES:
                    raise ValueError(f"{what} does not know {name}={value!r}.\nUse {VALUES[name, value]}.")
            return function(*args, **kwargs)

        return checked

    return decorate


def _raise_unknown(what: str, name: str) -> NoReturn:
    known = _known[what]
    similar = difflib.get_close_matches(name, known, 1)
    others = [f"{method}({name}=...)" for method, names in _known.items() if name in names]
    if name in ARGUMENTS:
        remedy = ARGUMENTS[name]
    elif others:
        remedy = f"Use {' or '.join(others)}"
    elif similar:
        remedy = f"Use {what}({similar[0]}=...)"
    else:
        remedy = f"Use one of {', '.join(known)}"
    raise TypeError(f"{what} has no argument {name!r}.\n{remedy}.")
