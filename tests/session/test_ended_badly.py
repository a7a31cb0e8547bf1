"""A session that ends badly, or gives its tensors up: no later one gets their addresses before they are freed."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ooc
from ooc.devices.cpu import CpuMemory
from ooc.memory.record import State
from ooc.replay.reruns import Reruns
from tests import forked
from tests.quick_plans import QUICK_PLANS
from tests.session.continuation import BUDGET, Trainer
from tests.session.recomputed import CASES, Training, session
from vmm.table import AllocatorTable
from vmm.torch_cpu import cpu_allocator

LENGTH = 20_000
ROOT = Path(__file__).parents[2]


def open_session() -> ooc.Session:
    return ooc.Session("4MiB", chunk_nbytes="64KiB", debug=True)


def places(tensors: list[Tensor]) -> set[int]:
    """The granules where their bytes are."""
    found: set[int] = set()
    for tensor in tensors:
        start = tensor.untyped_storage().data_ptr()
        found.update(range(start >> 16, (start + tensor.untyped_storage().nbytes() + 0xFFFF) >> 16))
    return found


def give_up(count: int) -> tuple[list[Tensor], set[int]]:
    """Tensors of a session that was closed without them, and where they were."""
    with open_session() as earlier:
        tensors = [torch.full((LENGTH,), float(index)) for index in range(count)]
        where = places(tensors)
        earlier.close(bring_back=False)
    return tensors, where


def test_addresses_of_what_was_given_up() -> None:
    """They are free when the tensors are, and that is no free of another session's."""
    held, where = give_up(5)
    with open_session() as later:
        ours = [torch.full((LENGTH,), 7.0) for _ in range(12)]
        assert not places(ours) & where
        held.clear()
        gc.collect()
        assert all(tensor.sum().item() == 7.0 * LENGTH for tensor in ours)
        assert len(later.engine.live_records()) == len(ours)
    assert all(tensor.sum().item() == 7.0 * LENGTH for tensor in ours)
    del ours
    with open_session():
        # What other tests have left free may come first.
        assert places([torch.full((LENGTH,), 7.0) for _ in range(400)]) & where


def test_without_the_rule_a_late_free_is_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMemory, "abandon_tensors", lambda *_: None)
    held, _ = give_up(5)
    with open_session() as later:
        ours = [torch.full((LENGTH,), 7.0) for _ in range(400)]  # what other tests have left free may come first
        held.clear()
        assert len(later.engine.live_records()) < len(ours)


def test_what_cannot_be_made_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ends by an exception, and the re-run fails that its variables need: they alone are lost, and said so."""
    outputs: list[Tensor] = []
    kept: list[Tensor] = []

    def fails(*_: object) -> None:
        raise RuntimeError("the re-run fails, says the test")

    def stop(_: Training, index: int, output: Tensor) -> None:
        if index == 4:
            outputs.append(output)
            monkeypatch.setattr(Reruns, "run_now", fails)
            raise KeyError("on purpose")

    def train_in_session() -> None:
        with session(case) as opened:
            kept.append(torch.full((LENGTH,), 3.0))
            Training(case, session=opened).run(hook=stop)

    def train() -> str:
        said = r"could not be brought back: .*discarded"
        with pytest.raises(ooc.SessionError, match=said) as raised:
            train_in_session()
        return "".join(traceback.format_exception(raised.value))

    case = CASES["convolutions"]
    said = train()
    assert "says the test" in said
    assert "on purpose" in said
    assert kept[0].sum().item() == 3.0 * LENGTH
    monkeypatch.undo()
    where = set(cpu_allocator().detached)
    with session(case) as opened:
        training = Training(case, session=opened)
        training.run(num_steps=2)
        assert not where & {record.address for record in opened.engine.live_records()}
        outputs.clear()
        gc.collect()
        training.run(num_steps=2)
    assert len(cpu_allocator().detached) < len(where)


@pytest.mark.parametrize("first", [0, 1])
def test_storages_of_reruns_that_outlive_their_session(first: int) -> None:
    """Held by a traceback, say. The one that is freed last counts, in whatever order they are."""
    held: list[Tensor] = []
    with open_session() as earlier:
        allocator: AllocatorTable = earlier.engine.memory.allocator
        held.append(torch.full((LENGTH,), 1.0))
        address, nbytes = held[0].untyped_storage().data_ptr(), held[0].untyped_storage().nbytes()
        held.clear()
        for _ in range(2):
            with allocator.rerunning([(nbytes, address)]):
                held.append(torch.empty(LENGTH))
        assert {tensor.untyped_storage().data_ptr() for tensor in held} == {address}
    with open_session() as later:
        ours = [torch.full((LENGTH,), 7.0) for _ in range(6)]
        assert address >> 16 not in places(ours)
        del held[first]
        assert allocator.is_alive(address)
        held.clear()
        assert not allocator.is_alive(address)
        assert len(later.engine.live_records()) == len(ours)
    assert allocator.state.num_rerun_alive == 0


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("in_step", [False, True])
def test_what_stays_where_it_is_can_be_used(debug: bool, in_step: bool) -> None:
    """Closed without being brought back, within a planned step or after it: all is there, to read and write."""

    def end() -> None:
        states.update(record.state for record in session.engine.live_records())
        session.close(bring_back=False)

    session, states = ooc.Session(BUDGET, chunk_nbytes="64KiB", debug=debug, **QUICK_PLANS), set[State]()
    with session.step():
        trainer, plain = Trainer(), Trainer()
    for index in range(5):
        with session.step():
            trainer.step(index)
    assert session.steps.rows[-1].mode == "planned"
    if in_step:
        with session.step():
            trainer.step(5, between=end)
    end()
    assert states >= {State.RESIDENT, State.AWAY}
    losses = [plain.step(index) for index in range(8)]
    assert [trainer.step(index) for index in range(5 + in_step, 8)] == losses[5 + in_step :]
    expected = plain.snapshot()
    assert all(np.array_equal(value, expected[name]) for name, value in trainer.snapshot().items())


SCRIPT = """
import sys, threading, weakref
import torch
from torch import nn
{opening}
class Average:
    def __init__(self):
        self.values = torch.full((400, 200), 2.0)
    def __del__(self):
        print("del", float(self.values.sum()), flush=True)
average, holder, final = Average(), type("Holder", (), {{}})(), torch.full((400, 200), 3.0)
weakref.finalize(holder, lambda values: print("final", float(values.sum()), flush=True), final)
batches = [torch.full((512, 512), float(index)) for index in range(8)]
net = nn.Linear(512, 512)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
for _ in range(6):
    sum(net(batch).square().mean() for batch in batches).backward()
    optimizer.step()
    optimizer.zero_grad()
print("end", flush=True)
"""


@pytest.mark.parametrize("opening", ["", "import ooc; session = ooc.Session('6MiB', step_boundary='optimizer')"])
def test_what_runs_while_the_interpreter_shuts_down_finds_its_tensors(opening: str, tmp_path: Path) -> None:
    """With more alive than the budget: under `ooc run`, and in a session that the program never closes."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(opening=opening))
    way = [] if opening else ["-m", "ooc", "run", "--budget", "6MiB"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run([sys.executable, *way, str(script)], env=environment, cwd=ROOT, timeout=600)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["end", "final 240000.0", "del 160000.0", ""]), done.stderr
