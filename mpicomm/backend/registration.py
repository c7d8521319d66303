"""Registers the backend with torch once torch.distributed is imported; importing this module does not import torch.

`torch.distributed.init_process_group("mpicomm")` therefore needs only `import mpicomm`, before or after torch, with or
without a call of `bootstrap`.
"""

from __future__ import annotations

import sys

from mpicomm import torch_compatibility
from mpicomm.devices import vendor_backends

TYPE_CHECKING = False  # as in mpicomm/__init__.py
if TYPE_CHECKING:
    import importlib.machinery
    import types
    from collections.abc import Callable, Sequence
    from typing import Any

    from mpicomm.backend.composite import CompositeProcessGroup
    from mpicomm.backend.process_group import MPIProcessGroup

NAME = "mpicomm"

_TORCH = "torch.distributed"
_names: list[str] = []
"""The registered names."""


def register() -> None:
    """Register the backend with torch under its names; further calls do nothing.

    From torch 2.14 on, this also registers the name `mpi`, if torch itself was built without MPI.
    """
    # This may run during torch's own import: use nothing but its distributed package and torch.accelerator here.
    import torch.distributed as dist

    if NAME in _names or not dist.is_available():
        return
    _register(NAME, _create_mpi)
    if torch_compatibility.torch_version() >= (2, 14) and not dist.is_mpi_available():
        _register("mpi", _create_mpi)
    for vendor in vendor_backends.known():
        register_beside(vendor)
    _set_device_types(vendor_backends.device_type())


def register_beside(vendor: str) -> str:
    """Register the backend over MPI that passes the tensors of one device type to the vendor's library.

    Args:
        vendor: The device type and the vendor's backend, such as `cuda:nccl`.

    Returns:
        The name of the registered backend, such as `mpicomm_nccl`.
    """
    device_type, _, backend = vendor.partition(":")
    name = f"{NAME}_{backend}"

    def create(options: Any, backend_options: Any) -> CompositeProcessGroup:
        from mpicomm.backend import groups  # late, as in the function `create` of this module
        from mpicomm.backend.composite import CompositeProcessGroup

        with torch_compatibility.blame_untested_torch():
            executor = groups.make_for_torch(options, takes_gpu_tensors=CompositeProcessGroup.takes_gpu_tensors)
            update_device_types()
            return CompositeProcessGroup.create(executor, options, name, device_type, backend, backend_options)

    if name not in _names:
        _register(name, create)
    return name


def _register(name: str, create: Callable[[Any, Any], Any]) -> None:
    import torch.distributed as dist

    # Not for the accelerator: torch would choose this backend as the default of a device without another one, and keep
    # it when the vendor's backend is registered.
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    _names.append(name)


def update_device_types() -> None:
    """List the accelerator as a device type of the backends if this process sees a device.

    An extension may have added the accelerator since `register`. Without a device it must not be listed: a
    ShardedTensor gathers on any device type that is listed besides the CPU. Calls the driver: MPI_Init comes before.
    """
    from mpicomm.devices import accelerator

    _set_device_types(vendor_backends.device_type() if accelerator.is_available() else None)


def _set_device_types(device_type: str | None) -> None:
    import torch.distributed as dist

    for name in _names:
        dist.Backend.backend_capability[name] = ["cpu"] if device_type is None else ["cpu", device_type]


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

    with torch_compatibility.blame_untested_torch():
        executor = groups.make_for_torch(options, takes_gpu_tensors=MPIProcessGroup.takes_gpu_tensors)
        update_device_types()
        return MPIProcessGroup(executor, options.group_id, backend_name, options.store)


def _create_mpi(options: Any, _backend_options: Any) -> MPIProcessGroup:
    return create(options, NAME)
