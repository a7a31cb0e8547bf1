"""torch.compile under a session: inductor's graphs are regions; of the rest, one warning, and nothing is traced."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import ooc
from ooc.dispatch import out_of_memory
from ooc.dispatch.mode import SessionMode
from ooc.interop.compilation import code_of
from ooc.interop.compiled_region import written_inputs
from tests.quick_plans import QUICK_PLANS

BUDGET = "8MiB"
WIDTH = 192
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
ROOT = Path(__file__).parents[2]


class Counting:
    """A backend that compiles nothing, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.num_graphs += 1
        return graph.forward


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + x.cos()


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "torch.compile does nothing" in str(w.message)]


def test_what_another_backend_would_compile_is_itself(backend: Counting) -> None:
    module = nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as caught, ooc.Session(BUDGET):
        warnings.simplefilter("always")
        assert torch.compile(wave, backend=backend) is wave
        assert torch.compile(module, backend="aot_eager", fullgraph=True) is module

        @torch.compile(backend=backend)
        def plain(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        module.compile(backend=backend)
        x = torch.ones(4)
        assert torch.equal(plain(x), x + 1)
        module(x)
    assert len(said(caught)) == 1
    assert backend.num_graphs == 0
    assert torch.compile is not wave
    assert torch.compile.__module__ == "torch"


def test_what_was_compiled_before_runs_eagerly_and_is_compiled_again_after(backend: Counting) -> None:
    """Functions, wrapped modules and modules compiled in place, optimizers' steps."""
    function = torch.compile(wave, backend=backend)
    wrapped = torch.compile(nn.Linear(8, 8), backend=backend)
    in_place = Doubling()
    in_place.compile(backend=backend)
    large = torch.randn(256, 256)
    x = torch.randn(8)
    expected = wave(large), wrapped._orig_mod(x), in_place.forward(x)
    with warnings.catch_warnings(record=True) as caught, ooc.Session(BUDGET):
        warnings.simplefilter("always")
        for _ in range(3):
            results = function(large), wrapped(x), in_place(x)
            assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    assert backend.num_graphs == 0
    assert len(said(caught)) == 1
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert caught[0].filename == __file__  # the line that used it, not ours or torch's
    function(large)
    wrapped(x)
    in_place(x)
    assert backend.num_graphs == 3


def test_without_a_session_dynamo_would_trace(backend: Counting) -> None:
    """The control: the same calls do compile."""
    torch.compile(wave, backend=backend)(torch.ones(4))
    assert backend.num_graphs == 1


def test_a_stance_that_the_user_sets_in_a_session_stays(backend: Counting) -> None:
    function = torch.compile(wave, backend=backend)
    with ooc.Session(BUDGET):
        torch.compiler.set_stance("eager_on_recompile")
    try:
        function(torch.ones(4))
        assert backend.num_graphs == 0
    finally:
        torch.compiler.set_stance("default")


def test_optimizer_steps_say_nothing(backend: Counting) -> None:
    """torch disables Dynamo around optimizers, which is no use of torch.compile."""
    torch.compile(wave, backend=backend)
    with warnings.catch_warnings(record=True) as caught, ooc.Session(BUDGET) as session:
        warnings.simplefilter("always")
        model = nn.Linear(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            with session.step():
                optimizer.zero_grad()
                model(torch.ones(4, 256)).sum().backward()
                optimizer.step()
    assert said(caught) == []


def test_dynamo_is_not_imported_for_nothing() -> None:
    code = "import sys, torch, ooc\nwith ooc.Session('8MiB'): pass\nassert 'torch._dynamo' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# -- regions


class Block(nn.Module):
    """Random numbers, batch norm's statistics, and a buffer that is a variable and is written in each forward pass."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("running", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.running.mul_(0.9).add_(x.t() @ x, alpha=0.1)
        return x + nn.functional.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))), 0.1, self.training)


def build(num_blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks)))


def train(
    step: Callable[[], Any], model: nn.Module, num_steps: int = 7, num_rows: int = 128
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and all that training changes."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(num_steps):
        with step():
            optimizer.zero_grad()
            loss = model(torch.randn(num_rows, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    state = [value["exp_avg"] for value in optimizer.state.values()]
    return losses, [t.detach().clone() for t in [*model.parameters(), *model.buffers(), *state]]


def compiled_blocks() -> nn.Sequential:
    model = build()
    for block in model:
        block.compile()
    return model


@pytest.fixture(scope="module")
def compiled_in_core() -> tuple[list[float], list[torch.Tensor]]:
    torch._dynamo.reset()
    return train(contextlib.nullcontext, compiled_blocks())


@needs_a_compiler
@pytest.mark.parametrize(("debug", "is_compiled_before"), [(False, False), (True, True)])
def test_blocks_are_regions(
    compiled_in_core: tuple[list[float], list[torch.Tensor]], debug: bool, is_compiled_before: bool
) -> None:
    """Bits as compiled in core; what was compiled before the session is made visible, too."""
    expected_losses, expected = compiled_in_core
    torch._dynamo.reset()
    if is_compiled_before:
        _forget_visibility()
        train(contextlib.nullcontext, compiled_blocks(), num_steps=1)
    with warnings.catch_warnings(record=True) as caught, ooc.Session("4MiB", debug=debug, **QUICK_PLANS) as session:
        warnings.simplefilter("always")
        losses, state = train(session.step, compiled_blocks())
        report = session.report()
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(expected, state, strict=True))
    modes = [step["mode"] for step in report["steps"]]
    assert modes.count("planned") >= 3, (modes, report["unplannable"], report["not_played"])
    assert sum(step["evicted_nbytes"] for step in report["steps"]) > 0
    assert said(caught) == []


@needs_a_compiler
@pytest.mark.parametrize("budget", ["1GiB", "4MiB"])
def test_a_module_of_torchs_own_that_is_compiled_in_place(budget: str) -> None:
    """Dynamo goes through its `forward` without compiling it, and would compile what is called there: ours, too."""

    def run(session: ooc.Session | None) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        model.compile()
        losses = []
        for _ in range(4):
            with session.step() if session is not None else contextlib.nullcontext():
                loss = model(torch.randn(64, 256)).square().mean()
                loss.backward()
                losses.append(loss.item())
        return losses

    expected = run(None)
    with ooc.Session(budget) as session:
        assert run(session) == expected
        assert torch._dynamo.utils.counters["graph_break"] == {}


def test_dynamo_is_kept_out_of_no_code_but_ours() -> None:
    """Functions of torch's that a module of ours imports are the program's, too."""
    files = {code.co_filename for code in code_of(out_of_memory)}
    assert out_of_memory.tree_map.__code__.co_filename not in files  # type: ignore[attr-defined]
    assert files == {out_of_memory.__file__}


class Softened(nn.Module):
    """A layer with a function of its own, made anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        class Soft(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
                context.save_for_backward(values)
                return values.exp().clamp(max=3)

            @staticmethod
            def backward(context: Any, gradient: torch.Tensor) -> Any:
                (values,) = context.saved_tensors
                return gradient * values.sigmoid()

        return Soft.apply(self.layer(x))


@needs_a_compiler
def test_code_of_dynamos_that_cannot_be_hashed() -> None:
    """It has a dictionary among its constants."""

    def run(step: Callable[[], contextlib.AbstractContextManager[Any]]) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = Softened()
        block.compile()
        losses = []
        for _ in range(3):
            with step():
                loss = block(torch.randn(256, WIDTH)).square().mean()
                loss.backward()
                losses += [loss.item(), block.layer.weight.grad.sum().item()]
        return losses

    expected = run(contextlib.nullcontext)
    with ooc.Session("4MiB") as session:
        assert run(session.step) == expected


@needs_a_compiler
def test_functional_gradients_within_a_region() -> None:
    """Dynamo traces what notices them at ends of steps, too."""

    @torch.compile(fullgraph=True)
    def pushed(x: torch.Tensor) -> torch.Tensor:
        return x + torch.vmap(torch.func.grad(lambda row: row.tanh().square().sum()))(x)

    x = torch.randn(64, 64)
    torch._dynamo.reset()
    expected = pushed(x)
    torch._dynamo.reset()
    with ooc.Session(BUDGET, step_boundary="optimizer"):
        found = pushed(x)
    assert torch.equal(found, expected)


@needs_a_compiler
def test_a_region_that_takes_much_of_the_budget_is_named() -> None:
    torch._dynamo.reset()
    for budget in ("16MiB", "4MiB"):
        torch.manual_seed(0)
        x, block = torch.randn(2048, WIDTH), Block()
        block.compile()
        with ooc.Session(budget), contextlib.ExitStack() as stack:
            if budget == "16MiB":
                stack.enter_context(pytest.warns(RuntimeWarning, match=r"inductor\.region\d+ is compiled as one"))
            else:
                stack.enter_context(pytest.raises(ooc.BudgetTooSmall, match="one compiled region"))
            block(x).sum().backward()


def _forget_visibility() -> None:
    """As in a process in which no session has compiled anything yet."""
    import torch._inductor.config

    SessionMode.sees_compiled_regions = False
    torch._inductor.config.wrap_inductor_compiled_regions = False  # type: ignore[attr-defined]


def _graph(function: Callable[..., Any], *arguments: torch.Tensor) -> Any:
    return make_fx(function)(*arguments)


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (lambda x, y: x + y, ()),
        (lambda x, y: x.copy_(x + y), (0,)),
        (lambda x, y: (x + 1, y.view(-1)[2:].mul_(2)), (1,)),
        (lambda x, y: (x + y).mul_(2), ()),
        (lambda x, y: torch._foreach_add_([x.t(), y.t()], 1), (0, 1)),
        (lambda x, y: x.split(1)[1].add_(y[:1]), (0,)),
    ],
)
def test_what_a_graph_writes(function: Callable[..., Any], written: tuple[int, ...]) -> None:
    assert written_inputs(_graph(function, torch.ones(2, 2), torch.ones(2, 2))) == written


def test_a_graph_with_an_unknown_op_writes_everything_that_the_op_is_given() -> None:
    graph = torch.fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    graph.output(graph.call_function(_unknown, (x, [z])))
    assert written_inputs(torch.fx.GraphModule({}, graph)) == (0, 2)
    assert written_inputs(None) is None
    del y


def _unknown(*_: Any) -> None:
    return None
