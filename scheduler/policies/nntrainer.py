"""`nntrainer`: swapping by execution order (NNTrainer, ICSE'24, section 4.3).

The trace's ops are read as NNTrainer's procedures (forward, compute gradient, compute derivative, apply
gradient), one execution order (EO) each; ops that neither make nor change anything belong to the procedure that
follows. Weights and tensors are swapped alike. Three modes:

* `on_demand`: what a procedure used goes out after it, what the next one needs comes in before it;
* `reduced`: what the next procedure uses again stays (in a plan an absence has a length, so that `on_demand` differs
  only where ops lie between; in the paper, too, the two perform the same: caption of figure 12);
* `proactive`: at order n, what order n + lookahead needs comes in, and what order n - 1 used goes out.

The lookahead is a number in the paper (1 by default), "determined statically"; the paper leaves a lookahead per
order as future work: `lookahead=0` of mode `proactive` stands for that here. Each order then gets the
longest lookahead for which the memory allows.

The paper has no budget: `tune` chooses mode and lookahead among those that fit, by simulation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from scheduler.budget import IntArray
from scheduler.chains import Away, Chain, PositionTicks, chains_of, residencies_of
from scheduler.layers import Procedure
from scheduler.plan import Machine, Residency
from scheduler.policies._fixed_gaps import best_of, does_not_fit, first_backward_op, held_chunks
from scheduler.trace import Trace

Mode: TypeAlias = Literal["on_demand", "reduced", "proactive"]

PER_ORDER = 0
_MODES: tuple[Mode, ...] = ("on_demand", "reduced", "proactive")
_LOOKAHEADS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One execution order: a procedure and the ops `[first_op, stop_op)` that it consists of."""

    procedure: Procedure
    first_op: int
    stop_op: int


def orders_of(trace: Trace) -> tuple[Order, ...]:
    """The trace's procedures in order.

    After the forward pass, an op that changes what lives across steps applies a gradient; one that makes what
    such an op reads computes a gradient; the rest compute derivatives.
    """
    backward = first_backward_op(trace) if trace.ops else 0
    applies = [
        index >= backward and any(u.writes and trace.variables[u.variable].birth_tick is None for u in op.uses)
        for index, op in enumerate(trace.ops)
    ]
    gradients = {u.variable for op, is_applied in zip(trace.ops, applies, strict=True) if is_applied for u in op.uses}
    found: list[Order] = []
    first = 0
    for index, op in enumerate(trace.ops):
        written = {u.variable for u in op.uses if u.writes}
        if not written and index < len(trace.ops) - 1:
            continue
        if index < backward:
            procedure = Procedure.FORWARD
        elif applies[index]:
            procedure = Procedure.APPLY
        else:
            procedure = Procedure.GRADIENT if written & gradients else Procedure.DERIVATIVE
        found.append(Order(procedure=procedure, first_op=first, stop_op=index + 1))
        first = index + 1
    return tuple(found)


def schedule(
    trace: Trace, machine: Machine, *, mode: Mode, lookahead: int = 1, wrap: bool = True
) -> tuple[Residency, ...]:
    """Swap by execution order.

    Args:
        trace: The step.
        machine: The budget is checked; only the lookahead per order makes use of it.
        mode: See the module's notes.
        lookahead: Orders, for `proactive`; 0: chosen for each order.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.

    Raises:
        BudgetTooSmall: What the mode holds does not fit.
        ValueError: Another mode, or a negative lookahead.
    """
    if mode not in _MODES or lookahead < 0:
        raise ValueError(
            f"mode={mode!r}, lookahead={lookahead}. Options: {', '.join(_MODES)}; a lookahead of 0 or more."
        )
    swaps = _Swaps(trace, machine, wrap=wrap)
    aways = swaps.decide(mode, lookahead)
    if swaps.most_held(aways) > machine.num_chunks:
        raise does_not_fit(trace, machine, swaps.chains, aways)
    return residencies_of(swaps.chains, aways, trace)


def tune(trace: Trace, machine: Machine, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Choose mode and lookahead by simulation among those that fit, unless they are given."""
    if "mode" in parameters and (parameters["mode"] != "proactive" or "lookahead" in parameters):
        return dict(parameters)
    swaps = _Swaps(trace, machine, wrap=bool(parameters.get("wrap", True)))
    modes: tuple[Mode, ...] = (parameters["mode"],) if "mode" in parameters else _MODES
    pairs: list[tuple[Mode, int]] = []
    for mode in modes:
        lookaheads = (PER_ORDER, *_LOOKAHEADS) if mode == "proactive" else (1,)
        pairs += [(mode, lookahead) for lookahead in lookaheads]
    decided = [swaps.decide(*pair) for pair in pairs]
    fitting = [index for index, aways in enumerate(decided) if swaps.most_held(aways) <= machine.num_chunks]
    best = best_of((residencies_of(swaps.chains, decided[i], trace) for i in fitting), trace, machine)
    mode, lookahead = pairs[fitting[best]] if best is not None else pairs[0]
    return {**parameters, "mode": mode, "lookahead": lookahead}


class _Swaps:
    """Decisions on one trace by execution orders."""

    def __init__(self, trace: Trace, machine: Machine, *, wrap: bool) -> None:
        self.trace = trace
        self.machine = machine
        self.chains: tuple[Chain, ...] = chains_of(trace, machine, wrap=wrap)
        self.ticks = PositionTicks(trace)
        self.num_ops = len(trace.ops)
        orders = orders_of(trace)
        self.stops = [order.stop_op for order in orders]
        self.firsts = [order.first_op for order in orders]

    def order_at(self, position: int) -> int:
        """The unrolled order that the op at an unrolled position belongs to."""
        step, op = divmod(position, self.num_ops)
        return step * len(self.stops) + bisect_left(self.stops, op + 1)

    def first_position(self, order: int) -> int:
        """The unrolled position of an order's first op."""
        step, index = divmod(order, len(self.firsts))
        return step * self.num_ops + self.firsts[index]

    def most_held(self, aways: list[Away]) -> int:
        """Chunks held at the worst tick."""
        return int(held_chunks(self.trace, self.chains, aways).max(initial=0))

    def decide(self, mode: Mode, lookahead: int) -> list[Away]:
        """Which gaps are away, from which op to which."""
        if not self.num_ops:
            return []
        if mode == "proactive" and lookahead == PER_ORDER:
            return self._look_ahead_per_order(self.decide("reduced", 1))
        ahead, leave = (lookahead, 2) if mode == "proactive" else (0, 1)
        found = []
        for chain in self.chains:
            for gap in chain.gaps:
                used = self.order_at(gap.earliest_release - 1) if gap.earliest_release else -1
                release = max(self.first_position(used + leave), gap.earliest_release)
                if gap.latest_load is None:
                    late = self.ticks.release(release) >= gap.stop_tick
                    found.append(Away(gap=gap, release=gap.earliest_release if late else release, load=None))
                    continue
                needed = self.order_at(gap.latest_load)
                load = min(self.first_position(needed - ahead), gap.latest_load)
                stays = load <= release or (mode == "reduced" and needed - used <= 1)
                if not stays:
                    found.append(Away(gap=gap, release=release, load=load))
                elif gap.forced:
                    found.append(Away(gap=gap, release=gap.earliest_release, load=max(load, gap.earliest_release)))
        return found

    def _look_ahead_per_order(self, aways: list[Away]) -> list[Away]:
        """For each order in turn, its loads as early as the memory allows, by the longest lookahead that fits."""
        held = held_chunks(self.trace, self.chains, aways)
        by_order: dict[int, list[int]] = {}
        for index, away in enumerate(aways):
            if away.load is not None:
                by_order.setdefault(self.order_at(away.load), []).append(index)
        found = list(aways)
        for order, own in sorted(by_order.items()):
            for lookahead in sorted(_LOOKAHEADS, reverse=True):
                earlier = [self._with_load(found[i], self.first_position(order - lookahead)) for i in own]
                change = self._change([found[i] for i in own], earlier)
                if int((held + change).max(initial=0)) <= self.machine.num_chunks:
                    held += change
                    for i, away in zip(own, earlier, strict=True):
                        found[i] = away
                    break
        return found

    def _with_load(self, away: Away, position: int) -> Away:
        assert away.load is not None
        return Away(gap=away.gap, release=away.release, load=min(max(position, away.release + 1), away.load))

    def _change(self, before: list[Away], after: list[Away]) -> IntArray:
        """Chunks held more at each tick."""
        change = np.zeros(self.trace.num_ticks, dtype=np.int64)
        for old, new in zip(before, after, strict=True):
            assert old.load is not None
            assert new.load is not None
            start, stop = self.ticks.load(new.load), min(self.ticks.load(old.load), old.gap.stop_tick)
            while start < stop:
                base = start // self.trace.num_ticks * self.trace.num_ticks
                end = min(stop, base + self.trace.num_ticks)
                change[start - base : end - base] += old.gap.num_chunks
                start = end
        return change
