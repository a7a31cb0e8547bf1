"""Sessions on a GPU, each in a process of its own; the very same over the fake driver."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.child import Order
from benchmarks.gpu.gate import Processes

ROOT = Path(__file__).parents[2]
PLACES = [pytest.param(True, id="fake"), pytest.param(False, id="cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("fake", PLACES)
def test_training_within_a_budget_is_bit_equal(fake: bool) -> None:
    order = Order(workload="conv_stack", preset="small" if fake else "full", digests=True)
    shell = Processes(limit_s=400, fake=fake)
    expected = shell.train(order)
    assert "error" not in expected, expected
    chunk_nbytes = (64 << 10) if fake else (2 << 20)
    budget_nbytes = max(expected["peak_nbytes"] // 2 // chunk_nbytes, 4) * chunk_nbytes
    found = shell.train(replace(order, variant="ours", budget_nbytes=budget_nbytes))
    assert "error" not in found, found
    assert [step["digest"] for step in found["steps"]] == [step["digest"] for step in expected["steps"]]
    assert found["steps"][-1]["mode"] == "planned"
    assert found["peak_nbytes"] <= budget_nbytes


@pytest.mark.gpu
def test_figures_and_refusals_of_a_real_device() -> None:
    script = """
import pytest, torch, ooc
with ooc.Session("256MiB", device="cuda", plan_cache=False) as session:
    x = torch.ones(8 << 20, device="cuda")
    y = torch.ones(64, device="cuda")
    assert torch.cuda.memory_allocated() == (32 << 20) + 256, torch.cuda.memory_allocated()
    assert torch.cuda.memory_reserved() == 256 << 20
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(1 << 30, device="cuda")
    with pytest.raises(ooc.errors.Refused):
        torch.cuda.CUDAGraph().capture_begin()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        x += 1
    x.record_stream(other)
    del x
    torch.cuda.empty_cache()
    kept = torch.full((4 << 20,), 3.0, device="cuda")
assert (kept == 3).all() and (y == 1).all()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_cuda_that_was_started_before_is_an_error() -> None:
    script = "import torch, ooc; torch.ones(1, device='cuda'); ooc.Session('64MiB', device='cuda')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "CUDA is initialised already in this process" in done.stderr
