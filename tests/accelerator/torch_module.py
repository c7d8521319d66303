"""`torch.emulated`: the functions that torch and its users expect of the module of a device, as of `torch.cuda`."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Event, Stream
from torch.types import Device

from tests.accelerator import hardware

__all__ = [
    "DeviceProperties", "Event", "Stream", "current_device", "current_stream", "default_stream", "device",
    "device_count", "empty_cache", "get_amp_supported_dtype", "get_device_name", "get_device_properties",
    "get_rng_state", "get_rng_state_all", "init", "initial_seed", "is_available", "is_bf16_supported",
    "is_initialized", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
    "memory_allocated", "memory_reserved", "reset_peak_memory_stats", "seed", "seed_all", "set_device",
    "set_rng_state", "set_rng_state_all", "set_stream", "stream", "synchronize",
]  # fmt: skip

_ops = torch.ops.emulated


class device:  # noqa: N801 (its name in every such module)
    """A context in which a device is the current one."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._previous = current_device()
        set_device(self._index)

    def __exit__(self, *_exception: object) -> None:
        set_device(self._previous)


class DeviceProperties(NamedTuple):
    name: str
    uuid: str
    total_memory: int
    multi_processor_count: int = 1
    major: int = 0
    minor: int = 0


def _index(device: Device = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def init() -> None: ...


def _lazy_init() -> None: ...


def _is_in_bad_fork() -> bool:
    return _ops.is_forked()


def device_count() -> int:
    return _ops.device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Device = None) -> Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.PrivateUse1.value)


def set_stream(stream: Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: Stream | None) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else stream


def get_device_properties(device: Device = None) -> DeviceProperties:
    index = _index(device)
    return DeviceProperties("Emulated device", hardware.visible_devices()[index].uuid, mem_get_info(index)[1])


def get_device_name(device: Device = None) -> str:
    return get_device_properties(device).name


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def memory_allocated(device: Device = None) -> int:
    return _ops.memory(_index(device))[0]


def max_memory_allocated(device: Device = None) -> int:
    return _ops.memory(_index(device))[2]


def memory_reserved(device: Device = None) -> int:
    return _ops.memory(_index(device))[1]


def max_memory_reserved(device: Device = None) -> int:
    return _ops.memory(_index(device))[3]


def reset_peak_memory_stats(device: Device = None) -> None:
    _ops.reset_peak_memory(_index(device))


def empty_cache() -> None:
    _ops.empty_cache()


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and the total memory in bytes."""
    total = _ops.memory_limit(_index(device))
    return max(0, total - memory_reserved(device)), total


def get_rng_state(device: Device = "emulated") -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Device = "emulated") -> None:
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def seed() -> None:
    _generator().seed()


def seed_all() -> None:
    _generator().seed()
    manual_seed_all(initial_seed())


def initial_seed() -> int:
    return _generator().initial_seed()


def _generator(device: Device = None) -> torch.Generator:
    return _ops.default_generator(_index(device))
