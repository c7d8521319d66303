"""A sharded model: the language model of char_lm.py, with each parameter sharded over the ranks (FSDP2).

FSDP gathers the parameters of a layer only while the layer computes, so a model may be larger than the memory of one
GPU. The optimizer state is sharded too; Adam has two values for each parameter. At the end rank 0 gathers the
parameters into an ordinary model, which generates text. Checkpoints have the same contents as without FSDP.

    $ mpirun -n 4 python -m mpicomm.examples.fsdp
    epoch 1/2  step 1  loss -  209 samples/s    2%  0:27 left
    epoch 1: loss 3.0090  eval_loss 2.5409
    epoch 2/2  step 83  loss 2.6309  1,007 samples/s   89%  0:00 left
    epoch 2: loss 2.4970  eval_loss 2.3281
    63,679 characters per second
    run
    ┌────────────────┬────────────────────────────────────────┐
    │ steps          │ 88 in 2 epochs                         │
    │ time           │ 0:06 (evaluation 0:00)                 │
    │ samples/s      │ 995 on 4 ranks                         │
    │ rank 0's steps │ 1% data, 97% compute, 3% communication │
    │ vm             │ 4 ranks on cpu, peak 364 MiB per rank  │
    └────────────────┴────────────────────────────────────────┘
    rank 3 holds 110,336 of 441,344 bytes
    rank 0 holds 110,336 of 441,344 bytes
    rank 2 holds 110,336 of 441,344 bytes
    rank 1 holds 110,336 of 441,344 bytes
    held-out loss 2.33. Text generated on rank 0:
    def iine alinere veser F)
    serale t t we ine.s oorge alinide
    in                  n   ine ap n an = tinis ar n *"
    in ' urin = taculise tolit simtic al t n  s(e(e, = actre):
"""

from __future__ import annotations

import sys

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

import mpicomm
from mpicomm.examples.char_lm import GOAL, Model, Text, generate, parse_arguments, read, train
from mpicomm.examples.ddp import share_cores


def main() -> None:
    arguments = parse_arguments(__doc__, "runs/fsdp")
    world = mpicomm.bootstrap(device=arguments.device)
    share_cores(world)
    text = read(arguments.characters)
    model, loss = train(text, arguments, strategy="fsdp")
    here, whole = bytes_held(model)
    print(f"rank {world.rank} holds {here:,} of {whole:,} bytes\n", end="", flush=True)
    copy = gathered(world, model, text)
    if copy is not None:
        print(f"held-out loss {loss:.2f}. Text generated on rank 0:\n{generate(copy, text)}", flush=True)
    if loss > GOAL:
        sys.exit(1)  # on all ranks: the loss is the same on each


def bytes_held(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of parameters on this rank, and on all ranks together."""
    here = whole = 0
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)  # FSDP replaces each parameter by one
        here += parameter.to_local().nbytes
        whole += parameter.nbytes
    return here, whole


def gathered(world: mpicomm.World, model: nn.Module, text: Text) -> nn.Module | None:
    """Return an unsharded model with the same parameters on rank 0, and None on the other ranks (collective)."""
    # With cpu_offload only rank 0 gets the parameters: a host with many ranks holds them only once.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.rank != 0:
        return None
    copy = Model(len(text.characters))
    copy.load_state_dict(state)
    return copy


if __name__ == "__main__":
    main()
