"""The job's store: the addresses on which it listens, and its use by code that knows only `env://`."""

from __future__ import annotations

from tests.launching import run_ranks
from tests.ports import reserved_port

SIZE = 2

# The programs run one after the other in one job, and each calls bootstrap(). Each rank writes lines that begin with
# the program's name.
PROGRAMS = """
import os, socket, subprocess, sys
import torch
import torch.distributed as dist
import mpicomm
from mpicomm.job import interfaces

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
    child = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); print(d.get_world_size())"
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
    yield world.master_addr, answers("127.0.0.1"), [a for a in interfaces.own_addresses() if answers(a)]

def address_of_the_user():
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port_of_the_user)
    world = mpicomm.bootstrap()
    yield world.master_addr, world.master_port, os.environ["MASTER_PORT"]

# The last one leaves the address of the user in the environment.
for program in (own_port_gloo, own_port_mpicomm, children, second_group, loopback, address_of_the_user):
    for words in program():
        sys.stdout.write(f"{program.__name__}: {words}\\n")
        sys.stdout.flush()
    mpicomm.shutdown()
"""


def test_programs_that_use_the_store() -> None:
    """A program sets a MASTER_PORT, as the setup() of PyTorch's DDP tutorial does, or uses the exported variables."""
    with reserved_port() as gloo, reserved_port() as mpicomm, reserved_port() as user:
        outcome = run_ranks(SIZE, ["-c", PROGRAMS, str(gloo), str(mpicomm), str(user)])
    assert outcome.status == 0, outcome
    total = SIZE * (SIZE + 1) // 2
    expected = {
        "own_port_gloo": total,
        "own_port_mpicomm": total,
        "children": SIZE,
        "second_group": total,
        "loopback": ("127.0.0.1", True, []),  # the other addresses of this host do not answer
        "address_of_the_user": ("127.0.0.1", user, str(user)),
    }
    lines = [f"{name}: {words}" for name, words in expected.items() for _ in range(SIZE)]
    assert sorted(outcome.stdout.splitlines()) == sorted(lines), outcome
