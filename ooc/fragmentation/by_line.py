"""Who holds memory, and who is in the way: buffers grouped by the user's lines (`frames.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ooc.fragmentation.analysis import holes_of
from ooc.fragmentation.frames import Origin, op_of, origin_of
from ooc.fragmentation.replay import Replay, alive_in
from ooc.fragmentation.stream import Stream

MAX_GROUPED = 50_000
"""Buffers whose stacks are looked at, the largest ones; the others are one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Allocations from one place in the program that lie between free blocks.

    Attributes:
        origin: That place.
        stack: One of their stacks in full, innermost first; empty if it was not recorded.
        op: The op that most of their bytes are of; or empty.
        num_buffers, nbytes: How many, and what they take up.
        adjoining_free_nbytes: Free bytes directly before and after them: what could join into
            larger blocks if these buffers were not there. A hole between two places counts for both.
    """

    origin: Origin
    stack: tuple[str, ...]
    op: str
    num_buffers: int
    nbytes: int
    adjoining_free_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHolder:
    """Memory that one place in the program holds at a moment.

    Attributes:
        origin: That place.
        op: The op that most of the bytes are of; or empty.
        num_buffers, nbytes: How many buffers, and what they take up, rounding included.
    """

    origin: Origin
    op: str
    num_buffers: int
    nbytes: int


def culprits(replay: Replay, stream: Stream, event_index: int, limit: int = 10) -> list[Culprit]:
    """Which allocations lie between the free blocks after an event, worst first."""
    if replay.address is None:
        return []
    origins: dict[int, Origin] = {}
    buffers: dict[Origin, set[int]] = {}
    adjoining: Counter[Origin] = Counter()
    for hole in holes_of(replay, stream, event_index):
        places = set()
        for buffer in (hole.before, hole.after):
            if buffer is not None:
                if buffer not in origins:
                    origins[buffer] = origin_of(stream.stack(buffer))
                buffers.setdefault(origins[buffer], set()).add(buffer)
                places.add(origins[buffer])
        for place in places:
            adjoining[place] += hole.nbytes
    ranked = sorted(adjoining, key=lambda origin: (-adjoining[origin], origin.texts()))
    return [
        Culprit(
            origin=origin,
            stack=stream.stack(min(buffers[origin])),
            op=_main_op(replay, stream, buffers[origin]),
            num_buffers=len(buffers[origin]),
            nbytes=int(sum(replay.block_nbytes[b] for b in buffers[origin])),
            adjoining_free_nbytes=adjoining[origin],
        )
        for origin in ranked[:limit]
    ]


def holders(replay: Replay, stream: Stream, event_index: int, limit: int = 10) -> list[MemoryHolder]:
    """Which places hold memory after an event, most first."""
    alive = alive_in(replay, stream, event_index)
    sizes = replay.block_nbytes[alive]
    largest = alive[(-sizes).argsort(kind="stable")[:MAX_GROUPED]]
    groups: dict[Origin, list[int]] = {}
    for buffer in largest.tolist():
        groups.setdefault(origin_of(stream.stack(buffer)), []).append(buffer)
    totals = {origin: int(replay.block_nbytes[found].sum()) for origin, found in groups.items()}
    ranked = sorted(totals, key=lambda origin: (-totals[origin], origin.texts()))
    return [
        MemoryHolder(
            origin=origin,
            op=_main_op(replay, stream, groups[origin]),
            num_buffers=len(groups[origin]),
            nbytes=totals[origin],
        )
        for origin in ranked[:limit]
    ]


def _main_op(replay: Replay, stream: Stream, buffers: Iterable[int]) -> str:
    """The op of most bytes among the buffers."""
    found: Counter[str] = Counter()
    for buffer in buffers:
        found[op_of(stream.stack(buffer))] += int(replay.block_nbytes[buffer])
    return max(found, key=lambda op: (found[op], op), default="")
