"""Model weights in one file: a plain state_dict, as `torch.save(model.state_dict(), path)` writes it."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mpicomm import agreement
from mpicomm.arguments import PATH
from mpicomm.collective_ops import collectives
from mpicomm.errors import CheckpointError
from mpicomm.training import run_directory


def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    all_gather: agreement.AllGather = collectives.all_gather_object,
) -> None:
    """Load a state_dict into a model that is not sharded.

    Args:
        model: The model.
        path: The file.
        all_gather: Gathers the failures of the ranks that load the file together; by default of all ranks (collective).

    Raises:
        CheckpointError: On every rank, if a rank cannot read the file, or the file does not fit the model.
    """
    PATH.check(path, "weights")

    def failed(rank: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"rank {rank} cannot load the weights in {os.fspath(path)!r}: {why}\n"
            f"Pass a file that is visible on all hosts and was written for this model by trainer.export(path) or "
            f"torch.save(model.state_dict(), path)."
        )

    agreement.run_on_all_ranks(all_gather, lambda: _load(model, path), Exception, failed)


def _load(model: nn.Module, path: str | os.PathLike[str]) -> None:
    # mmap, so that the ranks of a host share one copy in memory; torch.load supports it only for its zip format.
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(content, Mapping):
        raise TypeError(f"expected a state_dict, got a {type(content).__name__}")
    model.load_state_dict(content)


def export(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the full state_dict of a model, which may be sharded, on rank 0 (collective).

    Raises:
        CheckpointError: On every rank, if rank 0 cannot write the file.
    """
    PATH.check(path, "path", "export")
    is_writer = dist.get_rank() == 0
    content = _whole_state(model, keeps=is_writer)

    def write() -> None:
        if is_writer:
            _save(content, Path(path))

    def failed(rank: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"rank {rank} cannot write the weights to {os.fspath(path)!r}: {why}\n"
            f"Pass a path on a disk with enough free space, in a directory to which this user can write."
        )

    agreement.run_on_all_ranks(collectives.all_gather_object, write, Exception, failed)


def _whole_state(model: nn.Module, *, keeps: bool) -> dict[str, Any]:
    """Return the state_dict with unsharded tensors on the CPU (collective).

    Args:
        model: The model.
        keeps: Whether this rank keeps the tensors; other ranks only take part in the gather, and get None values.
    """
    state = model.state_dict()  # changed in place: it carries the versions of the modules, which a copy lacks
    for name, value in list(state.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        state[name] = (whole.cpu() if isinstance(whole, torch.Tensor) else whole) if keeps else None
    return state


def _save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_directory.write_whole(path, lambda file: torch.save(content, file))
    except RuntimeError as error:
        # When a write fails, torch raises an error about its own file position; the OSError is the context of it.
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    run_directory.sync(path.parent)
