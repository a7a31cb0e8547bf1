"""Steps whose sizes differ share one plan: equal to the in-core run, planned, and moving the bytes that are there.

The programs work on tensors of a few chunks of 64 KiB. Each test fails if its remedy is taken out; the docstring
names it.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.memory.residency import ResidencyManager
from ooc.replay.sequences import Sequences
from vmm.files import BLOCK_NBYTES

Step = Callable[[], contextlib.AbstractContextManager[None]]
Program = Callable[[Step, list[int]], list[Any]]

ROW = 256
LENGTHS = [100, 130, 70, 90, 128, 60, 127, 33, 101, 129, 88]


pytestmark = pytest.mark.usefixtures("one_thread")


def run(
    program: Program, lengths: list[int], *, budget: str = "2MiB", debug: bool = True, **options: Any
) -> tuple[ooc.Session, list[str]]:
    """Run in core and in a session; the results must be equal. The closed session, and how each step ran."""
    torch.manual_seed(0)
    expected = program(contextlib.nullcontext, lengths)
    torch.manual_seed(0)
    with ooc.Session(budget, debug=debug, plan_cache=False, **options) as session:
        found = program(session.step, lengths)
    assert found == expected
    return session, [row.mode for row in session.steps.rows]


def digest(tensors: list[Tensor]) -> list[float]:
    """Numbers that a wrong byte anywhere would change."""
    return [float(t.detach().double().sum()) for t in tensors] + [float(t.detach().double().norm()) for t in tensors]


def train(step: Step, lengths: list[int]) -> list[Any]:
    """A small network on batches of so many rows, made between the steps; the last logits stay until they are replaced.

    Some of what it computes is below the threshold of 64 KiB in short batches (a row of ROW floats has 1 KiB).
    """
    model = nn.Sequential(nn.Linear(ROW, 2 * ROW), nn.ReLU(), nn.Linear(2 * ROW, ROW))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    out: list[Any] = []
    for index, length in enumerate(lengths):
        batch = torch.randn(length, ROW, generator=torch.Generator().manual_seed(index))
        with step():
            logits = model(batch)
            loss = (logits - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
    return out + digest(list(model.parameters()))


@pytest.mark.parametrize("debug", [True, False])
def test_batches_of_any_length_are_planned(debug: bool) -> None:
    r = random.Random(3)
    lengths = [100, 130] + [r.randint(20, 160) for _ in range(13)]
    session, modes = run(train, lengths, debug=debug)
    assert modes[3:].count("planned") >= len(modes[3:]) - 3, modes
    assert session.engine.sequences.num_plans <= 2
    assert session.counters()["loaded_nbytes"] > 0


def test_the_last_batch_is_small() -> None:
    """Remedy: all of it below the threshold, so that the plan's allocations do not come, and its operands neither."""
    _, modes = run(train, [128] * 5 + [2] + [128] * 2 + [1, 128])
    assert modes[4:] == ["planned"] * 6, modes


def test_plans_number_in_logarithms() -> None:
    """Remedy: `_HEADROOM`. Each batch is longer than all before; only some of them leave the plan."""
    lengths = list(range(70, 150, 4))
    _, modes = run(train, lengths)
    most = math.ceil(math.log(150 / 70, 1.25)) + 1
    assert modes[3:].count("off_plan") <= most, modes


def test_transfers_move_the_bytes_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remedies: `fitting`, `note_present_nbytes`. A short step moves less than a long one, by the same plan."""
    moved: list[tuple[int, int]] = []
    start_write = ResidencyManager.start_write

    def note(manager: ResidencyManager, record: Any, segments: Any = None) -> Any:
        if segments is not None:
            moved.append((record.nbytes, segments.nbytes))
        return start_write(manager, record, segments)

    monkeypatch.setattr(ResidencyManager, "start_write", note)
    session, modes = run(train, [99, 160, 100, 160, 159, 161, 70, 70, 70, 160])
    assert modes[3:] == ["planned"] * 7, modes
    assert moved
    assert all(-(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES == total for nbytes, total in moved)
    sizes = {nbytes for nbytes, _ in moved if nbytes % (ROW * 4) == 0}
    assert {70 * ROW * 4, 160 * ROW * 4} & sizes  # as in the program, not as in the plan
    rows = session.steps.rows
    assert rows[7].evicted_nbytes < rows[4].evicted_nbytes


def two_results(step: Step, lengths: list[int]) -> list[Any]:
    """An op of two allocations of different sizes: the first falls below the threshold before the second does."""
    weights = [torch.randn(128 * ROW) for _ in range(20)]
    out: list[Any] = []
    for length in lengths:
        with step():
            kept = []
            for weight in weights:
                values, indices = weight[: length * ROW].sort(stable=True)  # 4 and 8 bytes an element
                kept.append((values, indices))
            out.append([float((v * i).sum()) for v, i in kept])
            del kept, values, indices
    return out


def test_an_allocation_below_the_threshold_does_not_shift_the_others() -> None:
    """Remedy: `PlannedAlloc.ordinal`. By size alone the indices would be taken for the values, and the plan left."""
    _, modes = run(two_results, [100, 90, 50, 40, 60, 110, 33, 64, 63, 65, 20], budget="4MiB")
    assert modes[3:] == ["planned"] * 8, modes


def test_a_size_beyond_the_envelope_leaves_the_plan_and_widens_it() -> None:
    session, modes = run(train, [100, 110, 105, 90, 300, 290, 100, 301], budget="4MiB")
    assert modes[3:] == ["planned", "off_plan", "planned", "planned", "planned"], modes
    assert session.engine.sequences.num_plans == 1


def test_sizes_that_never_differ_have_no_headroom() -> None:
    """A plan for equal steps holds what they have, to the byte."""
    session, modes = run(train, [100] * 6)
    assert modes[-1] == "planned"
    trace = session.trace()
    assert trace is not None
    assert max(v.nbytes for v in trace.variables) == 2 * ROW * ROW * 4  # a weight's, or its gradient's
    assert 2 * 100 * ROW * 4 in {v.nbytes for v in trace.variables}


def with_failures(step: Step, lengths: list[int]) -> list[Any]:
    """Every third step ends by an exception after its forward pass; the bytes of what is left are looked at."""
    model = nn.Sequential(nn.Linear(ROW, 2 * ROW), nn.Tanh(), nn.Linear(2 * ROW, ROW))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    out: list[Any] = []
    for index, length in enumerate(lengths):
        batch = torch.randn(length, ROW, generator=torch.Generator().manual_seed(index))
        with contextlib.suppress(RuntimeError), step():
            logits = model(batch)
            if index % 3 == 2:
                raise RuntimeError
            optimizer.zero_grad()
            (logits - batch).square().mean().backward()
            optimizer.step()
        out += digest([logits, batch])
    return out + digest(list(model.parameters()))


def test_steps_that_fail_halfway_leave_the_present_sizes() -> None:
    """Remedies: `trim` and `note_present_nbytes` at a bailout. The plan's size would read what was never written."""
    _, modes = run(with_failures, LENGTHS + LENGTHS[:4], budget="2MiB")
    assert "planned" in modes
    assert "off_plan" in modes


def with_evaluation(step: Step, lengths: list[int]) -> list[Any]:
    """An evaluation on batches of other sizes after every fourth step, within its period."""
    model = nn.Sequential(nn.Linear(ROW, 2 * ROW), nn.Tanh(), nn.Linear(2 * ROW, ROW))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    out: list[Any] = []
    for index, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(index)
        with step():
            batch = torch.randn(length, ROW, generator=generator)
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        out.append(loss.item())
        if index % 4 == 3:
            with torch.no_grad():
                for other in (50, 170):
                    out += digest([model(torch.randn(other, ROW, generator=generator))])
    return out + digest(list(model.parameters()))


def test_evaluation_with_other_sizes_in_between() -> None:
    _, modes = run(with_evaluation, LENGTHS * 2, budget="2MiB")
    assert modes.count("planned") >= len(modes) // 2, modes


def chain(step: Step, lengths: list[int]) -> list[Any]:
    """Activations alone: its budget depends on nothing else."""
    out = []
    for index, length in enumerate(lengths):
        with step():
            hidden = leaf = torch.randn(length, ROW, generator=torch.Generator().manual_seed(index)).requires_grad_()
            for _ in range(12):
                hidden = hidden.tanh()
            hidden.sum().backward()
            out += digest([leaf.grad] if leaf.grad is not None else [])
            del hidden, leaf
    return out


def test_a_plan_that_has_no_room_for_headroom_is_made_without() -> None:
    """Remedy: `_plan_shape` tries again. At the least budget that the longest step needs, steps are planned."""
    r = random.Random(1)
    lengths = [128, 100, 128] + [r.randint(20, 128) for _ in range(8)]
    _, modes = run(chain, lengths, budget="512KiB", chunk_nbytes="64KiB")
    assert modes[3:] == ["planned"] * 8, modes


def accumulated(step: Step, lengths: list[int]) -> list[Any]:
    """Three micro-batches a step; the longest of them is another one from step to step."""
    model = nn.Sequential(nn.Linear(ROW, 2 * ROW), nn.Tanh(), nn.Linear(2 * ROW, ROW))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    out: list[Any] = []
    for index, length in enumerate(lengths):
        with step():
            for turn in range(3):
                rows = length if turn == index % 3 else 70
                batch = torch.randn(rows, ROW, generator=torch.Generator().manual_seed(index * 3 + turn))
                loss = (model(batch) - batch).square().mean()
                loss.backward()
                out.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return out + digest(list(model.parameters()))


def test_each_micro_batch_may_be_as_large_as_any_other_was() -> None:
    """Remedy: `_alike`. Without it each place among the micro-batches would have a largest size of its own."""
    _, modes = run(accumulated, [100, 150, 71, 160, 161, 150, 160, 158, 161, 160])
    assert modes[3:] == ["planned"] * 7, modes


def one_that_differs(step: Step, lengths: list[int]) -> list[Any]:
    """Steps that differ in the size of one tensor alone, which is below the threshold in short ones."""
    weights = [torch.randn(128, ROW, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    out: list[Any] = []
    for length in lengths:
        with step():
            scale = torch.full((length, ROW), 0.5).mean()
            parts = [weight * scale for weight in weights]
            out.append([float(part.sum()) for part in parts])
            del parts
    return out


def test_a_shape_keeps_its_variables_when_one_of_them_falls_below_the_threshold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Remedies: in `Shape.add`, what is not seen counts as size 0, and only an equal observation takes its place.

    Without them the indices of the sizes noted are not those of the observation: IndexError, or a plan of other
    variables.
    """
    monkeypatch.setattr(Sequences, "_plan_shape", lambda *_: None)  # so that each step is learned from
    session, _ = run(one_that_differs, [100, 100, 10, 10, 10, 100, 10])
    shapes = list(session.engine.sequences._seen.values())
    num_variables = {len(shape.observed.trace.variables) for shape in shapes}
    assert len(shapes) == 1, num_variables
    envelope = shapes[0].envelope(64 << 10)
    assert envelope.is_of(shapes[0].observed.trace)
    assert len(envelope.elastic) == 1


def one_product(step: Step, lengths: list[int]) -> list[Any]:
    """Steps of one op: no other allocation comes in between."""
    weight, out = torch.ones(160, 160), torch.zeros(0)
    for _ in lengths:
        with step():
            out = weight @ weight
    return [float(out.sum())]


def test_allocations_are_counted_anew_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remedy: `State.restart`. Else one step's product was another allocation than the next one's: two variables."""
    seen: list[Any] = []
    learn = Sequences.learn

    def noted(self: Sequences, observed: Any, machine: Any) -> str:
        seen.append([origin[2] for origin in observed.origins if origin is not None])
        return learn(self, observed, machine)

    monkeypatch.setattr(Sequences, "learn", noted)
    monkeypatch.setattr(Sequences, "_plan_shape", lambda *_: None)  # so that each step is learned from
    run(one_product, [0] * 6)
    assert len(seen) >= 5
    assert all(ordinal == 1 for ordinals in seen for ordinal in ordinals), seen
