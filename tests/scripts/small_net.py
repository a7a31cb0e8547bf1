"""A small convolutional network, for recording and planning: a few steps, a loss printed for each."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--fail", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 32 * 32, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(options.steps):
    if options.fail and step == 1:
        raise RuntimeError("the script's own")
    inputs = torch.randn(options.batch_size, 3, 32, 32)
    loss = nn.functional.cross_entropy(model(inputs), torch.randint(10, (options.batch_size,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}")
