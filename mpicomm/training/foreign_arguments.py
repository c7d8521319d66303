"""Arguments that users know from Lightning, accelerate, Hugging Face and Keras: errors that name the one of `Trainer`.

difflib finds the argument if its name is similar; a table has the others, and values of other libraries. No such name
is accepted in place of another one: a script has one spelling.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LAUNCH = "Start the job with mpicomm run -n 4 script.py: there is one rank per process that the launcher starts"
_DEVICE = "Use mpicomm.bootstrap(device=...)"

REMEDIES = {
    # -- length of the run
    "num_train_epochs": "Use fit(epochs=...)",
    "fast_dev_run": "Use fit(limit_batches=...)",
    "val_check_interval": "Use fit(eval_every=...), in steps",
    "eval_steps": "Use fit(eval_every=...)",
    # -- batches and the step
    "accumulate_grad_batches": "Use Trainer(grad_accum_steps=...)",
    "per_device_train_batch_size": "Use Trainer(batch_size=...), the batch size of each rank",
    "train_batch_size": "Use Trainer(batch_size=...), the batch size of each rank",
    "gradient_clip_val": "Use Trainer(max_grad_norm=...)",
    "gradient_clip_algorithm": "Use Trainer(max_grad_norm=...), which clips the norm of all gradients",
    "clipnorm": "Use Trainer(max_grad_norm=...)",
    "criterion": "Use Trainer(loss_fn=...)",
    # -- precision and compilation
    "mixed_precision": 'Use Trainer(precision="bf16"), or "fp16"',
    "bf16": 'Use Trainer(precision="bf16")',
    "fp16": 'Use Trainer(precision="fp16")',
    "amp": 'Use Trainer(precision="bf16"), or "fp16"',
    "torch_compile": "Use Trainer(compile_model=True)",
    # -- processes and devices
    **dict.fromkeys(("devices", "num_nodes", "num_processes", "gpus"), _LAUNCH),
    **dict.fromkeys(("accelerator", "device", "cpu", "use_cpu"), _DEVICE),
    "fsdp": 'Use Trainer(strategy="fsdp")',
    "ddp_find_unused_parameters": "Use Trainer(find_unused_parameters=True)",
    # -- data
    "test_dataloaders": "Use evaluate(data=...)",
    "dataloaders": "Use evaluate(data=...) or predict(data=...)",
    "compute_metrics": "Use fit(metrics={name: function})",
    # -- checkpoints and reports
    "default_root_dir": "Use Trainer(checkpoint_dir=...)",
    "output_dir": "Use Trainer(checkpoint_dir=...)",
    "ckpt_path": "Use Trainer(checkpoint_dir=...): fit() resumes from its newest checkpoint",
    "resume_from_checkpoint": "Use Trainer(checkpoint_dir=...): fit() resumes from its newest checkpoint",
    "enable_checkpointing": "Use Trainer(checkpoint_dir=...); None disables checkpoints",
    "save_steps": "Use Trainer(save_every=...)",
    "save_total_limit": "Use Trainer(keep_checkpoints=...)",
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
    # -- values
    **{f"precision={value!r}": 'Use precision="bf16"' for value in ("bf16-mixed", "bf16-true")},
    **{f"precision={value!r}": 'Use precision="fp16"' for value in ("16-mixed", "16-true", "16", 16)},
    **{f"precision={value!r}": 'Use precision="float32"' for value in ("32-true", "32", "fp32", "no", 32)},
    "strategy='auto'": 'Use strategy="ddp"',
    "strategy='fsdp2'": 'Use strategy="fsdp"',
    "strategy='ddp_find_unused_parameters_true'": 'Use strategy="ddp" and find_unused_parameters=True',
}
"""The remedy for an argument of another library, or for one of its values, if no argument here has a similar name."""

_known: dict[str, list[str]] = {}
"""The arguments of each decorated method."""


def suggest_arguments(method: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that answers unknown arguments of a method with the right ones.

    Args:
        method: Its name in messages.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = _known[method] = list(inspect.signature(function).parameters)[1:]  # without self

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name, value in kwargs.items():
                if name not in known:
                    raise TypeError(f"{method} has no argument {name!r}.\n{_remedy(method, name)}.")
                if isinstance(value, (str, int)) and (remedy := REMEDIES.get(f"{name}={value!r}")):
                    raise ValueError(f"{method} does not know {name}={value!r}.\n{remedy}.")
            return function(*args, **kwargs)

        return checked

    return decorate


def _remedy(method: str, name: str) -> str:
    if name in REMEDIES:
        return REMEDIES[name]
    similar = difflib.get_close_matches(name, [known for names in _known.values() for known in names], 1)
    if not similar:
        return f"Use one of {', '.join(_known[method])}"
    owners = [owner for owner, names in _known.items() if similar[0] in names]
    if method in owners:
        owners = [method]
    return f"Use {' or '.join(f'{owner}({similar[0]}=...)' for owner in owners)}"
