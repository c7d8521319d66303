"""torch's flight recorder, which torch attaches to every group since 2.15, lists the groups of this backend."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import mpicomm
from mpicomm import torch_compatibility

pytestmark = [
    pytest.mark.each_torch("bootstrap"),
    pytest.mark.skipif(torch_compatibility.torch_version() < (2, 15), reason="torch attaches no flight recorder"),
]


def test_the_dump_of_the_flight_recorder_lists_world_and_subgroup(world: mpicomm.World) -> None:
    ranks = list(range(world.size))
    group = dist.new_group(ranks, group_desc="second")
    assert group in dist.distributed_c10d._world.pg_flight_recorder_hooks
    dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend="mpicomm"))
    listed = {(each["desc"], each["ranks"]) for each in dump["pg_config"].values()}
    assert {("default_pg", str(ranks)), ("second", str(ranks))} <= listed
    dist.destroy_process_group(group)


def test_the_dump_lists_operations_that_pass_through_the_dispatcher(world: mpicomm.World) -> None:
    group = dist.new_group(list(range(world.size)), group_desc="counted")
    dist.all_reduce(torch.ones(2), group=group)
    with CommDebugMode():
        dist.broadcast(torch.ones(2), 0, group=group)
    dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend="mpicomm"))
    listed = [each["profiling_name"] for each in dump["entries"] if each["process_group"][1] == "counted"]
    assert listed == ["mpicomm:broadcast"]
    dist.destroy_process_group(group)
