"""Futures of operations that failed, and the backward pass that raises their errors."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
import torch

from mpicomm import torch_internals
from mpicomm.backend.execution import backward_errors
from mpicomm.backend.execution.future_callbacks import all_of


class LossOfContactError(Exception):
    pass


def record(error: Exception) -> None:
    for errors in backward_errors.running_passes():
        errors.append(error)


def failed(error: Exception) -> torch.futures.Future[list[torch.Tensor]]:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    torch_internals.set_error(future, error, [torch.ones(2)])
    return future


def test_the_value_of_a_failed_future_is_its_error() -> None:
    error = LossOfContactError("planted")
    future = failed(error)
    for ask in (future.wait, future.value, future.value):
        with pytest.raises(LossOfContactError) as raised:
            ask()
        assert raised.value is error


def test_several_futures_fail_with_the_one_that_failed() -> None:
    done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    done.set_result([])
    with pytest.raises(RuntimeError, match="LossOfContactError: planted"):  # torch's type
        all_of([done, failed(LossOfContactError("planted"))]).wait()


def test_the_pass_in_which_an_operation_failed_raises_its_error_once() -> None:
    backward_errors.watch_backward()
    weight = torch.ones(1, requires_grad=True)
    record(LossOfContactError("before"))
    (2 * weight).sum().backward()  # does not raise
    product = 2 * weight
    product.register_hook(lambda _: record(LossOfContactError("within")))
    with pytest.raises(LossOfContactError, match="within"):
        product.sum().backward()
    (2 * weight).sum().backward()


def test_the_first_error_is_raised_also_after_a_pass_within_the_pass() -> None:
    backward_errors.watch_backward()

    def fail(_: torch.Tensor) -> None:
        record(LossOfContactError("first"))
        with torch.enable_grad():
            (2 * torch.ones(1, requires_grad=True)).sum().backward()  # as of a reentrant checkpoint
        record(LossOfContactError("second"))

    product = 2 * torch.ones(1, requires_grad=True)
    product.register_hook(fail)
    with pytest.raises(LossOfContactError, match="first"):
        product.sum().backward()


def test_another_error_of_the_pass_is_the_cause() -> None:
    backward_errors.watch_backward()

    def fail(_: torch.Tensor) -> None:
        record(LossOfContactError("first"))
        raise ValueError("second")

    product = 2 * torch.ones(1, requires_grad=True)
    product.register_hook(fail)
    with pytest.raises(LossOfContactError, match="first") as raised:
        product.sum().backward()
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize("is_of_gpu", [False, True])
def test_passes_of_several_threads_raise_their_own_errors(is_of_gpu: bool) -> None:
    """An operation that a thread of a GPU started may belong to each of the passes."""
    backward_errors.watch_backward()
    phase, has_ended = threading.Barrier(2, timeout=60), threading.Event()

    def run(name: str) -> None:
        def fail(_: torch.Tensor) -> None:
            for failing in ("first", "second"):
                phase.wait()
                if name == failing and is_of_gpu:
                    with concurrent.futures.ThreadPoolExecutor(1) as of_gpu:
                        of_gpu.submit(record, LossOfContactError(name)).result()
                elif name == failing:
                    record(LossOfContactError(name))
            phase.wait()
            if name == "second":
                has_ended.wait(60)

        product = 2 * torch.ones(1, requires_grad=True)
        product.register_hook(fail)
        try:
            product.sum().backward()
        finally:
            if name == "first":
                has_ended.set()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        passes = {name: pool.submit(run, name) for name in ("first", "second")}
        for name, running in passes.items():
            with pytest.raises(LossOfContactError, match="first" if is_of_gpu else name):
                running.result()


def test_a_thread_knows_whether_it_is_in_a_backward_pass() -> None:
    found = []
    product = 2 * torch.ones(1, requires_grad=True)
    product.register_hook(lambda _: found.append(torch_internals.is_in_backward()))
    product.sum().backward()
    assert (found, torch_internals.is_in_backward()) == ([True], False)
