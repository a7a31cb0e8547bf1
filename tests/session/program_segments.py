"""Random programs with their steps cut into segments from the first one on, and longer: the same programs as elsewhere.

python -m tests.session.program_runs --runner tests.session.program_segments:run_seed --seed 0 --count 60
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

from ooc.replay.segmentation import Segmentation
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
    Segmentation.note_segments = lambda self, keys: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Segmentation.__init__, Segmentation.note_segments = begin, note  # type: ignore[method-assign]


def with_segments(seed: int) -> Program:
    """The program of this seed with more steps: its own again, some of them cut short."""
    program = generate(seed)
    random = Random(seed)
    steps = list(program.steps)
    while len(steps) < _MOST_STEPS:
        step = random.choice(program.steps)
        if random.random() < 0.2:
            step = replace(step, stop=random.randrange(len(program.bodies[step.body])), raises=random.random() < 0.5)
        steps.append(step)
    lengths = tuple(random.choice(program.lengths) for _ in steps) if program.lengths else ()
    return replace(program, steps=tuple(steps), lengths=lengths)


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_runs.run_seed`."""
    program = with_segments(seed)
    expected = run_in_core(program)
    with forced_segments():
        outcome = run_in_session(program, expected)
    return {"modes": outcome.modes, "num_chunks": outcome.num_chunks}
