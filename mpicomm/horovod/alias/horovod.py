"""The module `horovod`, whose submodules have the names of `mpicomm.horovod`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

import mpicomm.horovod
from mpicomm.horovod import (
    elastic,
    functions,
    optimizer,
    process_sets,
    sync_batch_norm,
    tensor_operations,
)

__version__ = "0.28.1"  # the release of Horovod whose interface this is
__path__: list[str] = []  # a package without files: its submodules are in sys.modules

_PUBLIC = (*vars(mpicomm.horovod)["__all__"], *elastic.__all__)
_SUBMODULES: dict[str, tuple[types.ModuleType | None, Sequence[str]]] = {
    "common": (None, ()),
    "common.elastic": (elastic, ("ObjectState", "State")),
    "common.exceptions": (elastic, ("HorovodInternalError", "HostsUpdatedInterrupt")),
    "common.process_sets": (process_sets, _PUBLIC),
    "torch": (mpicomm.horovod, _PUBLIC),
    "torch.compression": (tensor_operations, ("Compression", "Compressor", "FP16Compressor", "NoneCompressor")),
    "torch.elastic": (elastic, (*elastic.__all__, "HorovodInternalError", "HostsUpdatedInterrupt")),
    "torch.elastic.sampler": (elastic, ("ElasticSampler",)),
    "torch.elastic.state": (elastic, ("ObjectState", "State", "TorchState")),
    "torch.functions": (functions, _PUBLIC),
    "torch.mpi_ops": (mpicomm.horovod, _PUBLIC),
    "torch.optimizer": (optimizer, _PUBLIC),
    "torch.sync_batch_norm": (sync_batch_norm, _PUBLIC),
}
"""The submodules, each after its package; the module that has its names, and the names that it has if they exist."""


def run(*args: Any, **kwargs: Any) -> Any:
    """Raise an error: Horovod's function starts processes itself."""
    raise NotImplementedError(
        "horovod.run starts processes itself, which mpicomm.horovod does not support.\n"
        "Start the script on all ranks: mpicomm run --horovod -n 4 SCRIPT.py"
    )


def _add(name: str, source: types.ModuleType | None, names: Sequence[str]) -> None:
    full = f"{__name__}.{name}"
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(full, None, is_package=True))
    if source is not None:
        module.__doc__ = source.__doc__
        vars(module).update({key: value for key, value in vars(source).items() if key in names})
        vars(module)["__all__"] = [key for key in names if key in vars(source)]
    sys.modules[full] = module
    package, _, last = full.rpartition(".")
    setattr(sys.modules[package], last, module)


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


for _name, (_source, _names) in _SUBMODULES.items():
    _add(_name, _source, _names)
sys.meta_path.insert(0, _MissingSubmodule)
