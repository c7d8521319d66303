"""A script for Horovod, with the structure of its MNIST example: a convolutional network, and images of digits.

It imports only Horovod, and `mpicomm run --horovod` runs it without Horovod. The accuracy varies between machines.

    $ mpicomm run --horovod -n 4 examples/horovod_script/digits.py
    epoch 1: loss 2.2872
    epoch 2: loss 1.8967
    epoch 3: loss 1.1436
    epoch 4: loss 0.7536
    epoch 5: loss 0.5392
    epoch 6: loss 0.4235
    test set: average loss 0.3254, accuracy 90.83%
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Digits with Horovod")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-allreduce", action="store_true", help="compress the gradients")
parser.add_argument("--use-adasum", action="store_true", help="reduce by Adasum")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=3)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=3)
        self.fc1 = nn.Linear(80, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the digits."""
        x = functional.relu(self.conv1(x))
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2)).flatten(1)
        x = functional.dropout(functional.relu(self.fc1(x)), training=self.training)
        return functional.log_softmax(self.fc2(x), dim=1)


def main(args: argparse.Namespace) -> None:
    # Horovod: initialize the library.
    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    # Horovod: partition the data among the ranks.
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    train_set, test_set = TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])
    train_sampler: DistributedSampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler: DistributedSampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_set, batch_size=1000, sampler=test_sampler)

    # Horovod: scale the learning rate by the number of ranks, which Adasum does not need.
    model = Net()
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * scale, momentum=args.momentum)

    # Horovod: start from the parameters and the optimizer of rank 0.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # Horovod: average the gradients of all ranks.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        loss = train(model, optimizer, train_loader)
        # Horovod: print only on rank 0.
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
    test(model, test_loader, len(test_sampler))


def train(model: nn.Module, optimizer: optim.Optimizer, loader: DataLoader) -> float:
    model.train()
    total = torch.zeros(())
    for data, target in loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return metric_average(total.item() / len(loader), "train_loss")


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader, length: int) -> None:
    model.eval()
    loss, correct = 0.0, 0.0
    for data, target in loader:
        output = model(data)
        loss += functional.nll_loss(output, target, reduction="sum").item()
        correct += (output.argmax(dim=1) == target).sum().item()
    # Horovod: average the metrics of the ranks.
    loss, accuracy = metric_average(loss / length, "test_loss"), metric_average(correct / length, "test_accuracy")
    if hvd.rank() == 0:
        print(f"test set: average loss {loss:.4f}, accuracy {accuracy:.2%}", flush=True)


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


if __name__ == "__main__":
    main(parser.parse_args())
