"""The job's store: where it listens, and that code which knows only `env://` finds it."""

from __future__ import annotations

import socket

from tests.launching import run_ranks

SIZE = 2
HEAD = """
import os, sys
import torch
import torch.distributed as dist
import mpicomm

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")

def total(**kwargs):
    dist.init_process_group("gloo", **kwargs)
    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()
"""
TOTAL = SIZE * (SIZE + 1) // 2


def lines(code: str, env: dict[str, str] | None = None) -> list[str]:
    outcome = run_ranks(SIZE, HEAD + code, env=env)
    assert outcome.status == 0, outcome
    return sorted(outcome.stdout.split("\n")[:-1])


def test_without_a_group_the_program_makes_its_own() -> None:
    code = """
world = mpicomm.bootstrap(None)
assert world.backend is None and not dist.is_initialized()
say(total(init_method="env://"))
"""
    assert lines(code) == [str(TOTAL)] * SIZE


def test_a_group_can_be_made_after_ours_is_destroyed() -> None:
    code = """
mpicomm.bootstrap()
dist.destroy_process_group()
say(total(init_method="env://"))
"""
    assert lines(code) == [str(TOTAL)] * SIZE


def test_one_host_is_served_on_loopback_only() -> None:
    code = """
import socket
from mpicomm.startup import rendezvous

def answers(address):
    try:
        socket.create_connection((address, world.master_port), timeout=2).close()
    except OSError:
        return False
    return True

world = mpicomm.bootstrap()
say(world.master_addr, answers("127.0.0.1"), [a for a in rendezvous.own_addresses() if answers(a)])
"""
    assert lines(code) == ["127.0.0.1 True []"] * SIZE


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_address_and_port_of_the_user_are_honoured() -> None:
    port = free_port()
    code = "w = mpicomm.bootstrap(); say(w.master_addr, w.master_port, os.environ['MASTER_PORT'])"
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    assert lines(code, env) == [f"127.0.0.1 {port} {port}"] * SIZE


def test_a_port_in_use_is_refused_on_every_rank() -> None:
    code = """
try:
    mpicomm.bootstrap()
except mpicomm.LaunchError as error:
    say(error)
del os.environ["MASTER_PORT"]
say("then", mpicomm.bootstrap().size)
"""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = lines(code, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    reasons = [line for line in said if "can listen nowhere" in line]
    assert len(reasons) == SIZE, said
    assert all(f"127.0.0.1 port {port}: Address already in use" in line for line in reasons)
    assert said.count(f"then {SIZE}") == SIZE
