"""Ops that do not fit the budget run in parts: bits, memory, errors, and what others see of it."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ooc
from ooc.memory.record import State
from ooc.tracing.operand_marks import ROOM_ORDINAL, OperandMark
from tests.thinned import thinned
from vmm.torch_cpu import ALLOC

MIB = 1 << 20
NUM_STEPS = 6
Step = Callable[[], Tensor]


class Style(nn.Module):
    """As fast_neural_style: padding, instance norm, upsampling, on activations larger than all weights."""

    def __init__(self) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
            layers = [nn.ReflectionPad2d(kernel // 2), nn.Conv2d(inputs, outputs, kernel, stride)]
            return nn.Sequential(*layers, nn.InstanceNorm2d(outputs, affine=True), nn.ReLU())

        self.down = nn.Sequential(block(3, 8, 5), block(8, 32, 3, 4))
        self.up = nn.Sequential(nn.Upsample(scale_factor=4), block(32, 4, 1), nn.Conv2d(4, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.up(self.down(x))
        return found


def style() -> tuple[nn.Module, Step]:
    model, x = Style(), torch.rand(2, 3, 64, 64)
    return _training(model, torch.optim.Adam(model.parameters(), 1e-2), lambda: F.mse_loss(model(x), x))


def table() -> tuple[nn.Module, Step]:
    """One parameter of 2.5 MiB, nearly all of the model."""
    model = nn.Sequential(nn.Embedding(10_000, 64, padding_idx=3), nn.Flatten(), nn.Linear(64 * 7, 10))
    x, y = torch.randint(0, 10_000, (16, 7)), torch.randint(0, 10, (16,))
    return _training(model, torch.optim.Adam(model.parameters(), 1e-2), lambda: F.cross_entropy(model(x), y))


def listed() -> tuple[nn.Module, Step]:
    """The same, with list ops, momentum and weight decay."""
    model = nn.Sequential(nn.Linear(16, 20_000), nn.LeakyReLU(), nn.Linear(20_000, 2, bias=False))
    x, y = torch.randn(4, 16), torch.randn(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True, amsgrad=True)
    return _training(model, optimizer, lambda: F.mse_loss(model(x), y))


def normed() -> tuple[nn.Module, Step]:
    """Batch norm, which writes its statistics, on activations of 2 MiB; the products are small beside these."""
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.BatchNorm2d(8), nn.AvgPool2d(8))
    x = torch.randn(4, 8, 128, 128, requires_grad=True)
    return _training(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), lambda: (model(x) ** 2).sum())


def joined() -> tuple[nn.Module, Step]:
    """Parameters of 512 KiB, joined, of which slices, rows and single elements are used: 1.5 MiB each way."""
    model = nn.ParameterList([nn.Parameter(torch.randn(64, 2048)) for _ in range(3)])
    chosen = torch.randint(0, 2048, (192, 5))

    def loss_of() -> Tensor:
        h = torch.cat(list(model))
        halves = torch.stack([h[:, :1024], h[:, 1024:]], 1)
        return h.gather(1, chosen).sum() + (h[8:] * 0.5).square().sum() + halves[:, :, 3].sum() + halves.square().sum()

    return _training(model, torch.optim.SGD(model.parameters(), 0.01), loss_of)


def _training(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Step) -> tuple[nn.Module, Step]:
    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model.optimizer = lambda: optimizer  # type: ignore[assignment]
    return model, step


def train(make: Callable[[], tuple[nn.Module, Step]], session: Any = None) -> list[Tensor]:
    """Losses, parameters, buffers and the optimizer's state after some steps, in this order."""
    torch.manual_seed(3)
    with session or contextlib.nullcontext():
        model, step = make()
        found = [step() for _ in range(NUM_STEPS)]
        found += [t.clone() for t in model.state_dict().values() if t.numel() < 1000]
        found += [t.detach() for t in model.state_dict().values() if t.numel() >= 1000]
        for entries in model.optimizer().state.values():  # type: ignore[operator]
            found += [t for t in entries.values() if isinstance(t, Tensor)]
    return found


def assert_same(expected: list[Tensor], actual: list[Tensor]) -> None:
    assert len(expected) == len(actual)
    for index, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert a.shape == b.shape and a.stride() == b.stride(), index
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)), index


@pytest.fixture(params=[False, True], ids=["plain", "debug"])
def debug(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


TRAININGS: dict[str, tuple[Callable[[], tuple[nn.Module, Step]], str]] = {
    "table": (table, "6MiB"),
    "table_small": (table, "3MiB"),
    "listed": (listed, "3MiB"),
    "normed": (normed, "4608KiB"),
    "style": (style, "2MiB"),
    "joined": (joined, "2MiB"),
}


@thinned("name,debug", list(TRAININGS), [False, True])
def test_training_below_the_largest_ops_need(name: str, debug: bool) -> None:
    """Bit for bit, within the budget, on demand and planned; the report says how many ops."""
    make, budget = TRAININGS[name]
    with ooc.Session(budget, chunk_nbytes="64KiB", step_boundary="optimizer", debug=debug) as session:
        actual = train(make)
        report = session.report()
        assert_same(train_in_core(make), actual)
    assert all(step["num_in_parts"] > 0 for step in report["steps"])
    assert [step["mode"] for step in report["steps"]] == ["learning"] * 3 + ["planned"] * 3
    assert all(step["num_demand_ops"] == 0 for step in report["steps"][3:])
    assert report["peak_nbytes"] <= report["budget_nbytes"]


def test_a_result_that_is_never_in_memory_is_not_planned(debug: bool) -> None:
    """A derivative and what one of its parts takes do not fit together; the report says what would be enough."""
    with ooc.Session("2560KiB", chunk_nbytes="64KiB", step_boundary="optimizer", debug=debug) as session:
        actual = train(normed)
        report = session.report()
        assert_same(train_in_core(normed), actual)
    assert all(step["num_in_parts"] > 0 for step in report["steps"])
    assert {step["mode"] for step in report["steps"]} == {"learning"}
    assert report["peak_nbytes"] <= report["budget_nbytes"]
    (why,) = report["unplannable"].values()
    assert "batch_norm_backward" in why
    needed = re.search(r"budget >= .*\((\d+) bytes\)", why)
    assert needed is not None and int(needed[1]) > report["budget_nbytes"]
    assert why in report["steps"][-1]["why"]


def train_in_core(make: Any) -> list[Tensor]:
    """In a session with room for all: it has been compared with plain training elsewhere."""
    return subprocess_result(make.__name__)


_in_core: dict[str, list[Tensor]] = {}


def subprocess_result(name: str) -> list[Tensor]:
    return _in_core[name]


@pytest.fixture(autouse=True, scope="module")
def _references() -> None:
    """Trained before any session is open."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for make in (style, table, listed, normed, joined):
        _in_core[make.__name__] = train(make)
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_with_the_budget_that_was_named_it_is_planned() -> None:
    with ooc.Session("2560KiB", step_boundary="optimizer") as session:
        _, step = normed()
        for _ in range(3):
            step()
        (why,) = session.report()["unplannable"].values()
        needed = re.search(r"budget >= .*\((\d+) bytes\)", why)
        assert needed is not None
        session.set_budget(int(needed[1]))
        for _ in range(4):
            step()
        assert [row["mode"] for row in session.report()["steps"]][-1] == "planned"


# -- single ops

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 2),
    "part": lambda t: t[:, 1:],
    "every second": lambda t: t[:, :, ::2],
    "expanded": lambda t: t[:1].expand(4, -1, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, debug: bool) -> None:
    """Operands of all kinds of strides, away or not; results have the strides that the whole op gives them."""
    make = VIEWS[view]

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        a, b, c = (make(torch.randn(4, 6, 64, 128)) for _ in range(3))
        d = a + b
        e = d.mul(c)
        f = torch.ops.aten.threshold_backward(e, d, 0.1)
        e.addcmul_(a, f, value=0.3)
        d.copy_(f)
        d[:, 1:3].zero_()
        return [d, e, f, e.gt(f), f.clone()]

    expected = run()
    with ooc.Session("1MiB", chunk_nbytes="64KiB", debug=debug) as session:
        actual = run()
        assert session.engine.manager.counters.num_in_parts > 2
    assert_same(expected, actual)


def test_an_op_that_is_not_in_the_table_is_refused_as_ever() -> None:
    with ooc.Session("2MiB", chunk_nbytes="64KiB") as session:
        a = torch.full((384, 1024), 2.0)
        for _ in range(2):
            with pytest.raises(ooc.BudgetTooSmall, match=r"needs 3\.0 MiB") as caught:
                a.exp()
        assert caught.value.op_index == 2
        assert a.add_(1).sum().item() == 3 * 384 * 1024
        assert all(record.pins == 0 for record in session.engine.manager.records.values())
        assert not session.engine.manager.counters.num_in_parts


def test_parts_that_do_not_fit_either_are_refused() -> None:
    """One channel of an image, and of the result: 1.5 MiB each."""
    with ooc.Session("4MiB", chunk_nbytes="64KiB") as session:
        x = torch.randn(1, 2, 768, 512)
        session.set_budget("2816KiB")
        with pytest.raises(ooc.BudgetTooSmall, match="native_batch_norm"):
            torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
        assert all(record.pins == 0 for record in session.engine.manager.records.values())
        session.set_budget("8MiB")
        assert torch.isfinite(x.sum())


def test_a_result_larger_than_the_budget() -> None:
    """Five times as large: it is away from its first byte on, and views of it take nothing."""
    torch.manual_seed(1)
    a = torch.randn(1 << 18)
    with ooc.Session("1MiB", chunk_nbytes="64KiB") as session:
        b = torch.zeros(1 << 20)
        c = b.view(16, -1).t().detach()
        b.add_(1)
        c[1::2].mul_(3)
        d = b + 0.5
        parts = [d[i : i + (1 << 16)].clone() for i in range(0, 1 << 20, 1 << 16)]
        assert max(r.nbytes for r in session.engine.manager.records.values()) == 4 * MIB
        assert session.report()["peak_nbytes"] <= MIB
    expected = torch.ones(1 << 20)
    expected.view(16, -1).t()[1::2].mul_(3)
    assert torch.equal(torch.cat(parts), expected + 0.5)
    assert a.numel()


def test_batch_norms_statistics_are_written_once() -> None:
    """Also where the op was refused memory first, as a whole."""

    def run() -> list[Tensor]:
        torch.manual_seed(2)
        x, mean, variance = torch.randn(2, 64, 64, 64), torch.zeros(64), torch.ones(64)
        y, *saved = torch.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)
        return [y, mean, variance, *saved]

    expected = run()
    with ooc.Session("3MiB", chunk_nbytes="64KiB") as session:
        actual = run()
        assert session.engine.manager.counters.num_in_parts == 1
    assert_same(expected, actual)


def test_a_result_that_was_not_asked_for() -> None:
    """By a mask; without data torch would make it."""

    def run() -> list[Tensor]:
        torch.manual_seed(2)
        x, gradient, weight = torch.randn(4, 8, 128, 128), torch.randn(4, 8, 128, 128), torch.randn(8)
        mean, scale = torch.zeros(8), torch.ones(8)
        made = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, None, None, mean, scale, True, 1e-5, [False, True, True]
        )
        assert made[0] is None
        return [t for t in made if t is not None]

    expected = run()
    with ooc.Session("3584KiB", chunk_nbytes="64KiB") as session:
        actual = run()
        assert session.engine.manager.counters.num_in_parts == 1
    assert_same(expected, actual)


def test_a_derivative_does_not_need_its_input() -> None:
    """Three tensors of its size are oneDNN's and the result; it would be a fourth."""

    def run() -> list[Tensor]:
        torch.manual_seed(2)
        x, weight = torch.randn(1, 4, 512, 512), torch.randn(4, 4, 8, 8)
        gradient = torch.randn(1, 4, 64, 64)
        made = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, [8, 8], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False]
        )
        return [made[0]]

    expected = run()
    with ooc.Session("13MiB", chunk_nbytes="64KiB") as session:
        actual = run()
        assert session.engine.manager.counters.num_in_parts == 1
    assert_same(expected, actual)


def test_what_a_library_needs_for_itself_is_planned() -> None:
    """The operands and the result of a derivative fit; what the library takes beside them only without the input."""
    torch.manual_seed(2)
    x, weight = torch.randn(1, 4, 512, 512), torch.randn(4, 4, 8, 8)
    gradient = torch.randn(1, 4, 64, 64)
    rest = [None, [8, 8], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False]]
    expected = torch.ops.aten.convolution_backward(gradient, x, weight, *rest)[0]
    with ooc.Session("13MiB", chunk_nbytes="64KiB") as session:
        x, weight, gradient = (t.clone() for t in (x, weight, gradient))
        other = torch.ones(6 << 18)
        for _ in range(5):
            with session.step():
                other.add_(1)
                made = torch.ops.aten.convolution_backward(gradient, x, weight, *rest)[0]
        report = session.report()
        assert [step["num_in_parts"] for step in report["steps"]] == [1] * 5
        assert [step["mode"] for step in report["steps"]][-1] == "planned"
        assert torch.equal(made, expected)


def test_versions_count_as_for_the_whole_op() -> None:
    """A backward pass through what was changed since raises."""
    with ooc.Session("3MiB", chunk_nbytes="64KiB") as session:
        x = torch.ones(512, 1024, requires_grad=True)
        y = x * 2
        z = (y * y).sum()
        before = y._version
        y.mul_(3)
        y.addcdiv_(y.detach(), y.detach() + 1)
        assert y._version == before + 2
        assert session.engine.manager.counters.num_in_parts > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


def test_operands_die_when_nobody_has_them() -> None:
    """Neither the refusal nor the parts keep anything alive until garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        with ooc.Session("3MiB", chunk_nbytes="64KiB") as session:
            a, b = torch.ones(1 << 19), torch.ones(1 << 19)
            c = a + b  # whose operands do not fit
            d = a.sqrt()  # whose result does not
            assert session.engine.manager.counters.num_in_parts == 2
            recorder = session.engine.runner.recording.recorder
            assert recorder is not None
            names = [str(op.func) for op in recorder.ops if not isinstance(op.func, OperandMark)]
            assert names[-2:] == ["aten.add.Tensor", "aten.sqrt.default"]
            allocated = [e.nbytes for e in recorder.events if e.kind == ALLOC and e.ordinal != ROOM_ORDINAL]
            assert allocated == [2 * MIB] * 4  # the parts' own are nobody's business
            seen = [weakref.ref(t) for t in (a, b, c, d)]
            del a, b, c, d
            assert [ref() for ref in seen] == [None] * 4
            torch.ones(1)
            session.engine.runner.absorb()
            assert not session.engine.manager.records
    finally:
        gc.enable()


def test_another_mode_sees_the_op_or_the_error() -> None:
    """A mode of the program's that was entered before the session would not see the parts: no op is cut."""

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Seeing(), ooc.Session("3MiB", chunk_nbytes="64KiB"):
        a = torch.ones(1 << 19)
        with pytest.raises(ooc.BudgetTooSmall):
            a + a.clone()


def test_default_devices_and_types_do_not_matter() -> None:
    with ooc.Session("3MiB", chunk_nbytes="64KiB"):
        a, b = torch.ones(1 << 19), torch.ones(1 << 19)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                c = a + b
        finally:
            torch.set_default_dtype(torch.float32)
        assert c.device.type == "cpu" and c.dtype is torch.float32
        assert c[:1000].sum().item() == 2000


def test_deterministic_fill_touches_nothing_that_is_away() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with ooc.Session("3MiB", chunk_nbytes="64KiB", debug=True) as session:
            a, b = torch.ones(1 << 19), torch.ones(1 << 19)
            c = a + b
            assert session.engine.manager.guards.num_served == 0
            assert c[-1000:].sum().item() == 2000
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_embeddings_bad_index_is_told_as_ever() -> None:
    """Its indices are a variable of 80 KiB, which is away by then: nobody reads them before they are loaded."""
    with ooc.Session("2MiB", chunk_nbytes="64KiB", debug=True) as session:
        weight, indices = torch.randn(30 * 1024, 16), torch.full((10_240,), 7)
        torch.ones(450 * 1024)  # the others go
        found = nn.functional.embedding(indices, weight)
        assert session.engine.manager.counters.num_in_parts == 1
        assert torch.equal(found[::1000].clone(), weight[7:8].expand(11, -1))
        indices[-1] = 30 * 1024
        with pytest.raises(IndexError):
            nn.functional.embedding(indices, weight)
        assert all(record.pins == 0 for record in session.engine.manager.records.values())


def test_rows_of_what_does_not_fit_are_found_by_their_numbers() -> None:
    """A replay buffer, or a data set: each step takes some rows of it, and puts others in their place."""

    def program() -> list[Any]:
        torch.manual_seed(0)
        data, found = torch.zeros(24_000, 11, 12, dtype=torch.uint8), []  # 3 MiB
        for rows in data.split(2_000):
            rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8))
        for step in range(6):
            chosen = torch.randint(-len(data), len(data), (40,))
            found += [data[chosen].sum().item(), data.index_select(0, chosen.abs() % len(data))[:, 3].tolist()]
            data[100 * step : 100 * step + 100].copy_(torch.full((100, 11, 12), step, dtype=torch.uint8))
            with pytest.raises(IndexError, match="index 24000 is out of bounds for dimension 0 with size 24000"):
                data[torch.tensor([7, len(data)])]
        return [*found, data[::50].long().sum().item()]

    expected = program()
    with ooc.Session("2MiB", chunk_nbytes="64KiB", debug=True) as session:
        assert program() == expected
        assert session.engine.manager.counters.num_in_parts >= 12


def test_what_is_in_memory_and_clean_is_written_there(debug: bool) -> None:
    """A part's write makes it dirty: dropped as clean it would come back as it was."""
    with ooc.Session("2560KiB", chunk_nbytes="64KiB", debug=debug) as session:
        a, b, c = (torch.full((1 << 18,), value) for value in (3.0, 4.0, 5.0))
        assert b.sum() + a.sum() > 0  # `a` was evicted, and has come back
        (record,) = [r for r in session.engine.manager.records.values() if r.address == address_of(session, a)]
        assert record.state is State.RESIDENT and record.stored
        a.addcmul_(b, c)
        assert session.engine.manager.counters.num_in_parts == 1
        assert record.state is State.RESIDENT
        torch.ones(1 << 18).add_(torch.ones(1 << 18))
        assert record.state is State.AWAY
        assert a.sum().item() == 23 << 18


def address_of(session: ooc.Session, tensor: Tensor) -> int:
    return session.engine.runner.dispatcher.address(tensor)


def test_no_byte_is_read_to_find_out_whether_an_op_can_be_cut() -> None:
    """One element of a variable that is away is an operand: in debug mode there is nothing at its address."""
    with ooc.Session("3MiB", chunk_nbytes="64KiB", debug=True) as session, session.step():
        c, a, b = torch.full((1 << 18,), 2.0), torch.full((1 << 19,), 3.0), torch.full((1 << 18,), 5.0)
        number, d = c[7], torch.full((1 << 19,), 4.0)
        assert a.sum() + b.sum() > 0  # `c` is away
        a.addcmul_(d, number)
        assert session.engine.manager.counters.num_in_parts == 1
        assert a[:: 1 << 16].tolist() == [11.0] * 8


def test_a_result_that_is_filled_in_memory_is_not_dropped_as_clean() -> None:
    """An embedding's, which was born away, as large as it is beside this pool (found by random program 1547)."""
    with ooc.Session("2MiB", chunk_nbytes="64KiB") as session:
        weight, indices = torch.full((28 * 1024, 16), 5.0), torch.zeros(9000, dtype=torch.int64)
        torch.ones(450 * 1024)  # the others go
        found = nn.functional.embedding(indices, weight)
        assert session.engine.manager.counters.num_in_parts == 1
        torch.ones(500 * 1024)  # all go
        assert found.sum().item() == 5 * 16 * 9000


def test_a_number_in_more_dimensions() -> None:
    """Of one element, with as many dimensions as the other operand: not flattened."""
    with ooc.Session("3MiB", chunk_nbytes="64KiB") as session:
        a, b = torch.full((8, 1 << 16), 3.0), torch.full((8, 1 << 16), 2.0)
        number = torch.full((1, 1), 2.0)
        a.addcmul_(b, number)
        b.addcmul_(a, a, value=-1)
        assert session.engine.manager.counters.num_in_parts > 0
        assert a[:, ::9999].unique().tolist() == [7.0]
