"""Faults in the operations of Horovod's API."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- negotiation ----------------------------------------------------------------------------------------
    Mutant(
        "Negotiation._add",
        old="self._slots[slot].signature == submission.signature",
        new="self._slots[slot].signature.kind == submission.signature.kind",
        fault="A rank that changes the shape of a tensor in the cache uses the old one on the other ranks.",
        tests="tests/horovod/test_negotiation.py -k 'random_sequences or leaves_the_name_usable'",
        ranks=0,
    ),
    Mutant(
        "Negotiation._forget",
        old="self._bits >> index & 1",
        new="False and self._bits >> index & 1",
        fault="A pending tensor whose name leaves the cache is never described, and waits for ever.",
        tests="tests/horovod/test_negotiation.py -k 'random_sequences or leaves_the_name_usable'",
        ranks=0,
    ),
    Mutant(
        "Negotiation.run_round",
        old="(1 << len(self._slots)) - 1 if self._rank in self._joined else self._bits",
        new="self._bits",
        fault="A rank that has joined does not take part in the operations of the cache.",
        tests="tests/horovod/test_negotiation.py -k test_ranks_that_have_joined",
        ranks=0,
    ),
    Mutant(
        "Negotiation._describe_old",
        old="self._to_describe.append(self._mine[self._slots[slot].name])",
        new="",
        fault="A tensor in the cache that a rank leaves out is not reported.",
        tests="tests/horovod/test_stalls.py -k test_a_late_rank",
        ranks=0,
    ),
    Mutant(
        "Negotiation._ready",
        old="self._joined and signature.kind not in _WITH_JOIN and not error",
        new="False and signature.kind not in _WITH_JOIN and not error",
        fault="An allgather runs on the ranks that have not joined, without those that have.",
        tests="tests/horovod/test_negotiation.py -k test_an_operation_without_zeros",
        ranks=0,
    ),
    # -- engine ---------------------------------------------------------------------------------------------
    Mutant(
        "ProcessSetEngine._complete",
        old="self._counts.clear()",
        new="",
        fault="After a join, operations without a name have other names on ranks that joined earlier.",
        tests="tests/horovod/test_matching.py -k test_ranks_number_calls",
        ranks=2,
    ),
    # -- operations -----------------------------------------------------------------------------------------
    Mutant(
        "_batches",
        old="nbytes + each.source.nbytes > threshold",
        new="False and nbytes + each.source.nbytes > threshold",
        fault="Fused tensors exceed the threshold.",
        tests="tests/horovod/test_fusion.py -k threshold",
        ranks=0,
    ),
    Mutant(
        "reduce",
        old="2",
        new="4",
        fault="With four ranks, only pairs of ranks are combined.",
        tests="tests/horovod/test_tensor_operations.py -k test_adasum",
        ranks=4,
    ),
    Mutant(
        "_Alltoall.backward",
        old="if rest:",
        new="if False and rest:",
        fault="The gradient of alltoall lacks rows that were sent to no rank.",
        tests="tests/horovod/test_tensor_operations.py -k test_gradients",
        ranks=2,
    ),
]
