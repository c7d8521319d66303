"""The order of operations on GPU tensors between the streams of the program and of the engine's thread."""

from __future__ import annotations

from collections.abc import Iterable

import torch

Events = list[tuple[torch.device, torch.cuda.Event]]


def record(tensors: Iterable[torch.Tensor]) -> Events:
    """Return an event in the current stream of each GPU that holds one of the tensors."""
    devices = {each.device for each in tensors if each.is_cuda}
    return [(device, torch.cuda.current_stream(device).record_event()) for device in devices]


def wait(events: Events) -> None:
    """Let the current streams wait for events; the calling thread does not wait."""
    for device, event in events:
        torch.cuda.current_stream(device).wait_event(event)


def use_in_current_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Tell torch's allocator that the current stream uses tensors that another stream may have allocated."""
    for each in tensors:
        if each.is_cuda:
            each.record_stream(torch.cuda.current_stream(each.device))
