"""Random programs whose plans write in one step what they release in the next, wherever the rules allow it.

python -m tests.session.program_border --seed 17
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from ooc.replay.plan_maker import PlanMaker
from scheduler.plan import Evicted, Kept, Loaded, Machine, Plan, Residency
from scheduler.policies._border import written_over_border
from scheduler.trace import Trace
from tests.session.program_reruns import _accepted
from tests.session.programs import Outcome, Program, generate, prepare_process, run_in_core, run_in_session
from tests.store_speed import SLOW, store_speed


def over_border(plan: Plan, trace: Trace) -> Plan:
    """The plan with as many writes over the border as it can have: what is in memory throughout goes, too, if dirty."""
    bare = tuple(replace(stay, chunks=()) for stay in plan.residencies)
    kept = written_over_border(bare, trace, plan.machine)
    plan = (_accepted(plan, trace, list(kept)) if kept is not None else None) or plan
    uses = trace.uses_by_variable()
    for v, variable in enumerate(trace.variables):
        own = [stay for stay in plan.residencies if stay.variable == v]
        if variable.becomes != v or not variable.evictable or [(s.start, s.stop) for s in own] != [(Kept(), Kept())]:
            continue
        apart = _apart(v, uses[v], len(trace.ops))
        if apart is not None:
            rest = [replace(stay, chunks=()) for stay in plan.residencies if stay.variable != v]
            plan = _accepted(plan, trace, [*rest, *apart]) or plan
    return plan


def _apart(variable: int, uses: list[tuple[int, Any]], num_ops: int) -> tuple[Residency, Residency] | None:
    """Two stays of what is read first and written later: away before the first write, written after the last one."""
    writers = [op for op, use in uses if use.writes]
    readers = [op for op, _ in uses if writers and op < writers[0]]
    release_op = readers[-1] + 1 if readers else 1
    if not writers or release_op >= writers[0]:
        return None
    write = Evicted(write_op=writers[-1] - num_ops, release_op=release_op)
    return (
        Residency(variable=variable, start=Kept(), stop=write),
        Residency(variable=variable, start=Loaded(writers[0]), stop=Kept()),
    )


PlanFor = Callable[[Machine], Plan]


@contextmanager
def remaking(remake: Callable[[PlanFor, Trace, Machine, int], Plan]) -> Iterator[list[Plan]]:
    """Every plan that a session makes is what `remake` makes of it, told how many came before. Gives the plans."""
    make = PlanMaker._make
    plans: list[Plan] = []

    def forced(self: PlanMaker, trace: Trace, machine: Machine) -> Plan:
        plans.append(remake(partial(make, self, trace), trace, machine, len(plans)))
        return plans[-1]

    PlanMaker._make = forced  # type: ignore[method-assign]
    try:
        yield plans
    finally:
        PlanMaker._make = make  # type: ignore[method-assign]


def forced_over_border() -> AbstractContextManager[list[Plan]]:
    """Every plan that a session makes has writes over the border where it can. Gives the plans."""
    return remaking(lambda plan_for, trace, machine, _: over_border(plan_for(machine), trace))


def run_slowly_if_odd(program: Program, seed: int) -> Outcome:
    """Run a program in a session: with an odd seed with a store so slow that its writes are still under way."""
    with store_speed(SLOW) if seed % 2 else nullcontext():
        return run_in_session(program, run_in_core(program))


def run_seed(seed: int) -> dict[str, Any]:
    """Run one seed in this process: half of them with a slow store."""
    with forced_over_border() as plans:
        outcome = run_slowly_if_odd(generate(seed), seed)
    modes = [*outcome.modes, *(["over_border"] if any(plan.writes_over_border for plan in plans) else [])]
    return {"modes": modes, "num_chunks": outcome.num_chunks}


def main() -> None:
    """Run one seed verbosely."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    program = generate(options.seed)
    print(program)
    prepare_process()
    with forced_over_border():
        print(run_in_session(program, run_in_core(program), verbose=True))


if __name__ == "__main__":
    main()
