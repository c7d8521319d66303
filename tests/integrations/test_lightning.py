"""Lightning's Trainer and Fabric, on the ranks of the job."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from mpicomm.errors import LaunchError, MpicommError
from mpicomm.job import session
from tests.integrations.digits import run_example
from tests.launching import run_ranks

PACKAGES = ("lightning", "torchmetrics")
EXAMPLE = "mpicomm.examples.integrations.lightning_digits"

FAILING = """
import lightning, torch
import mpicomm
from mpicomm.integrations.lightning import WorldEnvironment

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def training_step(self, batch, index):
        if self.global_rank == 1 and index == 2:
            raise ArithmeticError("the loss is infinite")
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

world = mpicomm.bootstrap()
trainer = lightning.Trainer(
    accelerator="cpu", devices=world.local_size, strategy="ddp", plugins=[WorldEnvironment()], max_epochs=9,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
data = torch.utils.data.TensorDataset(torch.ones(64, 2))
trainer.fit(Model(), torch.utils.data.DataLoader(data, 4))
"""


@pytest.mark.parametrize(
    ("command", "size"),
    [
        pytest.param(f"mpirun -n 4 python -m {EXAMPLE}", 4, marks=pytest.mark.make_integrations),
        (f"mpicomm run -n 2 -m {EXAMPLE}", 2),
        pytest.param(f"torchrun --nproc-per-node 2 -m {EXAMPLE}", 2, marks=pytest.mark.make_integrations),
    ],
)
def test_the_trainer_learns_with_each_launcher(run, command, size):
    run_example(run, command, f"DDPStrategy on {size} ranks")


@pytest.mark.make_integrations
def test_fabric_averages_gradients_of_replicated_and_sharded_models(run):
    outcome = run("mpirun -n 4 python -m tests.integrations.fabric")
    assert sorted(re.findall(r"^rank (\d) has passed", outcome.stdout, re.MULTILINE)) == ["0", "1", "2", "3"]


@pytest.mark.make_integrations
def test_an_exception_in_a_step_of_one_rank_ends_the_job():
    outcome = run_ranks(2, FAILING)
    assert outcome.status != 0, outcome
    assert "ArithmeticError: the loss is infinite" in outcome.stderr, outcome


# -- the environment, in this process --------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch):
    """Return a function that sets the World of this process."""

    def set_world(**values):
        given = dict.fromkeys((field.name for field in dataclasses.fields(session.World)), None)
        topology = {"rank": 2, "size": 8, "local_rank": 2, "local_size": 4, "node_rank": 0, "num_nodes": 2}
        found = given | topology | {"hostname": "node1", "device": torch.device("cpu"), "master_port": 29500} | values
        monkeypatch.setattr(session, "current_world", lambda: session.World(**found))

    return set_world


def environment():
    from mpicomm.integrations.lightning import WorldEnvironment

    return WorldEnvironment()


def test_the_environment_has_the_ranks_of_the_job(world):
    world(rank=3, local_rank=1, node_rank=1, master_addr="10.0.0.1")  # ranks placed on the nodes in turn
    found = environment()
    assert (found.global_rank(), found.world_size(), found.local_rank(), found.node_rank()) == (3, 8, 1, 1)
    assert (found.main_address, found.main_port) == ("10.0.0.1", 29500)
    assert found.creates_processes_externally
    found.set_global_rank(5)
    found.set_world_size(5)
    assert (found.global_rank(), found.world_size()) == (3, 8)
    found.validate_settings(num_devices=4, num_nodes=2)


def test_the_environment_needs_bootstrap():
    with pytest.raises(MpicommError, match=r"Call mpicomm\.bootstrap\(\) first"):
        environment()


@pytest.mark.parametrize(("devices", "nodes"), [(8, 1), (2, 2)])
def test_arguments_that_do_not_fit_the_job_raise_an_error_with_those_that_do(world, devices, nodes):
    world()
    with pytest.raises(LaunchError, match=f"ranks per node, 4, .*, 2; got devices={devices}, num_nodes={nodes}"):
        environment().validate_settings(num_devices=devices, num_nodes=nodes)


def test_nodes_with_different_numbers_of_ranks_raise_an_error(world):
    world(size=7)
    with pytest.raises(LaunchError, match=r"same number of ranks on each node: got 7 ranks on 2 nodes, 4 of them on"):
        environment().validate_settings(num_devices=4, num_nodes=2)


def test_a_gpu_that_lightning_does_not_select_raises_an_error(world):
    world(device=torch.device("cuda", 0))
    with pytest.raises(LaunchError, match="got cuda:0 on rank 2, expected cuda:2"):
        environment()
    world(device=torch.device("xpu", 1))
    with pytest.raises(LaunchError, match="got xpu:1 on rank 2, expected xpu:2"):
        environment()
    world(device=torch.device("cuda", 2))
    assert environment().local_rank() == 2


@pytest.mark.parametrize("kind", ["Trainer", "Fabric"])
def test_a_strategy_that_does_not_use_the_ranks_raises_an_error(world, kind):
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment

    world()
    with pytest.raises(LaunchError, match=r"each of the 8 ranks would train a separate model\.\nPass strategy=\"ddp\""):
        getattr(lightning, kind)(accelerator="cpu", devices=1, plugins=[environment()])
    # Of one rank, such as for a test after the training; with a plugin, since its detection initialises MPI.
    getattr(lightning, kind)(accelerator="cpu", devices=1, plugins=[LightningEnvironment()])
    world(size=1, rank=0, local_rank=0, local_size=1, num_nodes=1)
    getattr(lightning, kind)(accelerator="cpu", devices=1, plugins=[environment()])


@pytest.mark.parametrize("kind", ["Trainer", "Fabric"])
def test_a_distributed_strategy_uses_the_environment(world, kind):
    import lightning

    world()
    options = {"accelerator": "cpu", "devices": 4, "num_nodes": 2, "strategy": "ddp"}
    getattr(lightning, kind)(**options, plugins=[environment()])
