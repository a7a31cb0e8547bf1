"""Random programs with recomputation: the same programs as elsewhere, planned so that as much as possible runs again.

python -m tests.session.program_reruns --seed 17
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

import ooc
from ooc import options
from ooc.errors import StoreFailed
from ooc.replay.executor import Executor
from ooc.replay.plan_maker import PlanMaker
from ooc.replay.plan_switch import PlanChange
from ooc.replay.reruns import Reruns
from scheduler.colouring.colouring import Shortage
from scheduler.colouring.scratch import colour_with_scratch
from scheduler.plan import Discarded, Machine, Plan, PlanError, Recomputed, Residency, occupied_ticks
from scheduler.reruns import ReplayGraph
from scheduler.residency_builder import ordered
from scheduler.trace import Trace
from scheduler.verify import verify
from tests.session.programs import (
    CHUNK_NBYTES,
    Program,
    Statement,
    _Runner,
    generate,
    prepare_process,
    run_in_core,
    run_in_session,
)
from tests.store_speed import SLOW, USUAL, store_speed

POLICIES = ("auto", "sublinear", "dtr", "melon", "capuchin")
_MOST_DISCARDS = 25
_MOST_OPS = 12


@contextmanager
def slow_store() -> Iterator[None]:
    """In the planner's eyes the store moves a MB a second: everything that can be is recomputed."""
    recomputing, options._RECOMPUTING = options._RECOMPUTING, frozenset(POLICIES)
    try:
        with store_speed(SLOW):
            yield
    finally:
        options._RECOMPUTING = recomputing


def with_discards(plan: Plan, trace: Trace, seed: int) -> Plan:
    """The plan with many more gaps discarded and recomputed, wherever the rules allow it; some re-runs leave ghosts."""
    random = Random(seed)
    graph = ReplayGraph(trace)
    uses = trace.uses_by_variable()
    gaps = [
        (v, first, second)
        for v in range(len(trace.variables))
        if graph.maker[v] is not None
        for (first, _), (second, _) in pairwise(uses[v])
        if second > first + 1
    ]
    random.shuffle(gaps)
    for v, first, second in gaps[:_MOST_DISCARDS]:
        tick = trace.ops[second].start_tick
        spans = {stay: occupied_ticks(stay, trace) for stay in plan.residencies}
        stay = next(
            (s for s, (a, b) in spans.items() if s.variable == v and a <= trace.ops[first].start_tick + 1 < b), None
        )
        if stay is None or spans[stay][1] <= tick:
            continue
        present = {s.variable for s, (a, b) in spans.items() if a <= tick < b and s.variable != v}
        ops = graph.ops_for([v], second, present.__contains__, _MOST_OPS)
        if ops is None:
            continue
        stays = [replace(s, chunks=()) for s in plan.residencies if s is not stay]
        stays += [replace(stay, stop=Discarded(first), chunks=())]
        stays += [replace(stay, start=Recomputed(second, ops), chunks=())]
        plan = _accepted(plan, trace, stays) or plan
        for ghost in {g for op in ops for g in graph.births[op]} - {v}:
            death = trace.variables[ghost].death_tick
            if death is not None and death <= tick and random.random() < 0.5:
                last = min(second + random.randrange(6), len(trace.ops) - 1)
                made = graph.ops_for([ghost], second, present.__contains__, _MOST_OPS)
                residency = Residency(variable=ghost, start=Recomputed(second, made or ()), stop=Discarded(last))
                stays = [replace(s, chunks=()) for s in plan.residencies]
                plan = _accepted(plan, trace, [*stays, residency]) or plan
    return plan


def _accepted(plan: Plan, trace: Trace, stays: list[Residency]) -> Plan | None:
    """The plan with these residencies instead, coloured; None if there is no room or a rule is broken."""
    proposal = ordered(stays, trace)
    try:
        outcome = colour_with_scratch(proposal, trace, plan.machine)
        if isinstance(outcome, Shortage):
            return None
        residencies = ordered(outcome.colouring.residencies, trace)
        copies = outcome.colouring.border_copies
        found = replace(plan, residencies=residencies, scratch=outcome.scratch, border_copies=copies)
        verify(found, trace)
    except (PlanError, AssertionError, LookupError):
        return None
    return found


@contextmanager
def forced_reruns(seed: int) -> Iterator[None]:
    """Every plan that a session makes discards far more than its policy would."""
    make = PlanMaker._make

    def forced(self: PlanMaker, trace: Trace, machine: Machine) -> Plan:
        return with_discards(make(self, trace, machine), trace, seed)

    PlanMaker._make = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        PlanMaker._make = make  # type: ignore[method-assign]


@contextmanager
def counted_reruns() -> Iterator[list[int]]:
    """Counts re-runs, and variables that a plan's end left to be made again."""
    counts = [0, 0]
    play, remake = Reruns._play, Reruns.remake

    def counting_play(self: Reruns, *arguments: Any) -> None:
        play(self, *arguments)
        counts[0] += 1

    def counting_remake(self: Reruns) -> None:
        counts[1] += self.pending is not None
        remake(self)

    Reruns._play, Reruns.remake = counting_play, counting_remake  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Reruns._play, Reruns.remake = play, remake  # type: ignore[method-assign]


@contextmanager
def shrinking_budgets(seed: int) -> Iterator[list[int]]:
    """Where a plan runs ops again, the budget shrinks between ops now and then; it grows back at the next step.

    Yields how often it shrank, and how often the step went over to another plan.
    """
    random, counts = Random(seed), [0, 0]
    execute, go_over = _Runner._execute, Executor.go_over

    def counting_go_over(self: Executor, change: PlanChange) -> bool:
        is_over = go_over(self, change)
        counts[1] += is_over
        return is_over

    def executing(self: _Runner, statements: Sequence[Statement]) -> None:
        session, full = self.session, self.program.num_chunks * CHUNK_NBYTES
        if session is not None:
            full = max(full, session.budget_nbytes)
        for statement in statements:
            plan = session.engine.executor.active if session is not None else None
            if session is not None and plan is not None and plan.reruns and random.random() < 0.2:
                counts[0] += 1
                num_chunks = max(int(session.budget_nbytes // CHUNK_NBYTES * random.uniform(0.7, 1.0)), 4)
                with suppress(ooc.SessionError, StoreFailed):  # something must stay; an injected fault
                    session.set_budget(num_chunks * CHUNK_NBYTES)
            execute(self, [statement])
        if session is not None and session.budget_nbytes < full:
            with suppress(StoreFailed):
                session.set_budget(full)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Runner, "_execute", executing)
        patch.setattr(Executor, "go_over", counting_go_over)
        yield counts


def recomputing(seed: int) -> Program:
    """The program of this seed with a policy that recomputes."""
    return replace(generate(seed), policy=POLICIES[seed % len(POLICIES)])


def run_seed(seed: int, *, verbose: bool = False) -> dict[str, Any]:
    """Run one seed in this process."""
    program = recomputing(seed)
    with slow_store(), forced_reruns(seed), counted_reruns() as counts:
        outcome = run_in_session(program, run_in_core(program), verbose=verbose)
    return {"modes": outcome.modes, "num_chunks": outcome.num_chunks, "counts": counts}


def run_shrinking(seed: int, *, verbose: bool = False) -> dict[str, Any]:
    """Run one seed whose budget shrinks in mid-step."""
    program = recomputing(seed)
    with slow_store(), forced_reruns(seed), shrinking_budgets(seed) as counts:
        outcome = run_in_session(program, run_in_core(program), verbose=verbose)
    return {"modes": outcome.modes, "num_chunks": outcome.num_chunks, "counts": counts}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--shrinking", action="store_true", help="the budget shrinks in mid-step")
    parsed = parser.parse_args()
    prepare_process()
    with store_speed(USUAL):
        for number in range(parsed.seed, parsed.seed + parsed.count):
            try:
                run = run_shrinking if parsed.shrinking else run_seed
                print(number, run(number, verbose=parsed.count == 1)["counts"], flush=True)
            except Exception as error:
                print(number, "FAILED", type(error).__name__, str(error)[:300], flush=True)
                if parsed.count == 1:
                    raise
