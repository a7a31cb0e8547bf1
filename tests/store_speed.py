"""A store and ops that are as fast as they are told to be: no plan of a test depends on the machine, its load, or on
what ran before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ooc import _current
from ooc.memory.protocols import Store
from ooc.replay.op_timings import OpTimings
from ooc.telemetry import steps
from ooc.tracing.observed import Draws, Observed
from ooc.tracing.recorder import RecordedStep
from scheduler.plan import Machine
from scheduler.trace import Trace
from vmm.store import FileStore
from vmm.store_speed import StoreSpeed

USUAL = StoreSpeed(
    write_bytes_per_s=1e9, read_bytes_per_s=1e9, write_together_bytes_per_s=6e8, read_together_bytes_per_s=6e8
)
SLOW = StoreSpeed(
    write_bytes_per_s=1e6, read_bytes_per_s=1e6, write_together_bytes_per_s=5e5, read_together_bytes_per_s=5e5
)
"""In the planner's eyes: everything that can be is recomputed."""


_OP_NS, _BYTES_PER_NS = 10_000, 1.0
"""An op takes this long, and as long again as it takes to touch its operands once."""


@contextmanager
def store_speed(speed: StoreSpeed) -> Iterator[None]:
    """Sessions in this process plan for this speed and for ops timed by their operands; none of it is measured."""
    build = RecordedStep.build

    def timed(step: RecordedStep, draws: Draws = frozenset()) -> Observed:
        before, observed = step._observed, build(step, draws)
        if observed is not before and _current.session is not None:  # else ops are timed by a profile
            step._observed = observed = replace(observed, trace=_timed(observed.trace))
        return observed

    def machine(_timings: OpTimings, before: Machine, _store: Store) -> Machine:
        """The rates that a busy store of this speed would have shown."""
        return replace(
            before,
            load_bytes_per_s=speed.read_together_bytes_per_s,
            evict_bytes_per_s=speed.write_together_bytes_per_s,
            shared_bytes_per_s=None,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStore, "measure", lambda self, buffer=None: speed)
        patch.setattr(steps, "_measured", {})
        patch.setattr(RecordedStep, "build", timed)
        patch.setattr(OpTimings, "timed", lambda self, trace: trace)
        patch.setattr(OpTimings, "machine", machine)
        yield


def _timed(trace: Trace) -> Trace:
    """The trace with each op's time as its operands' sizes tell it."""
    sizes = [variable.nbytes for variable in trace.variables]
    ops = (
        replace(op, duration_ns=_OP_NS + int(sum(sizes[use.variable] for use in op.uses) / _BYTES_PER_NS))
        for op in trace.ops
    )
    return replace(trace, ops=tuple(ops))
