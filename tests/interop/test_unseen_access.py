"""Functions of torch's that touch memory without an op: `print`, `apply_`, `map_`, `torch.tensor`, a growing storage.

Within a planned step the addresses of what is away show other variables' bytes, and nobody would know of a write.
"""

from __future__ import annotations

import ctypes
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from tests.interop.cases import SIDE, check_in_steps
from tests.session.test_segments import digest, run
from tests.thinned import thinned

SIZE, NUM_STEPS = 256, 30
imported_by_name = Tensor.numpy
"""As by `from torch import ...`, before any session."""


def printed(b: Tensor) -> Any:
    return repr(b)


def gathered(b: Tensor) -> Any:
    entries = [b[i, i] for i in range(5)]
    return [torch.tensor(entries).tolist(), torch.as_tensor(entries).tolist(), b.new_tensor([entries]).tolist()]


def applied(b: Tensor) -> Any:
    return b[:4].apply_(lambda value: value * 0.5 + 1.0).sum().item()


def mapped(b: Tensor) -> Any:
    b[:1].map_(torch.zeros(1, SIZE), lambda value, _: value + 1.0)
    b[1:2].map2_(b[2:3], b[3:4], lambda value, one, other: value + one - other)
    return b[:4].sum().item()


def grown(b: Tensor) -> Any:
    b.untyped_storage().resize_(2 * b.untyped_storage().nbytes())
    return b.new_empty(0).set_(b.untyped_storage(), 0, (SIZE, SIZE)).square().mean().item()


def training(touch: Callable[[Tensor], Any]) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(SIZE, SIZE), nn.Tanh())))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    state, found = torch.randn(SIZE, SIZE), []
    for _ in range(NUM_STEPS):
        b = state * 0.5
        loss = net(torch.randn(64, SIZE)).square().mean() + b.square().mean()
        loss.backward()
        found += [touch(b), loss.item()]
        optimizer.step()
        optimizer.zero_grad()
        found.append([b.sum().item(), state.apply_(abs)[0, 0].item() if touch is applied else 0])
        del b, loss
    return found + digest(net)


@pytest.mark.parametrize("budget", ["2304KiB", pytest.param("2560KiB", marks=pytest.mark.slow), "3MiB"])
@thinned("touch,debug", [printed, gathered, applied, mapped, grown], [False, True])
def test_it_sees_and_changes_the_variables_own_bytes(touch: Callable[[Tensor], Any], debug: bool, budget: str) -> None:
    rows = run(lambda: training(touch), budget=budget, debug=debug)
    assert sum(row.num_planned_ops for row in rows) > 0


def constructed(entries: list[Tensor]) -> Any:
    one, other = entries
    made = [
        torch.asarray([one, other]),
        torch.sparse_coo_tensor([[0, 1], [1, 0]], [one, other]).to_dense(),  # type: ignore[arg-type]
        torch.nested.nested_tensor([[one, other], [one]]).to_padded_tensor(0.0),
        torch.ones(1).new([one, other]),
        torch.Tensor([one, other]),
        torch.FloatTensor([one, other]),
        torch.tensor([one, other], dtype=torch.bool),
        torch.arange(SIDE)[[[one, other]]],
    ]
    return [tensor.tolist() for tensor in made]


def written_through(pointer: int) -> int:
    (ctypes.c_int32).from_address(pointer + 64).value = 7
    return (ctypes.c_int32).from_address(pointer + 4096).value


def saved_by_script(integers: Tensor) -> Any:
    module = torch.jit.script(Held(integers))
    return torch.jit.load(io.BytesIO(module.save_to_buffer())).held.tolist()


class Held(nn.Module):
    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.register_buffer("held", held)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.held.sum()


def traced(integers: Tensor) -> Any:
    x = torch.ones(1, 4, 8, 8)
    with torch.no_grad():
        function = torch.jit.trace(
            lambda x: torch.conv2d(x, integers[:16, :16].float().reshape(4, 4, 4, 4).clamp(0, 9)), x
        )
        return [function(k * x).sum().item() for k in (1, 2)]


LATE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "the address of an array that is gone": (lambda z: z.mul_(1).numpy().ctypes.data, written_through),
    "elements in lists": (lambda z: [z[0, 0], z[1, 1]], constructed),
    "a function imported by name": (lambda z: z, lambda z: imported_by_name(z)[5].tolist()),
    "a script's buffer": (lambda z: z, saved_by_script),
    "a trace": (lambda z: z, traced),
}


@thinned("what,debug", list(LATE), [False, True])
def test_what_is_used_late_in_a_step(what: str, debug: bool) -> None:
    """The variable is used by ops at a step's start and end: in between it is away when it is used otherwise."""
    begin, use = LATE[what]
    check_in_steps(begin, use, debug=debug)


def test_scripts_may_be_compiled() -> None:
    with ooc.Session("1MiB"):
        assert torch.jit.script(plus_constant)(torch.ones(2)).tolist() == [2.0, 3.0]


def plus_constant(x: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0])


def test_a_thread_may_print_and_apply() -> None:
    from concurrent.futures import ThreadPoolExecutor

    expected = torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE)
    with ooc.Session("1MiB", chunk_nbytes="64KiB") as session, ThreadPoolExecutor(1) as threads:
        a = torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE)
        others = [torch.ones(SIZE, SIZE) for _ in range(6)]
        assert threads.submit(repr, a).result() == repr(expected)
        threads.submit(a[:2].apply_, lambda value: value + 1).result()
        expected[:2] += 1
        assert torch.equal(a, expected)
        assert session.engine.manager.counters.evicted_nbytes > 0
        del others


def test_afterwards_they_are_torchs_own() -> None:
    def now() -> list[Any]:
        names = ("apply_", "map_", "map2_", "__repr__", "__float__", "numpy")
        return [*(getattr(Tensor, name) for name in names), torch.UntypedStorage.resize_, imported_by_name]

    before, own = now(), set(vars(Tensor))
    with ooc.Session("1MiB"):
        assert all(ours is not theirs for ours, theirs in zip(now(), before, strict=True))
    assert now() == before
    assert set(vars(Tensor)) == own


def test_a_list_op_whose_lists_are_cut_otherwise_changes_others() -> None:
    """The same function on the same variables in the same order: `[a] += [b]`, and `[a, b] += [1, 2]`."""

    def program() -> list[Any]:
        torch.manual_seed(0)
        choose, losses = random.Random(3), []
        net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(SIZE, SIZE), nn.Tanh())))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        a, b, small = torch.randn(128, 128), torch.randn(128, 128), [torch.full((1,), 0.25), torch.full((1,), 0.5)]
        for step in range(60):
            if step < 24 or choose.random() < 0.6:
                torch._foreach_add_([a], [b])
            else:
                torch._foreach_add_([a, b], small)
            y = net(torch.randn(64, SIZE))
            loss = y.square().mean() + (y[:, :128] @ a.mul_(0.5) @ b).square().mean() * 1e-3
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            del y, loss
        return losses + digest(net)

    for debug in (False, True):
        run(program, budget="2304KiB", debug=debug)
