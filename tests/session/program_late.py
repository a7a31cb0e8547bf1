"""Random programs of a few kinds of steps that begin alike, in any order: steps go on with other plans in their midst.

python -m tests.session.program_runs --runner tests.session.program_late:run_seed --seed 0 --count 60
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

from ooc.replay import late_entry, unions
from ooc.replay.executor import Executor
from ooc.replay.segmentation import Segmentation
from tests.session.programs import Program, Step, generate, run_in_core, run_in_session

_NUM_STEPS, _NUM_KINDS = 20, 3


@contextmanager
def eager_late_entries() -> Iterator[Counter[str]]:
    """Sessions plan each kind of step whole, and go on with another plan wherever there is one. Counts how often."""
    found: Counter[str] = Counter()
    enter, note = Executor.enter, Segmentation.note_whole
    limits = late_entry._LEAST_LEFT, late_entry._LEAST_SHARE, unions._NUM_UNLIKE, unions._NUM_MIXED

    def counted(self: Executor, *arguments: Any, **options: Any) -> bool:
        is_entered = enter(self, *arguments, **options)
        if options.get("so_far") is not None:
            found["late entries" if is_entered else "late entries refused"] += 1
        return is_entered

    def ignore(_: Segmentation, **how: bool) -> None:
        del how

    Executor.enter = counted  # type: ignore[method-assign]
    Segmentation.note_whole = ignore  # type: ignore[method-assign]
    late_entry._LEAST_LEFT, late_entry._LEAST_SHARE, unions._NUM_UNLIKE, unions._NUM_MIXED = 1, 0.0, 99, 99
    try:
        yield found
    finally:
        Executor.enter, Segmentation.note_whole = enter, note  # type: ignore[method-assign]
        late_entry._LEAST_LEFT, late_entry._LEAST_SHARE, unions._NUM_UNLIKE, unions._NUM_MIXED = limits


def of_few_kinds(seed: int) -> Program:
    """The program of this seed, with bodies that have its first one's beginning, each from another place on less."""
    program, random = generate(seed), Random(seed)
    statements = [statement for body in program.bodies for statement in body]
    bodies = []
    for _ in range(_NUM_KINDS):
        cut = random.randrange(len(program.bodies[0]) + 1)
        rest = [random.choice(statements) for _ in range(random.randint(2, 12))]
        bodies.append((*program.bodies[0][:cut], *rest))
    steps = tuple(Step(body=random.randrange(_NUM_KINDS)) for _ in range(_NUM_STEPS))
    num_inside = tuple(map(len, bodies))
    return replace(program, bodies=tuple(bodies), num_inside=num_inside, steps=steps, lengths=())


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_runs.run_seed`."""
    program = of_few_kinds(seed)
    expected = run_in_core(program)
    with eager_late_entries() as found:
        outcome = run_in_session(program, expected)
    return {"modes": (*outcome.modes, *found.elements()), "num_chunks": outcome.num_chunks}
