"""Random programs with their steps cut into segments from the first one on, and longer.

Those of even seeds are the programs that run elsewhere; those of odd ones have statements that never do the same twice.

python -m tests.session.program_runs --runner tests.session.program_segments:run_seed --seed 0 --count 60
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

from ooc.replay.segmentation import Segmentation
from tests.session.program_statements import Statement
from tests.session.program_variations import VARIATIONS
from tests.session.programs import Program, generate, run_in_core, run_in_session

_MOST_STEPS = 12


@contextmanager
def forced_segments() -> Iterator[None]:
    """Sessions plan segments, and never whole steps."""
    begin, note = Segmentation.__init__, Segmentation.note_segments

    def is_on(self: Segmentation) -> None:
        begin(self)
        self.is_on = True

    Segmentation.__init__ = is_on  # type: ignore[method-assign]
    Segmentation.note_segments = lambda self, keys, complete=None: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Segmentation.__init__, Segmentation.note_segments = begin, note  # type: ignore[method-assign]


def with_segments(seed: int) -> Program:
    """The program of this seed with more steps, some of them cut short; of odd seeds, with variations in between."""
    program = generate(seed)
    random = Random(seed)
    steps = list(program.steps)
    while len(steps) < _MOST_STEPS:
        steps.append(random.choice(program.steps))
    if seed % 2:
        program = varied(program, random)
    for index in range(len(program.steps), len(steps)):
        if random.random() < 0.2:
            stop = random.randrange(len(program.bodies[steps[index].body]))
            steps[index] = replace(steps[index], stop=stop, raises=random.random() < 0.5)
    lengths = tuple(random.choice(program.lengths) for _ in steps) if program.lengths else ()
    return replace(program, steps=tuple(steps), lengths=lengths)


def varied(program: Program, random: Random) -> Program:
    """The program, less most of its statements, with such as never do the same twice."""
    bodies = []
    for body in program.bodies:
        statements = [s for s in body if random.random() < 0.5]
        for _ in range(random.randint(2, 5)):
            kind = random.choice(sorted(VARIATIONS))
            mask = 0xFFFF if random.random() < 0.6 else random.getrandbits(16)
            p, q = random.randrange(1 << 12), random.randrange(1 << 8)
            variation = Statement(kind, random.randrange(program.num_registers), 0, 0, p, q, mask)
            statements.insert(random.randrange(len(statements) + 1), variation)
        bodies.append(tuple(statements))
    sizes = (1024, 5000, 16384, 20000)
    return replace(
        program,
        bodies=tuple(bodies),
        num_inside=tuple(len(body) - (len(body) // 3 if random.random() < 0.3 else 0) for body in bodies),
        steps=tuple(replace(step, stop=None, raises=False) for step in program.steps),
        parameters=program.parameters or tuple(random.choice(sizes) for _ in range(random.randint(1, 5))),
        by_optimizer=random.random() < 0.5,
        fail_call=0,  # what fails is tried again, and a variation has done half of its work by then
    )


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_runs.run_seed`."""
    program = with_segments(seed)
    expected = run_in_core(program)
    with forced_segments():
        outcome = run_in_session(program, expected)
    return {"modes": outcome.modes, "num_chunks": outcome.num_chunks}
