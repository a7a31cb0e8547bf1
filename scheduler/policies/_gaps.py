"""`poet` for energy: the program over gaps, incumbents from the rules that it is compared with, and their walk.

Branch and bound wants a good schedule early, and solvers take one as a start. HiGHS as scipy wraps it cannot be given
one, so it is taken afterwards: the plan is the best of the program's answer and of what the rules of `capuchin`, `dtr`
and `melon` find (the incumbents). The notes say which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from scheduler.chains import chains_of
from scheduler.colouring import Shortage
from scheduler.evaluate import evaluate
from scheduler.milp.from_trace import Power
from scheduler.milp.gaps import GapChoice, GapRequest, choose_gaps
from scheduler.milp.program import Status
from scheduler.plan import Evicted, Loaded, Machine, Residency
from scheduler.policies import capuchin, dtr, melon
from scheduler.policies._rerun_policies import AsChosen
from scheduler.policies._slack import use_slack
from scheduler.policies._walk import Advice, Facts, Stuck, Walk
from scheduler.reruns import reruns_of
from scheduler.trace import Trace

Proposal: TypeAlias = tuple[Residency, ...]

_PROGRAM = "the program"

# Solves for one deadline: each after the first for as much less time as the plan before it was late in simulation.
_MOST_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A proposal, where it is from, and what it costs; `late_ns` is its time over the deadline, 0 if in time."""

    proposal: Proposal
    origin: str
    joules: float
    late_ns: float


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
        Stuck: Nothing fits.
    """
    facts = Facts(trace, machine)
    found: list[_Found] = []
    for origin, propose in _incumbents(facts, wrap=wrap):
        try:
            found.append(_judged(propose(), origin, facts, request))
        except Stuck:
            continue
    choice = GapChoice(status=Status.OPTIMAL)
    if trace.ops:
        choice = _solve_in_time(facts, request, found, wrap=wrap)
    best = min(found, key=lambda f: (f.late_ns, f.joules))
    if notes is not None and trace.ops:
        notes.append(_said(best, choice, request))
    return best.proposal


def _solve_in_time(facts: Facts, request: GapRequest, found: list[_Found], *, wrap: bool) -> GapChoice:
    """Solve, and add what comes of it to `found`; where that is late in simulation, solve again for less time.

    Returns:
        The first answer, whose bound holds for the deadline that was asked.
    """
    chains = chains_of(facts.trace, facts.machine, wrap=wrap)
    first: GapChoice | None = None
    asked = request
    for _ in range(_MOST_ROUNDS if request.deadline_ns is not None else 1):
        choice = choose_gaps(facts.trace, facts.machine, chains, facts.graph, asked)
        first = first or choice
        if choice.joules is None:
            break
        advice = AsChosen(choice.rerun, choice.paged, choice.kept)
        try:
            proposal = use_slack(Walk(facts, advice).schedule(wrap=wrap), facts.trace, facts.machine)
        except Stuck:
            break
        found.append(_judged(proposal, _PROGRAM, facts, request))
        if not found[-1].late_ns or request.deadline_ns is None or asked.deadline_ns is None:
            break
        share = request.deadline_ns / (request.deadline_ns + found[-1].late_ns)
        asked = replace(asked, deadline_ns=int(asked.deadline_ns * share))
    assert first is not None
    return first


def _incumbents(facts: Facts, *, wrap: bool) -> Iterator[tuple[str, Callable[[], Proposal]]]:
    yield "capuchin's rule, paging only", lambda: capuchin.propose(facts, wrap=wrap, recompute=False)
    yield "capuchin's rule", lambda: capuchin.propose(facts, wrap=wrap, recompute=True)
    yield "dtr's rule", lambda: dtr.propose(facts, wrap=wrap)
    yield "melon's rule", lambda: melon.propose(facts, wrap=wrap)
    yield "paging by next use", lambda: Walk(facts, Advice()).schedule(wrap=wrap)


def _judged(proposal: Proposal, origin: str, facts: Facts, request: GapRequest) -> _Found:
    late_ns = 0.0
    if request.deadline_ns is not None:
        outcome = evaluate(proposal, facts.trace, facts.machine, is_final=True)
        duration_ns = float("inf") if isinstance(outcome, Shortage) else float(outcome.duration_ns)
        late_ns = max(0.0, duration_ns - request.deadline_ns)
    joules = joules_of(proposal, facts.trace, facts.machine, request.power)
    return _Found(proposal=proposal, origin=origin, joules=joules, late_ns=late_ns)


def _said(best: _Found, choice: GapChoice, request: GapRequest) -> str:
    gap = "an unknown part" if choice.bound is None else f"{max(0.0, best.joules / choice.bound - 1):.1%}"
    struck = " (its limit in seconds struck)" if choice.was_cut_off else ""
    late = ""
    if best.late_ns and request.deadline_ns is not None:
        late = f"; no plan was found within {request.deadline_ns / 1e6:.3f} ms, this one is the fastest"
    line = f"the program over gaps: {choice.status.value}{struck}; the plan is its own"
    if best.origin != _PROGRAM:
        line = f"the program over gaps: {choice.status.value}{struck}; the plan is that of {best.origin}"
    return f"{line}, {gap} above the program's bound{late}"
