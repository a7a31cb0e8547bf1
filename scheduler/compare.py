"""Policies side by side on one step: the comparison behind `ooc plan` and the planner benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from scheduler.budget import BudgetTooSmall, smallest_num_chunks
from scheduler.cost.bounds import lower_bounds
from scheduler.plan import Machine, Plan, PlanError
from scheduler.planning import make_plan
from scheduler.policies import POLICIES
from scheduler.profiles import Profile, energy_j, least_energy_j
from scheduler.trace import Trace

Objective = Literal["time", "energy"]


class DeadlineTooShort(PlanError):
    """No plan ends in time.

    Attributes:
        deadline_ns: What was asked for.
        fastest_ns: The fastest step that any of the policies can plan; `policy` says which.
        bound_ns: What no plan can beat.
    """

    def __init__(self, *, deadline_ns: int, fastest_ns: int, policy: str, bound_ns: int) -> None:
        self.deadline_ns = deadline_ns
        self.fastest_ns = fastest_ns
        self.policy = policy
        self.bound_ns = bound_ns
        super().__init__(
            f"no plan takes at most {deadline_ns / 1e6:.3f} ms a step: the fastest takes {fastest_ns / 1e6:.3f} ms "
            f"({policy}); no plan can take less than {bound_ns / 1e6:.3f} ms on this machine within this budget. "
            f"Options: a deadline of at least {fastest_ns / 1e6:.3f} ms; a larger budget; a smaller batch."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one policy makes of a step.

    Attributes:
        plan: None where the policy finds none; `reason` says why.
        smallest_budget_nbytes: Where it finds none: the budget that it asks for, if it knows.
        energy_j: Of one step, where a profile with energy figures was given; `energy_bound_j`: what no plan can beat.
        carried_from_nbytes: In a sweep: the smaller budget whose plan is the best that is known here too.
    """

    policy: str
    plan: Plan | None
    reason: str = ""
    smallest_budget_nbytes: int | None = None
    energy_j: float | None = None
    energy_bound_j: float | None = None
    carried_from_nbytes: int | None = None

    @property
    def duration_ns(self) -> int:
        """The step's predicted time, with that of its remaps. The plan must exist."""
        assert self.plan is not None
        return self.plan.step_ns

    @property
    def moved_nbytes(self) -> int:
        """Bytes loaded and evicted in a step. The plan must exist."""
        assert self.plan is not None
        return self.plan.predicted["loaded_nbytes"] + self.plan.predicted["evicted_nbytes"]


def compare(
    trace: Trace,
    machine: Machine,
    policies: Iterable[str],
    *,
    profile: Profile | None = None,
    parameters: Mapping[str, Any] | None = None,
    recompute: bool = True,
    objective: Objective = "time",
    deadline_ns: int | None = None,
) -> tuple[Outcome, ...]:
    """Plan `trace` by each of `policies`. One that finds no plan says why; that is an outcome, not an error.

    `auto` never loses to another of them: where one is faster, its plan is `auto`'s, too, and a note says so.

    Args:
        profile: Adds the energy of each plan, if it has the figures.
        parameters: Passed to every policy.
        recompute: Whether a policy that can do both, moving and running ops again, may do both. Others do what
            they are for.
        objective, deadline_ns: Told to a policy that plans for them (`poet`). `choose` asks the others' plans, too.

    Raises:
        ProfileError: Energy is asked, and the profile has no figures.
    """
    found = []
    for policy in policies:
        own = dict(parameters or {})
        if "objective" in POLICIES[policy].parameters:
            own = {**_aims(trace, profile, objective, deadline_ns), **own}
        if "recompute" in POLICIES[policy].parameters:
            own.setdefault("recompute", recompute)
        try:
            plan = make_plan(trace, machine, policy, **own)
        except BudgetTooSmall as error:
            found.append(
                Outcome(
                    policy=policy,
                    plan=None,
                    reason=str(error),
                    smallest_budget_nbytes=error.smallest_budget_nbytes,
                )
            )
        except PlanError as error:
            found.append(Outcome(policy=policy, plan=None, reason=str(error)))
        else:
            joules = least = None
            if profile is not None and profile.energy is not None:
                joules = energy_j(trace, plan.predicted, profile)
                least = least_energy_j(trace, plan.bounds, profile)
            found.append(Outcome(policy=policy, plan=plan, energy_j=joules, energy_bound_j=least))
    return tuple(found if objective == "energy" else _with_the_best(found, recompute=recompute))


def _with_the_best(outcomes: Sequence[Outcome], *, recompute: bool) -> Iterator[Outcome]:
    """The outcomes, but `auto` has the best plan of them all: it asks the others itself where that is quick enough.

    A plan that runs ops again is for it only where it may, too.
    """
    planned = [o for o in outcomes if o.plan is not None and (recompute or not o.plan.recomputes)]
    for outcome in outcomes:
        if outcome.policy == "auto" and planned:
            best = min(planned, key=lambda o: (o.duration_ns, o.moved_nbytes))
            if best.plan is not None and (outcome.plan is None or best.duration_ns < outcome.duration_ns):
                note = f"this is the plan of {best.policy}"
                yield replace(
                    best, policy="auto", plan=replace(best.plan, policy="auto", notes=(*best.plan.notes, note))
                )
                continue
        yield outcome


def _aims(trace: Trace, profile: Profile | None, objective: Objective, deadline_ns: int | None) -> dict[str, Any]:
    """What is asked of a policy that knows objectives."""
    aims: dict[str, Any] = {} if deadline_ns is None else {"deadline_s": deadline_ns / 1e9}
    if objective == "energy" and profile is not None:
        energy = profile.require_energy()
        in_core = dict.fromkeys(("stall_ns", "loaded_nbytes", "evicted_nbytes"), 0) | {"duration_ns": trace.duration_ns}
        compute_w = energy_j(trace, in_core, profile) / max(trace.duration_ns / 1e9, 1e-12)
        watts = {"compute_w": compute_w, "load_w": energy.load_w, "evict_w": energy.evict_w}
        aims |= {"objective": objective, **watts}
    return aims


def choose(outcomes: Sequence[Outcome], *, objective: Objective = "time", deadline_ns: int | None = None) -> Outcome:
    """The best outcome within the deadline; of equally fast ones the one that moves the fewest bytes.

    Raises:
        PlanError: No policy found a plan; with the reason of the one that asks for the least.
        DeadlineTooShort: There are plans, but none in time.
        ValueError: Energy is asked and not known.
    """
    planned = [outcome for outcome in outcomes if outcome.plan is not None]
    if not planned:
        least = min(outcomes, key=lambda o: o.smallest_budget_nbytes or 1 << 62)
        raise PlanError(f"none of {', '.join(o.policy for o in outcomes)} finds a plan. {least.policy}: {least.reason}")
    in_time = [o for o in planned if deadline_ns is None or o.duration_ns <= deadline_ns]
    if not in_time:
        fastest = min(planned, key=lambda o: o.duration_ns)
        assert deadline_ns is not None
        assert fastest.plan is not None
        raise DeadlineTooShort(
            deadline_ns=deadline_ns,
            fastest_ns=fastest.duration_ns,
            policy=fastest.policy,
            bound_ns=fastest.plan.bounds["duration_ns"],
        )
    if objective == "energy":
        if any(o.energy_j is None for o in in_time):
            raise ValueError("energy is asked, but no profile with energy figures was given")
        return min(in_time, key=lambda o: (o.energy_j or 0.0, o.duration_ns))
    return min(in_time, key=lambda o: (o.duration_ns, o.moved_nbytes))


def sweep(
    trace: Trace,
    machine: Machine,
    num_chunks: Sequence[int],
    policies: Sequence[str],
    *,
    profile: Profile | None = None,
    recompute: bool = True,
) -> tuple[tuple[int, tuple[Outcome, ...]], ...]:
    """`compare` at each of `num_chunks` chunks, in growing order.

    A plan for a smaller budget is legal in a larger one, so for `auto` the best plan so far is carried on where a
    larger budget finds nothing better: its time never grows with the budget.

    Returns:
        `(chunks, outcomes)` for each budget.
    """
    points = []
    best: Outcome | None = None
    for count in sorted(set(num_chunks)):
        larger = replace(machine, num_chunks=count)
        outcomes = []
        for outcome in compare(trace, larger, policies, profile=profile, recompute=recompute):
            kept = outcome
            if outcome.policy == "auto":
                if best is not None and (outcome.plan is None or best.duration_ns < outcome.duration_ns):
                    kept = _carried(best, trace, larger)
                best = kept if kept.plan is not None else best
            outcomes.append(kept)
        points.append((count, tuple(outcomes)))
    return tuple(points)


def least_budgets(
    trace: Trace,
    machine: Machine,
    points: Sequence[tuple[int, Sequence[Outcome]]],
    *,
    profile: Profile | None = None,
    recompute: bool = True,
    num_tries: int = 5,
) -> dict[str, int | None]:
    """The least budget in chunks that each policy of a sweep plans within; None: it plans at none.

    Between the largest budget of the sweep at which it fails and the next one, halved `num_tries` times.
    """
    found: dict[str, int | None] = {}
    for index, outcome in enumerate(points[0][1] if points else ()):
        fits = [outcomes[index].plan is not None for _, outcomes in points]
        last_failure = max((i for i, fine in enumerate(fits) if not fine), default=-1)
        if last_failure == len(points) - 1:
            found[outcome.policy] = None
            continue
        high = points[last_failure + 1][0]
        low = points[last_failure][0] if last_failure >= 0 else high
        for _ in range(num_tries):
            middle = (low + high) // 2
            if middle in (low, high):
                break
            tried = compare(
                trace, replace(machine, num_chunks=middle), (outcome.policy,), profile=profile, recompute=recompute
            )
            low, high = (middle, high) if tried[0].plan is None else (low, middle)
        found[outcome.policy] = high
    return found


MIN_KNEE_GAIN = 0.03
"""A sweep in which memory buys a smaller share of the time than this has no knee."""


def knee(points: Sequence[tuple[int, Sequence[Outcome]]]) -> int | None:
    """The budget in chunks from which on more memory buys little time; None: it buys little everywhere.

    Of the fastest plan at each budget, the point farthest below the straight line from the smallest budget to the
    largest (Satopaa et al. 2011, "Finding a Kneedle in a Haystack").
    """
    line = [
        (count, min(o.duration_ns for o in outcomes if o.plan is not None))
        for count, outcomes in points
        if any(o.plan is not None for o in outcomes)
    ]
    if len(line) < 3:
        return None
    (least, slow), (most, quick) = line[0], line[-1]
    quick = min(quick, *(time for _, time in line))
    if slow <= 0 or (slow - quick) / slow < MIN_KNEE_GAIN:
        return None
    below = [(1 - (count - least) / (most - least)) - (time - quick) / (slow - quick) for count, time in line]
    return line[max(range(len(line)), key=lambda i: (below[i], -i))][0]


def budgets_between(trace: Trace, machine: Machine, num_budgets: int) -> tuple[int, ...]:
    """`num_budgets` budgets in chunks, evenly from the least that works to what the step needs in core."""
    least = smallest_num_chunks(trace, machine)
    most = max(lower_bounds(trace, machine)["in_core_nbytes"] // machine.chunk_nbytes, least)
    steps = max(num_budgets - 1, 1)
    return tuple(sorted({least + (most - least) * i // steps for i in range(num_budgets)}))


def _carried(outcome: Outcome, trace: Trace, machine: Machine) -> Outcome:
    assert outcome.plan is not None
    origin = outcome.carried_from_nbytes or outcome.plan.machine.budget_nbytes
    bounds = lower_bounds(trace, machine, recompute=outcome.plan.recomputes)
    plan = replace(outcome.plan, machine=machine, bounds=bounds)
    return replace(outcome, plan=plan, carried_from_nbytes=origin)
