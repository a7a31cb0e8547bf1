"""Train a model whose step takes over 1 GiB in core; print losses, then memory as this process sees it."""

import argparse

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--depth", type=int, default=16)
parser.add_argument("--steps", type=int, default=5)
arguments = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
width = arguments.width
model = nn.Sequential(*(layer for _ in range(arguments.depth) for layer in (nn.Linear(width, width), nn.ReLU())))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(arguments.steps):
    inputs = torch.randn(64, width, generator=torch.Generator().manual_seed(step))
    loss = functional.mse_loss(model(inputs), inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item().hex(), flush=True)
