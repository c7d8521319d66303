"""Checkpoints of a sharded model (FSDP2): saved by shards or by one rank, and loaded on another number of ranks.

In `shards` (DCP) each rank writes its shards, and reads the parts of its new shards from the files of all ranks. For
`whole.pt` rank 0 gathers and writes the state, for `torch.load`: it needs memory for all of it, and the others wait.

    $ mpirun -n 4 python -m mpicomm.examples.sharded_checkpoint
    4 ranks saved 4 shards and whole.pt
    $ mpirun -n 2 python -m mpicomm.examples.sharded_checkpoint --load
    load_shards on 2 ranks: the state that 4 ranks saved
    load_whole on 2 ranks: the state that 4 ranks saved

A complete checkpoint is not replaced: save each to a directory of its own, and remove runs/sharded to start again.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as state_dicts
from torch import nn
from torch.distributed.fsdp import fully_shard

import mpicomm

DIRECTORY = Path("runs/sharded")
ON_RANK_0 = state_dicts.StateDictOptions(full_state_dict=True, cpu_offload=True)  # empty on other ranks
FROM_RANK_0 = state_dicts.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
Training = tuple[nn.Module, torch.optim.Optimizer]


def main() -> None:
    world = mpicomm.bootstrap()
    model = nn.Sequential(nn.Linear(64, 127), nn.ReLU(), nn.Linear(127, 10)).to(world.device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64, device=world.device)).square().mean().backward()
    optimizer.step()  # also before loading: it creates the optimizer's state, into which to load
    if "--load" not in sys.argv:
        save(world, (model, optimizer))
        return
    for load in (load_shards, load_whole):
        saved = mpicomm.broadcast_object(load((model, optimizer)), src=0)
        assert saved["digest"] == digest((model, optimizer)), "the state differs from the saved one"
        if world.rank == 0:
            print(f"{load.__name__} on {world.size} ranks: the state that {saved['ranks']} ranks saved", flush=True)


def state_of(training: Training, options: state_dicts.StateDictOptions | None = None) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), state_dicts.get_state_dict(*training, options=options), strict=True))


def save(world: mpicomm.World, training: Training) -> None:
    about = {"digest": digest(training), "ranks": world.size}
    writer = dcp.FileSystemWriter(DIRECTORY / "shards", overwrite=False)  # a failure would mix old and new shards
    dcp.save({**state_of(training), "about": about}, storage_writer=writer)
    whole = state_of(training, ON_RANK_0)
    if world.rank == 0:
        torch.save({**whole, "about": about}, DIRECTORY / "whole.tmp")
        (DIRECTORY / "whole.tmp").replace(DIRECTORY / "whole.pt")
        print(f"{world.size} ranks saved {len([*DIRECTORY.glob('shards/*.distcp')])} shards and whole.pt", flush=True)


def load_shards(training: Training) -> dict[str, Any]:
    state = {**state_of(training), "about": {"digest": "", "ranks": 0}}
    dcp.load(state, checkpoint_id=DIRECTORY / "shards")  # into the shards of this rank
    state_dicts.set_state_dict(*training, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["about"]


def load_whole(training: Training) -> dict[str, Any]:
    state: dict[str, Any] = {"model": {}, "optimizer": {}, "about": {}}  # the other ranks get their shards from rank 0
    if dist.get_rank() == 0:
        state = torch.load(DIRECTORY / "whole.pt", weights_only=True)
    # Not set_state_dict: torch 2.13 loads no model on a rank whose state is empty, and rank 0 would wait for it.
    state_dicts.set_optimizer_state_dict(*training, state["optimizer"], options=FROM_RANK_0)
    state_dicts.set_model_state_dict(training[0], state["model"], options=FROM_RANK_0)
    return state["about"]


def digest(training: Training) -> str:
    """Return a digest of the model and the optimizer's state (collective)."""
    options = state_dicts.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    values = [value for part in state_of(training, options).values() for value in part.values()]
    return hashlib.sha256(b"".join(v.cpu().numpy().tobytes() for v in values if torch.is_tensor(v))).hexdigest()


if __name__ == "__main__":
    main()
