"""Exchanges of chunks: nobody shares a chunk who did not, and there are never more remaps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning_time import recurrent
from scheduler.colouring.exchange import Holder, _Table, exchange_chunks
from scheduler.colouring.scratch import ScratchColouring, colour_with_scratch
from scheduler.cost.bounds import lower_bounds
from scheduler.cost.evaluate import Evaluation, best_way, evaluate
from scheduler.plan import Machine
from scheduler.policies import POLICIES
from scheduler.verify import verify

NUM_TICKS = 40


@st.composite
def timetables(draw: st.DrawFn) -> list[Holder]:
    """Families of holders, each with any free chunks: a valid colouring with many remaps."""
    num_chunks = draw(st.integers(2, 10))
    taken = np.zeros((num_chunks, 2 * NUM_TICKS), dtype=bool)
    holders = []
    for family in range(draw(st.integers(1, 8))):
        size = draw(st.integers(1, 3))
        times = sorted(draw(st.sets(st.integers(0, NUM_TICKS), min_size=2, max_size=8)))
        over_the_cut = draw(st.booleans())
        stretches = list(zip(times[::2], times[1::2], strict=False))
        last = max(stretches[-1][1], 1)
        if over_the_cut and stretches[0][0] > 1 and last < NUM_TICKS:
            stretches.append((last, NUM_TICKS + draw(st.integers(1, stretches[0][0]))))
        for start, stop in stretches:
            ticks = np.arange(start, max(stop, start + 1)) % NUM_TICKS
            free = [c for c in range(num_chunks) if not taken[c, ticks].any()]
            if len(free) < size:
                continue
            chunks = draw(st.permutations(free))[:size]
            for chunk in chunks:
                taken[chunk, ticks] = True
            holders.append(
                Holder(start=start, stop=max(stop, start + 1), family=family, chunks=np.array(chunks, dtype=np.int64))
            )
    return [h for h in holders if len(h.chunks) == len(next(o for o in holders if o.family == h.family).chunks)]


def num_remaps(holders: list[Holder], chunks: list[np.ndarray]) -> int:
    total = 0
    for family in {h.family for h in holders}:
        own = sorted((h.start, i) for i, h in enumerate(holders) if h.family == family)
        indices = [i for _, i in own]
        around = [*indices, indices[0]] if len(indices) > 1 else indices
        total += sum(int(np.count_nonzero(chunks[a] != chunks[b])) for a, b in pairwise(around))
    return total


def assert_valid(holders: list[Holder], chunks: list[np.ndarray]) -> None:
    seen: dict[tuple[int, int], int] = {}
    for index, (holder, own) in enumerate(zip(holders, chunks, strict=True)):
        assert len(own) == len(set(own.tolist())) == len(holder.chunks)
        for tick in range(holder.start, holder.stop):
            for chunk in own.tolist():
                assert seen.setdefault((chunk, tick % NUM_TICKS), index) == index


@given(timetables())
def test_never_worse_never_shared(holders: list[Holder]) -> None:
    before = [h.chunks for h in holders]
    assert_valid(holders, before)
    after = exchange_chunks(holders, NUM_TICKS, cyclic=True)
    assert_valid(holders, after)
    assert num_remaps(holders, after) <= num_remaps(holders, before)
    again = exchange_chunks(holders, NUM_TICKS, cyclic=True)
    assert all(np.array_equal(a, b) for a, b in zip(after, again, strict=True))


def test_an_exchange_that_joins() -> None:
    """`a` came back to another chunk because a short-lived one had its own: the short ones change places."""
    one, two = np.array([0]), np.array([1])
    holders = [
        Holder(start=0, stop=10, family=0, chunks=one),
        Holder(start=12, stop=35, family=1, chunks=one),
        Holder(start=20, stop=30, family=0, chunks=two),
    ]
    assert num_remaps(holders, [h.chunks for h in holders]) == 2
    after = exchange_chunks(holders, NUM_TICKS, cyclic=True)
    assert num_remaps(holders, after) == 0


class _Forgetful(dict[int, Any]):
    """Remembers nothing."""

    def __setitem__(self, unit: int, trial: Any) -> None:
        return


@given(timetables())
def test_a_trial_that_is_not_made_again_would_have_changed_nothing(holders: list[Holder]) -> None:
    remembering, forgetful = (_Table(holders, NUM_TICKS, cyclic=True) for _ in range(2))
    forgetful._in_vain = _Forgetful()
    remembering.improve()
    forgetful.improve()
    assert remembering.row == forgetful.row


@given(timetables(), st.lists(st.integers(0, NUM_TICKS), min_size=1, max_size=8))
def test_wishes_that_overlap_cost_nobody_a_chunk(holders: list[Holder], late: list[int]) -> None:
    """A write that takes until the next one has the chunk already makes holders overlap, in what they wish alone."""
    wishes = [
        replace(h, stop=min(h.stop + late[index % len(late)], h.start + NUM_TICKS)) for index, h in enumerate(holders)
    ]
    after = exchange_chunks(wishes, NUM_TICKS, cyclic=True)
    assert_valid(holders, after)
    assert num_remaps(holders, after) <= num_remaps(holders, [h.chunks for h in holders])


def test_an_exchange_among_writes_that_last_for_all_of_the_step() -> None:
    """Where links are the limit everything is being written always; that must not stand in the way of an exchange."""
    one, two = np.array([0]), np.array([1])
    holders = [
        Holder(start=0, stop=NUM_TICKS, family=0, chunks=one),
        Holder(start=12, stop=12 + NUM_TICKS, family=1, chunks=one),
        Holder(start=0, stop=NUM_TICKS, family=2, chunks=two),
        Holder(start=12, stop=12 + NUM_TICKS, family=0, chunks=two),
    ]
    assert num_remaps(holders, exchange_chunks(holders, NUM_TICKS, cyclic=True)) == 0


def test_of_fewer_remaps_and_fewer_waits_the_faster_is_chosen() -> None:
    """Of an unrolled cell, exchanges that await no write leave fewer remaps, and longer waits for the writes."""
    trace = recurrent(60)
    machine = Machine(chunk_nbytes=2 << 20, num_chunks=1, load_bytes_per_s=1e9, evict_bytes_per_s=1e9)
    machine = replace(machine, num_chunks=lower_bounds(trace, machine)["smallest_budget_nbytes"] // (2 << 20))
    proposal = POLICIES["capuchin"].schedule(trace, machine)
    coloured = colour_with_scratch(proposal, trace, machine)
    assert isinstance(coloured, ScratchColouring)
    assert coloured.other is not None
    patient, hasty = (
        best_way(ScratchColouring(colouring=own, scratch=()), trace, machine)
        for own in (coloured.colouring, coloured.other.colouring)
    )
    assert hasty[0].colouring.num_remapped_chunks < patient[0].colouring.num_remapped_chunks
    assert hasty[2].duration_ns > patient[2].duration_ns
    for own in (patient, hasty):
        verify(replace(own[1], trace_fingerprint=trace.fingerprint()), trace)
    for remap_ns, expected in ((0, patient), (10**9, hasty)):
        chosen = best_way(coloured, trace, replace(machine, remap_ns=remap_ns))
        assert chosen[0] == expected[0]
        assert chosen[2] == expected[2]
    final = evaluate(proposal, trace, machine, is_final=True)
    assert isinstance(final, Evaluation)
    assert final.coloured.other is None
