"""An ordinary training script that knows nothing of ooc. Prints each loss to the last bit."""

import argparse
import atexit
import hashlib
import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def digest(model):
    body = hashlib.sha256()
    for parameter in model.parameters():
        body.update(parameter.detach().numpy().tobytes())
    return body.hexdigest()


def evaluate(model, inputs, targets):
    model.eval()
    with torch.no_grad():
        loss = functional.cross_entropy(model(inputs), targets).item()
    model.train()
    return loss


class Interrupting(nn.Module):
    """Sends this process SIGINT in the middle of its n-th forward pass."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return x


def main():
    parser = argparse.ArgumentParser(description="Train something small.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--interrupt-at", type=int, default=0)
    parser.add_argument("--raise-at", type=int, default=0)
    parser.add_argument("--exit", default=None)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    width = arguments.width
    model = nn.Sequential(
        nn.Linear(width, width),
        nn.ReLU(),
        Interrupting(arguments.interrupt_at),
        nn.Linear(width, width),
        nn.Dropout(0.1),
        nn.ReLU(),
        nn.Linear(width, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1100, width), torch.randint(0, 10, (1100,)))
    loader = DataLoader(data, batch_size=256, shuffle=True, num_workers=arguments.workers)
    print("arguments", sys.argv[1:], __name__, os.path.basename(__file__))
    atexit.register(lambda: print("at exit", digest(model)))
    step = 0
    for epoch in range(arguments.epochs):
        for inputs, targets in loader:
            step += 1
            loss = functional.cross_entropy(model(inputs), targets)
            if step == arguments.raise_at:
                loss = loss @ torch.ones(3, 3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print("step", step, loss.item().hex())
        print("epoch", epoch, evaluate(model, *data[:512]).hex())
    print("parameters", digest(model))
    if arguments.exit is not None:
        sys.exit(int(arguments.exit) if arguments.exit.isdigit() else arguments.exit)


if __name__ == "__main__":
    main()
