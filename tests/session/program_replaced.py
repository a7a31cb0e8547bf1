"""Random programs whose storages from outside are the same for some steps, and then others: what an agent collects.

Each step reads some of them, and may write into one; at times one is replaced, itself or what a parameter holds.

python -m tests.session.program_runs --runner tests.session.program_replaced:run_seed --seed 0 --count 60
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import torch

import ooc.replay.elastic
from ooc.replay.elastic import Envelope
from tests.session.program_statements import State, Statement
from tests.session.program_variations import VARIATIONS
from tests.session.programs import Program, Step, generate, run_in_core, run_in_session

_NUM_STEPS = 18
_MOST_KEPT = 6
_SIZES = (5000, 20000, 60000)


def _replace(state: State, s: Statement) -> None:
    """Every so many steps, another storage in the place of one: those of one statement, in turn."""
    turn, phase = divmod(state.step + s.q, 3 + s.p % _MOST_KEPT)
    if phase == 0 and s.q % 4 == 0 and state.parameters:
        parameter = state.parameters[(s.a + turn) % len(state.parameters)]
        parameter.data = torch.full_like(parameter, 0.01 * s.q)
        parameter.grad = None
    elif phase == 0:
        index = s.a % len(state.inputs)
        state.inputs[index] = torch.randn(len(state.inputs[index]))


def _read(state: State, s: Statement) -> None:
    state.put(s.dst, torch.tanh(state.inputs[s.a % len(state.inputs)][: 1024 + s.p]) * 0.5)


def _write(state: State, s: Statement) -> None:
    state.inputs[s.a % len(state.inputs)][s.p % 64 :: 7] += s.q / 64


_KINDS = {"replace_storage": _replace, "read_input": _read, "write_input": _write}
VARIATIONS.update(_KINDS)


@contextmanager
def counted_standing() -> Iterator[Counter[str]]:
    """Counts envelopes in which something stays where it is, though it is another storage at times."""
    found: Counter[str] = Counter()
    before = ooc.replay.elastic.standing

    def counted(*arguments: Any, **options: Any) -> Envelope:
        envelope = before(*arguments, **options)
        found["standing"] += bool(envelope.standing)
        return envelope

    ooc.replay.elastic.standing = counted
    try:
        yield found
    finally:
        ooc.replay.elastic.standing = before


def of_replaced(seed: int) -> Program:
    """The program of this seed, with such storages, each used in every step and replaced every few."""
    program, random = generate(seed), Random(seed)
    inputs = tuple(random.choice(_SIZES) for _ in range(random.randint(1, 3)))
    added = [
        Statement(
            kind=random.choices(tuple(_KINDS), (3, 4, 1))[0],
            dst=random.randrange(program.num_registers),
            a=random.randrange(len(inputs)),
            b=0,
            p=random.randrange(1 << 12),
            q=random.randrange(1 << 8),
            mask=0xFFFF,
        )
        for _ in range(random.randint(4, 10))
    ]
    body = list(program.bodies[0])
    for statement in added:
        body.insert(random.randint(0, len(body)), statement)
    return replace(
        program,
        bodies=(tuple(body),),
        num_inside=(len(body),),
        steps=(Step(body=0),) * _NUM_STEPS,
        inputs=inputs,
        lengths=program.lengths if random.random() < 0.3 else (),
        check_every=random.choice((0, 3)),
        fail_call=0,
    )


def run_seed(seed: int) -> dict[str, Any]:
    """As `program_runs.run_seed`."""
    program = of_replaced(seed)
    expected = run_in_core(program)
    with counted_standing() as found:
        outcome = run_in_session(program, expected)
    return {"modes": (*outcome.modes, *found.elements()), "num_chunks": outcome.num_chunks}
