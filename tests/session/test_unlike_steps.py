"""Steps none of which is like another: they are planned as a union, and what does not come is left out.

Each in core and under a session with debug checks, compared to the last bit; and how much of it was planned.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ooc
from ooc.errors import StoreFailed
from ooc.replay.bindings import Bindings
from ooc.replay.executor import Executor
from ooc.replay.omissions import Omissions
from ooc.replay.sequences import Sequences
from ooc.replay.union_plans import UnionPlans
from ooc.replay.unions import Unions
from ooc.tracing.recorder import RecordedStep, StepRecorder
from tests.quick_plans import QUICK_PLANS
from tests.session.program_unions import eager_unions
from tests.session.test_segments import SIZE, batch, digest, model, planned_share, run
from vmm.driver import MemoryFault

NUM_STEPS = 20
SCRIPT = Callable[[nn.Module, torch.optim.Optimizer, int, random.Random], Tensor]


def skipped(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """Each layer but the first is left out in two steps of five."""
    x = batch(seed)
    assert isinstance(net, nn.Sequential)
    for index in range(0, len(net), 2):
        if index == 0 or choose.random() < 0.6:
            x = net[index + 1](net[index](x)) + x * 0.5
    return x.square().mean()


def deeper(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """The first layers only, as many as it likes: early exits."""
    assert isinstance(net, nn.Sequential)
    return net[: 2 * choose.randint(1, len(net) // 2)](batch(seed)).square().mean()


def recurrent(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """The same layers again and again, for another length in each step."""
    x, losses = batch(seed, 96), []
    for _ in range(choose.randint(2, 6)):
        x = net(x)
        losses.append(x.square().mean())
    return torch.stack(losses).sum()


def routed(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """Two of the layers, which ones nobody knows: a mixture of experts."""
    assert isinstance(net, nn.Sequential)
    x = batch(seed)
    result = x * 0.5
    for index in sorted(choose.sample(range(len(net) // 2), 2)):
        result = result + torch.tanh(net[2 * index](x)) * choose.random()
    return result.square().mean()


def skipped_rows(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """Layers are left out, and each batch has another length, too."""
    x = batch(seed, choose.randint(100, 180))
    assert isinstance(net, nn.Sequential)
    for index in range(0, len(net), 2):
        if index == 0 or choose.random() < 0.6:
            x = net[index + 1](net[index](x)) + x * 0.5
    return x.square().mean()


def narrow_rows(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """Layers are left out, and in short batches some of what an op uses or makes is too small for a variable."""
    x = batch(seed, choose.randint(15, 90))
    assert isinstance(net, nn.Sequential)
    narrow = torch.tanh(x[:, :96] * 2)
    for index in range(0, len(net), 2):
        if index == 0 or choose.random() < 0.7:
            narrow = torch.tanh(narrow * 1.5)
            x = net[index + 1](net[index](x)) + torch.cat([narrow, narrow], 1)[:, : x.shape[1]] * 0.5
    return x.square().mean() + narrow.mean()


def decoded(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """One loop for each sentence, as long as that is; the second one looks at all states of the first one."""
    assert isinstance(net, nn.Sequential)
    x, states, outputs = batch(seed, 48), [], []
    for _ in range(choose.randint(3, 6)):
        x = net[:2](x)
        states.append(x)
    memory = torch.stack(states)
    keys = net[2](memory)
    for _ in range(choose.randint(3, 6)):
        weights = torch.softmax((keys * x).sum(-1, keepdim=True), 0)
        x = net[4:6](x + (weights * memory).sum(0))
        outputs.append(x)
    return net[6:](torch.stack(outputs)).square().mean()


def growing(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """Each turn sees all that came before it: a cache of keys."""
    assert isinstance(net, nn.Sequential)
    x, cache, losses = batch(seed, choose.randint(20, 40)), torch.zeros(0, SIZE), []
    for _ in range(choose.randint(3, 6)):
        cache = torch.cat([cache, net[0](x)])
        x = torch.tanh(net[2:](torch.softmax(x @ cache.T, 1) @ cache))
        losses.append(x.square().mean())
    return torch.stack(losses).sum()


def experts(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """Each row goes to one of the layers, so that these see other numbers of rows each time."""
    assert isinstance(net, nn.Sequential)
    x, num_experts = batch(seed, 320), len(net) // 2
    open_ones = choose.sample(range(num_experts), choose.randint(2, num_experts))
    chosen = x[:, : len(open_ones)].argmax(1)
    result = x * 0.5
    for number, index in enumerate(open_ones):
        rows = (chosen == number).nonzero()[:, 0]
        result = result.index_add(0, rows, torch.tanh(net[2 * index](x[rows])))
    return result.square().mean()


def packed(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """A recurrence over sentences, packed: fewer rows in each turn, some of which are too small for variables."""
    lengths = sorted((choose.randint(2, 6) for _ in range(24)), reverse=True)
    words = nn.utils.rnn.pack_padded_sequence(batch(seed, 24 * lengths[0]).view(24, lengths[0], SIZE), lengths, True)
    rows, state, start, outputs = words.data, batch(seed, 24) * 0.0, 0, []
    for number in words.batch_sizes.tolist():
        state = net(rows[start : start + number]) + 0.5 * state[:number]
        outputs.append(state)
        start += number
    return torch.cat(outputs).square().mean()


def train(script: SCRIPT, *, num_steps: int = NUM_STEPS, num_layers: int = 6) -> Callable[[], list[Any]]:
    def program() -> list[Any]:
        net, choose = model(num_layers=num_layers), random.Random(1)
        optimizer = torch.optim.Adam(net.parameters())
        losses = []
        for index in range(num_steps):
            optimizer.zero_grad()
            loss = script(net, optimizer, index, choose)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses + digest(net)

    return program


@pytest.mark.parametrize(("script", "least"), [(skipped, 0.95), (deeper, 0.95), (recurrent, 0.85), (routed, 0.3)])
def test_steps_none_of_which_is_like_another(script: SCRIPT, least: float) -> None:
    rows = run(train(script), budget="1792KiB")
    assert planned_share(rows[NUM_STEPS // 2 :]) > least, [row.why for row in rows]
    assert sum(row.evicted_nbytes for row in rows[NUM_STEPS // 2 :]) > 0


def acting(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
    """Turns of a policy whose states are too small for variables: what is left of them are sums of gradients."""
    state, losses = batch(seed, 4), []
    for _ in range(choose.randint(2, 7)):
        losses.append(net(state).square().mean())
        state = torch.roll(state, 1, 1)
    return torch.stack(losses).sum()


def test_turns_that_save_nothing_are_no_more_ops_than_in_the_longest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back, the first turn adds to no sum; it is known by its forward ops all the same."""
    found: list[tuple[int, int]] = []
    join, longest = Unions.join, [0]

    def noted(self: Unions, recording: RecordedStep, *args: Any, **options: Any) -> Any:
        joined = join(self, recording, *args, **options)
        longest[0] = max(longest[0], recording.num_ops)
        if joined is not None:
            found.append((joined[1].num_ops, longest[0]))
        return joined

    monkeypatch.setattr(Unions, "join", noted)
    monkeypatch.setattr(Sequences, "_plan_shape", lambda *_: None)  # so that each step joins
    run(train(acting), budget="1792KiB")
    assert len(found) > NUM_STEPS // 2
    assert all(num_ops <= most for num_ops, most in found), found


def test_turns_that_save_nothing_stay_planned() -> None:
    rows = run(train(acting), budget="1792KiB")
    assert planned_share(rows[NUM_STEPS // 2 :]) > 0.95, [row.why for row in rows]


@pytest.mark.parametrize(
    ("script", "num_steps", "least"),
    [
        (skipped_rows, 20, 0.5),
        (narrow_rows, 24, 0.5),
        (decoded, 20, 0.9),
        (growing, 14, 0.3),
        (experts, 12, -1.0),
        (packed, 24, 0.3),
    ],
)
def test_steps_that_differ_in_sizes_too(script: SCRIPT, num_steps: int, least: float) -> None:
    """Bits, above all: of experts that are chosen anew in each step, hardly anything is planned."""
    rows = run(train(script, num_steps=num_steps), budget="2MiB")
    assert planned_share(rows[num_steps // 2 :]) > least, [row.why for row in rows]
    assert sum(row.evicted_nbytes for row in rows[num_steps // 2 :]) > 0


@pytest.mark.parametrize("is_ahead", [False, True])
def test_two_kinds_of_steps_at_random(is_ahead: bool) -> None:
    """Nobody knows which of them comes, not even where its batch was made in the step before."""

    def program() -> list[Any]:
        net, choose, losses = model(num_layers=2), random.Random(3), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        x = torch.empty(0)
        for index in range(-1, 40):
            if index >= 0:
                h = torch.zeros(96, SIZE)
                x = x if is_ahead else batch(index, 96 * choose.choice((2, 5))).view(-1, 96, SIZE)
                for turn in range(len(x)):
                    h = torch.tanh(net(h + x[turn]))
                loss = h.square().mean()
                loss.backward()
                losses.append(loss.item())
            if is_ahead:
                x = batch(index, 96 * choose.choice((2, 5))).view(-1, 96, SIZE)
            optimizer.step()
            optimizer.zero_grad()
        return losses + digest(net)

    rows = run(program, budget="1792KiB")
    assert planned_share(rows[20:]) > 0.9, [row.why for row in rows]
    assert sum(row.evicted_nbytes for row in rows[20:]) > 0


def test_what_stands_in_is_what_the_step_uses() -> None:
    """With the copy left out, a layer reads what was in the chunks of its input before: the bits differ."""
    with eager_unions() as found:
        run(train(skipped), budget="1792KiB")
    assert found["omissions"] > NUM_STEPS
    assert found["stand-ins"] > NUM_STEPS
    copied = Omissions._relocate

    def forgotten(self: Omissions, record: Any, runs: Any) -> None:
        record.relocated(runs)
        self._manager.space.map(record.reservation, record.runs)

    Omissions._relocate = forgotten  # type: ignore[method-assign]
    try:
        with pytest.raises(AssertionError), eager_unions():
            run(train(skipped), budget="1792KiB")
    finally:
        Omissions._relocate = copied  # type: ignore[method-assign]


def test_a_step_that_is_left_after_omissions_is_recorded_as_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the recording says of the ops that were played is what recording them on demand would have said."""
    recorded: list[list[tuple[str, list[int]]]] = []
    num_replayed: list[int] = []
    finish = StepRecorder.finish

    def noted(self: StepRecorder, end_records: Any) -> RecordedStep:
        found = finish(self, end_records)
        observed = found.build()
        num_replayed.append(self.num_replayed)
        recorded.append(
            [
                (str(func), [observed.trace.variables[v].nbytes for v in used])
                for func, used in zip(observed.funcs, observed.occurrences, strict=True)
                if used
            ]
        )
        return found

    monkeypatch.setattr(StepRecorder, "finish", noted)
    program = train(skipped, num_steps=28)
    with monkeypatch.context() as patch, eager_unions():
        patch.setattr(UnionPlans, "note", lambda _, recording, *__, **___: f"{recording.signature}")
        run(program, budget="1792KiB")
    on_demand = list(recorded)
    recorded.clear()
    num_replayed.clear()
    stand_in, choose = Omissions._stand_in, random.Random(0)

    def leaving(self: Omissions, *arguments: Any) -> bool:
        is_next = stand_in(self, *arguments)
        active = self._executor.active
        if is_next and active is not None and len(active.omitted) > 10 and choose.random() < 0.1:
            self._executor.bail_out("a test")  # type: ignore[attr-defined]
            return False
        return is_next

    monkeypatch.setattr(Omissions, "_stand_in", leaving)
    with eager_unions():
        run(program, budget="1792KiB")
    assert sum(number > 20 for number in num_replayed) > 2, num_replayed
    for found in recorded:
        assert found in on_demand


def test_bytes_written_where_the_first_write_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in counts as written: its store's copy may be of before."""
    written: list[bool] = []
    stand_in = Bindings.stand_in

    def noted(self: Bindings, executable: Any, variable: Any, record: Any) -> None:
        stand_in(self, executable, variable, record)
        written.append(record.stored)

    monkeypatch.setattr(Bindings, "stand_in", noted)

    def in_place(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
        assert isinstance(net, nn.Sequential)
        x = net[0](batch(seed))
        for index in range(2, len(net), 2):
            if choose.random() < 0.6:
                x = net[index](torch.tanh(x))
            if choose.random() < 0.5:
                x.mul_(0.5)
        return x.square().mean()

    with eager_unions():
        run(train(in_place), budget="1792KiB")
    assert written


def test_equal_steps_leave_their_union(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once steps are alike they are planned as such: a plan for exactly them moves less."""
    given_up: list[str] = []
    give_up = Unions.give_up
    monkeypatch.setattr(Unions, "give_up", lambda self, key: given_up.append(key) or give_up(self, key))
    entered: list[bool] = []
    enter = Executor.enter
    monkeypatch.setattr(Executor, "enter", lambda self, *a, **k: entered.append(a[0].may_omit) or enter(self, *a, **k))

    def settling(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
        if seed < 10:
            return skipped(net, optimizer, seed, choose)
        loss: Tensor = net(batch(seed)).square().mean()
        return loss

    rows = run(train(settling, num_steps=36), budget="1792KiB")
    assert given_up
    assert True in entered
    assert not entered[-1]
    assert planned_share(rows[-6:]) == 1


def test_a_step_that_ends_early() -> None:
    """An exception in the middle of a step; the next step is whole again."""

    def failing(net: nn.Module, _: torch.optim.Optimizer, seed: int, choose: random.Random) -> Tensor:
        try:
            if seed % 5 == 4:
                skipped(net, _, seed, choose)
                raise ValueError(seed)
        except ValueError:
            pass
        return skipped(net, _, seed, choose)

    run(train(failing), budget="1792KiB")


@pytest.mark.parametrize("fault", [MemoryFault("a test"), StoreFailed("a test", errno=5)], ids=str)
def test_what_fails_while_ops_are_left_out_loses_nothing(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op raises, the step is given up, and the next ones go on with the right bytes."""
    stand_in, num_calls = Bindings.stand_in, itertools.count()

    def failing(self: Bindings, *arguments: Any) -> None:
        stand_in(self, *arguments)
        if may_fail and next(num_calls) % 7 == 3:
            raise copy.copy(fault)  # what is raised holds its frames, and with them an optimizer

    def program(left_out: set[int] | None) -> list[Any]:
        net = model(num_layers=6)
        optimizer = torch.optim.Adam(net.parameters())
        losses = []
        for index in range(20):
            if left_out is not None and index in left_out:
                continue
            optimizer.zero_grad()
            may_fail.append(True)
            try:
                loss = skipped(net, optimizer, index, random.Random(index))
                loss.backward()
            except type(fault):
                failed.add(index)
                continue
            finally:
                may_fail.clear()
            optimizer.step()
            losses.append(loss.item())
        optimizer.zero_grad()
        return losses + digest(net)

    failed: set[int] = set()
    may_fail: list[bool] = []
    monkeypatch.setattr(Bindings, "stand_in", failing)
    torch.manual_seed(0)
    with (
        eager_unions(),
        ooc.Session(
            "1792KiB", debug=True, plan_cache=False, step_boundary="optimizer", chunk_nbytes="64KiB",
            threshold_nbytes="16KiB", **QUICK_PLANS,
        ),
    ):  # fmt: skip
        found = program(None)
    torch.manual_seed(0)
    assert failed
    assert found == program(failed)


def test_backward_ops_are_known_by_their_forward_ops_also_after_a_bailout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op of a backward pass says whose gradient it is a part of, the ones too that the plan has played."""
    num_linked: list[tuple[int, int, int]] = []
    finish = StepRecorder.finish

    def noted(self: StepRecorder, end_records: Any) -> RecordedStep:
        found = finish(self, end_records)
        observed = found.build()
        ops, linked = observed.trace.ops, [pair for pair in enumerate(observed.forward) if pair[1] >= 0]
        for index, forward in linked:
            place = ops[index].where
            assert forward < index
            assert place in (f"backward of {ops[forward].where}", "backward") or place.startswith("backward (")
        over_border = sum(forward < self.num_replayed <= index for index, forward in linked)
        num_linked.append((len(linked), self.num_replayed, over_border))
        return found

    monkeypatch.setattr(StepRecorder, "finish", noted)
    run(train(skipped, num_steps=28), budget="1792KiB")
    assert all(number > 20 for number, _, _ in num_linked[2:])
    assert any(num_replayed and over_border for _, num_replayed, over_border in num_linked)
