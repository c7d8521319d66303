"""Faults in the optimizer, the broadcasts, hvd.elastic and the start of scripts that import Horovod."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- the optimizer ----------------------------------------------------------------------------------------------
    Mutant(
        "_GradientReducer._count_pass",
        old="len(bucket) == 1 or self._computed.issuperset(bucket)",
        new="len(bucket) >= 1",
        fault="The reduction of a group starts with its first gradient, before the others are computed.",
        tests="tests/horovod/test_optimizer.py -k training_equals",
        ranks=4,
    ),
    Mutant(
        "_GradientReducer.finish",
        old="""
if bucket not in self._started:
    self._start(bucket)
""",
        fault="A parameter without a gradient on this rank does not take part, and the other ranks wait for it.",
        tests="tests/horovod/test_optimizer.py -k without_a_gradient",
        ranks=4,
    ),
    Mutant(
        "_Settings.scales",
        old='{"prescale_factor": 1.0 / self.predivide_factor, "postscale_factor": self.predivide_factor}',
        new='{"prescale_factor": 1.0 / self.predivide_factor, "postscale_factor": 1.0}',
        fault="With gradient_predivide_factor, the mean gradient is divided by that factor.",
        tests="tests/horovod/test_optimizer.py -k training_equals",
        ranks=4,
    ),
    Mutant(
        "DistributedOptimizer",
        old='{name: value for name, value in vars(optimizer).items() if name != "step"}',
        new="{name: value for name, value in vars(optimizer).items()}",
        fault="With a learning-rate scheduler of the inner optimizer, step() does not reduce the gradients.",
        tests="tests/horovod/test_optimizer.py -k same_class",
        ranks=4,
    ),
    Mutant(
        "_AdasumOptimizer.step",
        old="start + change",
        new="change",
        fault="With Adasum, a step replaces the parameters by their changes.",
        tests="tests/horovod/test_optimizer.py -k adasum_adds",
        ranks=4,
    ),
    Mutant(
        "_buckets",
        old='broadcast_object(list(trained), first_rank, "optimizer.groups", process_set)',
        new="list(trained)",
        fault="Ranks that pass their parameters in different orders form different groups.",
        tests="tests/horovod/test_optimizer.py -k different_orders",
        ranks=4,
    ),
    Mutant(
        "optimizer._buckets",
        old="not isinstance(groups, int) or groups < 1",
        new="not isinstance(groups, int)",
        fault="hvd.DistributedOptimizer(groups=0) reduces no gradient.",
        tests="tests/horovod/test_optimizer.py -k arguments_are_checked",
        ranks=2,
    ),
    Mutant(
        "optimizer._parameters",
        old="list(group)",
        new="group",
        fault="hvd.DistributedOptimizer(groups=[module.parameters()]) ignores the group.",
        tests="tests/horovod/test_optimizer.py -k iterator",
        ranks=2,
    ),
    Mutant(
        "TorchState.__init__",
        old="break",
        fault="A TorchState of a model that is a sampler, too, is a KeyError.",
        tests="tests/horovod/test_elastic.py -k two_kinds",
        ranks=2,
    ),
    Mutant(
        "ElasticSampler.__iter__",
        old="itertools.cycle(self.remaining_indices)",
        new="self.remaining_indices",
        fault="If the samples cannot be divided evenly, ranks get different numbers of them.",
        tests="tests/horovod/test_elastic.py -k divided_among",
        ranks=4,
    ),
    # -- broadcasts and batch normalization ---------------------------------------------------------------------------
    Mutant(
        "_replace_state",
        old="optimizer.state.clear()",
        fault="A rank keeps the state of its optimizer if the root has none.",
        tests="tests/horovod/test_functions.py -k state_is_that_of_the_root",
        ranks=4,
    ),
    Mutant(
        "broadcast_optimizer_state",
        old='index_of_root(root_rank, global_process_set, "broadcast_optimizer_state")',
        fault="hvd.broadcast_optimizer_state from a rank that does not exist is an IndexError.",
        tests="tests/horovod/test_functions.py -k about_the_root",
        ranks=2,
    ),
    Mutant(
        "broadcast_object",
        old="_check_pickled(content, [root_rank], length.tolist())",
        fault="An object that the root cannot pickle is an error of other operations on the other ranks.",
        tests="tests/horovod/test_functions.py -k cannot_be_pickled",
        ranks=4,
    ),
    Mutant(
        "SyncBatchNorm._update_running_statistics",
        old="variance * (count / max(count - 1, 1))",
        new="variance",
        fault="The running variance of SyncBatchNorm is biased.",
        tests="tests/horovod/test_sync_batch_norm.py",
        ranks=4,
    ),
    Mutant(
        "ProcessSetEngine._cycle",
        old="""
if not isinstance(error, RankFailedError):
    self._group.abort()
""",
        fault="After a round that fails on one rank, the others wait in it until the job times out.",
        tests="tests/launch/test_horovod_scripts.py -k failed_on_one",
    ),
    Mutant(
        "run.wrapper",
        old="_report(error)",
        new="None",
        fault="hvd.elastic.run does not show an error from which it continues.",
        tests="tests/launch/test_horovod_scripts.py -k failed_on_one",
    ),
    Mutant(
        "GroupState.fail",
        old="check_revoked(error, self.record)",
        new="None",
        fault="The error on the other ranks does not say which rank has aborted the group.",
        tests="tests/launch/test_aborted_groups.py -k end_if",
    ),
    Mutant(
        "message_work.error_of",
        old="check_revoked(cause, operation.group)",
        new="None",
        fault="If another rank aborts the group of a message, the error advises to pass tensors of the same size.",
        tests="tests/launch/test_aborted_groups.py -k end_if",
    ),
    Mutant(
        "AlgorithmSelector.revoke",
        old="mpi.revoke(comm)",
        new="None",
        fault="After an abort, ranks wait in the parts of a hierarchical operation.",
        tests="tests/unit/test_algorithms.py -k aborted",
    ),
    Mutant(
        "run.wrapper",
        old="_others_wait(error)",
        new="False",
        fault="In a job without recovery, ranks wait for one whose round has failed.",
        tests="tests/launch/test_horovod_scripts.py -k without_recovery",
    ),
    # -- elastic ------------------------------------------------------------------------------------------------------
    Mutant(
        "_surviving_rank",
        old="world.size if world.previous_rank is None else world.rank",
        new="world.rank",
        fault="A spare that has become rank 0 sends its new state to the survivors, and the training starts again.",
        tests="tests/launch/test_horovod_scripts.py -k killed",
    ),
    Mutant(
        "run.wrapper",
        old="state.restore()",
        fault="After a failure, training continues from parameters that were not committed.",
        tests="tests/launch/test_horovod_scripts.py -k killed",
    ),
    Mutant(
        "ElasticSampler.reset",
        old="order[self.processed_num :]",
        new="order",
        fault="Samples that have been processed in an epoch are returned again after a failure.",
        tests="tests/horovod/test_elastic.py -k divided_among",
        ranks=4,
    ),
    # -- scripts ------------------------------------------------------------------------------------------------------
    Mutant(
        "install",
        old="sys.path.insert(0, DIRECTORY)",
        new="sys.path.append(DIRECTORY)",
        fault="An installed Horovod, or its sources in the working directory, is imported instead of mpicomm.horovod.",
        tests="tests/launch/test_horovod_scripts.py -k installed_horovod",
    ),
    Mutant(
        "_fusion_threshold",
        old="int(mebibytes) * 2**20",
        new="int(mebibytes)",
        fault="--fusion-threshold-mb is taken as a number of bytes.",
        tests="tests/unit/test_horovodrun.py",
    ),
]
