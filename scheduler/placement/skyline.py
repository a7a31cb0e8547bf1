"""Does a set of buffers fit under a capacity? A tree search over the skyline.

The search behind `exact` and `search`. It keeps, for each **section** (a stretch of time with one set of
live buffers; only the maximal sets matter), a **floor**: no unplaced buffer will lie lower there.
Buffers are placed from the bottom up, each exactly on the floor.

**Branching.** Take a *valley*: neighbouring sections with one floor f and higher floors, or nothing, on
both sides. For one of its sections s, look at the lowest unplaced buffer that is alive in s. In a solution
where every buffer has sunk as far as it can (a *canonical* solution; if there is one at all, there
is one of these) that buffer either lies at f, and then within the valley, or it rests on something:
on a wall of the valley, or on another unplaced buffer within the valley, not alive in s. So the
branches are: each unplaced buffer of s within the valley, placed at f; and "none", which lifts the floor
of s to the lowest of those supports. These cover all canonical solutions, whatever valley and
section are chosen, and the section with the fewest branches is.

**Pruning.** floor + unplaced bytes <= capacity must hold in every section (*slack*); buffers that stick
out of the valley start no lower than its lower wall, so what lies within must fill the section up to
there, but for the slack. A section without a buffer that could lie on its floor is lifted at once. Of
identical buffers one is tried. A state that has failed once is remembered. What falls apart in time is
solved apart, the tightest part first, and the first part that fails fails them all.

Canonical solutions, section inference, dominance of identical buffers, decomposition and the
monotonic floor are the ideas of minimalloc (Moffitt, "MiniMalloc: A Lightweight Memory Allocator for
Hardware-Accelerated Machine Learning", ASPLOS 2023). There the floor is one for all of time, and
buffers are chosen in order of their offsets; here it is one a section, and the tightest place decides, which
the memory of failed states then profits from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

# Failed states kept, at about 1 KiB each for 200 buffers. On minimalloc's A-F at most one state in ten is
# met again, so a larger memory could not save much.
_MAX_REMEMBERED = 30_000

_Key: TypeAlias = tuple[int, tuple[int, ...]]


class OutOfLuck(Exception):
    """The search was cut off by its limit: neither a fit nor a proof."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """Sections `[start, stop)` with the unplaced buffers `mask` in them, to be solved on their own.

    Attributes:
        depth: Height of the stack at which the part was cut out: if it fails, so does what is there.
        following: What is to be solved afterwards.
    """

    mask: int
    start: int
    stop: int
    depth: int
    following: _Part | None


@dataclass(slots=True, kw_only=True)
class _Node:
    """A state on the way down: a section, and what is still to be tried in it.

    Attributes:
        part: What the state belongs to.
        key: Its identity in the memory of failed states.
        settled: Sections whose floors were lifted because there was no other branch, with the floors before.
        floor: The section's floor.
        options: Buffers to put there; None: lift the floor to `lifted`.
        applied: The option that is in force.
    """

    part: _Part
    key: _Key
    settled: list[tuple[int, int]]
    section: int
    floor: int
    lifted: int
    options: Iterator[int | None]
    applied: int | None = None


@dataclass(slots=True, kw_only=True)
class _Branch:
    """The branches of one section: buffers `inside` that can go there now, and the next floor, if it is legal.

    The valley is the sections `[first, last)`.
    """

    section: int
    first: int
    last: int
    floor: int
    inside: int
    lifted: int
    may_lift: bool


class Skyline:
    """The tree over one set of buffers, for any capacity.

    Args:
        spans: Lifetimes `[start, stop)`.
        sizes: What each occupies, in any unit.

    Attributes:
        bound: The most that is occupied at once.
        num_nodes, num_dead_ends: States looked at so far, and those without a legal branch, over all calls.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        sections = _sections(spans)
        self.num_sections = len(sections)
        self.alive = [_mask(own) for own in sections]
        self.first = [self.num_sections] * len(sizes)
        self.last = [0] * len(sizes)  # one past the buffer's last section
        for section, own in enumerate(sections):
            for index in own:
                self.first[index] = min(self.first[index], section)
                self.last[index] = section + 1
        self.from_section = [0] * (self.num_sections + 1)  # buffers whose first section is this one or later
        for section in reversed(range(self.num_sections)):
            born = _mask(i for i in sections[section] if self.first[i] == section)
            self.from_section[section] = self.from_section[section + 1] | born
        self.until_section = [0] * (self.num_sections + 1)  # buffers whose last section lies before this one
        for section in range(self.num_sections):
            dead = _mask(i for i in sections[section] if self.last[i] == section + 1)
            self.until_section[section + 1] = self.until_section[section] | dead
        self.total = [sum(self.sizes[i] for i in own) for own in sections]
        self.bound = max(self.total, default=0)
        self.num_nodes = 0
        self.num_dead_ends = 0
        self._failed: set[_Key] = set()
        self._failed_capacity = -1

    def fit(
        self,
        capacity: int,
        *,
        priority: Sequence[float],
        fit_weight: float = 1.0,
        max_dead_ends: int,
        max_nodes: int = 1 << 62,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> tuple[int, ...] | None:
        """Offsets under which everything fits, or None: it is proven that nothing fits.

        Args:
            capacity: What the highest end may be.
            priority: Of the buffers that could be placed next, the one with the highest is tried first.
            fit_weight: The priority of one that begins or ends with its valley is multiplied by this, for each side;
                once more where it is level with the wall of that side.
            max_dead_ends: States without a legal branch to run into.
            max_nodes: States to look at.
            out_of_time: Asked every 64 states.

        Raises:
            OutOfLuck: No answer within the limits. What failed is remembered for the next call.
        """
        if capacity < self.bound:
            return None
        if self._failed_capacity != capacity:
            self._failed.clear()
            self._failed_capacity = capacity
        self.capacity, self.priority, self.fit_weight = capacity, priority, fit_weight
        self.floor = [0] * self.num_sections
        self.unplaced = list(self.total)
        self.offsets = [0] * len(self.sizes)
        fits = self._walk(self.num_dead_ends + max_dead_ends, self.num_nodes + max_nodes, out_of_time)
        return tuple(self.offsets) if fits else None

    def _walk(self, last_dead_end: int, last_node: int, out_of_time: Callable[[], bool]) -> bool:
        """Depth first, with an explicit stack: it grows as deep as there are buffers and lifts."""
        stack: list[_Node] = []
        todo = self._cut((1 << len(self.sizes)) - 1, (0, self.num_sections), (0, self.num_sections), 0, None)
        while todo is not None:
            self.num_nodes += 1
            if self.num_dead_ends >= last_dead_end or self.num_nodes > last_node:
                raise OutOfLuck
            if self.num_nodes % 64 == 0 and out_of_time():
                raise OutOfLuck
            node = self._open(todo)
            self.num_dead_ends += node is None
            while node is None or not self._try_next(node):
                if node is not None:
                    self._remember(node.key)
                    self._unsettle(node.settled)
                depth = todo.depth if node is None else node.part.depth
                if not depth:
                    return False
                while len(stack) > depth:  # what was solved beside the part that failed
                    solved = stack.pop()
                    self._undo(solved)
                    self._unsettle(solved.settled)
                node = stack.pop()
                self._undo(node)
            stack.append(node)
            todo = self._rest(node, len(stack))
        return True

    # -- parts -------------------------------------------------------------------------------

    def _rest(self, node: _Node, depth: int) -> _Part | None:
        """What is to be solved after the node's option: the pieces of its part, then what was waiting."""
        part, index = node.part, node.applied
        if index is None:  # a lift cuts nothing
            return _Part(mask=part.mask, start=part.start, stop=part.stop, depth=depth, following=part.following)
        window = (self.first[index], self.last[index])
        return self._cut(part.mask & ~(1 << index), (part.start, part.stop), window, depth, part.following)

    def _cut(
        self, mask: int, sections: tuple[int, int], window: tuple[int, int], depth: int, following: _Part | None
    ) -> _Part | None:
        """Parts that no buffer of `mask` crosses, tightest first; new cuts can only lie in `window`."""
        start, stop = sections
        alive = self.alive
        cuts = [start]
        for k in range(max(window[0], start + 1), min(window[1] + 1, stop)):
            if not alive[k - 1] & alive[k] & mask:
                cuts.append(k)
        cuts.append(stop)
        found = []
        for a, b in pairwise(cuts):
            own = mask & self.from_section[a] & self.until_section[b]
            if own:
                found.append((self._slack(a, b) if len(cuts) > 2 else 0, b - a, a, b, own))
        for _, _, a, b, own in sorted(found, reverse=True):
            following = _Part(mask=own, start=a, stop=b, depth=depth, following=following)
        return following

    def _slack(self, start: int, stop: int) -> int:
        return self.capacity - max(self.floor[k] + self.unplaced[k] for k in range(start, stop))

    # -- nodes -------------------------------------------------------------------------------

    def _open(self, part: _Part) -> _Node | None:
        """The state's node; None if it has failed before, or fails at once."""
        settled: list[tuple[int, int]] = []
        branch = self._fewest_branches(part, settled)
        key = (part.mask, tuple(self.floor[part.start : part.stop]))
        if branch is None or key in self._failed:
            self._unsettle(settled)
            return None
        options: list[int | None] = list(self._distinct(branch, part))
        if branch.may_lift:
            options.append(None)
        return _Node(
            part=part,
            key=key,
            settled=settled,
            section=branch.section,
            floor=branch.floor,
            lifted=branch.lifted,
            options=iter(options),
        )

    def _distinct(self, branch: _Branch, part: _Part) -> list[int]:
        """The buffers that can go there, in order of priority, one of each kind."""
        kinds = {(self.first[i], self.last[i], self.sizes[i]): i for i in _bits(branch.inside)}
        if self.fit_weight == 1:
            return sorted(kinds.values(), key=lambda i: -self.priority[i])
        left = self.floor[branch.first - 1] if branch.first > part.start else self.capacity
        right = self.floor[branch.last] if branch.last < part.stop else self.capacity

        def rank(index: int) -> float:
            top, weight = branch.floor + self.sizes[index], self.priority[index]
            if self.first[index] == branch.first:
                weight *= self.fit_weight ** (1 + (top == left))
            if self.last[index] == branch.last:
                weight *= self.fit_weight ** (1 + (top == right))
            return -weight

        return sorted(kinds.values(), key=rank)

    def _try_next(self, node: _Node) -> bool:
        for index in node.options:
            node.applied = index
            if index is None:
                self.floor[node.section] = node.lifted
            else:
                self._put(index, node.floor + self.sizes[index], -self.sizes[index])
                self.offsets[index] = node.floor
            return True
        return False

    def _undo(self, node: _Node) -> None:
        if node.applied is None:
            self.floor[node.section] = node.floor
        else:
            self._put(node.applied, node.floor, self.sizes[node.applied])

    def _unsettle(self, settled: list[tuple[int, int]]) -> None:
        for section, floor in reversed(settled):
            self.floor[section] = floor

    def _put(self, index: int, floor: int, change: int) -> None:
        for k in range(self.first[index], self.last[index]):
            self.floor[k] = floor
            self.unplaced[k] += change

    def _remember(self, key: _Key) -> None:
        if len(self._failed) >= _MAX_REMEMBERED:
            self._failed.clear()
        self._failed.add(key)

    # -- branching ---------------------------------------------------------------------------

    def _fewest_branches(self, part: _Part, settled: list[tuple[int, int]]) -> _Branch | None:
        """The section of all valleys with the fewest branches, then the least slack; None: the state fails.

        Sections where lifting is the only branch are lifted on the way, and noted in `settled`.
        """
        floors, stop = self.floor, part.stop
        above = self.capacity + 1
        best: _Branch | None = None
        best_rank = (len(self.sizes) + 2, 0, 0)
        first = part.start
        while first < stop:
            floor = floors[first]
            last = first + 1
            while last < stop and floors[last] == floor:
                last += 1
            left = floors[first - 1] if first > part.start else above
            wall = min(left, floors[last] if last < stop else above)
            if wall > floor:
                inside = part.mask & self.from_section[first] & self.until_section[last]
                num_settled = len(settled)
                for k in range(first, last):
                    here = inside & self.alive[k]
                    slack = self.capacity - floor - self.unplaced[k]
                    if wall - floor > slack and wall < above and self._total(here) + slack < wall - floor:
                        return None
                    if not here:
                        settled.append((k, floor))
                        floors[k] = wall
                        continue
                    count = here.bit_count()
                    if (count, slack, floor) >= best_rank:
                        continue
                    lifted = self._lowest_support(inside, here, floor, wall)
                    may_lift = lifted - floor <= slack
                    rank = (count + may_lift, slack, floor)
                    if rank < best_rank:
                        best_rank = rank
                        best = _Branch(
                            section=k,
                            first=first,
                            last=last,
                            floor=floor,
                            inside=here,
                            lifted=lifted,
                            may_lift=may_lift,
                        )
                if len(settled) > num_settled:  # the valley has changed: look again at what is left of it
                    best, best_rank = None, (len(self.sizes) + 2, 0, 0)
                    last = part.start
            first = last
        return best

    def _lowest_support(self, inside: int, here: int, floor: int, wall: int) -> int:
        """Where the lowest buffer of a section can rest, if not on the valley's floor.

        One that sticks out of the valley rests no lower than the wall. One of `here` rests on a
        buffer of the valley that is alive together with it, but not in the section, or on the wall.
        """
        others = inside & ~here
        if not others:
            return wall
        own = _bits(here)
        first, last = min(self.first[i] for i in own), max(self.last[i] for i in own)
        others &= ~(self.until_section[first] | self.from_section[last])
        return min(wall, min((floor + self.sizes[i] for i in _bits(others)), default=wall))

    def _total(self, mask: int) -> int:
        return sum(self.sizes[i] for i in _bits(mask))


def _sections(spans: Sequence[tuple[int, int]]) -> list[frozenset[int]]:
    """The maximal sets of buffers alive together, in order of time."""
    events: dict[int, tuple[list[int], list[int]]] = {}
    for index, (start, stop) in enumerate(spans):
        events.setdefault(start, ([], []))[0].append(index)
        events.setdefault(stop, ([], []))[1].append(index)
    alive: set[int] = set()
    found: list[frozenset[int]] = []
    is_new = False
    for time in sorted(events):
        born, dead = events[time]
        if dead and is_new:  # nothing was added since the last death: a subset of what was found
            found.append(frozenset(alive))
            is_new = False
        alive.difference_update(dead)
        alive.update(born)
        is_new = is_new or bool(born)
    return found


def _mask(indices: Iterable[int]) -> int:
    return sum(1 << index for index in indices)


def _bits(mask: int) -> list[int]:
    """Positions of the bits that are set, ascending."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found
