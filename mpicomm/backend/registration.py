"""Registers the backend with torch once torch.distributed is imported; importing this module does not import torch.

`torch.distributed.init_process_group("mpicomm")` therefore needs only `import mpicomm`, before or after torch, with or
without a call of `bootstrap`.
"""

from __future__ import annotations

import sys

from mpicomm import torch_compatibility

TYPE_CHECKING = False  # as in mpicomm/__init__.py
if TYPE_CHECKING:
    import importlib.machinery
    import types
    from collections.abc import Sequence
    from typing import Any

    from mpicomm.backend.composite import CompositeProcessGroup
    from mpicomm.backend.process_group import MPIProcessGroup

NAME = "mpicomm"
NAME_WITH_NCCL = "mpicomm_nccl"

_TORCH = "torch.distributed"
_is_registered = False
_names: list[str] = []
"""The registered names."""


def register() -> None:
    """Register the backend with torch under its names; further calls do nothing.

    From torch 2.14 on, this also registers the name `mpi`, if torch itself was built without MPI.
    """
    global _is_registered  # noqa: PLW0603  torch's table of backends is global to the process, and so is this flag
    # This may run during torch's own import: use nothing but its distributed package here.
    import torch.distributed as dist

    if _is_registered or not dist.is_available():
        return
    _is_registered = True
    creators = {NAME: _create_mpi, NAME_WITH_NCCL: _create_with_nccl}
    if _name_mpi_is_free():
        creators["mpi"] = _create_mpi
    for name, create in creators.items():
        dist.Backend.register_backend(name, create, extended_api=True, devices=_devices_of_build())
        _names.append(name)


def _devices_of_build() -> list[str]:
    """Return the device types of this torch build; it is too early to query for a GPU during the import of torch."""
    from torch import version

    return ["cpu", "cuda"] if version.cuda or getattr(version, "hip", None) else ["cpu"]


def _name_mpi_is_free() -> bool:
    """Return whether torch looks up a registered backend named `mpi`: from 2.14 on, if built without MPI."""
    import torch.distributed as dist

    return torch_compatibility.torch_version() >= (2, 14) and not dist.is_mpi_available()


def register_on_import_of_torch() -> None:
    """Register the backend now if torch.distributed is already imported, otherwise after its import."""
    if _TORCH in sys.modules:
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """An import hook that calls `register` after the import of torch.distributed.

    It does not derive from `MetaPathFinder`: importing that class takes longer than the rest of this package.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  importlib's signature
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TORCH:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: types.ModuleType) -> None:
                execute(module)
                register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


# torch calls these to create a process group. They are registered during torch's import, and the process groups need
# torch completely imported: hence the late imports.


def create(options: Any, backend_name: str) -> MPIProcessGroup:
    """Create a process group over MPI (collective over its ranks)."""
    from mpicomm.backend import groups
    from mpicomm.backend.process_group import MPIProcessGroup

    _forget_absent_gpus()
    with torch_compatibility.blame_untested_torch():
        executor = groups.make_for_torch(options, takes_gpu_tensors=MPIProcessGroup.takes_gpu_tensors)
        return MPIProcessGroup(executor, options.group_id, backend_name, options.store)


def _create_mpi(options: Any, _backend_options: Any) -> MPIProcessGroup:
    return create(options, NAME)


def _create_with_nccl(options: Any, backend_options: Any) -> CompositeProcessGroup:
    """Create a process group over MPI that uses NCCL for CUDA tensors (collective over its ranks)."""
    from mpicomm.backend import groups
    from mpicomm.backend.composite import CompositeProcessGroup, nccl_maker

    _forget_absent_gpus()
    with torch_compatibility.blame_untested_torch():
        executor = groups.make_for_torch(options, takes_gpu_tensors=CompositeProcessGroup.takes_gpu_tensors)
        make_inner = nccl_maker(backend_options)
        return CompositeProcessGroup(executor, options.group_id, NAME_WITH_NCCL, options.store, "cuda", make_inner)


def _forget_absent_gpus() -> None:
    """Remove `cuda` if there is no GPU: a ShardedTensor gathers on any device that is registered besides the CPU."""
    import torch
    import torch.distributed as dist

    for name in () if torch.cuda.is_available() else _names:
        dist.Backend.backend_capability[name] = ["cpu"]
