"""A job of several processes, as torchrun starts it: prints its bits. `--fail RANK`: that rank raises in mid-step."""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(failing: str) -> None:
    """Train in the process group that there is, and print the bits. The rank that is named so raises in mid-step."""
    torch.manual_seed(3)
    rank = dist.get_rank()
    model = DistributedDataParallel(
        nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), bucket_cap_mb=0.5, init_sync=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for step in range(7):
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.randn(64, 256, generator=generator)).square().mean()
        if failing == str(rank) and step == 5:
            raise ValueError("as asked for")
        loss.backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(f"rank {rank}: {digest.hexdigest()}\n", end="", flush=True)  # one write: the ranks share a pipe


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[2] if sys.argv[1:2] == ["--fail"] else "")
    dist.destroy_process_group()
