"""Real text that every machine has: the source files of Python's own standard library.

Nothing is downloaded. The text is the same for one version of Python, and so are all batches.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.models.workload import Batch, generator

CORPUS_LIMIT_NBYTES = 4_000_000
"""Enough that a demo never sees a byte twice; small beside any budget."""


@cache
def corpus(limit_nbytes: int = CORPUS_LIMIT_NBYTES) -> NDArray[np.uint8]:
    """The standard library's top-level modules, in order of name, cut to `limit_nbytes` bytes.

    The array is read-only and shared by all callers.

    Raises:
        FileNotFoundError: This Python has no standard library sources on disk.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    total = 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= limit_nbytes:
            break
    if not parts:
        raise FileNotFoundError(f"no *.py in {folder}: this Python has no standard library sources to train on")
    return np.frombuffer(b"".join(parts)[:limit_nbytes], dtype=np.uint8)


def next_byte_batch(step_index: int, *, batch_size: int, context: int) -> Batch:
    """`(inputs, targets)`, both int64 `[batch_size, context]`: targets are inputs one byte later."""
    text = corpus()
    starts = torch.randint(len(text) - context - 1, (batch_size,), generator=generator(step_index)).tolist()
    windows = np.stack([text[start : start + context + 1] for start in starts]).astype(np.int64)
    tokens = torch.from_numpy(windows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
