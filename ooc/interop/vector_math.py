"""The first vectorized function of a process, before several threads may call it at once.

With MKL's vector functions under torch 2.13 and two threads, the first `tanh` of 30,000 elements in a process had
errors of 5e-5 in some of them, in 18 of 50 processes: the library sets itself up, its accuracy too, while both threads
use it. All later calls are right, and so is the first one where any such function was called before, on one thread.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

_NUM_ELEMENTS = 8  # far too few to be shared out among threads


def settle_vector_math() -> None:
    """Have the library set itself up, so that what runs again, or in another process, has the same bits."""
    with _disable_current_modes():
        torch.ones(_NUM_ELEMENTS, dtype=torch.float32, device="cpu").exp()
