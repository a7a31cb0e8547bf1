"""Training whose memory is activations: what recomputes alone can play it in half of its memory."""

import torch
from torch import nn

torch.manual_seed(0)
layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
model = nn.Sequential(*layers, nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    loss = model(torch.randn(1024, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, loss.item().hex())
