"""The back end's names, made known to torch as soon as torch.distributed is there; imports neither of itself.

So `import mpicomm` is all that `torch.distributed.init_process_group("mpicomm")` needs, in whatever order a program
imports the two, and whether or not it calls `bootstrap`.
"""

from __future__ import annotations

import sys

from mpicomm.backend import versions

TYPE_CHECKING = False  # as in the package's own module
if TYPE_CHECKING:
    import importlib.machinery
    import types
    from collections.abc import Sequence
    from typing import Any

NAME = "mpicomm"
NAME_WITH_NCCL = "mpicomm_nccl"

_TORCH = "torch.distributed"
_is_registered = False
_names: list[str] = []
"""Those that are registered."""


def register() -> None:
    """Register the back end with torch under its names; calling it again does nothing.

    From torch 2.14 on the name `mpi` is registered too, where torch itself was built without MPI.
    """
    global _is_registered  # noqa: PLW0603  torch's table of names is the process's, and so is this
    # This may run in the middle of torch's own import: nothing here may need more than its distributed package.
    import torch.distributed as dist

    if _is_registered or not dist.is_available():
        return
    _is_registered = True
    creators = {NAME: _create, NAME_WITH_NCCL: _create_with_nccl} | ({"mpi": _create} if _leaves_mpi_open() else {})
    for name, create in creators.items():
        dist.Backend.register_backend(name, create, extended_api=True, devices=_devices_of_build())
        _names.append(name)


def _devices_of_build() -> list[str]:
    """Return the devices that this torch was built for. Whether there is a GPU is not asked while torch is imported."""
    from torch import version

    return ["cpu", "cuda"] if version.cuda or getattr(version, "hip", None) else ["cpu"]


def _forget_absent_gpus() -> None:
    """Let torch know that there is no GPU: a ShardedTensor gathers on any device that is registered beside the CPU."""
    import torch
    import torch.distributed as dist

    for name in () if torch.cuda.is_available() else _names:
        dist.Backend.backend_capability[name] = ["cpu"]


def _leaves_mpi_open() -> bool:
    """Tell whether torch would look up a registered back end called `mpi`; it does from 2.14 on."""
    import torch.distributed as dist

    return versions.of_torch() >= (2, 14) and not dist.is_mpi_available()


def register_when_torch_comes() -> None:
    """Register the back end now if torch.distributed is imported already, or else when it is."""
    if _TORCH in sys.modules:
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Lets `register` follow the import of torch.distributed.

    It is a MetaPathFinder by its method alone: to import that class takes longer than all the rest of this package.
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


# torch is being imported when these are registered; what makes groups needs it whole.
def _create(options: Any, _backend_options: Any) -> Any:
    from mpicomm.backend import factory

    _forget_absent_gpus()
    return factory.create(options, NAME)


def _create_with_nccl(options: Any, backend_options: Any) -> Any:
    from mpicomm.backend import factory

    _forget_absent_gpus()
    return factory.create_with_nccl(options, backend_options, NAME_WITH_NCCL)
