"""Pieces of a recording: what repeats in it, cut apart, each piece a recording of its own.

An evaluation over n batches runs the same ops n times. As a whole it comes again only when it has n batches again; a
piece comes again at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ooc.tracing.observed import StartVariable
from ooc.tracing.recorder import RecordedStep, StepRecorder
from vmm.table import between_ops
from vmm.torch_cpu import ALLOC

_MOST_OPS = 1 << 14
"""In longer recordings nothing is looked for."""
_MOST_PERIODS = 64
"""So many distances between repetitions are tried."""


def cuts(recording: RecordedStep) -> list[int]:
    """Where to cut a recording that repeats itself, as an evaluation does.

    Not where each repetition uses other variables: so does an optimizer, parameter by parameter.
    """
    ops = recording.ops
    found = repeats([id(op.func) for op in ops])
    there = recording.start.keys()
    used = [
        there & {address for op in ops[start:stop] for address in op.occurrences}
        for start, stop in itertools.pairwise(found)
    ]
    return found if all(addresses == used[0] for addresses in used) else []


def repeats(ids: Sequence[int]) -> list[int]:
    """Where to cut a sequence of ops that repeats itself: the starts of the repetitions, and the end of the last.

    The longest stretch counts in which each op is the same as the one a fixed distance before. Empty if no stretch of
    at least two repetitions makes up half of the sequence.
    """
    num_ops = len(ids)
    if num_ops > _MOST_OPS:
        return []
    best: tuple[int, int, int] | None = None  # ops covered, start, period
    where: dict[int, list[int]] = {}
    for index, op in enumerate(ids):
        where.setdefault(op, []).append(index)
    rarest = min((places for places in where.values() if len(places) > 1), key=len, default=[])
    periods = sorted({b - a for a, b in itertools.pairwise(rarest)})[:_MOST_PERIODS]
    for period in periods:
        start = 0
        for index in range(num_ops - period + 1):
            if index < num_ops - period and ids[index] == ids[index + period]:
                continue
            covered = index + period - start
            if index > start and covered >= 2 * period and (best is None or covered > best[0]):
                best = covered, start, period
            start = index + 1
    if best is None or 2 * best[0] < num_ops:
        return []
    covered, start, period = best
    return [start + number * period for number in range(covered // period + 1)]


def split(recording: RecordedStep, cuts: Sequence[int]) -> list[RecordedStep]:
    """A recording as pieces, cut before these ops.

    What is freed or allocated between two ops where a cut is belongs to the piece before it.
    """
    ops, events = recording.ops, recording.events
    starts = [0, *(cut for cut in cuts if 0 < cut < len(ops))]
    alive = dict(recording.start)
    names = _Serials(recording)
    pieces = []
    next_event = 0
    for start, stop in zip(starts, [*starts[1:], len(ops)], strict=True):
        recorder = StepRecorder({})
        recorder.flight_nbytes, recorder.grad_mode = recording.flight_nbytes, recording.grad_mode
        recorder.extend(ops[start:stop])
        began = dict(alive)
        limit = between_ops(stop) if stop < len(ops) else None
        while next_event < len(events) and (limit is None or events[next_event].position <= limit):
            event = events[next_event]
            recorder.events.append(event._replace(position=event.position - between_ops(start)))
            if event.kind == ALLOC:
                alive[event.address] = StartVariable(
                    nbytes=event.nbytes, serial=names.of(next_event), seen=True, kind="", label="", origin=None
                )
            else:
                alive.pop(event.address, None)
            next_event += 1
        pieces.append(
            RecordedStep(
                recorder=recorder, start=began, end_serials={address: v.serial for address, v in alive.items()}
            )
        )
    return pieces


class _Serials:
    """Serials of what is born within a recording: the storage's own where it is alive at the end, else made up."""

    def __init__(self, recording: RecordedStep) -> None:
        last: dict[int, int] = {}
        for index, event in enumerate(recording.events):
            if event.kind == ALLOC:
                last[event.address] = index
            else:
                last.pop(event.address, None)
        ends: Mapping[int, int] = recording.end_serials
        self._known = {index: ends[address] for address, index in last.items() if address in ends}

    def __repr__(self) -> str:
        return f"<_Serials, {len(self._known)} known>"

    def of(self, event: int) -> int:
        """The serial of what an event, by its index, allocated."""
        return self._known.get(event, -1 - event)
