"""`poet` for energy: the program over gaps, its incumbents, and their walk.

Branch and bound wants a good schedule early, and solvers take one as a start. HiGHS as scipy wraps it cannot be given
one, so it is taken afterwards: the plan is the best of the program's answer and of the incumbents, which are what the
rules of `capuchin`, `dtr` and `melon` and `checkmate`'s program find. The notes say which it was.

The program counts chunks, and does not see that what stays over the step boundary must stay in the same ones. Where
the colouring therefore gives way there (`scheduler.colouring.colouring`), what the program saved is lost in part. The
program is then solved once more with nothing else kept over the boundary than the best coloured plan so far keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from scheduler.chains import chains_of
from scheduler.colouring.colouring import Shortage
from scheduler.cost.evaluate import evaluate
from scheduler.milp.from_trace import Power
from scheduler.milp.gaps import GapChoice, GapRequest, choose_gaps
from scheduler.milp.program import Request
from scheduler.plan import Evicted, Kept, Loaded, Machine, Residency
from scheduler.policies import capuchin, dtr, melon
from scheduler.policies._greedy import Advice, Facts, Stuck, Walk
from scheduler.policies._program import plan_by_program
from scheduler.policies._remat_walk import RematFacts
from scheduler.policies._rerun_policies import AsChosen
from scheduler.policies._slack import use_slack
from scheduler.reruns import reruns_of
from scheduler.trace import Trace

Proposal: TypeAlias = tuple[Residency, ...]

_PROGRAM = "the program"

# Solves: one, one for another boundary, and for a deadline each for as much less time as the plan before it was late.
_MOST_ROUNDS = 4

# The size of the program over merged nodes, as of `checkmate`.
_NUM_NODES, _NUM_STAGES = 120, 24

# A colouring that adds less than this share of the energy is as good as the program asked for.
_LOST = 0.001

# Shares of memory within which slack is used.
_SLACK = (0.95, 1.0)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A proposal, where it is from, and what it costs once it has chunks.

    Attributes:
        late_ns: Its time over the deadline, 0 if in time; infinite where it falls short of chunks.
        kept: Variables that start the step in memory.
        lost_j: Energy that the colouring added.
    """

    proposal: Proposal
    origin: str
    late_ns: float
    joules: float
    duration_ns: float
    kept: frozenset[int] = frozenset()
    lost_j: float = 0.0

    @property
    def rank(self) -> tuple[float, float, float]:
        """Smaller is better."""
        return self.late_ns, self.joules, self.duration_ns


def joules_of(proposal: Proposal, trace: Trace, machine: Machine, power: Power) -> float:
    """Energy of the step under a proposal: ops, re-runs and bytes moved; waiting is free."""
    loaded = sum(trace.variables[r.variable].nbytes for r in proposal if isinstance(r.start, Loaded))
    evicted = sum(trace.variables[r.variable].nbytes for r in proposal if isinstance(r.stop, Evicted))
    compute_ns = trace.duration_ns + sum(rerun.duration_ns for rerun in reruns_of(proposal, trace, machine))
    return (
        compute_ns / 1e9 * power.compute_w
        + loaded / machine.load_bytes_per_s * power.load_w
        + evicted / machine.evict_bytes_per_s * power.evict_w
    )


def plan_by_gaps(
    trace: Trace, machine: Machine, request: GapRequest, *, wrap: bool, notes: list[str] | None = None
) -> Proposal:
    """The proposal of least energy within the deadline; the fastest that was found where none is in time.

    Raises:
        BudgetTooSmall: An op needs more at once than the budget.
        Stuck: Nothing fits.
    """
    facts = Facts(trace, machine)
    found = []
    for origin, propose in _incumbents(facts, request, wrap=wrap):
        try:
            found.append(_judged(propose(), origin, facts, request))
        except Stuck:
            continue
    if not found:
        raise Stuck(0, (), ())
    if not trace.ops:
        return found[0].proposal
    choice = _solve_in_time(facts, request, found, wrap=wrap)
    best = min(found, key=lambda f: f.rank)
    if notes is not None:
        notes.append(_said(best, choice, request))
    return best.proposal


def _solve_in_time(facts: Facts, request: GapRequest, found: list[_Found], *, wrap: bool) -> GapChoice:
    """Solve, and add what comes of it to `found`; again for another boundary or for less time, where that is needed.

    Returns:
        The first answer: its bound holds for what was asked.
    """
    chains = chains_of(facts.trace, facts.machine, wrap=wrap)
    asked = request
    first: GapChoice | None = None
    for _ in range(_MOST_ROUNDS):
        choice = choose_gaps(facts.trace, facts.machine, chains, facts.graph, asked)
        first = first or choice
        own = _played(facts, choice, request, wrap=wrap)
        if not own and asked.deadline_ns is not None:  # late by some way, but perhaps the fastest
            asked = replace(asked, deadline_ns=None)
            continue
        if not own:
            break
        found[:0] = own  # of equals, the program's
        best = min(own, key=lambda f: f.rank)
        if best.lost_j > _LOST * best.joules and not asked.not_kept:
            kept = min(found, key=lambda f: f.rank).kept
            asked = replace(asked, not_kept=frozenset(c.heir for c in chains if c.heir not in kept))
        elif best.late_ns and request.deadline_ns is not None and asked.deadline_ns is not None:
            share = request.deadline_ns / (request.deadline_ns + best.late_ns)
            asked = replace(asked, deadline_ns=int(asked.deadline_ns * share))
        else:
            break
    assert first is not None
    return first


def _played(facts: Facts, choice: GapChoice, request: GapRequest, *, wrap: bool) -> list[_Found]:
    """The program's answer as proposals: with all slack used to hide transfers, with most of it, with none.

    Slack that is used makes the step faster, and colouring harder.
    """
    if choice.joules is None:
        return []
    try:
        bare = Walk(facts, AsChosen(choice.rerun, choice.paged, choice.kept)).schedule(wrap=wrap)
    except Stuck:
        return []
    proposals = [bare]
    for share in _SLACK:
        within = replace(facts.machine, num_chunks=int(facts.machine.num_chunks * share))
        proposals.append(use_slack(bare, facts.trace, within))
    return [_judged(proposal, _PROGRAM, facts, request) for proposal in dict.fromkeys(proposals)]


def _incumbents(facts: Facts, request: GapRequest, *, wrap: bool) -> Iterator[tuple[str, Callable[[], Proposal]]]:
    yield "capuchin's rule, paging only", lambda: capuchin.propose(facts, wrap=wrap, recompute=False)
    yield "capuchin's rule", lambda: capuchin.propose(facts, wrap=wrap, recompute=True)
    yield "dtr's rule", lambda: dtr.propose(RematFacts(facts.trace, facts.machine), wrap=wrap)
    yield "melon's rule", lambda: melon.propose(facts, wrap=wrap)
    yield "the program over nodes, without paging", lambda: _without_paging(facts, request, wrap=wrap)
    yield "paging by next use", lambda: Walk(facts, Advice()).schedule(wrap=wrap)


def _without_paging(facts: Facts, request: GapRequest, *, wrap: bool) -> Proposal:
    """As `checkmate`: over merged nodes the program sees what one re-run may bring back for several later uses."""
    asked = Request(
        budget_nbytes=facts.machine.budget_nbytes,
        paging=False,
        objective="time",
        node_limit=request.node_limit,
        time_limit_s=request.time_limit_s,
        relative_gap=request.relative_gap,
    )
    return plan_by_program(
        facts.trace,
        facts.machine,
        request=asked,
        num_nodes=_NUM_NODES,
        num_stages=_NUM_STAGES,
        power=Power(),
        exact=True,
        wrap=wrap,
    )


def _judged(proposal: Proposal, origin: str, facts: Facts, request: GapRequest) -> _Found:
    trace, machine = facts.trace, facts.machine
    joules = joules_of(proposal, trace, machine, request.power)
    outcome = evaluate(proposal, trace, machine, is_final=True)
    if isinstance(outcome, Shortage):
        nothing = float("inf")
        return _Found(proposal=proposal, origin=origin, late_ns=nothing, joules=joules, duration_ns=nothing)
    coloured = outcome.plan.residencies
    coloured_j = joules_of(coloured, trace, machine, request.power)
    late_ns = 0.0 if request.deadline_ns is None else max(0.0, float(outcome.duration_ns - request.deadline_ns))
    return _Found(
        proposal=proposal,
        origin=origin,
        late_ns=late_ns,
        joules=coloured_j,
        duration_ns=float(outcome.duration_ns),
        kept=frozenset(r.variable for r in coloured if isinstance(r.start, Kept)),
        lost_j=coloured_j - joules,
    )


def _said(best: _Found, choice: GapChoice, request: GapRequest) -> str:
    gap = "an unknown part" if choice.bound is None else f"{max(0.0, best.joules / choice.bound - 1):.1%}"
    struck = " (its limit in seconds struck)" if choice.was_cut_off else ""
    whose = "its own" if best.origin == _PROGRAM else f"that of {best.origin}"
    late = ""
    if best.late_ns and request.deadline_ns is not None:
        late = f"; no plan was found within {request.deadline_ns / 1e6:.3f} ms, this one is the fastest"
    how = f"the program over gaps: {choice.status.value}{struck}"
    return f"{how}; the plan is {whose}, {gap} above the program's bound{late}"
