"""Random programs no two of whose steps are alike, so that unions of their steps are planned.

Their statements are such as never do the same twice; of some, more are left out at random in each step.

python -m tests.session.program_runs --runner tests.session.program_unions:run_seed --seed 0 --count 60
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

from ooc.replay import unions
from ooc.replay.elastic import Envelope
from ooc.replay.omissions import Omissions
from ooc.replay.segmentation import Segmentation
from ooc.replay.step_unions import StepUnion
from tests.session.program_segments import varied
from tests.session.programs import Program, generate, run_in_core, run_in_session

_MOST_STEPS = 16


@contextmanager
def eager_unions() -> Iterator[Counter[str]]:
    """Sessions begin unions with the first two steps that differ, and plan whole steps. Counts what is left out."""
    found: Counter[str] = Counter()
    omit, note = Omissions._omit, Segmentation.note_whole
    limits = unions._NUM_FIRST, unions._NUM_UNLIKE
    plan = StepUnion.envelope

    def noted(self: StepUnion, *arguments: Any, **options: Any) -> Envelope:
        envelope = plan(self, *arguments, **options)
        found["elastic envelopes"] += bool(envelope.elastic)
        return envelope

    def counted(self: Omissions, *arguments: Any) -> bool:
        found["omissions"] += 1
        found["stand-ins"] += len(arguments[-1])
        return omit(self, *arguments)

    def ignore(_: Segmentation, **how: bool) -> None:
        del how

    StepUnion.envelope = noted  # type: ignore[method-assign]
    Omissions._omit = counted  # type: ignore[method-assign, assignment]
    Segmentation.note_whole = ignore  # type: ignore[method-assign]
    unions._NUM_FIRST, unions._NUM_UNLIKE = 0, 2
    try:
        yield found
    finally:
        Omissions._omit, Segmentation.note_whole = omit, note  # type: ignore[method-assign]
        StepUnion.envelope = plan  # type: ignore[method-assign]
        unions._NUM_FIRST, unions._NUM_UNLIKE = limits


def with_unlike_steps(seed: int, *, may_vary: bool) -> Program:
    """The program of this seed, with variations in its bodies, and more steps, some of them cut short.

    With `may_vary`, results have other sizes in each step, too.
    """
    program, random = generate(seed), Random(seed)
    steps = list(program.steps)
    while len(steps) < _MOST_STEPS:
        steps.append(random.choice(program.steps))
    program = varied(program, random)
    for index in range(len(program.steps), len(steps)):
        if random.random() < 0.1:
            stop = random.randrange(len(program.bodies[steps[index].body]) + 1)
            steps[index] = replace(steps[index], stop=stop, raises=random.random() < 0.5)
    lengths = tuple(random.choice((10, 40)) if random.random() < 0.2 else random.randint(60, 130) for _ in steps)
    return replace(program, steps=tuple(steps), lengths=lengths if may_vary else ())


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_runs.run_seed`."""
    program = with_unlike_steps(seed, may_vary=seed % 2 == 1)
    expected = run_in_core(program)
    with eager_unions() as found:
        outcome = run_in_session(program, expected)
    return {"modes": (*outcome.modes, *found.elements()), "num_chunks": outcome.num_chunks}
