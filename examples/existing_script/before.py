"""Fit a linear model to noisy samples with DistributedDataParallel, one process per rank."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else torch.device(accelerator.type, local_rank)
    torch.manual_seed(0)

    x = torch.randn(1024, 3)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]]) + 0.1 * torch.randn(1024, 1)
    dataset = TensorDataset(x, y)
    sampler: DistributedSampler[int] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    model = DistributedDataParallel(nn.Linear(3, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / dist.get_world_size():.4f}")

    if rank == 0:
        weights = ", ".join(f"{weight:.2f}" for weight in model.module.weight.flatten().tolist())
        print(f"{dist.get_world_size()} ranks found the weights {weights}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
