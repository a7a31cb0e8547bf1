"""Unions of steps: one sequence of ops of which each step has some, and leaves out others.

Where layers are skipped at random, rows are routed to experts, or sequences have another length each time, no step is
like one before. But each is, as far as it goes, a part of one long sequence: of all that any of them did, in an order
that contradicts none. That one is planned, and replayed with what does not come left out (`ooc.replay.omissions`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ooc.replay.elastic import Envelope, standing
from ooc.replay.union_parts import FreePhase, UnionOp, UnionVariable
from ooc.replay.union_walk import UnionWalk
from ooc.tracing.observed import DRAWN, Observed, Origin
from ooc.tracing.op_semantics import joins_list
from scheduler.trace import Op, Trace, Uses, Variable
from vmm.table import between_ops, inside_op

_LEAST_COMMON = 0.35
"""Of the ops that touch variables, the shorter of the two must have so many in common with the other."""
_MOST_OF_OTHER_SIZES = 0.02
"""Of the bytes that a step allocates: what has another size in each step would be there in all of its sizes."""
_MOST_GROWTH = 3.0
"""A union is at most so many times as long as the longest step in it: beyond that, its steps have no common order."""
_MOST_OPS = 1 << 15
_MOST_STEP_OPS = 1 << 14
"""To compare longer steps takes seconds: three layers of GRU over packed sequences, 25,000 ops of 0.5 s."""
_MOST_VERSIONS = 32
"""A plan that was made beside training may be for one of the latest so many, and what was born in it is known."""
_MOST_FAMILIES = 8
"""Recordings whose places of birth are remembered: what was born in them may still be alive."""


def may_belong(observed: Observed) -> bool:
    """Whether a step may belong to any union.

    It has ops, not too many, no collectives, and none that ran in parts; no library has taken memory to keep.
    """
    is_whole = not any(observed.flights) and all(apart is None for apart in observed.sliced)
    return is_whole and not observed.strays and 0 < len(observed.funcs) <= _MOST_STEP_OPS


class StepUnion:
    """A union of steps, which grows with each that has something new.

    It is used as a `Shape` is (`ooc.replay.elastic`).

    Args:
        observed: The first step.
        name: Tells it from others.
        older_than: See `add`.
        is_of_segments: Of parts of steps.
        is_elastic: Of steps that differ in sizes, too: a variable is the same one at whatever size.

    Attributes:
        num_seen: Steps that were added.
        num_latest_new: Ops that the latest one had and the union had not.
    """

    def __init__(
        self,
        observed: Observed,
        name: str,
        *,
        older_than: int = -1,
        is_of_segments: bool = False,
        is_elastic: bool = False,
    ) -> None:
        self._name = name
        self.is_of_segments = is_of_segments
        self._may_vary = is_elastic
        self._ops: list[UnionOp] = []
        self._tail = UnionOp(func=None, name="", where="", duration_ns=0)
        self.variables: list[UnionVariable] = []
        self._grad_mode = observed.grad_mode
        self.num_seen = self.num_latest_new = self._version = self._longest = 0
        self._origins: deque[dict[Origin, UnionVariable]] = deque(maxlen=_MOST_FAMILIES)
        self._observed: Observed | None = None
        self._versions: dict[str, dict[Origin, UnionVariable]] = {}  # by family, the latest at the end
        self.add(observed, older_than=older_than)

    @property
    def is_elastic(self) -> bool:
        """Whether some variable's size differs from one step to another."""
        return bool(self._varying())

    def __repr__(self) -> str:
        return f"<StepUnion of {self.num_seen} steps: {len(self._ops)} ops, {len(self.variables)} variables>"

    @property
    def num_ops(self) -> int:
        """Ops so far."""
        return len(self._ops)

    # -- what belongs to it

    def walk(self, observed: Observed) -> UnionWalk | None:
        """What a step has in common with it. None: too little, or nobody can tell."""
        if not may_belong(observed) or observed.grad_mode != self._grad_mode:
            return None
        self._note_drawn(observed)
        starting = [v for v in self.variables if not v.is_born]
        known = self._known(observed, starting)
        walk = UnionWalk(self._ops, observed, known, starting, is_elastic=self._may_vary, step=self.num_seen)
        if not self._ops:
            return walk
        ours = sum(not op.is_bystander for op in self._ops)
        if walk.num_matched < _LEAST_COMMON * min(ours, walk.num_matched + walk.num_new):
            return None
        nbytes = sum(v.nbytes for v in observed.trace.variables if v.birth_tick is not None)
        if walk.nbytes_of_other_sizes > _MOST_OF_OTHER_SIZES * nbytes:
            return None
        longest = max(self._longest, len(observed.funcs))
        num_ops = len(self._ops) + walk.num_new
        return walk if num_ops <= min(_MOST_GROWTH * longest, _MOST_OPS) else None

    def _note_drawn(self, observed: Observed) -> None:
        """What an op was taken to use in each step, and is drawn anew as it has turned out, is anybody from now on."""
        if not observed.drawn:
            return
        used = zip(observed.funcs, observed.trace.ops, observed.occurrences, strict=True)
        draws = {(func, op.where) for func, op, operands in used if not observed.drawn.isdisjoint(operands)}
        displaced = set[UnionVariable]()
        for op in [op for op in self._ops if (op.func, op.where) in draws]:
            before = op.operands
            op.operands = tuple(self._anybody(v) if v.death is None and v.label != DRAWN else v for v in before)
            displaced.update(v for v in before if v not in op.operands and not v.is_born)
        for variable in displaced.difference(v for op in self._ops for v in op.operands):
            variable.is_replaced, variable.is_persistent = True, False

    def _anybody(self, variable: UnionVariable) -> UnionVariable:
        found = UnionVariable(nbytes=variable.nbytes, kind=variable.kind, label=DRAWN, evictable=True)
        found.index, found.is_new, found.is_replaced = len(self.variables), False, True
        self.variables.append(found)
        self._observed, self._version = None, self._version + 1
        return found

    def draws(self, observed: Observed, walk: UnionWalk) -> set[tuple[Any, str]]:
        """Ops of a step that join others than the union's at their places: what earlier steps have left, drawn anew."""
        ours = {(op.func, op.where, len(op.operands)) for op in self._ops if joins_list(op.func)}
        if not ours:
            return set()
        uses = zip(observed.funcs, observed.occurrences, strict=True)
        elsewhere = {variable for func, used in uses if not joins_list(func) for variable in used}
        steps = zip(walk.found, observed.trace.ops, observed.occurrences, strict=True)
        return {
            (op.func, traced.where)
            for op, traced, used in steps
            if op.place < 0  # it is new
            and (op.func, traced.where, len(used)) in ours
            and elsewhere.isdisjoint(used)
            and any(observed.start_serials[variable] is not None for variable in used)
            and observed.drawn.isdisjoint(used)
        }

    def _known(self, observed: Observed, starting: list[UnionVariable]) -> dict[int, UnionVariable]:
        """Variables that exist at a step's start, by their storages, or by where they were born in the step before."""
        by_serial = {v.serial: v for v in starting if v.serial is not None}
        known: dict[int, UnionVariable] = {}
        taken: set[UnionVariable] = set()
        for index, serial in enumerate(observed.start_serials):
            if serial is None:
                continue
            variable, origin = by_serial.get(serial), observed.origins[index]
            if variable is None and origin is not None and (born := self.born_at(origin)) is not None:
                variable = born.heir
            if variable is None or variable in taken:
                continue
            may_vary = self._may_vary and variable.may_vary
            if may_vary or variable.nbytes == observed.trace.variables[index].nbytes:
                known[index] = variable
                taken.add(variable)
        return known

    def born_at(self, origin: Origin) -> UnionVariable | None:
        """What was born at a place of a step that was added, or of an earlier version of the union."""
        places = self._versions.get(origin[0])
        if places is not None:
            return places.get(origin)
        return next((found[origin] for found in self._origins if origin in found), None)

    # -- adding to it

    def add(self, observed: Observed, *, older_than: int, walk: UnionWalk | None = None) -> None:
        """Add a step.

        Args:
            observed: The step.
            older_than: Storages with smaller serials existed when the step before it began.
            walk: What it has in common with the union, if that is known.
        """
        walk = walk or self.walk(observed)
        if walk is None:
            raise ValueError("the step does not belong to the union")
        self._longest = max(self._longest, len(observed.funcs))
        self.num_seen += 1
        self.num_latest_new = walk.num_new
        has_news = walk.has_news or not self._ops
        self._ops = walk.carry_out(self._tail)
        for index, variable in sorted(walk.roles.items()):
            if variable.is_new:
                variable.index = len(self.variables)
                self.variables.append(variable)
                variable.is_new, variable.serial = False, None  # it is noted like those of others
            self._note_start(observed, index, variable, older_than)
            variable.end_serial = observed.end_serials[index]
        self._link(observed, walk.roles)
        self._observed = None
        self._version += has_news
        self._num_alive = observed.num_alive
        self._origins.appendleft(
            {
                origin: variable
                for index, variable in walk.roles.items()
                if observed.trace.variables[index].birth_tick is not None
                and (origin := observed.origins[index]) is not None
            }
        )

    def note_latest(self, observed: Observed, older_than: int) -> None:
        """Note once more the storages of a step that was added before others, and came after them."""
        walk = self.walk(observed)
        if walk is None:
            return
        for index, variable in walk.roles.items():
            if not variable.is_new and variable.serial != observed.start_serials[index]:  # else it says nothing new
                self._note_start(observed, index, variable, older_than)
        self._link(observed, {i: v for i, v in walk.roles.items() if not v.is_new})

    @staticmethod
    def _note_start(observed: Observed, index: int, variable: UnionVariable, older_than: int) -> None:
        serial = observed.start_serials[index]
        if serial is None:
            return
        variable.is_replaced |= variable.serial not in (None, serial) or index in observed.drawn
        # What was born in the step before, and lives on, is an optimizer's state.
        is_older = serial == variable.serial or serial < older_than or observed.origins[index] is not None
        variable.is_persistent = variable.death is None and is_older and not variable.is_replaced
        variable.serial, variable.rank = serial, observed.start_ranks[index]

    def _link(self, observed: Observed, roles: Mapping[int, UnionVariable]) -> None:
        """Note what was born in the step before, as which it exists now."""
        heirs = {v.heir for v in self.variables if v.heir is not None}
        for index, variable in roles.items():
            origin = observed.origins[index]
            if observed.start_serials[index] is None or origin is None or variable in heirs:
                continue
            born = self.born_at(origin)
            if born is None or born.heir is not None:
                continue
            if born.nbytes == variable.nbytes or (self._may_vary and variable.may_vary):
                born.heir = variable
                heirs.add(variable)
                born.join(variable)

    # -- planning it

    @property
    def observed(self) -> Observed:
        """The union as if it had been observed: a step that leaves nothing out."""
        if self._observed is None:
            self._observed = self._as_observed()
            births = zip(self._observed.origins, self.variables, strict=True)
            self._versions.pop(self._family, None)
            self._versions[self._family] = {origin: variable for origin, variable in births if origin is not None}
            for old in list(self._versions)[:-_MOST_VERSIONS]:
                del self._versions[old]
        return self._observed

    def for_plan(self, envelope: Envelope) -> Observed | None:
        """The union as it was when an envelope was made of it, with the latest serials."""
        found = envelope.union
        if found is None:
            return None
        pairs = zip(found.start_serials, self.variables, strict=False)
        return replace(found, start_serials=tuple(v.serial if s is not None else None for s, v in pairs))

    def envelope(self, chunk_nbytes: int, *, headroom: float = 1.0, is_segment: bool = False) -> Envelope:
        """The trace to plan for (`Shape.envelope`). No op of it is to run again."""
        trace, elastic = self.observed.trace, self._varying()
        sizes = [v.nbytes for v in trace.variables]
        for index in elastic:
            sizes[index] = -(-int(sizes[index] * headroom) // chunk_nbytes) * chunk_nbytes
        variables = tuple(replace(v, nbytes=nbytes) for v, nbytes in zip(trace.variables, sizes, strict=True))
        trace = replace(trace, variables=variables)
        found = standing(trace, variables, elastic) if is_segment else Envelope(trace=trace, elastic=elastic)
        return replace(found, may_omit=True, union=self.observed)

    def _varying(self) -> frozenset[int]:
        """Variables whose sizes differ, and those that have one size with these in a plan."""
        if not self._may_vary:
            return frozenset()
        return frozenset(v.index for v, (_, varies) in zip(self.variables, self._sizes(), strict=True) if varies)

    def _sizes(self) -> list[tuple[int, bool]]:
        """For each variable the largest size of those that have one with it in a plan, and whether that differs.

        What one step alone had is taken to be as large as what had its size in that step.
        """
        groups: dict[int, tuple[int, bool]] = {}
        for v in self.variables:
            if id(v.group) not in groups:
                varies = any(each.smallest < each.nbytes and each.may_vary for each in v.group)
                groups[id(v.group)] = max(each.nbytes for each in v.group), varies
        found = dict(groups)
        for v in self.variables:
            if v.twin is not None and v.num_seen == 1:
                nbytes, varies = found[id(v.group)]
                more, differs = groups[id(v.twin.group)]
                found[id(v.group)] = (max(nbytes, more), True) if differs else (nbytes, varies)
        return [(nbytes, varies and v.may_vary) for v in self.variables for nbytes, varies in (found[id(v.group)],)]

    def fits(self, envelope: Envelope) -> bool:
        """Whether an envelope has all of the union's ops and variables, room for all sizes seen, and groups of one."""
        held = envelope.trace.variables
        return envelope.is_of(self.observed.trace) and all(
            envelope.has_room(v.index, nbytes)
            and (not varies or v.index in envelope.elastic)
            and held[v.index].nbytes == held[v.group[0].index].nbytes
            for v, (nbytes, varies) in zip(self.variables, self._sizes(), strict=True)
        )

    def _as_observed(self) -> Observed:
        deaths: dict[tuple[int, FreePhase], list[UnionVariable]] = {}
        for variable in self.variables:
            if variable.death is not None:
                op, phase = variable.death
                deaths.setdefault((op.place if op is not None else -1, phase), []).append(variable)
        births: dict[UnionVariable, int] = {}
        dies: dict[UnionVariable, int] = {}
        made: list[Op] = []
        tick, every = 1, Uses()

        def pass_by(variables: Sequence[UnionVariable], ticks: dict[UnionVariable, int]) -> None:
            nonlocal tick
            for variable in variables:
                ticks[variable] = tick
                tick += 1

        for op in (*self._ops, self._tail):
            # Nobody knows which came first: what is born may not take the place of what is freed there.
            pass_by(op.between, births)
            pass_by(deaths.get((op.place - 1, FreePhase.AFTER), []), dies)
            if op is self._tail:
                break
            start = tick
            tick += 1
            pass_by(op.inside, births)
            pass_by(deaths.get((op.place, FreePhase.INSIDE), []), dies)
            uses = [every.of(v.index, reads=True, writes=v in op.written) for v in dict.fromkeys(op.operands)]
            uses += [every.of(v.index, reads=False, writes=True) for v in op.inside if v not in op.operands]
            made.append(
                Op(
                    name=op.name,
                    where=op.where,
                    start_tick=start,
                    stop_tick=tick,
                    duration_ns=op.duration_ns,
                    uses=tuple(uses),
                )
            )
        variables = tuple(
            Variable(
                nbytes=nbytes,
                birth_tick=births.get(v),
                death_tick=dies.get(v),
                becomes=self._becomes(v),
                evictable=v.evictable,
                kind=v.kind,
                label=v.label,
            )
            for v, (nbytes, _) in zip(self.variables, self._sizes(), strict=True)
        )
        return Observed(
            trace=Trace(ops=tuple(made), variables=variables, num_ticks=tick + 1, cyclic=True),
            funcs=tuple(op.func for op in self._ops),
            occurrences=tuple(tuple(v.index for v in op.operands) for op in self._ops),
            start_serials=tuple(v.serial if not v.is_born else None for v in self.variables),
            start_ranks=tuple(v.rank if not v.is_born else None for v in self.variables),
            end_serials=tuple(v.end_serial for v in self.variables),
            sliced=(None,) * len(self._ops),
            family=self._family,
            origins=self._birthplaces(),
            grad_mode=self._grad_mode,
            num_alive=self._num_alive,
            replaceable=frozenset(v.index for v in self.variables if v.is_replaceable),
            forward=tuple(op.forward.place if op.forward is not None else -1 for op in self._ops),
        )

    @property
    def _family(self) -> str:
        return f"{self._name}, version {self._version}"

    def _birthplaces(self) -> tuple[Origin | None, ...]:
        places: dict[UnionVariable, Origin] = {}
        for op in (*self._ops, self._tail):
            for position, born in ((between_ops(op.place), op.between), (inside_op(op.place), op.inside)):
                for number, variable in enumerate(born, 1):
                    places[variable] = self._family, position, variable.ordinal if self._may_vary else number
        return tuple(places.get(variable) for variable in self.variables)

    @staticmethod
    def _becomes(variable: UnionVariable) -> int | None:
        if variable.death is not None:
            return None
        if not variable.is_born:
            return variable.index if variable.is_persistent else None
        heir = variable.heir
        return heir.index if heir is not None and heir.death is not None and variable.evictable else None
