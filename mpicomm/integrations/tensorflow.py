"""TensorFlow's cluster of workers, from the job's ranks."""

from __future__ import annotations

import json
import os
import socket

from mpicomm.collective_ops.collectives import all_gather_object
from mpicomm.errors import MpicommError
from mpicomm.integrations import serving
from mpicomm.integrations.requirements import installed_by, require_world
from mpicomm.job.session import World

with installed_by("tensorflow"):
    import tensorflow as tf

_reserved: list[socket.socket] = []
"""Keeps the ports bound until the process ends."""


def cluster_resolver(world: World) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Return the cluster resolver of the job: each rank is a worker (collective).

    Sets TF_CONFIG, so that strategies without a resolver argument find the cluster, too. Pass the resolver to
    `tf.distribute.MultiWorkerMirroredStrategy`, before any other use of TensorFlow.

    Args:
        world: The World that `bootstrap` returned.

    Raises:
        TypeError: If `world` is not a World.
        MpicommError: If the program has used TensorFlow before, for example has created a tensor: then
            `MultiWorkerMirroredStrategy` cannot be created.
    """
    require_world(world)
    if _is_initialised():
        raise MpicommError(
            "cluster_resolver() must be called before any other use of TensorFlow, got an initialised runtime: "
            "MultiWorkerMirroredStrategy could not configure its collectives.\n"
            "Call bootstrap(), cluster_resolver(world) and MultiWorkerMirroredStrategy first, each once, before the "
            "program creates tensors, models or data sets."
        )
    # TensorFlow binds the port itself. Until then, a bound socket that does not listen keeps it from other programs,
    # and receives no connections. SO_REUSEPORT allows sockets of one user to share a port.
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("", 0))
    _reserved.append(reserved)
    host = serving.own_address(world)
    workers = all_gather_object(f"[{host}]" if ":" in host else host)
    ports = all_gather_object(reserved.getsockname()[1])
    addresses = [f"{worker}:{port}" for worker, port in zip(workers, ports, strict=True)]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": world.rank}}
    )
    return tf.distribute.cluster_resolver.TFConfigClusterResolver()


def _is_initialised() -> bool:
    """Return whether TensorFlow has initialised its runtime: then it refuses another number of threads."""
    threading = tf.config.threading
    threads = threading.get_inter_op_parallelism_threads()
    try:
        threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    threading.set_inter_op_parallelism_threads(threads)
    return False
