"""TensorFlow's workers on our ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integrations.digits import accuracy
from tests.launching import Outcome, run_ranks

PACKAGES = ("tensorflow-cpu",)
COMMANDS = [
    ("mpirun -n 2 python -m mpicomm.examples.integrations.tensorflow_digits", 2),
    ("mpirun -n 4 python -m mpicomm.examples.integrations.tensorflow_digits", 4),
    ("torchrun --nproc-per-node 2 examples/integrations/tensorflow_digits.py", 2),
]

# No other program can bind a reserved port; TensorFlow's server can, and the ranks' addresses are equal on all ranks.
PORTS = """
import json, os, socket, mpicomm
import tensorflow as tf
from mpicomm.integrations.tensorflow import cluster_resolver
world = mpicomm.bootstrap()
resolver = cluster_resolver(world)
workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
assert workers == resolver.cluster_spec().as_dict()["worker"]
assert len(set(workers)) == world.size
assert (resolver.task_type, resolver.task_id) == ("worker", world.rank)
assert mpicomm.all_gather_object(workers) == [workers] * world.size
port = int(workers[world.rank].rpartition(":")[2])
with socket.socket() as other:
    try:
        other.bind(("", port))
    except OSError:
        pass
    else:
        raise AssertionError("the port is not reserved")
server = tf.distribute.Server(resolver.cluster_spec(), job_name="worker", task_index=world.rank)
socket.create_connection(("127.0.0.1", port), timeout=60).close()
mpicomm.barrier()
if world.rank == 0:
    print("passed")
"""

# The check of the runtime does not initialise it, so the second call succeeds.
EARLY = """
import mpicomm
import tensorflow as tf
from mpicomm.integrations.tensorflow import cluster_resolver
world = mpicomm.bootstrap()
try:
    cluster_resolver(None)
except TypeError as error:
    assert "world must be a World, from bootstrap(), got None" in str(error), error
cluster_resolver(world)
cluster_resolver(world)
assert tf.config.threading.get_inter_op_parallelism_threads() == 0
mpicomm.barrier()
print("not initialised", flush=True)
tf.ones(3)
cluster_resolver(world)
"""


@pytest.mark.parametrize(("command", "ranks"), COMMANDS)
def test_the_strategy_learns_the_digits(run: Callable[..., Outcome], command: str, ranks: int) -> None:
    outcome = run(command, finds=accuracy)
    assert accuracy(outcome)["accuracy, %"] > 90, outcome
    lines = outcome.stdout.splitlines()
    assert f"{ranks} workers" in lines, outcome
    assert "parameters identical on all ranks" in lines, outcome


def test_the_ports_are_reserved_until_tensorflow_listens() -> None:
    outcome = run_ranks(2, PORTS)
    assert outcome.status == 0, outcome
    assert "passed" in outcome.stdout.splitlines(), outcome


def test_an_earlier_use_of_tensorflow_is_an_error() -> None:
    outcome = run_ranks(2, EARLY)
    assert outcome.status != 0, outcome
    assert outcome.stdout.count("not initialised") == 2, outcome
    assert "cluster_resolver() must be called before any other use of TensorFlow" in outcome.stderr, outcome
