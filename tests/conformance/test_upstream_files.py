"""`python -m tests.conformance.upstream_files` runs every kind of PyTorch's test cases on ranks, with both backends."""

from __future__ import annotations

from pathlib import Path

from tests.launching import run_alone

_FILE = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import DistributedTestBase, MultiThreadedTestCase, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import TestCase

class OfProcesses(DistributedTestBase):
    world_size = 2

    @property
    def device(self):
        return torch.device("cuda")

    @skip_if_lt_x_gpu(2)
    def test_sum(self):
        group = self.create_pg(self.device.type)
        assert type(group) is dist.ProcessGroup or dist.get_backend() == "mpicomm"
        total = torch.ones(3, device=self.device) * (self.rank + 1)
        dist.all_reduce(total)
        self.assertEqual(total, torch.full((3,), 3.0))

    def test_only_gloo(self):
        self.create_pg("cpu")
        self.assertEqual(dist.get_backend(), "gloo")

    def test_neither(self):
        self.create_pg("cpu")
        self.assertEqual(dist.get_world_size(), 3)

class OfThreads(MultiThreadedTestCase):
    world_size = 2

    def test_ranks(self):
        ranks = [None] * 2
        dist.all_gather_object(ranks, self.rank)
        self.assertEqual(ranks, [0, 1])

class OfOneProcess(TestCase):
    def test_two_ranks(self):
        dist.init_process_group("fake", rank=1, world_size=2)
        rank = torch.tensor([dist.get_rank()])
        dist.all_reduce(rank)
        self.assertEqual(rank.item(), 1)

    def test_no_group(self):
        self.assertFalse(dist.is_initialized())

    def test_too_many_ranks(self):
        dist.init_process_group("fake", rank=1, world_size=64)

    def test_without_gpu(self):
        if not torch.cuda.is_available():
            return
        self.fail("has a GPU")
"""


def test_every_kind_of_test_case_runs_with_both_backends(tmp_path: Path) -> None:
    path = tmp_path / "test_kinds.py"
    path.write_text(_FILE)
    outcome = run_alone(["-m", "tests.conformance.upstream_files", "--limit", "100", str(path)], timeout=400)
    assert "test_kinds.py: 4 both, 1 only Gloo, 0 only mpicomm, 1 neither, 2 skipped" in outcome.stdout, str(outcome)
    assert "only Gloo: OfProcesses.test_only_gloo (2 ranks)" in outcome.stdout
    assert "neither: OfProcesses.test_neither (2 ranks)" in outcome.stdout
    assert outcome.status == 1
