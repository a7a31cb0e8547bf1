"""Which steps belong together as a union: those of a program whose steps are all different."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ooc.replay.step_unions import StepUnion, may_belong
from ooc.replay.union_walk import UnionWalk
from ooc.tracing.observed import Observed
from ooc.tracing.recorder import RecordedStep

_NUM_FIRST = 2
"""The first steps of any program have ops that never come again: the model is made, then the optimizer's state."""
_NUM_UNLIKE, _WINDOW = 3, 5
"""If so many of the latest were unlike earlier ones, or not what was expected, they are taken for parts of one step;
so many kinds, that is, by their ops. Sooner than for a sign that steps are to be cut into segments
(`ooc.replay.segmentation`)."""
_NUM_MIXED, _LONG_WINDOW = 4, 12
"""Of two kinds that are taken for each other, so many must have come."""
_OLDEST = 64
"""Steps and segments after which one of these is forgotten in any case."""
_MOST_UNIONS = 4
_MOST_MISSES = 16
"""Where recordings do not go together, so many at most are passed before it is tried again."""
_ELASTIC = 1.1
"""A union of steps that differ in sizes is one only if without it would have so many times as many ops: what uses
another size would be there in all of them."""
_MOST_LEFT = 4
"""So often in a row its plan may be left before its end, then the union is given up; its steps have no order."""
_MOST_ALIKE = 8
"""So often in a row its steps leave out the same ops, then they are alike, and are to be planned as such."""
_MOST_GROWN = 8
"""So often in a row steps may have something new, then the union is given up: layers in another order each time."""
_LITTLE = 0.25
"""So much counts a step that has little new: of a loop whose turns come in two kinds each turn tells that by itself."""
_MUCH_NEW = 0.01
"""Of a union's ops: a step with more that are new lets it grow much."""
_MOST_MUCH_GROWN = 8
"""So often in a row it may grow much, then it is given up: its steps have no order, and comparing them takes long."""
_REST, _LONGEST_REST = 32, 1024
"""Recordings to pass after a union was given up; each time twice as many."""


@dataclass(slots=True)
class _Unlike:
    """A step or segment that was unlike earlier ones, or not what was expected.

    Attributes:
        recording: None once another one of its kind has come.
        kind: By its ops.
        key: Of its sequence, as it was learned then.
        turn: When it came, counted in steps and segments of these kinds.
        period: The same, counted in all.
    """

    recording: RecordedStep | None
    kind: tuple[bool, int]
    older_than: int
    key: str
    turn: int
    period: int


@dataclass(slots=True)
class _Played:
    """What came of a union's plan of late."""

    num_left: int = 0
    num_grown: float = 0
    num_much_grown: int = 0
    num_alike: int = 0
    omitted: tuple[int, ...] = ()


class Unions:
    """Keeps unions of the steps that were not like any other; steps and segments apart.

    Args:
        draws: Ops that join what is drawn anew in each step (`ooc.tracing.observed.Draws`); it grows.

    Attributes:
        num_begun: Unions that were begun so far.
        forgotten: Those that are kept no more; for whoever has plans for them to empty.
    """

    def __init__(self, draws: set[tuple[Any, str]] | None = None) -> None:
        self._draws = draws if draws is not None else set()
        self._unions: dict[str, StepUnion] = {}  # the one that grew last at the end
        self._unlike: deque[_Unlike] = deque(maxlen=_LONG_WINDOW)
        self._num_seen = self._num_made = self._num_periods = self._num_turns = 0
        self._older_than = -1
        self._num_misses = self._num_to_pass = 0
        self._played: dict[str, _Played] = {}
        self._rest = _REST
        self.num_begun = 0
        self.forgotten: list[str] = []

    def __repr__(self) -> str:
        return f"<Unions: {list(self._unions.values())}>"

    def note(self, recording: RecordedStep) -> int:
        """Note that a step was recorded. All storages with smaller serials existed when the one before it began."""
        older_than = self._older_than
        self._older_than = max((v.serial for v in recording.start.values()), default=-1) + 1
        self._num_seen += 1
        self._num_turns += 1
        self._note_period()
        return older_than

    def _note_period(self) -> None:
        self._num_periods += 1
        while self._unlike and (
            self._num_turns - self._unlike[0].turn >= _LONG_WINDOW
            or self._num_periods - self._unlike[0].period >= _OLDEST
        ):
            self._unlike.popleft()

    def of(self, key: str) -> StepUnion | None:
        """The union of this key."""
        return self._unions.get(key)

    def keys(self, *, is_segment: bool) -> list[str]:
        """The keys of the unions of segments, or of whole steps."""
        return [key for key, union in self._unions.items() if union.is_of_segments == is_segment]

    def join(
        self, recording: RecordedStep, older_than: int, *, is_segment: bool, key: str | None
    ) -> tuple[str, StepUnion] | None:
        """Add a step to the union that it belongs to; or begin one, if it was like no other or not what was expected.

        Args:
            recording: The step.
            older_than: What `note` has returned.
            is_segment: Whether it is a part of a step: those have unions of their own.
            key: That of its sequence; None: nobody has looked for it yet, and no union is begun.

        Returns:
            The union's key, and the union; None: there is none for it.
        """
        if self._num_seen <= _NUM_FIRST:
            return None
        if self._num_to_pass > 0:
            self._num_to_pass -= 1
            return None
        found, is_missed = self._extended(recording, older_than, is_segment), False
        if found is None and key is not None:
            kind, now = (is_segment, recording.signature), (self._num_turns, self._num_periods)
            steps = self._noted(_Unlike(recording, kind, older_than, key, *now))
            found = self._begun(steps, is_segment) if steps else None
            is_missed = bool(steps) and found is None
        if is_missed:
            self._num_misses = min(2 * self._num_misses + 1, _MOST_MISSES)
            self._num_to_pass = self._num_misses
        elif found is not None:
            self._num_misses = 0
        return found

    def _extended(self, recording: RecordedStep, older_than: int, is_segment: bool) -> tuple[str, StepUnion] | None:
        for key, union in reversed(self._unions.items()):
            if union.is_of_segments != is_segment:
                continue
            observed, num_draws = recording.build(self._draws), len(self._draws)
            walk = self._walk(union, observed)
            if walk is not None and len(self._draws) > num_draws:
                observed = recording.build(self._draws)
                walk = union.walk(observed)
            if walk is not None:
                union.add(observed, older_than=older_than, walk=walk)
                self._unions[key] = self._unions.pop(key)
                return None if self._grows_without_end(key, union) else (key, union)
        return None

    def _walk(self, union: StepUnion, observed: Observed) -> UnionWalk | None:
        """What a step has in common with a union. What turns out to be drawn anew is noted in `_draws`."""
        walk = union.walk(observed)
        if walk is not None:
            self._draws |= union.draws(observed, walk)
        return walk

    def _grows_without_end(self, key: str, union: StepUnion) -> bool:
        played = self._played.setdefault(key, _Played())
        played.num_much_grown = played.num_much_grown + 1 if _has_much_new(union) else 0
        return played.num_much_grown >= _MOST_MUCH_GROWN and self.give_up(key)

    def _noted(self, latest: _Unlike) -> list[_Unlike]:
        """Of which steps a union is to be begun now: the latest of each kind, in order. None yet: empty."""
        for earlier in self._unlike:
            if earlier.kind == latest.kind:
                earlier.recording = None  # they may be large
        self._unlike.append(latest)
        alike = [each for each in self._unlike if each.kind[0] == latest.kind[0]]
        kinds = [each for each in alike if each.recording is not None]
        of_late = [each for each in kinds if self._num_turns - each.turn < _WINDOW]
        are_mixed = len(kinds) >= 2 and len(alike) >= _NUM_MIXED
        return kinds if are_mixed or len(of_late) >= _NUM_UNLIKE else []

    def _begun(self, steps: Sequence[_Unlike], is_segment: bool) -> tuple[str, StepUnion] | None:
        self._num_made += 1
        num_draws = len(self._draws)
        observed = [
            (each.recording.build(self._draws), each.older_than) for each in steps if each.recording is not None
        ]
        latest, older_than = observed[-1]
        if not may_belong(latest):
            return None
        union = self._union_of(observed, is_segment=is_segment, is_elastic=False)
        if union is None or union.num_ops > _ELASTIC * len(latest.funcs):  # it has these, whatever it is
            elastic = self._union_of(observed, is_segment=is_segment, is_elastic=True)
            if union is None or (elastic is not None and elastic.num_ops * _ELASTIC < union.num_ops):
                union = elastic
        if len(self._draws) > num_draws:
            return self._begun(steps, is_segment)  # once more: now it is known what is drawn anew
        if union is None:
            return None
        union.note_latest(latest, older_than)
        self._unlike.clear()
        self.num_begun += 1
        key = f"union {self._num_made} of steps"
        self._unions[key] = union
        for old in list(self._unions)[:-_MOST_UNIONS]:
            self._forget(old)
        return key, union

    def _union_of(
        self, steps: Sequence[tuple[Observed, int]], *, is_segment: bool, is_elastic: bool
    ) -> StepUnion | None:
        """Of the last of these steps, and of others that have much in common with it. None: there is none."""
        latest, older_than = steps[-1]
        name = f"union {self._num_made}"
        union = StepUnion(latest, name, older_than=older_than, is_of_segments=is_segment, is_elastic=is_elastic)
        for observed, older in steps[:-1]:
            if (walk := self._walk(union, observed)) is not None:
                union.add(observed, older_than=older, walk=walk)
        return union if union.num_seen >= 2 else None

    def note_left(self, key: str, *, has_news: bool) -> None:
        """Note that a step has left a union's plan, with something new or not. The union may be given up then."""
        if key not in self._unions:
            return
        played = self._played.setdefault(key, _Played())
        if has_news:
            played.num_grown += 1 if _has_much_new(self._unions[key]) else _LITTLE
        else:
            played.num_left += 1
        if played.num_left > _MOST_LEFT or played.num_grown > _MOST_GROWN:
            self.give_up(key)

    def note_played(self, key: str | None, omitted: Sequence[int]) -> None:
        """Note that a step has played a plan to its end: a union's, which may be given up then, or another's."""
        self._num_turns += any(each.key == key for each in self._unlike)  # others do not count: they take no turns
        self._note_period()
        if key is None or key not in self._unions:
            return
        played, latest = self._played.setdefault(key, _Played()), tuple(omitted)
        played.num_left = played.num_grown = played.num_much_grown = 0
        played.num_alike = played.num_alike + 1 if played.omitted == latest else 0
        played.omitted = latest
        if played.num_alike >= _MOST_ALIKE:
            self.give_up(key)

    def give_up(self, key: str) -> bool:
        """Forget a union, and begin no other for some time. Whether there was one."""
        if key not in self._unions:
            return False
        self._forget(key)
        self._unlike.clear()
        self._num_to_pass, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        return True

    def _forget(self, key: str) -> None:
        del self._unions[key]
        self._played.pop(key, None)
        self.forgotten.append(key)


def _has_much_new(union: StepUnion) -> bool:
    """Whether the latest step that was added had much that the union had not."""
    return union.num_latest_new > _MUCH_NEW * union.num_ops
