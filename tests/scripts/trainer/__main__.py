"""Started by `python -m trainer` or `ooc run -m trainer`."""

import sys

import torch

from . import WIDTH

torch.manual_seed(0)
weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
print("main", __name__, __package__, __spec__.name, sys.argv[1:], sys.modules["__main__"].WIDTH)
for _ in range(5):
    loss = (torch.randn(256, WIDTH) @ weight).tanh().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
