"""Random programs whose plans copy within memory at the step's border whatever they can.

python -m tests.session.program_relocation --seed 17
"""

from __future__ import annotations

import argparse
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler.colouring.border_copies import border_copies
from scheduler.colouring.runs import all_runs
from scheduler.plan import Kept, Machine, Plan, PlanError, Residency, occupied_ticks
from scheduler.trace import Trace
from scheduler.verify import verify
from tests.session.program_border import PlanFor, over_border, remaking, run_slowly_if_odd
from tests.session.program_segments import forced_segments, with_segments
from tests.session.programs import generate, prepare_process, run_in_core, run_in_session


def relocating(plan: Plan, trace: Trace, seed: int) -> Plan:
    """The plan with what is kept ending the step in other chunks than it starts the next one with, wherever it may.

    In half of the cases in its own, in another order, which makes rings.
    """
    rng = random.Random(seed)
    stays = list(plan.residencies)
    heads = {stay.variable: index for index, stay in enumerate(stays) if isinstance(stay.start, Kept)}
    for index, stay in enumerate(stays):
        heir = trace.variables[stay.variable].becomes
        if not isinstance(stay.stop, Kept) or heir is None or heads[heir] == index:
            continue
        if not (trace.variables[stay.variable].evictable and trace.variables[heir].evictable):
            continue
        before, own = stays[index], list(stay.chunk_indices())
        free = [] if rng.random() < 0.5 else _free(plan, trace, stays, index)
        chosen = rng.sample([*own, *free], len(own))
        stays[index] = replace(stay, chunks=all_runs([np.array(chosen, dtype=np.int64)])[0])
        found = _with_copies(plan, trace, stays)
        if found is None:
            stays[index] = before
        else:
            plan = found
    return plan


def _free(plan: Plan, trace: Trace, stays: list[Residency], index: int) -> list[int]:
    """Chunks that nobody has while a residency lasts, which lasts to the end of the step."""
    start = occupied_ticks(stays[index], trace)[0]
    taken = {c for other in stays if occupied_ticks(other, trace)[1] > start for c in other.chunk_indices()}
    rooms = (room for room in plan.scratch if trace.ops[room.before_op].start_tick >= start)
    taken.update(c for room in rooms for first, count in room.chunks for c in range(first, first + count))
    return [chunk for chunk in range(plan.machine.num_chunks) if chunk not in taken]


def _with_copies(plan: Plan, trace: Trace, stays: list[Residency]) -> Plan | None:
    """The plan with these residencies, and the copies that they need; None if there are none, or a rule is broken."""
    starts = {stay.variable: stay for stay in stays if isinstance(stay.start, Kept)}
    kept = [
        (np.array(stay.chunk_indices()), np.array(starts[heir].chunk_indices()))
        for stay in stays
        if isinstance(stay.stop, Kept) and (heir := trace.variables[stay.variable].becomes) is not None
    ]
    copies = border_copies(kept, plan.machine.num_chunks)
    if copies is None:
        return None
    found = replace(plan, residencies=tuple(stays), border_copies=copies)
    try:
        verify(found, trace)
    except PlanError:
        return None
    return found


def forced_relocation(seed: int = 0, *, spare: float = 0.1, early: bool = True) -> AbstractContextManager[list[Plan]]:
    """Every plan that a session makes copies at the border what it can. Gives the plans.

    Args:
        seed: Of the choice of chunks.
        spare: Plans are made for so much less memory than there is, if that works, which leaves free chunks.
        early: With writes over the border, too: what is copied may be on its way out.
    """

    def remake(plan_for: PlanFor, trace: Trace, machine: Machine, number: int) -> Plan:
        try:
            plan = plan_for(replace(machine, num_chunks=int(machine.num_chunks * (1 - spare))))
        except PlanError:
            plan = plan_for(machine)
        plan = over_border(plan, trace) if early else plan
        return relocating(replace(plan, machine=machine), trace, seed + number)

    return remaking(remake)


def run_seed(seed: int) -> dict[str, Any]:
    """Run one seed in this process: half of them with a store so slow that its writes are still under way.

    Of each four, one has its steps planned in segments.
    """
    in_segments = seed % 4 == 2
    program = with_segments(seed) if in_segments else generate(seed)
    with forced_segments() if in_segments else nullcontext(), forced_relocation(seed, spare=0.2 * (seed % 3)) as plans:
        outcome = run_slowly_if_odd(program, seed)
    modes = [*outcome.modes, *(["relocating"] if any(plan.border_copies for plan in plans) else [])]
    return {"modes": modes, "num_chunks": outcome.num_chunks}


def main() -> None:
    """Run one seed verbosely."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    program = generate(options.seed)
    print(program)
    prepare_process()
    with forced_relocation(options.seed):
        print(run_in_session(program, run_in_core(program), verbose=True))


if __name__ == "__main__":
    main()
