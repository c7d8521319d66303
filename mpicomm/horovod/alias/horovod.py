"""The module `horovod`, whose submodules are those of `mpicomm.horovod`."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import mpicomm.horovod as torch
from mpicomm.horovod import (
    compression,
    elastic,
    elastic_sampler,
    exceptions,
    functions,
    optimizer,
    process_sets,
    sync_batch_norm,
)

__version__ = "0.28.1"  # the release of Horovod whose interface this is
__path__: list[str] = []  # a package without files: its submodules are in sys.modules

common = types.ModuleType("horovod.common", "Horovod's package of the parts that do not depend on PyTorch.")

_SUBMODULES: dict[str, types.ModuleType] = {
    "torch": torch,
    "torch.mpi_ops": torch,
    "torch.compression": compression,
    "torch.functions": functions,
    "torch.optimizer": optimizer,
    "torch.sync_batch_norm": sync_batch_norm,
    "torch.elastic": elastic,
    "torch.elastic.state": elastic,
    "torch.elastic.sampler": elastic_sampler,
    "common": common,
    "common.elastic": elastic,
    "common.exceptions": exceptions,
    "common.process_sets": process_sets,
}


def run(*args: Any, **kwargs: Any) -> Any:
    """Raise an error: Horovod's function starts processes itself."""
    raise NotImplementedError(
        "horovod.run starts processes itself, which mpicomm.horovod does not support.\n"
        "Start the script on all ranks: mpicomm run --horovod -n 4 SCRIPT.py"
    )


class _MissingSubmodule:
    """Explains why a submodule is missing: the others are in `sys.modules`, where Python looks first."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Raise an error if a submodule of `horovod` is requested; see `importlib.abc.MetaPathFinder`."""
        if not name.startswith(f"{__name__}."):
            return None
        raise ModuleNotFoundError(
            f"mpicomm.horovod has no {name}: it supports horovod.torch only.\nUse Horovod itself for other frameworks.",
            name=name,
        )


for _name, _module in _SUBMODULES.items():
    sys.modules[f"{__name__}.{_name}"] = _module
for _name in ("elastic", "exceptions", "process_sets"):
    setattr(common, _name, _SUBMODULES[f"common.{_name}"])
sys.meta_path.insert(0, _MissingSubmodule)  # type: ignore[arg-type]  # a class with the static method of a finder
