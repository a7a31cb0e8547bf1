"""A real Triton kernel, launched by `kernel[grid]`, in planned steps: it reads and writes what the plan moves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import contextlib, sys
import torch, triton
import triton.language as tl
import ooc

@triton.jit
def blend(out, x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) * 0.5 + tl.load(y + at, mask=inside), mask=inside)

def train(session):
    weights = [torch.full((1024, 1024), 0.1 * (i + 1), device="cuda") for i in range(8)]
    sums = []
    for _ in range(6):
        with session.step() if session else contextlib.nullcontext(), torch.no_grad():
            x = torch.ones(1024, 1024, device="cuda")
            for weight in weights:
                out = torch.empty_like(x)
                blend[(1024,)](out, x, weight, x.numel(), BLOCK=1024)
                weight.mul_(1.01)
                x = out
            sums.append(x.double().sum().item())
            del x, out
    return sums + [weight.double().sum().item() for weight in weights]

if sys.argv[1] == "ours":
    debug = sys.argv[2] == "debug"
    with ooc.Session("28MiB", device="cuda", host_budget="1GiB", plan_cache=False, debug=debug) as session:
        found = train(session)
        rows = session.report()["steps"]
        assert rows[-1]["mode"] == "planned", rows
        assert rows[-1]["evicted_nbytes"] > 0, rows
else:
    found = train(None)
print([value.hex() for value in found])
"""


@pytest.mark.gpu
def test_a_triton_kernel_is_an_op_of_the_step(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "launches.py"  # Triton reads its kernels' source
    path.write_text(SCRIPT)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(path), *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    expected = run("in core", "")
    assert run("ours", "") == expected
    assert run("ours", "debug") == expected
