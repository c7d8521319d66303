"""The GPUs that `mpicomm run` counts without torch. Needs a GPU: the kernel has no files of an emulated one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpicomm.devices import accelerator, counting, vendors
from mpicomm.launch import visible_devices

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

_COUNT = "import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)"


@pytest.mark.parametrize("value", [None, "", "-1", "0", "0,0", "99", "0,99,1", "1,0"])
def test_the_number_of_gpus_is_that_of_torch(value: str | None) -> None:
    variables = vendors.vendor().visible_variables
    if not variables or not accelerator.is_available():
        pytest.skip("needs a GPU")
    environ = {name: text for name, text in os.environ.items() if name not in visible_devices.NAMES}
    if value is not None:
        environ[variables[0]] = value
    process = subprocess.run(
        [sys.executable, "-c", _COUNT], env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    assert counting.count(environ).count == int(process.stdout)
