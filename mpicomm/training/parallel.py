"""How the model is spread over the ranks: whole on each (DDP), or in parts (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mpicomm import arguments
from mpicomm.training.hooks import bf16_compression_hook

STRATEGIES = ("ddp", "fsdp")
HOOKS = ("bf16", "fp16", "powersgd")


class DDPModel:
    """The whole model on every rank; gradients are averaged while the backward pass runs."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        grad_compression: str | None,
        *,
        find_unused_parameters: bool,
        is_compiled: bool,
    ) -> None:
        self.inner = model.to(device)
        devices = [device.index] if device.type == "cuda" else None
        self._ddp = DistributedDataParallel(
            self.inner, device_ids=devices, find_unused_parameters=find_unused_parameters, gradient_as_bucket_view=True
        )
        # What is compiled is DDP itself: its compiler leaves gaps between the buckets, where they are sent.
        self.model: Any = torch.compile(self._ddp) if is_compiled else self._ddp
        self._alone: Any = torch.compile(self.inner) if is_compiled else self.inner
        self._hook = grad_compression
        self.hook_state: Any = None
        """What the communication hook remembers from step to step."""

        if grad_compression == "powersgd":
            self.hook_state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Any]:
        """Use the model as it is for evaluation: without what keeps it alike on all ranks."""
        with _evaluating(self.inner):
            yield self._alone

    @contextlib.contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """Run a backward pass that another one of the same step follows."""
        with self._ddp.no_sync():
            yield

    def begin_step(self) -> None:
        """Do nothing: DDP itself gives all ranks the buffers of rank 0."""

    def check_backward(self) -> None:
        """Do nothing: DDP hooks into the parameters, whatever the model returns."""

    def warm_up(self, run: Callable[[nn.Module], torch.Tensor]) -> None:
        """Bring DDP into the state in which it stays, by a pass that is thrown away (collective).

        DDP puts the gradients into buckets anew after its first backward pass. Sums of other buckets may be rounded
        otherwise, so the first step of a resumed run would not have the bits that it had in the run before.
        """
        run(self.model).backward()
        self._ddp.zero_grad(set_to_none=True)
        if self._hook is not None:
            self._register_hook()

    def _register_hook(self) -> None:
        hooks: dict[str | None, tuple[Any, Callable[..., Any]]] = {
            "bf16": (None, bf16_compression_hook),
            "fp16": (None, default_hooks.fp16_compress_hook),
            "powersgd": (self.hook_state, powerSGD_hook.powerSGD_hook),
        }
        state, hook = hooks[self._hook]
        self._ddp.register_comm_hook(state, hook)


class FSDPModel:
    """Every rank holds its part of each parameter, and gets the rest for as long as it computes with it."""

    def __init__(self, model: nn.Module, device: torch.device, low: torch.dtype | None, *, is_compiled: bool) -> None:
        self.inner = model.to(device)
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)  # as DDP does: ranks may have begun with other numbers
        share_buffers(model)
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low is not None else None)
        mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
        layers = _layers(model)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        if is_compiled:
            for part in layers or [model]:  # between two of them parameters are gathered, which is not compiled
                part.forward = torch.compile(part.forward)
        self.model: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.hook_state: Any = None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Any]:
        """Use the model as it is for evaluation: all ranks call it equally often."""
        with _evaluating(self.model):
            try:
                yield self.model
            finally:
                self.model.reshard()  # otherwise what was gathered last stays until the next pass

    @contextlib.contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """Run a backward pass that another one of the same step follows."""
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def begin_step(self) -> None:
        """Give all ranks the buffers of rank 0, as DDP does (collective)."""
        share_buffers(self.inner)

    def check_backward(self) -> None:
        """Refuse a model whose backward pass FSDP has not seen. It hooks into the tensors in the model's outputs.

        Raises:
            TypeError: If it found none there; the parameters are then still whole, with gradients of this rank alone.
        """
        if not all(isinstance(each, DTensor) for each in self.inner.parameters()):
            raise TypeError(
                "FSDP found no tensor in the model's outputs, and could not reduce the gradients.\n"
                "Return a tensor from forward(), or a tuple, list or dict of tensors, not an object of another class."
            )

    def warm_up(self, run: Callable[[nn.Module], torch.Tensor]) -> None:
        """Do nothing: what FSDP does in a step does not depend on those before."""


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    strategy: str,
    grad_compression: str | None,
    low: torch.dtype | None,
    sync_batchnorm: bool,
    find_unused_parameters: bool,
    is_compiled: bool,
) -> DDPModel | FSDPModel:
    """Spread a model over the ranks, and let the optimizer know its parameters (collective).

    Args:
        low: The dtype in which FSDP computes; None for that of the parameters.

    Raises:
        ValueError: If batch normalization is to be synchronized where it cannot be.
    """
    if sync_batchnorm and device.type == "cpu":
        raise ValueError("torch's synchronized batch normalization needs GPUs.\nLeave sync_batchnorm out on CPUs.")
    names = {parameter: name for name, parameter in model.named_parameters()}
    if sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if strategy == "ddp":
        return DDPModel(
            model, device, grad_compression, find_unused_parameters=find_unused_parameters, is_compiled=is_compiled
        )
    spread_out = FSDPModel(model, device, low, is_compiled=is_compiled)
    here = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [here[names[each]] for each in group["params"]]
    return spread_out


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def share_buffers(model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, which have seen its samples only (collective)."""
    for buffer in model.buffers():
        dist.broadcast(buffer.detach(), src=0)


def check_arguments(strategy: str, grad_compression: str | None) -> None:
    """Check the strategy and the gradient compression.

    Raises:
        TypeError: If one is not a str.
        ValueError: If a name is unknown, or grad_compression is passed with strategy='fsdp'.
    """
    arguments.one_of(*STRATEGIES).check(strategy, "strategy")
    arguments.one_of(*HOOKS).or_none().check(grad_compression, "grad_compression")
    if grad_compression is not None and strategy != "ddp":
        raise ValueError(
            f"grad_compression={grad_compression!r} is for strategy='ddp'.\n"
            f"With 'fsdp', precision='bfloat16' halves the bytes."
        )


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules in the model's outermost lists, which are its repeated layers; each is gathered by itself."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            found += [layer for layer in child if any(True for _ in layer.parameters())]
        else:
            found += _layers(child)
    return found
