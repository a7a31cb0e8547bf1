"""Static placement as data: buffers with lifetimes in, offsets out.

A **buffer** is `nbytes` that must lie somewhere in one arena during `[start, stop)`, half-open, in
any unit of time in which order is right (ticks of a trace, execution orders, op indices). A
**placement** gives each one its offset. Its **height** is the arena that it needs; the most bytes
alive at once is a lower bound that no placement beats. Finding the least height is NP-hard (dynamic
storage allocation), hence the planners of this package.

With an alignment of `a` bytes every buffer starts at a multiple of `a` and occupies whole multiples
of it, as in an allocator that rounds sizes up; bounds and heights count what is occupied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Bytes that need a place from `start` until `stop` (not included).

    Attributes:
        nbytes: At least 1.
        start, stop: Half-open lifetime; `start < stop`.
        name: For people and files; need not be unique.
    """

    nbytes: int
    start: int
    stop: int
    name: str = ""

    def __post_init__(self) -> None:
        if self.nbytes <= 0:
            raise ValueError(f"buffer {self.name!r}: nbytes must be at least 1, is {self.nbytes}")
        if self.start >= self.stop:
            raise ValueError(f"buffer {self.name!r}: lifetime [{self.start}, {self.stop}) is empty")

    @property
    def duration(self) -> int:
        """Length of the lifetime, in the problem's unit of time."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be placed.

    Attributes:
        buffers: In order of request; a placement's offsets come in the same order.
        alignment: Offsets and occupied sizes are multiples of this many bytes.
        capacity: Bytes of the arena, or None where the least height is asked. Planners other than
            `exact` aim at the least height in either case.
    """

    buffers: tuple[Buffer, ...]
    alignment: int = 1
    capacity: int | None = None

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise ValueError(f"alignment must be at least 1 byte, is {self.alignment}")
        if self.capacity is not None and self.capacity < 0:
            raise ValueError(f"capacity must not be negative, is {self.capacity} bytes")

    def occupied_nbytes(self) -> tuple[int, ...]:
        """For each buffer, the bytes that it takes up: `nbytes` rounded up to the alignment."""
        return tuple(-(-b.nbytes // self.alignment) * self.alignment for b in self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where each buffer lies.

    Attributes:
        offsets: For each buffer, the offset of its first byte.
        height: One past the highest occupied byte: the arena needed.
        bound: A proven lower bound on the height of any placement of the same kind.
        planner: Who made it.
        runs: None where each buffer lies in one piece at its offset. Otherwise, for each buffer, its
            pieces `(offset, nbytes)` in the order of its bytes: what virtual addressing allows.
    """

    offsets: tuple[int, ...]
    height: int
    bound: int
    planner: str
    runs: tuple[tuple[tuple[int, int], ...], ...] | None = None

    @property
    def is_optimal(self) -> bool:
        """Is it proven that no placement needs less?"""
        return self.height == self.bound

    def fits(self, capacity: int) -> bool:
        """Does it fit an arena of `capacity` bytes?"""
        return self.height <= capacity


def lower_bound(problem: Problem) -> int:
    """Most bytes occupied at once: no placement is lower, contiguous or in pieces."""
    change: dict[int, int] = {}
    for buffer, nbytes in zip(problem.buffers, problem.occupied_nbytes(), strict=True):
        change[buffer.start] = change.get(buffer.start, 0) + nbytes
        change[buffer.stop] = change.get(buffer.stop, 0) - nbytes
    live = peak = 0
    for time in sorted(change):
        live += change[time]
        peak = max(peak, live)
    return peak


def placement_of(problem: Problem, offsets: Iterable[int], *, planner: str, bound: int | None = None) -> Placement:
    """A placement with its height worked out; `bound` defaults to `lower_bound`."""
    found = tuple(offsets)
    ends = [offset + nbytes for offset, nbytes in zip(found, problem.occupied_nbytes(), strict=True)]
    return Placement(
        offsets=found,
        height=max(ends, default=0),
        bound=lower_bound(problem) if bound is None else bound,
        planner=planner,
    )
