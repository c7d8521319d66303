"""The host cannot touch the memory of the emulated device: by load or store, or through a system call."""

from __future__ import annotations

import signal

import pytest

from tests import accelerator
from tests.launching import run_alone

pytestmark = pytest.mark.skipif(bool(accelerator.reason_to_skip()), reason=accelerator.reason_to_skip())

TENSOR = """
import ctypes, os, torch
from tests import accelerator
accelerator.register()
tensor = torch.ones(1000, device="emulated")
torch.accelerator.synchronize()
assert tensor.sum().item() == 1000
libc = ctypes.CDLL(None, use_errno=True)
"""


@pytest.mark.parametrize("access", ["ctypes.string_at(tensor.data_ptr(), 1)", "ctypes.memset(tensor.data_ptr(), 0, 1)"])
def test_an_access_by_the_host_is_a_segmentation_fault(access: str) -> None:
    outcome = run_alone(TENSOR + access)
    assert outcome.status == -signal.SIGSEGV, outcome


def test_a_system_call_fails() -> None:
    outcome = run_alone(
        TENSOR
        + """
import errno
class Vector(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]
host = ctypes.create_string_buffer(100)
vectors = Vector(ctypes.addressof(host), 100), Vector(tensor.data_ptr(), 100)
assert libc.write(os.pipe()[1], ctypes.c_void_p(tensor.data_ptr()), 100) == -1
assert ctypes.get_errno() == errno.EFAULT
assert libc.process_vm_readv(os.getpid(), ctypes.byref(vectors[0]), 1, ctypes.byref(vectors[1]), 1, 0) == -1
assert ctypes.get_errno() == errno.EFAULT
"""
    )
    assert outcome.status == 0, outcome
