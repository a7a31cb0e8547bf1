"""Vector clocks, and the pairs of conflicting accesses that nothing orders.

An *agent* is a stream or a host thread; each counts its acts. A clock says, for each agent, up to which
act everything has happened before. (Lamport 1978, Fidge 1988, Mattern 1989.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Clock", "Interval", "Race", "RaceDetector", "TrackedAccess", "joined"]

Clock = dict[int, int]

_MANY_ACCESSES = 64


def joined(*clocks: Mapping[int, int]) -> Clock:
    """The clock of one who knows all that these know."""
    result: Clock = {}
    for clock in clocks:
        for agent, tick in clock.items():
            if tick > result.get(agent, 0):
                result[agent] = tick
    return result


class Interval(NamedTuple):
    """Bytes `[start, stop)` of physical memory, and the address by which they were touched.

    `space` is "device" or "host": offsets in the device's memory, or addresses of the host's.
    """

    space: str
    start: int
    stop: int
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedAccess:
    """One act's touch of one interval.

    Attributes:
        act_id: Number of the act; one act may touch many intervals.
        name: What the act is, for people.
        agent: Who did it.
        tick: Which of the agent's acts it is.
        is_write: Whether it writes.
        interval: What it touches.
    """

    act_id: int
    name: str
    agent: int
    tick: int
    is_write: bool
    interval: Interval

    def __str__(self) -> str:
        verb = "writes" if self.is_write else "reads"
        return f"{self.name} {verb} {self.interval.stop - self.interval.start} bytes at {self.interval.address:#x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Two accesses to the same bytes, one of them a write, that no stream, event or host order puts in order.

    Attributes:
        first: The one that was submitted first.
        second: The other. The same act as `first` where one launch reaches bytes through two aliases.
    """

    first: TrackedAccess
    second: TrackedAccess

    def __str__(self) -> str:
        interval = self.second.interval
        where = f"{interval.space} memory at offset {interval.start:#x}"
        if self.first.act_id == self.second.act_id:
            return f"two aliases within one launch: {self.first}; {self.second}; {where}"
        return f"nothing orders: {self.first}; {self.second}; {where}"


class RaceDetector:
    """All accesses so far that a later one could still conflict with, and the races found.

    Args:
        block_nbytes: Accesses are looked up by blocks of this size, so that a search need not see all of memory.
    """

    def __init__(self, *, block_nbytes: int = 2 << 20) -> None:
        self._block_nbytes = block_nbytes
        self._blocks: dict[tuple[str, int], list[_Known]] = {}
        self._limits: dict[tuple[str, int], int] = {}
        self._found: dict[tuple[int, int], Race] = {}

    @property
    def races(self) -> tuple[Race, ...]:
        """Each pair of acts that race once, in the order in which they were found.

        Every pair, but for this: of a block of memory with more than 64 accesses, those are forgotten
        behind which an access of the same or more bytes has come that is ordered after them and
        conflicts with whatever they conflict with. Who races with a forgotten one races with that, too.
        """
        return tuple(self._found.values())

    def add(self, access: TrackedAccess, clock: Clock) -> None:
        """Compare an access with all earlier ones.

        Args:
            access: What is touched.
            clock: What has happened before it, and itself. Kept: it must not be changed later.
        """
        interval = access.interval
        for block in range(interval.start // self._block_nbytes, (interval.stop - 1) // self._block_nbytes + 1):
            key = (interval.space, block)
            others = self._blocks.setdefault(key, [])
            for other in others:
                if _conflict(other.access, access) and not _is_ordered(other.access, access, clock):
                    pair = (other.access.act_id, access.act_id)
                    self._found.setdefault(pair, Race(first=other.access, second=access))
            others.append(_Known(access, clock))
            if len(others) > self._limits.get(key, _MANY_ACCESSES):
                kept = [it for index, it in enumerate(others) if not _is_covered(it.access, others[index + 1 :])]
                self._blocks[key] = kept
                self._limits[key] = max(_MANY_ACCESSES, 2 * len(kept))


class _Known(NamedTuple):
    access: TrackedAccess
    clock: Clock


def _is_covered(access: TrackedAccess, later: Iterable[_Known]) -> bool:
    """Whether some later access is ordered after this one and meets all that this one could meet."""
    start, stop = access.interval.start, access.interval.stop
    return any(
        it.access.interval.start <= start
        and stop <= it.access.interval.stop
        and (it.access.is_write or not access.is_write)
        and it.access.act_id != access.act_id
        and it.clock.get(access.agent, 0) >= access.tick
        for it in later
    )


def _conflict(one: TrackedAccess, other: TrackedAccess) -> bool:
    if not (one.is_write or other.is_write):
        return False
    return one.interval.start < other.interval.stop and other.interval.start < one.interval.stop


def _is_ordered(earlier: TrackedAccess, later: TrackedAccess, clock: Mapping[int, int]) -> bool:
    if earlier.act_id != later.act_id:
        return clock.get(earlier.agent, 0) >= earlier.tick
    # Within one launch the same address is the kernel's own business; two addresses of one byte are an alias.
    one, other = earlier.interval, later.interval
    return one.address - one.start == other.address - other.start
