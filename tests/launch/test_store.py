"""The job's store: the addresses on which it listens, and its use by code that knows only `env://`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launching import Outcome, run_ranks
from tests.ports import reserved_port

pytestmark = pytest.mark.xdist_group("store")  # the tests share the outcome of one job

SIZE = 2
TOTAL = SIZE * (SIZE + 1) // 2

# The programs run one after the other in one job, and each calls bootstrap(). Each rank writes lines that begin with
# the program's name. If a program fails, the traceback names it, and the tests of the later programs fail, too.
PROGRAMS = """
import os, socket, subprocess, sys
import torch
import torch.distributed as dist
import mpicomm
from mpicomm.job import rendezvous

_, port_of_gloo, port_of_mpicomm, port_of_the_user = sys.argv

def total(backend="gloo", **kwargs):
    dist.init_process_group(backend, **kwargs)
    tensor = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()

def own_port_gloo():
    world = mpicomm.bootstrap(None)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port_of_gloo)
    yield total("gloo", rank=world.rank, world_size=world.size)

def own_port_mpicomm():
    world = mpicomm.bootstrap(None)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port_of_mpicomm)
    yield total("mpicomm", rank=world.rank, world_size=world.size)

def children():
    mpicomm.bootstrap(None)
    child = "import torch.distributed as d; d.init_process_group('gloo'); print(d.get_world_size())"
    ended = subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
    yield ended.stdout.strip()

def second_group():
    mpicomm.bootstrap()
    dist.destroy_process_group()
    yield total(init_method="env://")

def loopback():
    world = mpicomm.bootstrap()
    def answers(address):
        try:
            socket.create_connection((address, world.master_port), timeout=2).close()
        except OSError:
            return False
        return True
    yield world.master_addr, answers("127.0.0.1"), [a for a in rendezvous.own_addresses() if answers(a)]

def address_of_the_user():
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port_of_the_user)
    world = mpicomm.bootstrap()
    yield world.master_addr, world.master_port, os.environ["MASTER_PORT"]

# Behind the one that leaves the address of the user in the environment comes no other.
NAMES = "own_port_gloo own_port_mpicomm children second_group loopback address_of_the_user"
for name in NAMES.split():
    for words in globals()[name]():
        sys.stdout.write(f"{name}: {words}\\n")
        sys.stdout.flush()
    mpicomm.shutdown()
"""


@pytest.fixture(scope="module")
def ports() -> Iterator[list[int]]:
    """Three free ports."""
    with reserved_port() as gloo, reserved_port() as mpicomm, reserved_port() as user:
        yield [gloo, mpicomm, user]


@pytest.fixture(scope="module")
def outcome(ports: list[int]) -> Outcome:
    return run_ranks(SIZE, ["-c", PROGRAMS, *map(str, ports)])


def lines(outcome: Outcome, program: str) -> list[str]:
    """Return the output of the ranks in a program."""
    found = [line.partition(": ") for line in outcome.stdout.splitlines()]
    words = sorted(text for name, _, text in found if name == program)
    assert words, f"the program {program} printed no lines: it failed, or one before it\n{outcome}"
    return words


@pytest.mark.parametrize("backend", ["mpicomm", "gloo"])
def test_a_program_sets_a_master_port_of_its_own(backend: str, outcome: Outcome) -> None:
    """As the setup() of PyTorch's DDP tutorial does."""
    assert lines(outcome, f"own_port_{backend}") == [str(TOTAL)] * SIZE, outcome


def test_child_processes_make_a_group_with_the_exported_variables(outcome: Outcome) -> None:
    assert lines(outcome, "children") == [str(SIZE)] * SIZE, outcome


def test_a_group_can_be_made_after_ours_is_destroyed(outcome: Outcome) -> None:
    assert lines(outcome, "second_group") == [str(TOTAL)] * SIZE, outcome


def test_one_host_is_served_on_loopback_only(outcome: Outcome) -> None:
    assert lines(outcome, "loopback") == ["('127.0.0.1', True, [])"] * SIZE, outcome


def test_address_and_port_of_the_user_are_honoured(outcome: Outcome, ports: list[int]) -> None:
    port = ports[2]
    assert lines(outcome, "address_of_the_user") == [f"('127.0.0.1', {port}, '{port}')"] * SIZE, outcome


def test_the_job_ends_with_status_0(outcome: Outcome) -> None:
    assert outcome.status == 0, outcome
