"""`lms`: Large Model Support (Le et al. 2018/2019, TFLMS), as the window paper describes it (section 2).

An activation whose next use is more than `swapout_threshold` ops away is written out right after its use, and
loaded `swapin_ahead` ops before the next one. Both distances are fixed for the whole step; parameters and
optimizer state stay. The paper's text says "at most the threshold" for the swap-out; the sense must be the
reverse (what is used soon stays), and so does the original. Distance is counted in ops of the recorded
order, which is a topological order of the graph.

There is no budget in this policy: its own authors tune both numbers until the step fits, and so does `tune`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.budget import BudgetTooSmall
from scheduler.chains import Away, Chain, Gap, chains_of, residencies_of
from scheduler.plan import Machine, Residency
from scheduler.policies._fixed_gaps import aways_by, best_of, does_not_fit, held_chunks, is_activation
from scheduler.trace import Trace

# Distances tried for the load, in ops; for each one, the largest threshold that fits.
_AHEAD = (0, 1, 2, 4, 8, 16, 32, 64)


def schedule(
    trace: Trace, machine: Machine, *, swapout_threshold: int, swapin_ahead: int, wrap: bool = True
) -> tuple[Residency, ...]:
    """Swap activations by distance.

    Args:
        trace: The step.
        machine: The budget is checked, not used; rates do not matter here.
        swapout_threshold: In ops: an activation goes away where its next use is further than that.
        swapin_ahead: In ops before that use: where its load is issued; 0: right before it.
        wrap: Whether what lives across steps may stay in memory over the boundary of a cyclic step.

    Raises:
        BudgetTooSmall: What stays does not fit.
    """
    chains = chains_of(trace, machine, wrap=wrap)
    aways = _decide(trace, chains, swapout_threshold, swapin_ahead)
    if int(held_chunks(trace, chains, aways).max(initial=0)) > machine.num_chunks:
        raise does_not_fit(trace, machine, chains, aways)
    return residencies_of(chains, aways, trace)


def tune(trace: Trace, machine: Machine, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Choose both distances by simulation among those that fit, unless they are given.

    Raises:
        BudgetTooSmall: No pair of distances fits; with the smallest budget for which one does.
    """
    given = dict(parameters)
    wrap = bool(given.get("wrap", True))
    chains = chains_of(trace, machine, wrap=wrap)
    aheads = [given["swapin_ahead"]] if "swapin_ahead" in given else [a for a in _AHEAD if a < max(len(trace.ops), 2)]
    pairs: list[tuple[int, int]] = []
    for ahead in aheads:
        threshold = given.get("swapout_threshold")
        if threshold is None:
            threshold = _largest_that_fits(trace, machine, chains, ahead)
        if threshold is not None:
            pairs.append((threshold, ahead))
    if not pairs:
        raise _infeasible(trace, machine, chains, aheads)
    proposals = (residencies_of(chains, _decide(trace, chains, *pair), trace) for pair in pairs)
    best = best_of(proposals, trace, machine) if len(pairs) > 1 else 0
    threshold, ahead = pairs[best or 0]
    return {**given, "swapout_threshold": threshold, "swapin_ahead": ahead}


def _decide(trace: Trace, chains: tuple[Chain, ...], threshold: int, ahead: int) -> list[Away]:
    def rule(chain: Chain, gap: Gap) -> int | None:
        if gap.latest_load is None or not is_activation(trace, chain):
            return None
        is_far = gap.latest_load - (gap.earliest_release - 1) > threshold
        return gap.latest_load - ahead if is_far else None

    return aways_by(rule, chains)


def _largest_that_fits(trace: Trace, machine: Machine, chains: tuple[Chain, ...], ahead: int) -> int | None:
    """The largest threshold (fewest swaps) that fits: memory grows with the threshold."""

    def fits(threshold: int) -> bool:
        held = held_chunks(trace, chains, _decide(trace, chains, threshold, ahead))
        return int(held.max(initial=0)) <= machine.num_chunks

    low, high = 0, len(trace.ops)
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _infeasible(trace: Trace, machine: Machine, chains: tuple[Chain, ...], aheads: list[int]) -> BudgetTooSmall:
    every = [_decide(trace, chains, 0, ahead) for ahead in aheads]
    least = min(every, key=lambda aways: int(held_chunks(trace, chains, aways).max(initial=0)))
    return does_not_fit(trace, machine, chains, least)
