"""A job of several processes, as torchrun starts it: prints its bits. `--fail RANK`: that rank raises in mid-step."""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(
    nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), bucket_cap_mb=0.5, init_sync=False
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
generator = torch.Generator().manual_seed(rank)
for step in range(7):
    optimizer.zero_grad(set_to_none=True)
    loss = model(torch.randn(64, 256, generator=generator)).square().mean()
    if sys.argv[1:] == ["--fail", str(rank)] and step == 5:
        raise ValueError("as asked for")
    loss.backward()
    optimizer.step()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
print(f"rank {rank}: {digest.hexdigest()}\n", end="", flush=True)  # one write: the ranks share a pipe
dist.destroy_process_group()
