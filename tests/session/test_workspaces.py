"""What an op allocates and keeps without naming it (cuBLAS's workspace, a library's cache) stays, beside a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import ooc
from ooc.memory.record import State
from ooc.testing.fake_device import FakeCudaDevice
from tests.cuda.cases import CudaSession, fixed_speed
from tests.thinned import thinned

NUM_STEPS = 8
BUDGET_NBYTES = 3600 << 10


class Library:
    """A product of matrices that keeps a workspace, fills it, and looks whether it is as it left it."""

    def __init__(self) -> None:
        self.workspaces: list[torch.Tensor] = []
        self.is_taken = True
        self.num_wrong = 0

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for workspace in self.workspaces:
            self.num_wrong += not workspace.amin() == workspace.amax() == 7.0  # without a variable of its own
        if self.is_taken and not self.workspaces:
            self.workspaces.append(torch.full((150_000,), 7.0))
        return x.mm(w)


@pytest.fixture
def library() -> Iterator[Library]:
    made = Library()
    registered = torch.library.Library("ooc_workspace_test", "FRAGMENT")
    registered.define("mm(Tensor x, Tensor w) -> Tensor")
    registered.impl("mm", made, "CPU")
    yield made
    registered._destroy()


def _train(session: ooc.Session | None) -> list[str]:
    torch.manual_seed(0)
    weights = [torch.randn(256, 256) for _ in range(8)]
    found = []
    for index in range(NUM_STEPS):
        with session.step() if session is not None else torch.no_grad():
            x = torch.full((256, 256), 0.1 * index)
            outputs = []
            for weight in weights:
                x = torch.ops.ooc_workspace_test.mm(x, weight).tanh()
                outputs.append(x)
            for weight, output in zip(weights, reversed(outputs), strict=True):
                weight.sub_(output, alpha=1e-3)
            found.append(x.sum().item().hex())
            del x, outputs, weight, output
    return found


def _on_cpu(debug: bool) -> ooc.Session:
    return ooc.Session(BUDGET_NBYTES, plan_cache=False, debug=debug)


def _on_fake(debug: bool) -> ooc.Session:
    return CudaSession(BUDGET_NBYTES, device=FakeCudaDevice(), debug=debug)


@pytest.mark.usefixtures("kernels_in_cpp")
@pytest.mark.parametrize("debug", [False, True], ids=["standing", "debug"])
@pytest.mark.parametrize("make_session", [_on_cpu, _on_fake], ids=["cpu", "fake"])
def test_steps_are_planned_around_a_workspace(
    library: Library, make_session: Callable[[bool], ooc.Session], debug: bool
) -> None:
    expected = _train(None)
    library.workspaces.clear()
    with fixed_speed(), make_session(debug) as session:
        assert _train(session) == expected
        assert library.num_wrong == 0
        assert [row.mode for row in session.steps.rows][-3:] == ["planned"] * 3, session.steps.refusals
        assert session.steps.rows[-1].evicted_nbytes > 0
        (record,) = session.engine.manager.workspaces()
        assert record.state is State.RESIDENT
        assert session.report()["peak_nbytes"] <= BUDGET_NBYTES
        library.workspaces.clear()


@pytest.mark.usefixtures("kernels_in_cpp")
@thinned("when,varies,make_session", [0, 1, 2, 3, 6], [False, True], [_on_cpu, _on_fake])
def test_a_workspace_may_come_in_any_step_and_from_an_op_on_nothing_large(
    library: Library, make_session: Callable[[bool], ooc.Session], when: int, varies: bool
) -> None:
    """A linear layer of ten outputs took one: the op had no other variable, so steps with and without looked alike."""

    def train(session: ooc.Session | None) -> list[str]:
        torch.manual_seed(0)
        weights = [torch.randn(256, 256) for _ in range(8)]
        found = []
        for index in range(14):
            library.is_taken = index >= when
            with session.step() if session is not None else torch.no_grad():
                x = torch.full((200 + 8 * (index % 5 if varies else 0), 256), 0.1 * index)
                outputs = []
                for weight in weights:
                    x = x.mm(weight).tanh()
                    outputs.append(x)
                head = torch.ops.ooc_workspace_test.mm(x[:4, :4].contiguous(), torch.ones(4, 4)).sum()
                for weight, output in zip(weights, reversed(outputs), strict=True):
                    weight.sub_(output[:200].sum(), alpha=1e-3)
                found.append((x.sum() + head).item().hex())
                del x, outputs, weight, output
        return found

    expected = train(None)
    library.workspaces.clear()
    with make_session(False) as session:
        assert train(session) == expected
        assert library.num_wrong == 0
        rows = session.steps.rows
        late = rows[max(when, 3) + 2 :]
        assert [row.mode for row in late] == ["planned"] * len(late), [(row.mode, row.why) for row in rows]
        assert session.engine.learned()["unplannable"] == {}
        assert len(session.engine.manager.workspaces()) == 1
        assert session.report()["peak_nbytes"] <= BUDGET_NBYTES
        library.workspaces.clear()


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_what_a_python_function_keeps_is_given_out_and_may_make_way(library: Library, debug: bool) -> None:
    """Its ops are seen, so that the cache is a variable as others, whose address shows its bytes wherever they are."""
    expected = _train(None)
    library.workspaces.clear()
    with _on_cpu(debug) as session:
        assert _train(session) == expected
        assert library.num_wrong == 0
        assert session.engine.manager.workspaces() == []
        assert [row.mode for row in session.steps.rows][-3:] == ["planned"] * 3, session.steps.refusals
        assert session.steps.rows[-1].evicted_nbytes > 0
        assert session.report()["peak_nbytes"] <= BUDGET_NBYTES
        library.workspaces.clear()


def test_memory_of_another_thread_is_not_taken_for_a_workspace() -> None:
    """Its ops may be running between ours, so it must not be moved."""
    import threading

    found: list[torch.Tensor] = []
    with ooc.Session(BUDGET_NBYTES, plan_cache=False) as session:
        thread = threading.Thread(target=lambda: found.append(torch.ones(100_000)))
        thread.start()
        thread.join()
        assert session.engine.manager.workspaces() == []
        found.clear()
