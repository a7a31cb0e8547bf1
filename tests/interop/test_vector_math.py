"""The first vectorized function of a process, under a session. It fails in a third of all runs without the remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import torch
import ooc

torch.set_num_threads(2)
with ooc.Session("64MiB", plan_cache=False):
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(values.tanh(), values.tanh())
"""


def test_the_first_vectorized_function_has_the_bits_of_any_other() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, cwd=Path(__file__).parents[2])
