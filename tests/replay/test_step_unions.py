"""Steps with some of a model's layers each make a union that has all layers, in their order, and each step in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from ooc.replay.step_unions import StepUnion, may_belong
from ooc.replay.unions import Unions
from ooc.tracing.observed import Observed, StartVariable
from ooc.tracing.recorded_ops import OpRecord
from ooc.tracing.recorder import RecordedStep, StepRecorder
from scheduler.budget import smallest_num_chunks
from scheduler.plan import Machine
from scheduler.planning import make_plan
from vmm.table import between_ops, inside_op
from vmm.torch_cpu import ALLOC, Event

NUM_LAYERS = 8
NBYTES = 1 << 16
FREE = ALLOC + 1


class Recorded:
    """A step of a residual network that has these layers: forward, backward and an update, parameter by parameter."""

    def __init__(self, layers: Sequence[int], *, state: int = 0, is_lifted: bool = False) -> None:
        self._begin(state)
        self._run(layers, is_lifted=is_lifted)

    def _begin(self, state: int) -> None:
        self.ops: list[OpRecord] = []
        self.events: list[Event] = []
        self.next = 10_000 + 1000 * state
        self.start = {
            100 + layer: StartVariable(nbytes=NBYTES, serial=layer, seen=True, kind="", label="", origin=None)
            for layer in range(NUM_LAYERS)
        }

    def _run(self, layers: Sequence[int], *, is_lifted: bool) -> None:
        x = self.op("make", [], births=1)[0]
        inputs = {}
        for layer in layers:
            (y,) = self.op("linear", [x, 100 + layer], births=1, where=f"layer {layer}")
            inputs[layer], x = (x, y), y
        (g,) = self.op("loss", [x], births=1)
        gradients = {}
        for layer in reversed(layers):
            before, after = inputs[layer]
            g_before, weight = self.op("linear_backward", [g, before, 100 + layer], births=2, where="backward")
            self.free(after, g)
            gradients[layer], g = weight, g_before
        self.free(g, inputs[layers[0]][0])
        for layer in layers:
            self.op("update", [100 + layer, gradients[layer]], written=[100 + layer], where="optimizer")
            self.free(gradients[layer])
        if is_lifted:
            self.op("measure", [100], births=0)

    def op(
        self, name: str, operands: list[int], *, births: int = 0, written: Sequence[int] = (), where: str = ""
    ) -> list[int]:
        made = list(range(self.next, self.next + births))
        self.next += births
        place = inside_op(len(self.ops))
        self.events += [
            Event(address=address, nbytes=NBYTES, kind=ALLOC, ordinal=n, position=place)
            for n, address in enumerate(made, 1)
        ]
        self.ops.append(
            OpRecord(func=name, where=where, occurrences=operands, written=written, results=made, duration_ns=1000)
        )
        return made

    def free(self, *addresses: int) -> None:
        position = between_ops(len(self.ops))
        self.events += [
            Event(address=address, nbytes=0, kind=FREE, ordinal=0, position=position) for address in addresses
        ]

    def recording(self) -> RecordedStep:
        recorder = StepRecorder({})
        recorder.extend(self.ops)
        recorder.events = self.events
        return RecordedStep(
            recorder=recorder, start=self.start, end_serials={a: v.serial for a, v in self.start.items()}
        )

    def observed(self) -> Observed:
        return self.recording().build()


def united(subsets: Sequence[Sequence[int]]) -> StepUnion:
    """The union of all; those that have too little in common with it at first join it later."""
    union = StepUnion(Recorded(subsets[0]).observed(), "union", older_than=NUM_LAYERS)
    left = list(enumerate(subsets))[1:]
    while left:
        waiting = []
        for number, layers in left:
            observed = Recorded(layers, state=number).observed()
            walk = union.walk(observed)
            if walk is None:
                waiting.append((number, layers))
            else:
                union.add(observed, older_than=NUM_LAYERS, walk=walk)
        assert len(waiting) < len(left), waiting
        left = waiting
    return union


def layers_in_order(union: StepUnion, name: str) -> list[int]:
    observed = union.observed
    serials = observed.start_serials
    found = []
    for func, used in zip(observed.funcs, observed.occurrences, strict=True):
        if func == name:
            found += [serial for v in used if (serial := serials[v]) is not None]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_every_step_is_in_the_union_of_all(seed: int) -> None:
    r = random.Random(seed)
    subsets = [sorted(r.sample(range(NUM_LAYERS), r.randint(4, 7))) for _ in range(24)]
    union = united(subsets)
    full = Recorded(range(NUM_LAYERS)).observed()
    assert union.num_ops <= 1.5 * len(full.funcs)
    for layers in subsets:
        walk = union.walk(Recorded(layers, state=99).observed())
        assert walk is not None
        assert walk.num_new <= 2, (layers, walk)  # what was changed since may have another order


def test_layers_come_in_their_order() -> None:
    """No two of the first steps' layers are in one step: what is older is used first, and last in the backward pass."""
    union = united([[0, 2, 4, 7], [0, 1, 3, 7], [0, 5, 6, 7]])
    assert layers_in_order(union, "linear") == list(range(NUM_LAYERS))
    assert layers_in_order(union, "linear_backward") == list(reversed(range(NUM_LAYERS)))
    assert layers_in_order(union, "update") == list(range(NUM_LAYERS))


def test_each_layer_takes_what_the_one_before_it_makes() -> None:
    """In the union as in a step that leaves nothing out, though no step had all of them."""
    union = united([[0, 1, 3, 4], [0, 2, 3, 4], [0, 1, 2, 4], [0, 1, 2, 3]])
    observed = union.observed
    made: int | None = None
    for index, (func, used) in enumerate(zip(observed.funcs, observed.occurrences, strict=True)):
        if func == "linear":
            assert made is None or used[0] == made
            (made,) = (use.variable for use in observed.trace.ops[index].uses if not use.reads)
        elif func == "loss":
            assert used[0] == made


@pytest.mark.parametrize("seed", range(6))
def test_no_lifetime_is_shorter_than_in_any_step(seed: int) -> None:
    r = random.Random(seed)
    subsets = [sorted({0, *r.sample(range(1, NUM_LAYERS), r.randint(3, 6))}) for _ in range(10)]
    union = united(subsets)
    trace = union.observed.trace
    for layers in subsets:
        observed = Recorded(layers, state=77).observed()
        walk = union.walk(observed)
        assert walk is not None
        for index, variable in walk.roles.items():
            _, stop = trace.lifetime(union.variables.index(variable))
            used = [i for i, occurrences in enumerate(observed.occurrences) if index in occurrences]
            if used:
                assert stop > trace.ops[walk.found[used[-1]].place].start_tick


class WithStorage(Recorded):
    """A step in which a storage comes and goes between two ops, before the last layer: a finalizer's, say."""

    def op(self, name: str, operands: list[int], *, where: str = "", **options: Any) -> list[int]:
        if where == f"layer {NUM_LAYERS - 1}":
            position = between_ops(len(self.ops))
            self.events.append(Event(address=self.next, nbytes=NBYTES, kind=ALLOC, ordinal=1, position=position))
            self.free(self.next)
            self.next += 1
        return super().op(name, operands, where=where, **options)


def test_what_comes_and_goes_between_two_ops_ends_after_it_began() -> None:
    """It is born before the op that follows, and the union may have others between that and the op before."""
    last = NUM_LAYERS - 1
    union = StepUnion(WithStorage([*range(last - 1), last]).observed(), "union", older_than=NUM_LAYERS)
    union.add(Recorded(range(NUM_LAYERS), state=1).observed(), older_than=NUM_LAYERS)
    trace = union.observed.trace
    (storage,) = (v for v in range(len(trace.variables)) if all(u.variable != v for op in trace.ops for u in op.uses))
    (place,) = (i for i, op in enumerate(trace.ops) if op.where == f"layer {last}")
    birth, death = trace.variables[storage].birth_tick, trace.variables[storage].death_tick
    assert birth is not None
    assert death is not None
    assert trace.ops[place - 1].stop_tick <= birth < death < trace.ops[place].start_tick


def test_a_union_can_be_planned_for_less_than_it_needs() -> None:
    union = united([[0, 1, 3, 4, 6], [0, 2, 3, 5, 7], [1, 2, 4, 5, 6, 7]])
    trace = union.envelope(NBYTES).trace
    machine = Machine(chunk_nbytes=NBYTES, num_chunks=1, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)
    least = smallest_num_chunks(trace, machine)
    num_chunks = max(least + 2, trace.peak_nbytes() // NBYTES // 2)
    machine = Machine(chunk_nbytes=NBYTES, num_chunks=num_chunks, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)
    assert trace.peak_nbytes() > num_chunks * NBYTES
    assert make_plan(trace, machine).predicted["loaded_nbytes"] > 0


class Narrow(Recorded):
    """Each layer narrows what it gets before it is used; in a short batch that is too small for a variable."""

    def __init__(self, layers: Sequence[int], *, is_short: bool, state: int = 0) -> None:
        self._begin(state)
        (x,) = self.op("make", [], births=1)
        kept = []
        for layer in layers:
            where = f"layer {layer}"
            narrow = self.op("narrow", [x], births=not is_short, where=where)
            wide = self.op("bend", narrow, births=not is_short, where=where)
            (y,) = self.op("widen", [*wide, 100 + layer], births=1, where=where)
            kept.append((layer, narrow, wide, y))
            self.free(x)
            x = y
        for layer, narrow, wide, y in reversed(kept):
            (g,) = self.op("widen_backward", [*wide, 100 + layer], births=1, where="backward")
            self.op("update", [100 + layer, g], written=[100 + layer], where="optimizer")
            self.free(*narrow, *wide, g, *([y] if y == x else []))


def test_what_is_too_small_for_a_variable_in_some_steps() -> None:
    """Also together with layers that are left out. Without the rule each short batch would be new, op by op."""
    steps = [([0, 1, 3, 4], False), ([0, 2, 3, 4], True), ([0, 1, 2, 4], True)]
    union: StepUnion | None = None
    for state, (layers, is_short) in enumerate(steps):
        observed = Narrow(layers, is_short=is_short, state=state).observed()
        if union is None:
            union = StepUnion(observed, "union", older_than=NUM_LAYERS, is_elastic=True)
            continue
        walk = union.walk(observed)
        assert walk is not None, (layers, is_short)
        union.add(observed, older_than=NUM_LAYERS, walk=walk)
    assert union is not None
    names = list(union.observed.funcs)
    assert names.count("widen") == names.count("update") == 5
    small = [v for v in union.variables if v.birth is not None and v.birth.func in ("narrow", "bend")]
    assert len(small) == 8  # layer 2 has not been seen with a long batch
    assert {v.smallest for v in small} == {0, NBYTES}  # nor layer 3 and others that no short one had
    for layers, is_short in [*steps, ([0, 3], True), ([0, 4], False)]:
        walk = union.walk(Narrow(layers, is_short=is_short, state=9).observed())
        assert walk is not None
        assert walk.num_new <= 1, (layers, is_short)


def test_what_has_nothing_in_common_is_not_united() -> None:
    union = united([[0, 1, 2, 3]])
    other = Recorded([0, 1, 2, 3])
    for op in other.ops:
        op.func = f"other {op.func}"
    assert union.walk(other.observed()) is None
    assert not may_belong(StepRecorder({}).build({}))


def join(unions: Unions, layers: Sequence[int], number: int, *, key: str | None = "") -> str | None:
    """Record a step, of a sequence that has this key; none is asked for by default. The key of the union it joined."""
    recording = Recorded(layers, state=number).recording()
    found = unions.join(recording, unions.note(recording), is_segment=False, key=str(layers) if key == "" else key)
    return found[0] if found is not None else None


def test_unions_begin_when_steps_are_unlike() -> None:
    unions = Unions()
    keys = [join(unions, range(length), number) for number, length in enumerate((5, 4, 6, 5, 7, 6, 5, 4))]
    assert keys[:4] == [None] * 4
    assert len(set(keys[4:])) == 1
    assert keys[4] is not None
    assert unions.give_up(keys[4])
    assert not unions.keys(is_segment=False)


def begun_by(steps: Sequence[int | str]) -> list[int]:
    """With which of these a union is begun: steps of so many layers that are recorded, or sequences that are played."""
    unions, found = Unions(), []
    for number, step in enumerate((2, 2, *steps)):
        if isinstance(step, str):
            unions.note_played(step, ())
        elif join(unions, range(step), number, key=f"length {step}") is not None:
            found.append(number - 2)
    return found[:1]


def test_unions_begin_when_two_kinds_are_taken_for_each_other() -> None:
    assert begun_by([5, 4, 5, 4]) == [3]
    assert begun_by([5, "length 5", 4, 4, "length 4", "length 4", 5]) == [6]
    assert begun_by([5, 5, 5, 5, 5, 5]) == []  # of one kind, however often: it is not known yet
    assert begun_by([5, 4, *["length 5"] * 12, 5, 4]) == []  # most of the time it was right
    assert begun_by([5, 4, *["another"] * 12, 5, 4]) == [15]  # which says nothing of them
    assert begun_by([5, 4, *["another"] * 99, 5, 4]) == []  # long ago


def test_no_union_begins_with_steps_that_are_foreseen() -> None:
    unions = Unions()
    assert [join(unions, range(3 + number % 4), number, key=None) for number in range(12)] == [None] * 12


class Changing(Recorded):
    """A step in which a list op changes two variables, between layers of which it has some."""

    def __init__(self, *, before: bool, changes: bool, after: bool) -> None:
        self._begin(0)
        x = self.op("make", [], births=1)[0]
        y, z = (self.op("linear", [x, 100 + layer], births=1)[0] for layer in range(2))
        if before:
            x = self._through(x, 2)
        z = self._through(self._through(z, 3), 4)
        if changes:
            self.op("mul_", [x, y], written=[x, y])
        z = self._through(z, 5)
        if after:
            x = self._through(x, 6)
        x = self._through(x, 7)
        self.op("loss", [x, y, z], births=1)
        self.free(x, y, z)

    def _through(self, x: int, layer: int) -> int:
        (y,) = self.op("linear", [x, 100 + layer], births=1, where=f"layer {layer}")
        self.free(x)
        return y


@pytest.mark.parametrize("seed", range(40))
def test_what_a_step_changes_is_changed_in_the_union(seed: int) -> None:
    """A variable may stand in for another one further on: what an op changes is what that is there."""
    kinds, choose = [(0, 1, 1), (1, 0, 1), (1, 1, 0)], random.Random(seed)
    union: StepUnion | None = None
    num_checked = 0
    for _ in range(12):
        before, changes, after = map(bool, choose.choice(kinds))
        observed = Changing(before=before, changes=changes, after=after).observed()
        if union is None:
            union = StepUnion(observed, "union", older_than=NUM_LAYERS)
            continue
        walk = union.walk(observed)
        assert walk is not None
        union.add(observed, older_than=NUM_LAYERS, walk=walk)
        for index, op in enumerate(walk.found):
            written = {use.variable for use in observed.trace.ops[index].uses if use.reads and use.writes}
            for variable, other in zip(op.operands, observed.occurrences[index], strict=True):
                assert other not in written or variable in op.written
                num_checked += other in written
    assert num_checked > 0


def test_a_union_that_grows_little_by_little_is_kept_longer() -> None:
    """Loops whose turns come in two kinds: each turn tells that by itself, and then nothing is new any more."""
    for share, most in ((0.5, 8), (0.001, 32)):
        unions = Unions()
        key = [join(unions, range(length), number) for number, length in enumerate((5, 4, 6, 5, 7))][-1]
        assert key is not None
        union = unions.of(key)
        assert union is not None
        union.num_latest_new = int(share * union.num_ops)
        for _ in range(most):
            unions.note_left(key, has_news=True)
        assert unions.of(key) is union
        unions.note_left(key, has_news=True)
        assert unions.of(key) is None


class OptimizerSegment(Recorded):
    """An optimizer's step as a segment: gradients that the segment before has made, and the one after will free."""

    def __init__(self, layers: Sequence[int], *, first_serial: int) -> None:
        self._begin(0)
        for layer in layers:
            self.start[200 + layer] = StartVariable(
                nbytes=NBYTES,
                serial=first_serial + layer,
                seen=True,
                kind="",
                label="",
                origin=None,
            )
            self.op("update", [100 + layer, 200 + layer], written=[100 + layer], where="optimizer")


def test_a_gradient_that_one_segment_alone_has_is_no_variable_that_lives_on() -> None:
    """A plan that waited for it was never entered, and the union was given up."""
    earlier = OptimizerSegment([1, 2, 3, 4, 5, 6, 7], first_serial=100).observed()
    latest = OptimizerSegment([0, 2, 3, 4, 5, 6, 7], first_serial=200).observed()
    union = StepUnion(latest, "union", older_than=200, is_of_segments=True)
    union.add(earlier, older_than=100)
    union.note_latest(latest, older_than=200)
    lives_on = {i for i, variable in enumerate(union.observed.trace.variables) if variable.becomes == i}
    used = [operands for operands in union.observed.occurrences if operands]
    assert len(used) == NUM_LAYERS
    assert lives_on == {weight for weight, _ in used}
