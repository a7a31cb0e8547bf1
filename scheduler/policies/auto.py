"""`auto`: our own policy, in its first form.

Three decisions, each one pass (the gaps are those of `scheduler.chains`):

1. *Which* gaps are away. While some tick holds more than the budget, take the gap over that tick
   that relieves the most time over budget for each byte moved. What a transfer costs beyond its bytes
   (`Machine.latency_ns`) counts as bytes: few large gaps rather than many small ones.
2. *When* bytes move, if memory were free. Writes go out in the order in which the bytes become
   final; loads come in as late as the in-link allows, in reverse order of need.
3. *How much* of that fits. A chosen gap first counts as away for all of its length; then releases
   are put off until their writes are done, and loads are brought forward, as far as the
   memory of each tick allows.

Where the best of that still stalls, the other policies' plans are candidates too, and so are plans made for
somewhat less memory than there is: both are legal here, and a greedy choice is not always the best. With
recomputation allowed, so are the plans of the policies that recompute, and the best plan with some of its gaps
exchanged for re-runs (`_recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.budget import pinned_chunks, pins_of, require_budget
from scheduler.chains import chains_of, residencies_of
from scheduler.colouring.colouring import Shortage
from scheduler.cost.evaluate import Evaluation, evaluate
from scheduler.plan import Machine, Residency
from scheduler.policies import capuchin
from scheduler.policies._border import better_over_border
from scheduler.policies._candidates import smaller_budgets
from scheduler.policies._recompute import with_reruns
from scheduler.policies._search import MOST_FINALS, NO_STALL, OTHERS, SLACK, Search
from scheduler.trace import Trace

# With more ops, training waits for few choices only, and for no placement to be coloured before the next: estimates
# say when ops start.
_MOST_OPS_WITH_CARE = 500

# While training waits, fewer candidates of a long step are coloured as the finished plan will be, which takes seconds:
# as many as have so many ops together, but for two.
_MOST_OPS_COLOURED = 8_000


def schedule(
    trace: Trace,
    machine: Machine,
    *,
    wrap: bool = True,
    thorough: bool = True,
    recompute: bool = False,
    exact: bool = True,
    evaluations: dict[tuple[Residency, ...], Evaluation] | None = None,
) -> tuple[Residency, ...]:
    """Keep what fits, move what does not, and hide the moves.

    Args:
        trace: The step.
        machine: Budget and rates.
        wrap: Whether variables may stay in memory over the boundary of a cyclic step.
        thorough: Whether to look at other policies' plans, too, and at plans for much less memory. It
            takes several times as long; while a training run waits, it is not worth that.
        recompute: Whether ops may be run again where that pays. Off by default, because not every executor can.
        exact: With `thorough` and `recompute`: whether the programs of `poet` and `checkmate` are solved where they
            are small enough. It takes up to their time limit, and where that strikes, the plan depends on the
            machine's speed. If not, their relaxations are rounded.
        evaluations: Gets that of what is returned, if it was coloured on the way as `colour_with_scratch` would colour
            it; it need not be coloured, nor simulated, again.

    Raises:
        BudgetTooSmall: An op needs more at once than the budget.
    """
    require_budget(trace, machine, pins := pins_of(trace))
    chains = chains_of(trace, machine, wrap=wrap)
    if not trace.ops:
        return residencies_of(chains, (), trace)
    search = Search(trace, machine, chains, pinned_chunks(trace, machine, pins))
    recompute = recompute and any(op.replayable for op in trace.ops)
    if not thorough:
        found = _found_quickly(search, wrap=wrap, recompute=recompute)
        return search.returned(_over_border(found, search, wrap=wrap), evaluations)
    if search.is_long:
        search.try_few_choices()
    else:
        search.try_choices()
    if recompute:
        search.try_reruns({"wrap": wrap, "exact": exact})
    if not search.beats_all_that_move:
        for num_chunks in () if search.is_long else smaller_budgets(trace, machine, SLACK):
            if search.is_perfect:
                break
            smaller = Search(trace, replace(machine, num_chunks=num_chunks), chains, search.pinned)
            smaller.try_choices()
            if smaller.best is not None:
                search.consider(smaller.best.proposal)
        search.try_others(OTHERS, {"wrap": wrap, "recompute": False})
    search.adopt_choices()
    search.retime()
    if recompute:
        search.exchange()
        search.try_mixed(wrap=wrap)
    best = search.fastest()
    if best is not None and best.simulation.stall_ns > NO_STALL * trace.duration_ns:
        quick = Search(trace, machine, chains, search.pinned)
        found = _found_quickly(quick, wrap=wrap, recompute=recompute)
        kept = _over_border(found, quick, wrap=wrap)
        if kept is not None and not kept.is_final:
            final = evaluate(kept.proposal, trace, machine, is_final=True)
            kept = final if not isinstance(final, Shortage) else None
        best = min((best, kept), key=lambda own: own.rank) if kept is not None else best
    return search.returned(best, evaluations)


def _found_quickly(search: Search, *, wrap: bool, recompute: bool) -> list[Evaluation]:
    """The best plan while training waits, without re-runs and, if they may be, with them. Empty if nothing colours."""
    trace = search.trace
    search.in_haste = len(trace.ops) > _MOST_OPS_WITH_CARE
    if search.is_long:
        search.try_few_choices()
    else:
        search.try_choices()
    if not search.is_good:
        # A third of our own choices' time; ahead by up to 15 % where links are the limit, by 1 % where remaps are.
        search.try_others((capuchin,), {"wrap": wrap, "recompute": False})
        search.retime_one()
    few = min(MOST_FINALS, max(_MOST_OPS_COLOURED // len(trace.ops), 2))
    best = search.fastest(most_finals=few) if search.is_long else _best_with_slack(search)
    if best is None:
        return []
    return [best, with_reruns(best, trace, wrap=wrap)] if recompute else [best]


def _over_border(found: Sequence[Evaluation], search: Search, *, wrap: bool) -> Evaluation | None:
    """The best of what `_found_quickly` found, with what is dirty at the step's border written before it and kept."""
    if not found or not wrap:
        return found[-1] if found else None
    distinct = {id(own): own for own in found}.values()
    return min((better_over_border(own, search.trace) for own in distinct), key=lambda outcome: outcome.rank)


def _best_with_slack(search: Search) -> Evaluation | None:
    """The best choice; or one made for a little less memory, if its colouring saves more than it stalls."""
    best = min(search.candidates, key=lambda found: found.rank, default=None)
    if best is None or not best.num_remapped_chunks:
        return best
    if search.best is None:
        return search.fastest()
    machine = search.machine
    slack = Search(
        search.trace, replace(machine, num_chunks=int(machine.num_chunks * SLACK)), search.chains, search.pinned
    )
    slack.in_haste = search.in_haste
    if search.in_haste:
        reserve, by_length = search.best_choice
        slack.try_choice(reserve, by_length=by_length)
    else:
        slack.try_choices()
    fastest: Evaluation | None = None
    for own in sorted((*search.candidates, *([slack.best] if slack.best else [])), key=lambda found: found.rank):
        if fastest is None or own.simulation.duration_ns < fastest.duration_ns:
            final = evaluate(own.proposal, search.trace, machine, is_final=True)
            if not isinstance(final, Shortage) and (fastest is None or final.rank < fastest.rank):
                fastest = final
    return fastest or best
