"""Memory of the emulated device: the host cannot touch it, and freed memory loses its contents as early as on a GPU."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.launching import Outcome

Run = Callable[..., Outcome]
ONES = """
import ctypes, errno, os
ones = torch.ones(1000, device="emulated")
synchronize()
"""


@pytest.mark.parametrize("access", ["ctypes.string_at(ones.data_ptr(), 1)", "ctypes.memset(ones.data_ptr(), 0, 1)"])
def test_an_access_by_the_host_is_a_segmentation_fault(run_on_device: Run, access: str) -> None:
    outcome = run_on_device(ONES + access)
    assert outcome.status == -signal.SIGSEGV, outcome


def test_a_system_call_on_memory_of_the_device_fails(run_on_device: Run) -> None:
    outcome = run_on_device(
        ONES
        + """
class Vector(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
host = ctypes.create_string_buffer(100)
vectors = Vector(ctypes.addressof(host), 100), Vector(ones.data_ptr(), 100)
assert libc.write(os.pipe()[1], ctypes.c_void_p(ones.data_ptr()), 100) == -1
assert ctypes.get_errno() == errno.EFAULT
assert libc.process_vm_readv(os.getpid(), ctypes.byref(vectors[0]), 1, ctypes.byref(vectors[1]), 1, 0) == -1
assert ctypes.get_errno() == errno.EFAULT
assert ones.sum().item() == 1000
"""
    )
    assert outcome.status == 0, outcome


def test_freed_memory_is_overwritten_unless_its_use_is_recorded(run_on_device: Run) -> None:
    outcome = run_on_device("""
def is_read_before_it_is_freed(seed, is_recorded):
    accelerator.configure(seed)
    source = torch.full((1000,), 7.0, device="emulated")
    address = source.data_ptr()
    synchronize()
    side = torch.Stream(device="emulated")
    with side:
        copy = source.clone()
    if is_recorded:
        source.record_stream(side)
    del source
    assert is_recorded or torch.empty(1000, device="emulated").data_ptr() == address, "not reused at once"
    with side:
        assert torch.empty(1000, device="emulated").data_ptr() != address, "reused on another stream"
    synchronize()
    assert torch.empty(1000, device="emulated").data_ptr() == address, "not reused after the recorded operations"
    return copy.eq(7).all().item()

assert all(is_read_before_it_is_freed(seed, True) for seed in SEEDS)
assert not all(is_read_before_it_is_freed(seed, False) for seed in SEEDS)
pinned = torch.full((1000,), 7.0).pin_memory()
target = torch.empty(1000, device="emulated")
target.copy_(pinned, non_blocking=True)
del pinned
assert target.eq(7).all().item(), "pinned memory was freed during a copy"
""")
    assert outcome.status == 0, outcome


def test_only_copies_of_pinned_memory_run_later(run_on_device: Run) -> None:
    outcome = run_on_device("""
def is_read_after_the_copy(seed, is_pinned):
    accelerator.configure(seed)
    host = torch.zeros(1000, pin_memory=is_pinned)
    assert host.is_pinned() == host[10:].is_pinned() == is_pinned
    host.copy_(torch.full((1000,), 7.0, device="emulated"), non_blocking=True)
    return host.eq(7).all().item()

def is_written_after_the_copy(seed, is_pinned):
    accelerator.configure(seed)
    host = torch.full((1000,), 7.0)
    host = host.pin_memory() if is_pinned else host
    target = torch.empty(1000, device="emulated")
    target.copy_(host, non_blocking=True)
    host.zero_()
    return target.eq(7).all().item()

for is_ordered in is_read_after_the_copy, is_written_after_the_copy:
    assert all(is_ordered(seed, False) for seed in SEEDS)
    orders = {is_ordered(seed, True) for seed in SEEDS}
    assert orders == {False, True}, "copies run always late, or always early"
""")
    assert outcome.status == 0, outcome


def test_the_limit_of_memory(run_on_device: Run) -> None:
    outcome = run_on_device(
        """
assert torch.emulated.mem_get_info() == (4096000, 4096000)
half = torch.empty(2048000, dtype=torch.uint8, device="emulated")
del half
torch.empty(4000000, dtype=torch.uint8, device="emulated")  # after the cached block is released
accelerator.set_memory_limit(0, 1 << 20)
try:
    torch.empty(1 << 20 | 1, dtype=torch.uint8, device="emulated")
except torch.OutOfMemoryError as error:
    print(error)
torch.empty(4000000, dtype=torch.uint8, device="emulated:1")
""",
        EMULATED_MEMORY="4096000",
    )
    assert outcome.status == 0, outcome
    expected = "emulated:0 out of memory. Tried to allocate 1048577 bytes; 0 of 1048576 bytes are allocated"
    assert outcome.stdout.strip() == expected, outcome
