"""Sessions on a GPU, each in a process of its own; the very same over the fake driver."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.gpu.child import Order
from benchmarks.gpu.gate import Processes
from tests.cuda.forked_gate import ForkedProcesses

ROOT = Path(__file__).parents[2]


def run(script: str) -> None:
    """In a process of its own."""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PLACES = [pytest.param(True, id="fake"), pytest.param(False, id="cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("fake", PLACES)
def test_training_within_a_budget_is_bit_equal(fake: bool) -> None:
    order = Order(workload="conv_stack", preset="small" if fake else "full", digests=True, host_budget_nbytes=1 << 30)
    shell = (ForkedProcesses if fake else Processes)(limit_s=170, fake=fake)
    expected = shell.train(order)
    assert "error" not in expected, expected
    chunk_nbytes = (64 << 10) if fake else (2 << 20)
    budget_nbytes = max(expected["peak_nbytes"] // 2 // chunk_nbytes, 4) * chunk_nbytes
    found = shell.train(replace(order, variant="ours", budget_nbytes=budget_nbytes))
    assert "error" not in found, found
    assert [step["digest"] for step in found["steps"]] == [step["digest"] for step in expected["steps"]]
    modes = [step["mode"] for step in found["steps"]]
    assert modes[-1] == "planned", (modes, found["unplannable"], found["planning_s"])
    assert found["peak_nbytes"] <= budget_nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["remapped", "best_fit"])
def test_what_sessions_are_compared_with_gives_the_same_bits(placement: Literal["remapped", "best_fit"]) -> None:
    order = Order(workload="conv_stack", digests=True, host_budget_nbytes=1 << 30, num_steps=5)
    shell = Processes(limit_s=100, fake=False)
    expected = shell.train(order)
    assert "error" not in expected, expected
    budget_nbytes = int(expected["peak_nbytes"] * 0.7) >> 21 << 21
    found = shell.train(replace(order, variant="ours", budget_nbytes=budget_nbytes, placement=placement))
    assert "error" not in found, found
    assert [step["digest"] for step in found["steps"]] == [step["digest"] for step in expected["steps"]]


@pytest.mark.gpu
def test_computation_alone_runs_at_sizes_that_do_not_fit() -> None:
    order = Order(workload="conv_stack", variant="aliased", budget_nbytes=512 << 20, num_steps=3)
    found = Processes(limit_s=60, fake=False).train(order)
    assert "error" not in found, found
    assert found["aliased_nbytes"] > 512 << 20


@pytest.mark.gpu
def test_cupy_arrays_live_in_the_budget_and_cross_by_dlpack() -> None:
    """Both ways without a copy; no kernel of CuPy's own, since those must be compiled."""
    pytest.importorskip("cupy")
    script = """
import cupy, numpy, torch, ooc
with ooc.Session("256MiB", device="cuda", host_budget="512MiB", plan_cache=False) as session:
    x = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    cupy.cuda.set_allocator(session.cupy_allocator())
    before = torch.cuda.memory_allocated()
    a = cupy.asarray(numpy.arange(1000, dtype=numpy.float32))
    assert torch.cuda.memory_allocated() - before >= 4000
    t = torch.from_dlpack(a)
    assert t.data_ptr() == a.data.ptr
    t += 1
    torch.cuda.synchronize()
    assert (a.get() == numpy.arange(1000) + 1).all()
    seen = cupy.from_dlpack(x)
    assert seen.data.ptr == x.data_ptr() and seen.shape == x.shape
    with session.step():  # the pointer's own export has ended: from here on CuPy's holds it
        others = [torch.full((4 << 20,), float(i), device="cuda") for i in range(20)]  # 320 MiB
        assert all(float(o[0]) == i for i, o in enumerate(others))
        assert (seen[100:200].get() == numpy.arange(100, 200)).all()
    record = session.engine.record_at(session.engine.addresses()(x))
    assert record.exports == 1, record
    del seen
    session.engine.manager.end_exports()
    assert record.exports == 0, record
    del a, t, others, x
    cupy.cuda.set_allocator(None)
"""
    run(script)


@pytest.mark.gpu
def test_figures_and_refusals_of_a_real_device() -> None:
    script = """
import pytest, torch, ooc
with ooc.Session("256MiB", device="cuda", host_budget="256MiB", plan_cache=False) as session:
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
    run(script)


@pytest.mark.gpu
def test_planned_ops_on_several_streams_come_one_after_the_other() -> None:
    """The program does not order its streams itself: what one makes the other uses, frees, and allocates anew."""
    script = """
import contextlib, os, torch, ooc
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

def train(session):
    torch.manual_seed(0)
    weights = [torch.randn(1024, 1024, device="cuda").div_(32).requires_grad_() for _ in range(12)]
    other = torch.cuda.Stream()
    found = []
    for index in range(7):
        with session.step() if session is not None else contextlib.nullcontext():
            x = torch.full((1024, 1024), 0.01 * (index + 1), device="cuda")
            for number, weight in enumerate(weights):
                is_aside = session is not None and number % 3 == 1
                for _ in range(4):  # enough work that a stream which is not waited for comes too late
                    with torch.cuda.stream(other) if is_aside else contextlib.nullcontext():
                        x = torch.tanh(x @ weight)
            loss = x.sum()
            loss.backward()
            with torch.no_grad():
                for weight in weights:
                    weight -= 0.01 * weight.grad
                    weight.grad = None
            found.append(loss.item().hex())
            del x, loss
    return found, session.steps.rows[-1] if session is not None else None

with ooc.Session("96MiB", device="cuda", host_budget="1GiB", plan_cache=False, background_planning=False) as session:
    found, last = train(session)
    modes = [row.mode for row in session.steps.rows]
    assert last.mode == "planned" and last.evicted_nbytes > 0, (modes, last, session.engine.learned())
    boxed = session.engine.runner.dispatcher.num_boxed
    assert boxed > 0
expected, _ = train(None)
assert found == expected, (found, expected)
"""
    run(script)


@pytest.mark.gpu
def test_threads_without_a_context_allocate_and_free() -> None:
    """A user's thread in a session; after it autograd's own, which a backward pass outside of sessions runs on."""
    script = """
import threading, torch, ooc
found = []

def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

with ooc.Session("256MiB", device="cuda", host_budget="512MiB", plan_cache=False) as session:
    full = [torch.full((16 << 20,), float(i), device="cuda") for i in range(3)]  # 192 of 240 MiB
    in_thread(lambda: found.append(torch.full((24 << 20,), 7.0, device="cuda")))
    assert len(found) == 1 and bool((found[0] == 7).all()), found
    assert all(bool((t == i).all()) for i, t in enumerate(full))
    del full
in_thread(found.clear)  # unmapped there
x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
(x @ x).sum().backward()
assert bool((x.grad == 2048).all())
in_thread(lambda: found.append(torch.ones(1 << 20, device="cuda")))
assert float(found[0].sum()) == 1 << 20
"""
    run(script)


@pytest.mark.gpu
def test_cuda_that_was_started_before_is_an_error() -> None:
    script = "import torch, ooc; torch.ones(1, device='cuda'); ooc.Session('64MiB', device='cuda', host_budget='64MiB')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "CUDA is initialised already in this process" in done.stderr
