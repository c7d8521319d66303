"""Streams of the emulated device run late, in any order that events allow, which a seed decides."""

from __future__ import annotations

from collections.abc import Callable

from tests.launching import Outcome

Run = Callable[..., Outcome]


def test_only_events_order_streams(run_on_device: Run) -> None:
    outcome = run_on_device("""
def is_read_after_the_write(seed, has_event, devices):
    accelerator.configure(seed)
    source = torch.zeros(1000, device=devices[0])
    target = torch.zeros(1000, device=devices[1])
    synchronize(0), synchronize(1)
    side = torch.Stream(device=devices[1])
    source.fill_(7)
    if has_event:
        side.wait_event(torch.accelerator.current_stream(0).record_event())
    with side:
        target.add_(source if devices[0] == devices[1] else source.to(devices[1]))
    synchronize(0), synchronize(1)
    return target.eq(7).all().item()

same = "emulated:0", "emulated:0"
assert all(is_read_after_the_write(seed, True, same) for seed in SEEDS)
assert {is_read_after_the_write(seed, False, same) for seed in SEEDS} == {False, True}
assert all(is_read_after_the_write(seed, False, ("emulated:0", "emulated:1")) for seed in SEEDS)  # as CUDA's copies
""")
    assert outcome.status == 0, outcome


def test_the_seed_decides_the_order(run_on_device: Run) -> None:
    outcome = run_on_device("""
streams = [torch.Stream(device="emulated") for _ in range(3)]
counters = [torch.zeros(1, device="emulated") for _ in streams]
synchronize()

def order(seed):
    accelerator.configure(seed)
    accelerator.take_log()
    for _ in range(5):
        for stream, counter in zip(streams, counters):
            with stream:
                counter.add_(1)
    synchronize()
    log = accelerator.take_log()
    assert len(log) == 15, log
    return tuple(log)

orders = [order(seed) for seed in SEEDS]
assert len(set(orders)) > 15
assert orders == [order(seed) for seed in SEEDS]
""")
    assert outcome.status == 0, outcome


def test_an_error_arrives_with_the_next_synchronisation(run_on_device: Run) -> None:
    outcome = run_on_device("""
values, index = torch.zeros(3, device="emulated"), torch.tensor([3], device="emulated")
accelerator.configure(1)
values.index_select(0, index)
values.add_(1)
for call in (synchronize, values.cpu):
    try:
        print(call())
    except RuntimeError as error:
        print(error)
""")
    assert outcome.status == 0, outcome
    assert outcome.stdout.splitlines() == [
        "emulated:0: an earlier operation failed. aten::index_select: index out of range in self",
        "tensor([1., 1., 1.])",
    ], outcome


def test_copies_take_the_time_of_their_rate(run_on_device: Run) -> None:
    outcome = run_on_device("""
import time
accelerator.configure(copy_rate=100e6)
host, target = torch.zeros(2_500_000, pin_memory=True), torch.empty(2_500_000, device="emulated")
synchronize()
start, end = (torch.Event(device="emulated", enable_timing=True) for _ in range(2))
start.record()
target.copy_(host, non_blocking=True)
end.record()
assert not end.query()
time.sleep(0.2)
assert end.query(), "the device does not run by itself"
assert 90 < start.elapsed_time(end), start.elapsed_time(end)
""")
    assert outcome.status == 0, outcome


def test_a_forked_child_cannot_use_the_device(run_on_device: Run) -> None:
    outcome = run_on_device("""
import os, sys
tensor = torch.ones(3, device="emulated")
synchronize()
if os.fork() == 0:
    assert torch.emulated._is_in_bad_fork()
    try:
        tensor.add_(1)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
assert os.wait()[1] == 0
""")
    assert outcome.status == 0, outcome
    assert "Cannot re-initialize emulated in forked subprocess" in outcome.stdout, outcome
