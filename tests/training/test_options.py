"""Optional features of a run: compilation and determinism."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
import torch

import mpicomm
from tests.training.test_steps import make_model, make_trainer, samples, train

pytestmark = pytest.mark.mpi


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a compiler")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_compiled_model_trains_as_it_would(world: mpicomm.World, strategy: str) -> None:
    data = samples(24 * world.size + 3)
    model = make_model()
    trainer = make_trainer(model, batch_size=8, strategy=strategy, compile_model=True)
    torch._dynamo.utils.counters.clear()
    with torch._inductor.config.patch(compile_threads=1):  # more would be processes that outlive the test
        trainer.fit(data, 2, eval_data=data)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    found = [each.full_tensor() if strategy == "fsdp" else each for each in model.parameters()]  # type: ignore[operator]
    for mine, plain in zip(found, train(data, batch_size=8), strict=True):
        torch.testing.assert_close(mine.detach(), plain, rtol=1e-4, atol=1e-5)


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    benchmark = torch.backends.cudnn.benchmark
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.usefixtures("_as_before")
def test_deterministic_makes_a_run_repeatable(world: mpicomm.World) -> None:
    torch.backends.cudnn.benchmark = True
    data = samples(16 * world.size)
    first, second = (train(data, batch_size=4, deterministic=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert (torch.backends.cudnn.benchmark, os.environ["CUBLAS_WORKSPACE_CONFIG"]) == (False, ":4096:8")
