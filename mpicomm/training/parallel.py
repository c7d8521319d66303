"""Parallel strategies: replicated (DDP) or sharded (FSDP2) models, and the compression of gradients.

This module must not use `from __future__ import annotations`: DDP compares the annotations of a hook with types.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mpicomm import arguments
from mpicomm.devices import accelerator
from mpicomm.watchdog import rank_failures

STRATEGIES = ("ddp", "fsdp")
HOOKS = ("bf16", "fp16", "powersgd")


@dataclasses.dataclass(frozen=True)
class ParallelOptions:
    """Arguments of `Trainer` on how the ranks share the model.

    Raises:
        TypeError: If strategy or grad_compression is not a str.
        ValueError: If one of these names is unknown, or grad_compression is passed with strategy='fsdp'.
    """

    strategy: str
    grad_compression: str | None
    sync_batchnorm: bool
    find_unused_parameters: bool
    compile_model: bool

    def __post_init__(self) -> None:
        arguments.one_of(*STRATEGIES).check(self.strategy, "strategy")
        arguments.one_of(*HOOKS).or_none().check(self.grad_compression, "grad_compression")
        if self.grad_compression is not None and self.strategy != "ddp":
            raise ValueError(
                f"grad_compression={self.grad_compression!r} requires strategy='ddp', got strategy={self.strategy!r}.\n"
                f"Omit grad_compression; with 'fsdp', precision='bfloat16' halves the bytes of the parameters sent."
            )


class DDPModel:
    """The model replicated on every rank with DistributedDataParallel, which overlaps all-reduce and backward pass."""

    broadcasts_buffers = True
    """Whether a forward pass broadcasts the buffers of rank 0."""

    def __init__(
        self, model: nn.Module, device: torch.device, options: ParallelOptions, *, synchronizes: bool = True
    ) -> None:
        self.inner = _moved(model, device)
        self._ddp = DistributedDataParallel(
            self.inner,
            device_ids=None if device.type == "cpu" else [device.index],
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=True,
            init_sync=synchronizes,
        )
        # Compile the DDP module, not the model: torch then breaks graphs between buckets, where DDP sends gradients.
        self.model: Any = torch.compile(self._ddp) if options.compile_model else self._ddp
        self._alone: Any = torch.compile(self.inner) if options.compile_model else self.inner
        self._hook = options.grad_compression
        self.hook_state: Any = None
        """The state that the communication hook keeps from step to step."""
        if self._hook == "powersgd":
            self.hook_state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Any]:
        """Yield the model in evaluation mode. It runs without DDP, so ranks may call it a different number of times."""
        with _evaluating(self.inner):
            yield self._alone

    def unsynchronized(self) -> contextlib.AbstractContextManager[None]:
        """Disable gradient synchronization in the block, for all but the last backward pass of a step."""
        return self._ddp.no_sync()

    def check_backward(self) -> None:
        """Do nothing: DDP hooks into the parameters, so it works with any outputs of the model."""

    def warm_up(self, run: Callable[[nn.Module], torch.Tensor]) -> None:
        """Run one forward and backward pass and discard its gradients, then register the hook (collective).

        DDP rebuilds its gradient buckets after the first backward pass. Sums over other buckets may be rounded
        differently, so without this pass the first step of a resumed run would not be bit-identical to the same step of
        an uninterrupted run.
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
    """The model sharded with FSDP2: each rank stores a shard of each parameter, and gathers it for computing."""

    broadcasts_buffers = False

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        options: ParallelOptions,
        compute_dtype: torch.dtype | None,
        *,
        synchronizes: bool = True,
    ) -> None:
        self.inner = _moved(model, device)
        if synchronizes:
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), src=0)  # as DDP does: the ranks' initial parameters may differ
            share_buffers(model)
        reduce_dtype = None if compute_dtype is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
        mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
        layers = _layers(model)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        if options.compile_model:
            for part in layers or [model]:  # layer by layer: the all-gather between two layers cannot be compiled
                part.forward = torch.compile(part.forward)
        self.model: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.hook_state: Any = None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Any]:
        """Yield the model in evaluation mode. All ranks must call it the same number of times."""
        with _evaluating(self.model):
            try:
                yield self.model
            finally:
                self.model.reshard()  # otherwise the last gathered parameters stay allocated until the next pass

    @contextlib.contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """Disable gradient synchronization in the block, for all but the last backward pass of a step."""
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def check_backward(self) -> None:
        """Check that FSDP reduced the gradients. It hooks into the tensors in the model's outputs.

        Raises:
            TypeError: If FSDP found no tensor in the outputs. The parameters are then still unsharded, with the
                gradients of this rank only.
        """
        if not all(isinstance(parameter, DTensor) for parameter in self.inner.parameters()):
            raise TypeError(
                "FSDP found no tensor in the model's outputs and therefore cannot reduce the gradients.\n"
                "Return a tensor from forward(), or a tuple, list or dict of tensors, not an object of another class."
            )

    def warm_up(self, run: Callable[[nn.Module], torch.Tensor]) -> None:
        """Do nothing: an FSDP step does not depend on earlier steps."""


def names_in(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the names of the optimizer's parameters in the model, by parameter group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    device: torch.device,
    options: ParallelOptions,
    compute_dtype: torch.dtype | None,
    *,
    synchronizes: bool = True,
) -> DDPModel | FSDPModel:
    """Replicate or shard a model, and replace the optimizer's parameters by the sharded ones.

    Args:
        names: The names of the optimizer's parameters, from `names_in`.
        compute_dtype: The dtype in which FSDP computes; None for the dtype of the parameters.
        synchronizes: Broadcast the parameters and buffers of rank 0 (collective).

    Raises:
        ValueError: If sync_batchnorm is set on CPUs.
    """
    if options.sync_batchnorm and device.type == "cpu":
        raise ValueError(
            "sync_batchnorm=True requires GPUs (torch.nn.SyncBatchNorm does not support CPUs), got the device cpu.\n"
            "Omit sync_batchnorm on CPUs."
        )
    if options.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if options.strategy == "ddp":
        return DDPModel(model, device, options, synchronizes=synchronizes)
    sharded = FSDPModel(model, device, options, compute_dtype, synchronizes=synchronizes)
    # FSDP replaces the parameters of the model; the optimizer gets the new ones, matched by name.
    parameters = dict(model.named_parameters())
    for group, names_of_group in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [parameters[name] for name in names_of_group]
    return sharded


class ModelTemplate:
    """The model as the user passed it, from which it can be wrapped again.

    DDP leaves the model unchanged, so the template is the model itself. FSDP replaces its parameters and cannot be
    undone, so the template is a copy without the content of the parameters.
    """

    def __init__(self, model: nn.Module, *, copies: bool) -> None:
        self._model: nn.Module | None = model
        self._copy = _copied(model, lambda parameter: torch.empty_like(parameter, device="meta")) if copies else None

    @property
    def has_values(self) -> bool:
        """Whether the parameters of the next model from `make` have values."""
        return self._model is not None

    def make(self, device: torch.device) -> nn.Module:
        """Return the model; with FSDP, later calls return a copy whose parameters have undefined values."""
        if self._model is None:
            assert self._copy is not None
            return _copied(self._copy, lambda parameter: torch.empty_like(parameter, device=device))
        model = self._model
        if self._copy is not None:
            self._model = None
        return model


def _copied(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of a model in which `change` makes the content of the parameters."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(change(parameter.detach()), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model after moving it to a device, where its parameters are the same objects as before.

    The optimizer refers to these objects, and so do layers with tied weights. `Module.to` keeps them, except on the
    devices of extensions of torch: it replaces the parameters unless it may swap their content.
    """
    probe = nn.ParameterList([torch.empty(0)])
    parameter = probe[0]
    if probe.to(device)[0] is parameter:
        return model.to(device)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor; another tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Broadcast the buffers of rank 0, whose statistics cover only its own samples (collective).

    If a rank fails meanwhile, they keep their values.
    """
    buffers = list(model.buffers())
    received = [buffer.clone() for buffer in buffers]
    for tensor in received:
        dist.broadcast(tensor, src=0)
    complete_operations()
    for buffer, tensor in zip(buffers, received, strict=True):
        buffer.copy_(tensor)


def complete_operations() -> None:
    """If ranks may fail, wait until the device has run all operations: those of an aborted group end without an error.

    Raises:
        RankFailedError: If a rank has failed.
    """
    if rank_failures.current() is not None:
        accelerator.wait_for_work()
        rank_failures.raise_if_failed(None)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model: the modules in its outermost lists. FSDP gathers each one separately."""
    layers: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            layers += [layer for layer in child if any(True for _ in layer.parameters())]
        else:
            layers += _layers(child)
    return layers


# -- compression of gradients ------------------------------------------------------------------------------------------


_STATE = arguments.instance(
    "a torch ProcessGroup", dist.ProcessGroup, remedy="Call model.register_comm_hook(None, bf16_compression_hook)."
).or_none()
_BUCKET = arguments.instance(
    "a torch.distributed.GradBucket",
    dist.GradBucket,
    remedy="Let DDP call the hook: model.register_comm_hook(None, bf16_compression_hook).",
)


def bf16_compression_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in bfloat16, which halves the bytes of float32 and keeps its range.

    For `DistributedDataParallel.register_comm_hook`, on any device (collective over the group). It replaces torch's
    `bf16_compress_hook`. It has another name, because DDP rejects every hook of that name where NCCL is not available.

    torch's hook divides before it sums, so that fp16 does not overflow, and rounds the quotients. bfloat16 cannot
    overflow where float32 does not, so this hook leaves the average to the backend. The mpicomm backend sums and
    divides in float32 and rounds once. Each gradient is therefore rounded twice: at compression and at the average.

    Args:
        state: The process group to average over; None for all ranks.
        bucket: The gradients of one DDP bucket, a 1-D buffer.

    Returns:
        A future of the bucket's buffer, which then contains the averages in the dtype of the bucket.

    Raises:
        TypeError: If an argument is of another type.
    """
    _STATE.check(state, "state", "bf16_compression_hook")
    _BUCKET.check(bucket, "bucket", "bf16_compression_hook")
    gradients = bucket.buffer()
    compressed = gradients.to(torch.bfloat16)
    work = dist.all_reduce(compressed, op=dist.ReduceOp.AVG, group=state, async_op=True)

    def decompress(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return gradients.copy_(reduced.value()[0])

    return work.get_future().then(decompress)
