"""Two halves of what was observed, each without some variables, merge into the whole."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import pytest

from ooc.replay.merging import merged, strangers
from ooc.tracing.observed import Observed
from scheduler.trace import Op, Trace, Use, Variable
from vmm.table import inside_op

NUM_OPS = 12


def observation(seed: int) -> Observed:
    """Random ops: each uses some of what is alive, makes up to three variables, and may free some, as may what follows.

    Variable 0 exists throughout, the others are born, freed or both.
    """
    r = random.Random(seed)
    births: dict[int, int | None] = {0: None, 1: None, 2: None}
    deaths: dict[int, int] = {}
    origins: dict[int, tuple[str, int, int] | None] = {0: None, 1: ("f", 99, 1), 2: ("f", 97, 1)}
    tick = 0
    ops: list[Op] = []
    occurrences = []

    def free(least: int) -> None:
        nonlocal tick
        for index in [i for i in births if i > 0 and i not in deaths and r.random() < 0.2][least:]:
            deaths[index] = tick
            tick += 1

    for number in range(NUM_OPS):
        start, tick = tick, tick + 1
        alive = [i for i in births if i not in deaths]
        operands = [r.choice(alive) for _ in range(r.randint(0, 4))]
        uses = {i: Use(variable=i, reads=True, writes=r.random() < 0.3) for i in operands}
        for ordinal in sorted(r.sample(range(1, 6), r.randint(0, 3))):
            index = len(births)
            births[index], origins[index] = tick, ("f", inside_op(number), ordinal)
            uses[index] = Use(variable=index, reads=False, writes=True)
            tick += 1
        free(1)
        ops.append(Op(name="op", start_tick=start, stop_tick=tick, duration_ns=1, uses=tuple(uses.values())))
        occurrences.append(tuple(operands))
        free(0)
    n = len(births)
    variables = tuple(Variable(nbytes=100 + i, birth_tick=births[i], death_tick=deaths.get(i)) for i in range(n))
    return Observed(
        trace=Trace(ops=tuple(ops), variables=variables, num_ticks=tick),
        funcs=("op",) * NUM_OPS,
        occurrences=tuple(occurrences),
        start_serials=tuple(i if births[i] is None else None for i in range(n)),
        start_ranks=tuple(0 if births[i] is None else None for i in range(n)),
        end_serials=tuple(None if i in deaths else i for i in range(n)),
        family="f",
        origins=tuple(origins[i] for i in range(n)),
    )


def without(observed: Observed, gone: Collection[int]) -> tuple[Observed, list[int]]:
    """As it would have been observed if these had been small; and which variables the others are."""
    trace = observed.trace
    kept = [i for i in range(len(trace.variables)) if i not in gone]
    index_of = {old: new for new, old in enumerate(kept)}
    dropped = {t for i in gone for t in (trace.variables[i].birth_tick, trace.variables[i].death_tick)}
    place = {t: n for n, t in enumerate(t for t in range(trace.num_ticks) if t not in dropped)}

    def retick(tick: int | None) -> int | None:
        return None if tick is None else place[tick]

    def after(tick: int) -> int:
        return sum(1 for t in place if t < tick)

    ops = tuple(
        replace(
            op,
            start_tick=place[op.start_tick],
            stop_tick=after(op.stop_tick),
            uses=tuple(replace(u, variable=index_of[u.variable]) for u in op.uses if u.variable in index_of),
        )
        for op in trace.ops
    )
    variables = tuple(
        replace(v, birth_tick=retick(v.birth_tick), death_tick=retick(v.death_tick))
        for v in (trace.variables[i] for i in kept)
    )
    return replace(
        observed,
        trace=replace(trace, ops=ops, variables=variables, num_ticks=len(place)),
        occurrences=tuple(tuple(index_of[i] for i in o if i in index_of) for o in observed.occurrences),
        start_serials=tuple(observed.start_serials[i] for i in kept),
        start_ranks=tuple(observed.start_ranks[i] for i in kept),
        end_serials=tuple(observed.end_serials[i] for i in kept),
        origins=tuple(observed.origins[i] for i in kept),
    ), kept


def place_of(trace: Trace, tick: int | None) -> tuple[int, bool] | None:
    """The op inside which a tick comes, or before which."""
    if tick is None:
        return None
    for number, op in enumerate(trace.ops):
        if tick < op.stop_tick:
            return number, tick >= op.start_tick
    return len(trace.ops), False


@pytest.mark.parametrize("seed", range(60))
def test_halves_make_the_whole(seed: int) -> None:
    whole, r = observation(seed), random.Random(seed)
    loose = [i for i in range(1, len(whole.trace.variables)) if r.random() < 0.6]
    loose = [i for i in loose if whole.trace.variables[i].birth_tick is not None or i in (1, 2)]
    loose = [i for i in loose if (v := whole.trace.variables[i]).birth_tick is not None or v.death_tick is not None]
    half = len(loose) // 2
    (ours, names), (theirs, other_names) = without(whole, loose[:half]), without(whole, loose[half:])
    alignment = {n: names.index(name) for n, name in enumerate(other_names) if name in names}
    made = merged(ours, theirs, alignment)
    names = names + [other_names[i] for i in strangers(theirs, alignment) or ()]
    assert sorted(names) == list(range(len(whole.trace.variables)))
    for index, name in enumerate(names):
        v, expected = made.trace.variables[index], whole.trace.variables[name]
        assert v.nbytes == expected.nbytes
        assert place_of(made.trace, v.birth_tick) == place_of(whole.trace, expected.birth_tick)
        assert place_of(made.trace, v.death_tick) == place_of(whole.trace, expected.death_tick)
        for by_variable in ("start_serials", "start_ranks", "end_serials", "origins"):
            assert getattr(made, by_variable)[index] == getattr(whole, by_variable)[name]
    for number, (op, expected_op) in enumerate(zip(made.trace.ops, whole.trace.ops, strict=True)):
        uses = [replace(u, variable=names[u.variable]) for u in op.uses]
        assert sorted(uses, key=lambda u: u.variable) == sorted(expected_op.uses, key=lambda u: u.variable)
        ordinals = [origin[2] for u in op.uses if not u.reads and (origin := made.origins[u.variable]) is not None]
        born = [
            u.variable
            for u in op.uses
            if place_of(made.trace, made.trace.variables[u.variable].birth_tick) == (number, True)
        ]
        by_tick = sorted(born, key=lambda i: made.trace.variables[i].birth_tick or 0)
        assert [made.origins[i] for i in by_tick] == sorted(made.origins[i] or ("", 0, 0) for i in born)
        assert len(ordinals) == len(born)
        found = [names[i] for i in made.occurrences[number]]
        assert sorted(found) == sorted(whole.occurrences[number])
        for part, part_names in ((ours, names), (theirs, other_names)):  # in the order in which either has seen them
            seen = [part_names[i] for i in part.occurrences[number]]
            rest = iter(found)
            assert all(any(name == next_name for next_name in rest) for name in seen)


def test_what_cannot_be_merged() -> None:
    """What exists throughout, or can never be away, is no stranger."""
    whole = observation(0)
    assert strangers(whole, range(1, len(whole.trace.variables))) is None
    born = next(i for i, v in enumerate(whole.trace.variables) if v.birth_tick is not None)
    others = set(range(len(whole.trace.variables))) - {born}
    assert strangers(whole, others) == [born]
    pinned = tuple(replace(v, evictable=i != born) for i, v in enumerate(whole.trace.variables))
    assert strangers(replace(whole, trace=replace(whole.trace, variables=pinned)), others) is None
    elsewhere = tuple(("f", 0, 1) if i == born else origin for i, origin in enumerate(whole.origins))
    assert strangers(replace(whole, origins=elsewhere), others) is None
