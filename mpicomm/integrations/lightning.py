"""Lightning's Trainer and Fabric on the ranks of the job: `plugins=[WorldEnvironment()]`."""

from __future__ import annotations

import weakref

from mpicomm.errors import LaunchError
from mpicomm.integrations.requirements import installed_by
from mpicomm.job import session

with installed_by("lightning"):
    from lightning.fabric.plugins.environments import ClusterEnvironment


_unused: weakref.WeakSet[WorldEnvironment] = weakref.WeakSet()
"""The environments that no strategy has used."""


class WorldEnvironment(ClusterEnvironment):
    """The job of `bootstrap()` as Lightning's cluster environment, for `Trainer` and `Fabric`.

    Lightning starts no processes, and its strategies use the process group that `bootstrap()` has initialised::

        world = mpicomm.bootstrap()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=world.local_size, num_nodes=world.num_nodes, strategy="ddp",
            plugins=[WorldEnvironment()],
        )

    Without a distributed strategy, Lightning would train a separate model on each rank: then `Trainer` and `Fabric`
    raise LaunchError.

    Raises:
        MpicommError: If `bootstrap` has not been called.
        LaunchError: If this rank's GPU is not the one that Lightning selects, the GPU with the number of the local
            rank.
    """

    def __init__(self) -> None:
        self._world = world = session.current_world()
        if world.device.type != "cpu" and world.device.index != world.local_rank:
            raise LaunchError(
                f"Lightning selects the GPU with the number of the local rank: got {world.device} on rank "
                f"{world.rank}, expected {world.device.type}:{world.local_rank}.\n"
                f"Let every rank see all GPUs of its node (with Slurm: without --gpus-per-task and --gpu-bind), and "
                f"start as many ranks per node as it has GPUs."
            )
        _unused.add(self)

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the processes already exist: Lightning starts none."""
        return True

    @property
    def main_address(self) -> str:
        """The address of the job's store."""
        return self._world.master_addr

    @property
    def main_port(self) -> int:
        """The port of the job's store."""
        return self._world.master_port

    @staticmethod
    def detect() -> bool:
        """Return whether this process is in a job that `bootstrap()` has formed."""
        current = session.current()
        return current is not None and current.is_open

    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """Ignore Lightning's number of ranks, which `validate_settings` has compared with that of the job."""

    def global_rank(self) -> int:
        """Return the rank in the job, which may differ from Lightning's node rank * devices + local rank."""
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:  # noqa: ARG002  the name of the base class
        """Ignore the rank that Lightning computes, since the launcher has chosen the rank.

        Distributed strategies call this method when `Trainer` or `Fabric` creates them.
        """
        _unused.discard(self)

    def local_rank(self) -> int:
        """Return the rank in the node."""
        return self._world.local_rank

    def node_rank(self) -> int:
        """Return the number of the node."""
        return self._world.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check the arguments of Trainer or Fabric: Lightning partitions the data by `devices` * `num_nodes`.

        Raises:
            LaunchError: If they are not the ranks of this node and the number of nodes, or the nodes have different
                numbers of ranks.
        """
        world = self._world
        if world.local_size * world.num_nodes != world.size:
            raise LaunchError(
                f"Lightning needs the same number of ranks on each node: got {world.size} ranks on {world.num_nodes} "
                f"nodes, {world.local_size} of them on {world.hostname}.\n"
                f"Start the same number on each node, as with `mpicomm run --nproc-per-node 4`."
            )
        if (num_devices, num_nodes) != (world.local_size, world.num_nodes):
            raise LaunchError(
                f"devices and num_nodes must be the ranks per node, {world.local_size}, and the number of nodes, "
                f"{world.num_nodes}; got devices={num_devices}, num_nodes={num_nodes}.\n"
                f"Pass devices=world.local_size, num_nodes=world.num_nodes, with world = mpicomm.bootstrap()."
            )


def check_use() -> list[object]:
    """Check that the new Trainer or Fabric uses its WorldEnvironment; an entry point, which Lightning calls in both.

    Returns:
        No callbacks: Lightning adds to the Trainer or Fabric those that an entry point returns.

    Raises:
        LaunchError: If there are several ranks, and an environment that no strategy has used.
    """
    unused = list(_unused)
    _unused.clear()
    if unused and (size := unused[0].world_size()) > 1:
        raise LaunchError(
            f"the strategy of Trainer or Fabric does not use WorldEnvironment(): each of the {size} ranks would train "
            f"a separate model.\n"
            f'Pass strategy="ddp" or another distributed strategy, and create WorldEnvironment() in the same call: '
            f"plugins=[WorldEnvironment()]."
        )
    return []
