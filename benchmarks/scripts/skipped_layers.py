"""Stochastic depth: a transformer each of whose layers is skipped in one step of five, so that no two steps agree."""

import random

import torch
from common import SIZE, iterations, tell, tell_bits
from torch import nn

torch.manual_seed(1)
choose = random.Random(2)
WIDTH = 192 * SIZE
blocks = nn.ModuleList(
    [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.0) for _ in range(12)]
)
first, last = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 10)
optimizer = torch.optim.AdamW([*blocks.parameters(), *first.parameters(), *last.parameters()], lr=1e-4)
for index in iterations(16):
    hidden = first(torch.randn(8, 64, 32))
    for block in blocks:
        if choose.random() < 0.8:
            hidden = block(hidden)
    loss = nn.functional.cross_entropy(last(hidden.mean(1)), torch.randint(0, 10, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(index, loss)
tell_bits(blocks, first, last)
