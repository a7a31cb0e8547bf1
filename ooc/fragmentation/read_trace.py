"""Reads our own trace: one step's variables, with the ticks of their birth and death."""

from __future__ import annotations

import numpy as np

from ooc.fragmentation.errors import BadFile
from ooc.fragmentation.stream import ALLOC, FREE, Recorded, Stream
from scheduler.trace import Trace, TraceError

SOURCE = "ooc trace"


def read_trace(text: str) -> list[Stream]:
    """The stream of the step's variables. Raises `BadFile`.

    Variables that exist when the step starts are allocated first, in the trace's order.
    """
    try:
        trace = Trace.from_json(text)
    except TraceError as error:
        raise BadFile(str(error)) from None
    if not trace.variables:
        raise BadFile("the trace has no variables: there is nothing to replay")
    events = []
    for index, variable in enumerate(trace.variables):
        start = -1 if variable.birth_tick is None else variable.birth_tick
        events.append((start, ALLOC, index))
        if variable.death_tick is not None:
            events.append((variable.death_tick, FREE, index))
    # Within one tick a death comes first: at its death tick a variable is already gone.
    events.sort(key=lambda event: (event[0], event[1] == ALLOC, event[2]))
    order = [index for tick, kind, index in events if kind == ALLOC]
    new_index = {old: new for new, old in enumerate(order)}
    variables = [trace.variables[index] for index in order]
    where: dict[int, str] = {}
    for op in trace.ops:
        for use in op.uses:
            where.setdefault(use.variable, f"{op.name} at {op.where}" if op.where else op.name)

    def stack(buffer: int) -> tuple[str, ...]:
        variable = variables[buffer]
        return tuple(text for text in (variable.label or variable.kind, where.get(order[buffer], "")) if text)

    return [
        Stream(
            source=SOURCE,
            device="step",
            kind=np.array([kind for _, kind, _ in events], dtype=np.int8),
            buffer=np.array([new_index[index] for _, _, index in events], dtype=np.int64),
            nbytes=np.array([variable.nbytes for variable in variables], dtype=np.int64),
            pool=np.zeros(len(variables), dtype=np.int64),
            num_initial=sum(variable.birth_tick is None for variable in variables),
            recorded=Recorded(peak_live_nbytes=trace.peak_nbytes()),
            stack=stack,
            notes=("one training step; variables below the session's threshold are not in it",),
        ).validate()
    ]
