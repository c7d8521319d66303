"""Faults in the adapter for Lightning, and in the variables for accelerate."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "WorldEnvironment.global_rank",
        old="self._world.rank",
        new="self._world.node_rank * self._world.local_size + self._world.local_rank",
        fault="Lightning's rank is computed as if the ranks of a node were consecutive.",
        tests="tests/integrations/test_lightning.py -k test_the_environment_has_the_ranks_of_the_job",
    ),
    Mutant(
        "WorldEnvironment.validate_settings",
        old="(num_devices, num_nodes) != (world.local_size, world.num_nodes)",
        new="num_devices * num_nodes != world.size",
        fault="Trainer accepts all numbers of devices and nodes whose product is the number of ranks.",
        tests="tests/integrations/test_lightning.py -k test_arguments_that_do_not_fit_the_job",
    ),
    Mutant(
        "WorldEnvironment.__init__",
        old="world.device.index != world.local_rank",
        new="world.device.index != 0",
        fault="The GPU of a rank is compared with GPU 0 instead of the one that Lightning selects.",
        tests="tests/integrations/test_lightning.py -k test_a_gpu_that_lightning_does_not_select",
    ),
    Mutant(
        "WorldEnvironment.set_global_rank",
        old="_unused.discard(self)",
        fault="Trainer refuses a strategy that uses the environment.",
        tests="tests/integrations/test_lightning.py -k test_a_distributed_strategy_uses_the_environment",
    ),
    Mutant(
        "lightning_callbacks",
        old="[] if adapter is None else adapter.check_use()",
        new="[]",
        fault="Without a distributed strategy each rank trains a separate model, without an error.",
        tests="tests/integrations/test_lightning.py -k test_a_strategy_that_does_not_use_the_ranks",
    ),
    Mutant(
        "_export",
        old="values[_ACCELERATE_USE_CPU]",
        new="session.environ[_ACCELERATE_USE_CPU]",
        fault="ACCELERATE_USE_CPU is not set, so with accelerate each rank trains alone.",
        tests="tests/integrations/test_accelerate.py -k mpirun",
    ),
]
