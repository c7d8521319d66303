"""Faults in the optimizer, the broadcasts, hvd.elastic and the start of scripts that import Horovod."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- the optimizer ----------------------------------------------------------------------------------------------
    Mutant(
        "horovod/optimizer.py",
        old="len(bucket) == 1 or self._computed.issuperset(bucket)",
        new="len(bucket) >= 1",
        fault="The reduction of a group starts with its first gradient, before the others are computed.",
        tests="tests/horovod/test_optimizer.py -k training_equals",
        ranks=4,
    ),
    Mutant(
        "horovod/optimizer.py",
        old="if bucket not in self._started:\n                self._start(bucket)",
        new="pass",
        fault="A parameter without a gradient on this rank does not take part, and the other ranks wait for it.",
        tests="tests/horovod/test_optimizer.py -k without_a_gradient",
        ranks=4,
    ),
    Mutant(
        "horovod/optimizer.py",
        old='"postscale_factor": self.predivide_factor}',
        new='"postscale_factor": 1.0}',
        fault="With gradient_predivide_factor, the mean gradient is divided by that factor.",
        tests="tests/horovod/test_optimizer.py -k training_equals",
        ranks=4,
    ),
    Mutant(
        "horovod/optimizer.py",
        old='vars(optimizer).items() if name != "step"}',
        new="vars(optimizer).items()}",
        fault="With a learning-rate scheduler of the inner optimizer, step() does not reduce the gradients.",
        tests="tests/horovod/test_optimizer.py -k same_class",
        ranks=4,
    ),
    Mutant(
        "horovod/optimizer.py",
        old="                parameter.copy_(start + change)",
        new="                parameter.copy_(change)",
        fault="With Adasum, a step replaces the parameters by their changes.",
        tests="tests/horovod/test_optimizer.py -k adasum_adds",
        ranks=4,
    ),
    Mutant(
        "horovod/optimizer.py",
        old='order = broadcast_object(list(trained), _first_rank(process_set), "optimizer.groups", process_set)',
        new="order = list(trained)",
        fault="Ranks that pass their parameters in different orders form different groups.",
        tests="tests/horovod/test_optimizer.py -k different_orders",
        ranks=4,
    ),
    # -- broadcasts and batch normalization ---------------------------------------------------------------------------
    Mutant(
        "horovod/functions.py",
        old="    optimizer.state.clear()\n",
        new="",
        fault="A rank keeps the state of its optimizer if the root has none.",
        tests="tests/horovod/test_functions.py -k state_is_that_of_the_root",
        ranks=4,
    ),
    Mutant(
        "horovod/functions.py",
        old="    _check_pickled(content, [root_rank], length.tolist())\n",
        new="",
        fault="An object that the root cannot pickle is an error of other operations on the other ranks.",
        tests="tests/horovod/test_functions.py -k cannot_be_pickled",
        ranks=4,
    ),
    Mutant(
        "horovod/sync_batch_norm.py",
        old="unbiased = variance * (count / max(count - 1, 1))",
        new="unbiased = variance",
        fault="The running variance of SyncBatchNorm is biased.",
        tests="tests/horovod/test_sync_batch_norm.py",
        ranks=4,
    ),
    # -- elastic ------------------------------------------------------------------------------------------------------
    Mutant(
        "horovod/elastic.py",
        old="candidate = world.size if world.previous_rank is None else world.rank",
        new="candidate = world.rank",
        fault="A spare that has become rank 0 sends its new state to the survivors, and the training starts again.",
        tests="tests/launch/test_horovod_scripts.py -k killed",
        ranks=0,
    ),
    Mutant(
        "horovod/elastic.py",
        old="                state.restore()\n",
        new="",
        fault="After a failure, training continues from parameters that were not committed.",
        tests="tests/launch/test_horovod_scripts.py -k killed",
        ranks=0,
    ),
    Mutant(
        "horovod/elastic_sampler.py",
        old="self.remaining_indices = order[self.processed_num :]",
        new="self.remaining_indices = order",
        fault="Samples that have been processed in an epoch are returned again after a failure.",
        tests="tests/horovod/test_elastic.py -k divided_among",
        ranks=4,
    ),
    # -- scripts ------------------------------------------------------------------------------------------------------
    Mutant(
        "horovod/alias/__init__.py",
        old="        sys.path.insert(0, DIRECTORY)",
        new="        sys.path.append(DIRECTORY)",
        fault="An installed Horovod, or its sources in the working directory, is imported instead of mpicomm.horovod.",
        tests="tests/launch/test_horovod_scripts.py -k installed_horovod",
        ranks=0,
    ),
    Mutant(
        "cli/horovodrun.py",
        old="int(mebibytes) * 2**20",
        new="int(mebibytes)",
        fault="--fusion-threshold-mb is taken as a number of bytes.",
        tests="tests/unit/test_horovodrun.py",
        ranks=0,
    ),
]
