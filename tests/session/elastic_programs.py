"""Random programs of one body whose sizes differ in each of many steps, as with batches of any length."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.session.program_statements import KINDS
from tests.session.programs import Program, Step, generate, run_in_core, run_in_session

NUM_STEPS = 14


def elastic(seed: int) -> Program:
    """The program of a seed, its first body run again and again at other lengths."""
    program, r = generate(seed), random.Random(seed)
    body = tuple(replace(s, mask=0xFFFF) for s in program.bodies[0] if s.kind in KINDS)
    odd = r.choice((0, 0, 1, 2))  # steps that end early, or by an exception
    steps = [Step(body=0)] * NUM_STEPS
    for index in r.sample(range(NUM_STEPS), odd):
        steps[index] = Step(body=0, stop=r.randrange(len(body)), raises=r.random() < 0.5)
    return replace(
        program,
        bodies=(body,),
        num_inside=program.num_inside[:1],
        steps=tuple(steps),
        check_every=r.choice((1, 0, 5)),
        lengths=tuple(r.choice((2, 10, 40)) if r.random() < 0.2 else r.randint(50, 130) for _ in steps),
    )


def run_seed(seed: int) -> dict[str, Any]:
    """Run one seed in this process (`python -m tests.session.program_runs --runner ...:run_seed`)."""
    program = elastic(seed)
    outcome = run_in_session(program, run_in_core(program))
    return {"modes": outcome.modes, "num_chunks": outcome.num_chunks}
