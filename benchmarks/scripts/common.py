"""What the scripts share: counting the CPU time of each iteration, and the bits of what was trained."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

LENGTH = int(os.environ.get("SCRIPT_LENGTH", "1"))
"""How many times as long the scripts train. What is measured once warm needs more than what is compared."""

SIZE = int(os.environ.get("SCRIPT_SIZE", "1"))
"""How many times as wide the models are: where an op takes as long as in models that people train."""


def iterations(count: int) -> Iterator[int]:
    """Count from 0 to `count`, times `LENGTH`; at the end tell the median CPU time of the later half, on stderr."""
    spent = []
    for index in range(count * LENGTH):
        before = time.process_time()
        yield index
        spent.append(time.process_time() - before)
    _tell_time(spent)


def time_optimizer_steps() -> None:
    """Tell the same of what lies between an optimizer's steps, when the script ends: for loops that others own."""
    times: list[float] = []
    register_optimizer_step_post_hook(lambda *_: times.append(time.process_time()))
    atexit.register(lambda: _tell_time([stop - start for start, stop in itertools.pairwise(times)]))


def _tell_time(spent: list[float]) -> None:
    if spent:
        print(json.dumps({"cpu_s": statistics.median(spent[len(spent) // 2 :])}), file=sys.stderr)


def tell(index: int, loss: torch.Tensor | float) -> None:
    """Print a loss, all of its bits."""
    print(index, float(loss).hex())


def tell_bits(*models: nn.Module) -> None:
    """Print a hash of all parameters and buffers."""
    found = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            found.update(
                value.detach().clone().contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else b""
            )
    print(found.hexdigest())
