"""A replica group of one process under torchft, with Gloo; it runs in an interpreter that has torchft.

Its use of torchft is that of torchft's documentation: a Manager with ProcessGroupGloo, and its DistributedDataParallel
and Optimizer. All replicas start from the same parameters, so they need no synchronisation before the first step.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.recovery_peers.step_log import StepLog, make_network, take_step


def main() -> None:
    """Train until the benchmark terminates the process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("limit", type=int)
    parser.add_argument("number", type=int)
    parser.add_argument("lighthouse", help="the address of the lighthouse")
    parser.add_argument("--timeout", type=float, help="seconds of the operations of the manager")
    parser.add_argument("--gloo-timeout", type=float, help="seconds of the operations of Gloo")
    options = parser.parse_args()
    log = StepLog(options.directory, options.number, options.limit)
    network, inner = make_network()
    applied: list[bool] = []
    received: list[bool] = []
    inner.register_step_post_hook(lambda *_: applied.append(True))

    def load_state(state: dict[str, Any]) -> None:
        received.append(True)
        network.load_state_dict(state["network"])
        inner.load_state_dict(state["optimizer"])

    # The store is that of the replica group, which torchrun would create.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(**_timeout(options.gloo_timeout)),
        load_state_dict=load_state,
        state_dict=lambda: {"network": network.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"replica_{options.number}",
        **_timeout(options.timeout),
    )
    model = DistributedDataParallel(manager, network)
    optimizer = Optimizer(manager, inner)
    while True:
        applied.clear()
        received.clear()
        take_step(model, optimizer)
        log.write(
            step=manager.current_step(),
            size=manager.num_participants(),
            applied=bool(applied),
            received=bool(received),
        )


def _timeout(seconds: float | None) -> dict[str, timedelta]:
    """Return the argument that sets a timeout; none for torchft's default."""
    return {} if seconds is None else {"timeout": timedelta(seconds=seconds)}


if __name__ == "__main__":
    main()
