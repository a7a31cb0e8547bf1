"""An ordinary training script that says where it is, for whoever interrupts it. Trains until it is told to end."""

import argparse
import multiprocessing
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()


def say(what):
    print(what, flush=True)


if __name__ == "__main__":
    say(f"opened {os.getpid()}")
    torch.manual_seed(0)
    layers = [layer for _ in range(options.depth) for layer in (nn.Linear(160, 160), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = TensorDataset(torch.randn(4096, 160))
    context = multiprocessing.get_context("fork") if options.workers else None
    step = 0
    while step < options.steps:
        for (inputs,) in DataLoader(rows, batch_size=256, num_workers=options.workers, multiprocessing_context=context):
            loss = model(inputs).square().mean()
            loss.backward()
            say(f"step {step}")
            optimizer.step()  # the end of a step: what comes next is learnt, planned or played
            optimizer.zero_grad()
            step += 1
            if step == options.steps:
                break
    say("closing")
