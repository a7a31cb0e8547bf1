"""Ops in parts: what goes wrong in the middle, who else looks, and what the caller has laid out."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ooc
from ooc.errors import StoreFailed
from ooc.memory.record import State
from vmm.slot_parts import SlotParts

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kth", range(1, 9))
def test_a_store_that_fails_in_the_middle(kth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an op that writes no operand nothing is left; a retry gives the bits. Nothing stays pinned."""
    calls = 0
    for name in ("read", "write"):
        original = getattr(SlotParts, name)

        def failing(self: SlotParts, *arguments: Any, original: Any = original) -> None:
            nonlocal calls
            calls += 1
            if calls == kth:
                raise OSError(5, "Input/output error")
            original(self, *arguments)

        monkeypatch.setattr(SlotParts, name, failing)
    with ooc.Session("3MiB", chunk_nbytes="64KiB") as session:
        a, b = torch.full((1 << 19,), 3.0), torch.full((1 << 19,), 4.0)
        manager = session.engine.manager
        with pytest.raises(StoreFailed, match="Input/output error"):
            a * b
        assert all(record.pins == 0 for record in manager.records.values())
        gc.collect()
        c = a * b
        assert len(manager.records) == 3
        assert c[12345:12350].tolist() == [12.0] * 5
        assert c.sum().item() == 12.0 * (1 << 19)
        assert a.sum().item() == 3.0 * (1 << 19)


def test_a_forked_process_keeps_what_it_saw() -> None:
    """A child reads the slots of away variables; what is written in parts afterwards goes to others."""
    with ooc.Session("3MiB", chunk_nbytes="64KiB") as session:
        a, b = torch.full((1 << 19,), 3.0), torch.full((1 << 19,), 4.0)
        c = a * b
        (record,) = [
            r for r in session.engine.manager.records.values() if r.state is State.AWAY and r.slot is not None
        ][-1:]
        assert record.slot is not None
        reading, writing = os.pipe()
        done, told = os.pipe()
        pid = os.fork()
        if not pid:
            os.read(reading, 1)
            ok = c[:10].tolist() == [12.0] * 10 and c[-10:].tolist() == [12.0] * 10
            os.write(told, b"y" if ok else b"n")
            os._exit(0)
        c.addcdiv_(a, b)  # in parts, in place
        c.mul_(2)
        os.write(writing, b"x")
        assert os.read(done, 1) == b"y"
        os.waitpid(pid, 0)
        for descriptor in (reading, writing, done, told):
            os.close(descriptor)
        assert c.sum().item() == 2 * 12.75 * (1 << 19)
        assert session.engine.manager.counters.num_in_parts == 2


def test_what_was_given_out_shows_what_parts_write() -> None:
    with ooc.Session("3MiB", chunk_nbytes="64KiB") as session:
        a, b, c = (torch.full((1 << 19,), value) for value in (3.0, 4.0, 5.0))
        shown = a.numpy()
        a.addcmul_(b, c)
        assert session.engine.manager.counters.num_in_parts == 1
        assert shown[0] == shown[-1] == 23.0
        shown[7] = 1.0
        d = a + b
        assert d[:9].tolist() == [27.0] * 7 + [5.0] + [27.0]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
def test_memory_is_the_kernels_to_tell() -> None:
    """Three variables of 96 MiB in 8 MiB: the process grows by the pool, and by no more than 16 MiB beside it."""
    program = """
import re, torch, ooc
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
torch.set_num_threads(1)
with ooc.Session("8MiB", chunk_nbytes="64KiB") as session:
    (torch.ones(1 << 20) + torch.empty(8, device="meta").new_ones(1, device="cpu")).add_(1)
    torch.empty(8, device="meta") + 1  # brings torch's compiler, as any optimizer does
    before = peak()
    a, b = torch.ones(24 << 20), torch.zeros(24 << 20)
    c = a + b
    c.addcdiv_(a, c)
    print(peak() - before, session.report()["peak_nbytes"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    grown, pool = map(int, done.stdout.split())
    assert pool <= 8 * MIB
    assert grown < 8 * MIB + 16 * MIB


OUT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "softmax": lambda a, out: torch.ops.aten._softmax.out(a, -1, False, out=out),
    "cat": lambda a, out: torch.cat([a[:500], a[500:]], out=out),
    "stack": lambda a, out: torch.stack([a[:, :200], a[:, 200:]], 1, out=out.view(1000, 2, 200)),
    "gather": lambda a, out: torch.gather(a, 1, torch.arange(400).flip(0)[None].expand(1000, 400), out=out),
    "pow": lambda a, out: torch.pow(a, 2, out=out),
    "select": lambda a, out: torch.index_select(a, 0, torch.arange(1000).flip(0), out=out),
    "embedding": lambda a, out: torch.ops.aten.embedding.out(a, torch.arange(1000).flip(0), out=out),
    "full": lambda a, out: torch.full(out.shape, 3.0, out=out),
}


@pytest.mark.parametrize("name", OUT)
def test_where_results_are_to_go_is_kept_or_the_op_refused(name: str) -> None:
    """A part would resize `out=` to its own sizes."""
    torch.manual_seed(1)
    a, expected = torch.randn(1000, 400), torch.zeros(1000, 400)
    OUT[name](a, expected)
    with ooc.Session("2MiB", chunk_nbytes="64KiB"):
        torch.manual_seed(1)
        a, out = torch.randn(1000, 400), torch.zeros(1000, 400)
        try:
            OUT[name](a, out)
        except ooc.BudgetTooSmall:
            assert name not in ("select", "embedding", "full")
        else:
            assert out.shape == expected.shape
            assert all(map(torch.equal, out.split(100), expected.split(100)))
