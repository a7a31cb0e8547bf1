"""What policies without a budget share: a rule says for each gap whether it is away, and the result fits or not.

`lms` and `vdnn` decide by distance or by layer and learn only afterwards what memory that takes. Both search
their parameters; where none fits, the error says which op is in the way and what budget would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np

from scheduler.budget import BudgetTooSmall, IntArray, budget_too_small
from scheduler.chains import Away, Chain, Gap, PositionTicks
from scheduler.colouring.colouring import Shortage
from scheduler.cost.evaluate import Evaluation, evaluate
from scheduler.plan import Machine, Residency
from scheduler.trace import Trace

Rule: TypeAlias = Callable[[Chain, Gap], int | None]
"""For a gap that may be away: the position at which its load is issued at the earliest; None: it stays."""


def aways_by(rule: Rule, chains: tuple[Chain, ...]) -> list[Away]:
    """The decisions of a rule. Chunks are released at the first moment; whoever takes them waits for the write."""
    found = []
    for chain in chains:
        for gap in chain.gaps:
            load = rule(chain, gap)
            if load is None and not gap.forced:
                continue
            if gap.latest_load is None:
                found.append(Away(gap=gap, release=gap.earliest_release, load=None))
                continue
            wanted = gap.latest_load if load is None else min(load, gap.latest_load)
            position = max(wanted, gap.earliest_release)
            if position > gap.earliest_release or gap.forced:
                found.append(Away(gap=gap, release=gap.earliest_release, load=position))
    return found


def held_chunks(trace: Trace, chains: tuple[Chain, ...], aways: Iterable[Away]) -> IntArray:
    """Chunks held at each tick of the step with these decisions."""
    change = np.zeros(trace.num_ticks + 1, dtype=np.int64)
    ticks = PositionTicks(trace)

    def add(start: int, stop: int, num_chunks: int) -> None:
        while start < stop:
            base = start // trace.num_ticks * trace.num_ticks
            end = min(stop, base + trace.num_ticks)
            change[start - base] += num_chunks
            change[end - base] -= num_chunks
            start = end

    for chain in chains:
        if chain.pins or not chain.starts_away:
            add(chain.start_tick, chain.stop_tick, chain.num_chunks)
    for away in aways:
        start = max(ticks.release(away.release), away.gap.start_tick)
        stop = away.gap.stop_tick if away.load is None else min(ticks.load(away.load), away.gap.stop_tick)
        add(start, stop, -away.gap.num_chunks)
    return np.cumsum(change)[:-1]


def best_of(candidates: Iterable[tuple[Residency, ...]], trace: Trace, machine: Machine) -> int | None:
    """Index of the candidate that simulates best; None where none can be coloured."""
    best: tuple[tuple[int, int, int], int] | None = None
    for index, proposal in enumerate(candidates):
        outcome: Evaluation | Shortage = evaluate(proposal, trace, machine)
        if not isinstance(outcome, Shortage) and (best is None or (outcome.rank, index) < best):
            best = outcome.rank, index
    return None if best is None else best[1]


def does_not_fit(trace: Trace, machine: Machine, chains: tuple[Chain, ...], aways: list[Away]) -> BudgetTooSmall:
    """The error for decisions that hold too much: with the worst op, what is held there, and the budget they need."""
    held = held_chunks(trace, chains, aways)
    tick = int(held.argmax())
    by_chain: dict[int, list[Away]] = {}
    for away in aways:
        by_chain.setdefault(away.gap.chain, []).append(away)
    variables = [
        chain.variable
        for index, chain in enumerate(chains)
        if held_chunks(trace, (chain,), by_chain.get(index, ()))[tick]
    ]
    return budget_too_small(trace, machine, tick=tick, variables=variables, smallest_num_chunks=int(held[tick]))


def is_activation(trace: Trace, chain: Chain) -> bool:
    """Is the chain born within the step and dead at its end? What these policies call an activation."""
    v = trace.variables[chain.variable]
    return v.birth_tick is not None and v.death_tick is not None


def first_backward_op(trace: Trace) -> int:
    """The op with which the backward pass begins: by name, else the op at which the most bytes are alive."""
    for index, op in enumerate(trace.ops):
        if "backward" in op.name:
            return index
    live = max(trace.live_nbytes(), key=lambda entry: (entry[1], entry[0]), default=(0, 0))[0]
    return next((index for index, op in enumerate(trace.ops) if op.stop_tick > live), max(len(trace.ops) - 1, 0))
