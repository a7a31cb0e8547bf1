"""Ops on demand that are run from torch's stack of values, without Python (native/boxed_demand.h)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import ooc
import ooc.dispatch.mode
from ooc.errors import BudgetTooSmall
from ooc.replay import unions
from tests.dispatch.seen_ops import Seen

WIDTH = 128
"""A square has 64 KiB: it is managed."""

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.library.custom_op("ooc_tests::scaled", mutates_args=())
def scaled(x: Tensor, parts: list[Tensor], by: float = 2.0, *, shift: int = 0) -> list[Tensor]:
    if shift < 0:
        raise KeyError("as asked")
    return [part * by + x for part in parts]


@torch.library.custom_op("ooc_tests::halve_", mutates_args=("x",))
def halve_(x: Tensor, other: Tensor | None = None) -> None:
    x.mul_(0.5 if other is None else 0.25)


def squares(number: int) -> list[Tensor]:
    return [torch.randn(WIDTH, WIDTH) for _ in range(number)]


def numbers() -> list[Tensor]:
    x, y = squares(2)
    x = x * 2 + 1.5
    x += 3
    y = 2 - y / 4
    z = torch.where(x > 0, x, 0.0) + (y == True)  # noqa: E712 - a tensor
    return [z.add(x, alpha=2), torch.add(x, y, alpha=0.5), x.pow(2), torch.div(x, 3, rounding_mode="floor"), x * 1j]


def written() -> list[Tensor]:
    x, y, z = squares(3)
    torch.mul(x, y, out=z)
    torch.add(x, 2, out=z)
    x.relu_().clamp_(max=1.0)
    x[:, 3] = 7
    x[x > 0.5] = 0.25
    values, indices = torch.empty(0), torch.empty(0, dtype=torch.int64)
    torch.sort(y, out=(values, indices))
    return [x, z, values, indices]


def views() -> list[Tensor]:
    x, y = squares(2)
    parts = [*x.split(32), *y.unbind()[:3], *x.t().chunk(2, dim=1)]
    x.view(-1)[::2].zero_()
    total = torch.cat([part.reshape(-1) for part in parts])
    return [total, torch.stack([x, y], dim=1), x.expand(2, -1, -1).contiguous(), y.diagonal().clone()]


def random() -> list[Tensor]:
    (x,) = squares(1)
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return [F.dropout(x), torch.bernoulli(x.sigmoid()), made, torch.randperm(20_000), x.uniform_(-1, 1), x.normal_()]


def optional() -> list[Tensor]:
    x, y = squares(2)
    chosen = x[torch.arange(100), :], x[:, torch.arange(100)], x[None, :, torch.tensor([1, 2])]
    kept = F.layer_norm(x, (WIDTH,)) + F.layer_norm(x, (WIDTH,), y[0], y[1])
    made = torch.full((WIDTH, WIDTH), 2.0, dtype=torch.float32, device="cpu"), torch.zeros_like(x, dtype=torch.int64)
    loss = F.cross_entropy(x, torch.zeros(WIDTH, dtype=torch.int64), label_smoothing=0.1)
    return [*chosen, kept, *made, x.to(torch.bfloat16), x.to(memory_format=torch.preserve_format), loss, x.std()]


def lists() -> list[Tensor]:
    x, y, z = squares(3)
    torch._foreach_add_([x, y], 1)
    torch._foreach_addcdiv_([x, y], [y, z], [z, z], 0.1)
    return [*torch._foreach_mul([x, y], 2.0), *torch._foreach_norm([x, y]), *torch.meshgrid(x[0], y[0], indexing="ij")]


def custom() -> list[Tensor]:
    x, y = squares(2)
    ops = torch.ops.ooc_tests
    found = ops.scaled(x, [x, y]) + ops.scaled(x, [x, y], 3.0, shift=1)
    ops.halve_(x, y)
    ops.halve_(y)
    return [*found, x, y]


def failing() -> list[Tensor]:
    x, y = squares(2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch"):
            torch.mm(x, torch.ones(WIDTH + 1, 2))
        with pytest.raises(KeyError, match="as asked"):
            torch.ops.ooc_tests.scaled(x, [y], shift=-1)
    return [x @ y]


def sparse() -> list[Tensor]:
    embedding = nn.Embedding(512, WIDTH, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    loss = embedding(torch.randint(0, 512, (64, 4))).square().sum()
    # Not `backward`: it copies a sparse gradient of which somebody has parts, and Python objects count as somebody.
    (embedding.weight.grad,) = torch.autograd.grad(loss, [embedding.weight])
    optimizer.step()
    return [embedding.weight, cast(Tensor, embedding.weight.grad).coalesce().values()]


def trained() -> list[Tensor]:
    first, second, table = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Embedding(256, WIDTH)
    parameters = [*first.parameters(), *second.parameters(), *table.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, foreach=False)
    x = table(torch.randint(0, 256, (WIDTH,)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = first(x).relu()
    x = cast(Tensor, checkpoint(lambda x: F.gelu(second(x)) * 2, x.float(), use_reentrant=False))
    with torch.no_grad():
        scale = x.abs().mean()
    loss = F.dropout(x / scale, 0.3).softmax(1).square().mean()
    loss.backward()
    total = nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return [loss, total, *parameters]


PROGRAMS = [numbers, written, views, random, optional, lists, custom, failing, sparse, trained]

Program = Callable[[], list[Tensor]]


@contextlib.contextmanager
def opened(**options: Any) -> Iterator[ooc.Session]:
    with ooc.Session("32MiB", chunk_nbytes="64KiB", threshold_nbytes="4KiB", plan_cache=False, **options) as session:
        yield session


def recorded(program: Program, **options: Any) -> tuple[list[Any], list[Any], int]:
    """What a few steps record, no two of which are equal; their bits; how many ops went without Python."""
    torch.manual_seed(0)
    found: list[Any] = []
    bits: list[Any] = []
    with opened(**options) as session:
        runner, manager = session.engine.runner, session.engine.manager
        for index in range(5):
            with session.step():
                torch.ones(WIDTH, WIDTH)
                for _ in range(index):
                    torch.ones(WIDTH, WIDTH).sin_()
                results = program()
                runner.absorb()
                recorder = runner.recording.recorder
                assert recorder is not None
                numbers = _Numbers()
                found.append(
                    [(e.nbytes, e.kind, e.position, e.ordinal, numbers.of(e.address)) for e in recorder.events]
                )
                found.append([_shown(op, numbers) for op in recorder.ops])
                found.append(_nodes(recorder.ops))
                found.append([(r.nbytes, r.seen, r.stored, r.pins) for r in manager.records.values()])
                bits.append([x.detach().numpy().tobytes() if x.dtype != torch.bfloat16 else None for x in results])
                del results
        return found, bits, runner.dispatcher.num_boxed_demand


def _nodes(ops: Any) -> list[int | None]:
    """Of each op the autograd node, counted from the first op's; below 0: it is of that node's gradient."""
    first = next((op.node for op in ops if op.node > 0), 0)
    return [None if op.node == 0 else op.node - first if op.node > 0 else -1 - (-1 - op.node - first) for op in ops]


class _Numbers:
    """Addresses by the order in which they first come."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, address: int) -> int:
        return self._known.setdefault(address, len(self._known))


def _shown(op: Any, numbers: _Numbers) -> tuple[Any, ...]:
    parts = op.occurrences, op.written, op.results
    return str(op.func), op.where, *([numbers.of(a) for a in part] for part in parts), op.replayable


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_recorded_is_that_of_the_way_through_python(
    program: Program, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops, operands, what is written and returned, allocations by number, frees, places, nodes, states of records."""
    boxed = recorded(program, recompute=recompute)
    monkeypatch.setattr(ooc.dispatch.mode, "boxed_ops", lambda: None)
    other = recorded(program, recompute=recompute)
    for one, two in zip(boxed[0], other[0], strict=True):
        assert one == two
    assert boxed[1] == other[1]
    assert boxed[2] > 15
    assert other[2] == 0


@pytest.mark.usefixtures("kernels_in_cpp")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_kind_that_python_has_tried_is_known_on_torchs_stack(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no op needs Python in the end but those that run in parts, and those that raise."""
    seen: list[str] = []
    monkeypatch.setattr(unions, "_NUM_UNLIKE", 99)  # they are to run on demand
    monkeypatch.setattr(unions, "_NUM_MIXED", 99)
    with opened(recompute=True) as session:
        runner = session.engine.runner
        run = runner._run
        monkeypatch.setattr(runner, "_run", lambda func, *rest: seen.append(str(func)) or run(func, *rest))
        for index in range(6):
            torch.manual_seed(0)
            with session.step():
                torch.ones(WIDTH, WIDTH)
                for _ in range(index):
                    torch.ones(WIDTH, WIDTH).sin_()
                seen.clear()
                before = runner.dispatcher.num_boxed_demand
                program()
        assert runner.dispatcher.num_boxed_demand - before > 4
    allowed = {"aten.mm.default"} if program is failing else set()
    assert {name for name in seen if "_foreach_" not in name} <= allowed


def num_boxed(session: ooc.Session) -> int:
    return session.engine.runner.dispatcher.num_boxed_demand


def test_ops_before_the_first_step_do_not_need_python() -> None:
    """A script that only evaluates has no other ops."""
    with opened() as session:
        x, y = squares(2)
        before = num_boxed(session)
        for _ in range(20):
            x.add_(y)
            x = x * y
        assert num_boxed(session) - before == 40


def test_ops_need_python_only_while_a_collective_is_under_way() -> None:
    """And the first one after the program's wait, which ends the use of its operands in the trace."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with opened() as session:
            x, y = squares(2)
            recorder = session.engine.runner.recording.recorder
            assert recorder is not None
            for _ in range(3):
                work = dist.all_reduce(y, async_op=True)
                assert work is not None
                x.add_(1)
                work.wait()
                x.add_(2)
                x.add_(3)
                before = num_boxed(session)
                x.add_(4)
                x.add_(5)
                assert num_boxed(session) - before == 2
            landed = [list(op.landed) for op in recorder.ops if op.where == recorder.ops[-4].where]
            assert landed == [[y.untyped_storage().data_ptr()]] * 3
    finally:
        dist.destroy_process_group()


def test_what_an_op_writes_is_written_out_again() -> None:
    """`a` is in the store and clean when ops write it: by its place, by its name, and by a custom op."""
    with ooc.Session("2MiB", recompute=False) as session, session.step():
        a, b = torch.ones(256, 1024), torch.ones(192, 1024)
        one = torch.ones(256, 1)
        before = num_boxed(session)
        expected = 1.0
        for _ in range(4):
            for write, result in (
                (lambda: a.add_(1), lambda x: x + 1),
                (lambda: torch.mul(a, one, out=a), lambda x: x),
                (lambda: torch.ops.ooc_tests.halve_(a), lambda x: x / 2),
            ):
                assert a.sum().item() == expected * 256 * 1024  # loads it
                write()
                expected = result(expected)
                assert b.sum().item() == 192 * 1024
                torch.ones(192, 1024)  # one of them goes
        assert a.sum().item() == expected * 256 * 1024
        assert num_boxed(session) - before > 20


def test_an_op_that_raises_leaves_nothing_pinned_and_nothing_alive() -> None:
    with ooc.Session("8MiB", recompute=False) as session, session.step():
        a, b = torch.ones(256, 256), torch.ones(128, 128)
        manager = session.engine.manager
        for _ in range(3):
            with pytest.raises(RuntimeError, match="multiplied"):
                a @ b
            with pytest.raises(KeyError, match="as asked"):
                torch.ops.ooc_tests.scaled(a, [a], shift=-1)
            a.add_(1)
            assert all(record.pins == 0 for record in manager.records.values())
        assert num_boxed(session) > 0
        assert a.sum().item() == 4 * 256 * 256
        num_records = len(manager.records)
        del b
        gc.collect()
        session.engine.runner.absorb()
        assert len(manager.records) == num_records - 1


@pytest.mark.usefixtures("whole_ops")
def test_an_op_that_finds_no_room_is_explained() -> None:
    """Also one that would go on without: nothing is pinned afterwards, and nothing counts as clean."""

    @torch.library.custom_op("ooc_tests::goes_on", mutates_args=("x",))
    def goes_on(x: Tensor) -> None:
        x.add_(1)
        with contextlib.suppress(RuntimeError):
            torch.ones(1024, 1024)

    with ooc.Session("2MiB", recompute=False) as session, session.step():
        manager = session.engine.manager
        a = torch.ones(256, 1024)
        for number in range(3):
            with pytest.raises(BudgetTooSmall, match=__name__.rpartition(".")[2]):
                a.expand(4, -1, -1).contiguous()
            with pytest.raises(BudgetTooSmall):
                goes_on(a)
            assert all(record.pins == 0 for record in manager.records.values())
            torch.ones(320, 1024)  # `a` goes
            assert a.sum().item() == (number + 2) * 256 * 1024
        assert num_boxed(session) > 0


def test_other_modes_and_subclasses_see_what_they_saw() -> None:
    """A mode above ours, one that a custom op enters, and a class that dispatches for itself."""
    inner = Seen()

    @torch.library.custom_op("ooc_tests::watched", mutates_args=())
    def watched(x: Tensor) -> Tensor:
        with inner:
            return x * 3

    def names() -> tuple[list[str], list[str], float]:
        inner.names.clear()
        x = torch.ones(WIDTH, WIDTH)
        with Seen() as outer:
            y = watched(x).relu() * 2
        pair = TwoTensor(y, x) + 1
        total = (watched(pair.a) + pair.b).sum().item()
        return outer.names, list(inner.names), total

    expected = names()
    with ooc.Session("8MiB", recompute=False) as session, session.step():
        for _ in range(3):
            assert names() == expected
        assert num_boxed(session) > 0
    assert names() == expected


@pytest.mark.usefixtures("kernels_in_cpp")
def test_ops_within_an_op_are_no_ops_of_the_step() -> None:
    with ooc.Session("8MiB", recompute=False) as session, session.step():
        x = torch.ones(WIDTH, WIDTH)
        x.add_(1)
        before = num_boxed(session)
        torch.ops.ooc_tests.scaled(x, [x, x])
        torch.ops.ooc_tests.scaled(x, [x, x])
        recorder = session.engine.runner.recording.recorder
        assert recorder is not None
        assert [str(op.func) for op in recorder.ops][-3:] == ["aten.add_.Tensor", *["ooc_tests.scaled.default"] * 2]
        assert num_boxed(session) > before


def test_an_op_registered_again_is_another_op() -> None:
    """Its schema may come to lie where the one before lay: that of the op that comes is asked, each time."""

    def add_one(x: Tensor) -> None:
        x.add_(1)

    with ooc.Session("8MiB", recompute=False) as session, session.step():
        x = torch.ones(WIDTH, WIDTH)
        for number in range(6):
            with torch.library._scoped_library("ooc_tests_again", "FRAGMENT") as library:
                writes = number % 2 == 1
                library.define("change(Tensor(a!) x) -> ()" if writes else "change(Tensor x) -> Tensor")
                library.impl("change", add_one if writes else lambda x: x * 2, "CPU")
                for _ in range(3):
                    found = torch.ops.ooc_tests_again.change(x)
                    assert writes or found.sum().item() == 2 * x.sum().item()
        assert x.sum().item() == (1 + 9) * WIDTH * WIDTH
        assert num_boxed(session) > 6
