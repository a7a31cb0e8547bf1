"""From a trace to a plan: schedule, colour, verify, predict.

`make_plan` is the planner's front door. A policy proposes residencies; this module gives them
chunks, lets the independent checker look at the result, and adds what the simulator predicts and
how far that is from the best possible.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler.budget import BudgetTooSmall
from scheduler.colouring.scratch import ScratchColouring, schedule_that_colours
from scheduler.cost.bounds import lower_bounds
from scheduler.cost.evaluate import Evaluation, best_way, remap_ns
from scheduler.cost.simulate import Simulation
from scheduler.garbage import without_collections
from scheduler.plan import Machine, Plan, PlanError, Residency
from scheduler.policies import POLICIES
from scheduler.residency_builder import ordered
from scheduler.trace import Trace
from scheduler.verify import verify

__all__ = ["BudgetTooSmall", "make_plan"]


def make_plan(
    trace: Trace, machine: Machine, policy: str = "auto", *, with_bounds: bool = True, **parameters: Any
) -> Plan:
    """Plan one step.

    Args:
        trace: The step.
        machine: Budget, chunk size and measured transfer rates.
        policy: A name in `scheduler.policies.POLICIES`.
        with_bounds: Whether the plan says how far it is from the best possible: a third of a simple policy's time.
        parameters: The policy's own, by keyword.

    Returns:
        A coloured and verified plan with predictions, and lower bounds if asked for.

    Raises:
        BudgetTooSmall: An op needs more at once than the budget.
        ValueError: Unknown policy.
    """
    # A third of `window`'s time for a step of 10,000 ops went into them.
    with without_collections(), trace.remembering():
        plan = _plan(trace, machine, policy, parameters)
        if with_bounds:
            plan = replace(plan, bounds=lower_bounds(trace, machine, recompute=plan.recomputes))
        return plan


def _plan(trace: Trace, machine: Machine, policy: str, parameters: dict[str, Any]) -> Plan:
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; there are {', '.join(sorted(POLICIES))}")
    tune = POLICIES[policy].tune
    if tune is not None:
        parameters = tune(trace, machine, parameters)
    notes: list[str] = []
    coloured, simulation = _coloured_schedule(trace, machine, policy, parameters, notes)
    if simulation is None:
        coloured, _, simulation = best_way(coloured, trace, machine)
    colouring = coloured.colouring
    plan = Plan(
        trace_fingerprint=trace.fingerprint(),
        policy=policy,
        machine=machine,
        parameters=parameters,
        residencies=ordered(colouring.residencies, trace),
        scratch=coloured.scratch,
        border_copies=colouring.border_copies,
        notes=tuple(notes),
    )
    verify(plan, trace)
    result = simulation
    predicted = {
        "duration_ns": result.duration_ns,
        "stall_ns": result.stall_ns,
        "peak_nbytes": result.peak_nbytes,
        "loaded_nbytes": result.loaded_nbytes,
        "evicted_nbytes": result.evicted_nbytes,
        "dropped_nbytes": result.dropped_nbytes,
        "num_remapped_chunks": colouring.num_remapped_chunks,
        "remap_ns": remap_ns(colouring.num_remapped_chunks, machine),
        "num_runs": colouring.num_runs,
    }
    if plan.recomputes:
        predicted |= {"recompute_ns": result.recompute_ns, "discarded_nbytes": result.discarded_nbytes}
    if plan.border_copies:
        predicted |= {"relocate_ns": result.relocate_ns, "relocated_nbytes": result.relocated_nbytes}
    return replace(plan, predicted=predicted)


def _coloured_schedule(
    trace: Trace, machine: Machine, policy: str, parameters: dict[str, Any], notes: list[str]
) -> tuple[ScratchColouring, Simulation | None]:
    """Schedule and colour; `notes` gets what the policy says of the schedule that is used.

    With the colouring comes its simulation, if the policy made one on the way.

    Where variables that can never be away cross the boundary, the colouring may still fall short of
    chunks. Then plan again for a smaller pool, and as the last resort with nothing else kept.
    """
    attempts = [parameters]
    if parameters.get("wrap", True) and "wrap" in POLICIES[policy].parameters:
        attempts.append({**parameters, "wrap": False})
    for attempt in attempts:
        coloured = _coloured_attempt(trace, machine, policy, attempt, notes)
        if coloured is not None:
            return coloured
    raise PlanError(
        f"no chunk assignment found for {machine.num_chunks} chunks of {machine.chunk_nbytes} bytes: variables that "
        f"can never be away cross the step boundary and cut the pool up. Options: a larger budget."
    )


def _coloured_attempt(
    trace: Trace, machine: Machine, policy: str, parameters: dict[str, Any], notes: list[str]
) -> tuple[ScratchColouring, Simulation | None] | None:
    """Schedule with these parameters, and colour; None if no pool, however small, leads to a colouring."""
    evaluations: dict[tuple[Residency, ...], Evaluation] = {}
    known: dict[tuple[Residency, ...], ScratchColouring] = {}

    def schedule(logical: Machine) -> tuple[Residency, ...]:
        notes.clear()
        sinks = {"notes": notes, "evaluations": evaluations if logical is machine else None}
        own: dict[str, Any] = {**sinks, "search_smallest": logical is machine}  # of a smaller pool nobody reads why not
        own = {name: value for name, value in own.items() if name in POLICIES[policy].parameters}
        proposal = POLICIES[policy].schedule(trace, logical, **{**own, **parameters})
        known.update((residencies, evaluation.coloured) for residencies, evaluation in evaluations.items())
        return proposal

    found = schedule_that_colours(schedule, trace, machine, known)
    if found is None:
        return None
    proposal, coloured = found
    return coloured, evaluations[proposal].simulation if proposal in evaluations else None
