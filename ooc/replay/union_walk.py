"""A walk through a union along one observed step: which of its ops the step has, in order, and what it has besides.

Op by op the next one of the union is looked for that is the same op on the same variables. Ops that use what exists
throughout, parameters for one, are *anchors*: they tell where in its model a step is. An op that comes before an anchor
that the union does not have belongs to that.

What a step leaves out, a layer for one, makes its neighbours use each other's results: where the op that makes an
operand was left out, another variable may *stand in* for it, if the op has an operand in common all the same, or what
follows agrees.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

from ooc.replay.union_anchors import UnionAnchors
from ooc.replay.union_order import interleaved, longest_ascent
from ooc.replay.union_parts import (
    NO_VARIABLES,
    FreePhase,
    Match,
    StepBirths,
    UnionOp,
    UnionVariable,
    is_born_later,
    later,
    outlive_uses,
)
from ooc.replay.union_turns import UnionTurns
from ooc.tracing.call_sites import is_of_backward, may_be_one_place
from ooc.tracing.observed import Observed

_MOST_CANDIDATES = 64
"""So many ops with the same function are compared before an op is taken to be new."""
_LEAST_BETWEEN = 64
"""So many ops at least between two looks at what is certain from there on."""
_LOOKAHEAD = 4
"""So many ops after a candidate must be those that come, where its operands do not say enough."""


class UnionWalk:
    """Walks once, and changes nothing of the union before `carry_out`.

    Args:
        ops: The union's.
        observed: The step.
        known: Variables that exist at the step's start, by index, which are known to be these of the union.
        starting: Those of the union that exist at the start.
        is_elastic: Whether variables are the same though their sizes differ: by place of birth, then, and by use.
        step: A number of its own.

    Attributes:
        found: For each op of the step, that of the union; a new one where it has none.
        roles: For each variable of the step, what it is in the union, at last.
        num_matched: Ops that touch variables and that both have.
        num_new: Those that only the step has.
    """

    def __init__(
        self,
        ops: Sequence[UnionOp],
        observed: Observed,
        known: Mapping[int, UnionVariable],
        starting: Sequence[UnionVariable],
        *,
        is_elastic: bool = False,
        step: int = 0,
    ) -> None:
        self._ops = ops
        self._step = step
        self._is_elastic = is_elastic
        self._observed = observed
        self._starting = starting
        self._births = StepBirths(observed)
        self._places: dict[Any, list[int]] = {}
        self._places_of: dict[tuple[Any, UnionOp | None], list[int]] = {}  # of one op's gradient
        for op in ops:
            self._places.setdefault(op.func, []).append(op.place)
            self._places_of.setdefault((op.func, op.forward), []).append(op.place)
        self._num_ours = Counter((op.func, op.where) for op in ops)
        self._num_theirs = Counter(zip(observed.funcs, (op.where for op in observed.trace.ops), strict=True))
        self._num_of_forward = Counter(zip(observed.funcs, observed.forward, strict=False))
        self._touching = [op.place for op in ops if not op.is_bystander]
        self._coming = [i for i in range(len(observed.funcs)) if self._touches(i)]
        self._turns = UnionTurns(ops, observed, self._births)
        self._sizes_now: dict[tuple[int, int], set[int]] = {}  # by an earlier step, and a size in it
        self.roles: dict[int, UnionVariable] = {}
        self._taken: set[UnionVariable] = set()
        for other, variable in known.items():
            self._note_role(other, variable)
        self._replaced: dict[UnionVariable, UnionVariable] = {}  # by what comes where another one came before
        self._goes_on = False  # whether the latest op was one of the union's
        self.found: list[UnionOp] = []
        self._is_new: list[bool] = []
        self._changed: dict[UnionOp, tuple[UnionVariable, ...]] = {}
        self._written: list[tuple[UnionOp, list[UnionVariable]]] = []
        self._added: list[tuple[UnionOp, bool, UnionVariable]] = []  # whether it is born in the op, or before it
        self._stood_in: list[tuple[int, UnionOp, UnionVariable, UnionVariable]] = []
        self._not_born: list[UnionVariable] = []
        self.num_matched = self.num_new = 0
        self._anchors = UnionAnchors(ops, observed, self.roles)
        self._walk()

    def __repr__(self) -> str:
        return f"<UnionWalk: {self.num_matched} ops in common, {self.num_new} new>"

    @property
    def nbytes_of_other_sizes(self) -> int:
        """Bytes of what only the step has, in ops that both have: mostly, what has another size there."""
        return sum(variable.nbytes for *_, variable in self._added)

    @property
    def has_news(self) -> bool:
        """Whether the step has anything that the union lacks."""
        return bool(self.num_new or self._added or self._changed)

    def _touches(self, index: int) -> bool:
        return bool(self._observed.occurrences[index] or self._births.at(index, is_inside=True))

    # -- walking

    def _walk(self) -> None:
        place, looked_at = 0, -_LEAST_BETWEEN
        fixed, upcoming = dict[int, int](), list[int]()
        was_backward = False
        for index, func in enumerate(self._observed.funcs):
            is_backward = is_of_backward(self._observed.trace.ops[index].where)
            if index == 0 or (is_backward != was_backward and index - looked_at >= _LEAST_BETWEEN):
                fixed, looked_at = self._fixed(index, place), index
                upcoming = sorted(fixed, reverse=True)
            was_backward = is_backward
            while upcoming and upcoming[-1] <= index:
                upcoming.pop()
            stop = fixed[upcoming[-1]] if upcoming else len(self._ops)
            match: Match | None = None
            if index in fixed and self._may_be_of(index, self._ops[fixed[index]]):
                match = self._compare(index, self._ops[fixed[index]])
            match = match or self._find(index, func, place, stop)
            if match is None:
                op = self._new_op(index, func)
                self.num_new += self._touches(index)
            else:
                op = match.op
                self._take(index, match)
                place = op.place + 1
                self.num_matched += self._touches(index)
            self.found.append(op)
            self._is_new.append(match is None)
            if self._touches(index):
                self._goes_on = match is not None

    def _fixed(self, start: int, place: int) -> dict[int, int]:
        """Ops of the step that are certainly these of the union: no other one has such operands at such places.

        From an op of the step on, and from one of the union on. What a step has saved going forward tells which op is
        which going back.
        """
        ours: dict[Any, list[int]] = {}
        theirs: dict[Any, list[int]] = {}
        for op in self._ops[place:]:
            used = tuple(v if v.birth is None or v.birth.place < place else None for v in op.operands)
            if any(used):
                ours.setdefault((op.func, used), []).append(op.place)
        for index in range(start, len(self._observed.funcs)):
            known = tuple(map(self.roles.get, self._observed.occurrences[index]))
            if any(known):
                theirs.setdefault((self._observed.funcs[index], known), []).append(index)
        pairs = sorted(
            (found[0], places[0])
            for token, found in theirs.items()
            if len(found) == 1 and len(places := ours.get(token, [])) == 1
        )
        return dict(longest_ascent(pairs))

    def _find(self, index: int, func: Any, place: int, stop: int) -> Match | None:
        """The next op of the union, from one on and before another, that an op of the step may be."""
        is_of_new = self._anchors.belongs_to_new(index, place)
        role = self._turns.role(index, self.roles)
        if role is not None and role.birth is not None and role.birth.place < 0:
            return None  # of a turn that the union does not have
        first_touching = bisect_left(self._touching, place)
        for candidate in self._candidates(index, func, place, role):
            if candidate >= stop:
                break
            if not may_be_one_place(self._ops[candidate].where, self._observed.trace.ops[index].where):
                continue
            match = self._compare(index, self._ops[candidate])
            if match is None:
                continue
            if match.has_stand_ins and not (
                self._anchors.is_same(index, candidate) or self._is_only_there(index, self._ops[candidate])
            ):
                continue
            is_jump = first_touching < len(self._touching) and self._touching[first_touching] < candidate
            if is_of_new and (is_jump or not (self._goes_on and match.is_certain)):
                continue
            if not is_jump or match.is_exact or self._is_of_one_gradient(index, self._ops[candidate]):
                return match
            if self._agrees(index, candidate, may_lack=match.is_small):
                return match
        return None

    def _forward(self, index: int) -> UnionOp | None:
        """Whose gradient an op of the step is a part of; None: nobody's, or nobody knows."""
        place = self._observed.forward[index] if self._observed.forward else -1
        return self.found[place] if place >= 0 else None

    def _may_be_of(self, index: int, op: UnionOp) -> bool:
        """Whether an op of the step and one of the union may be parts of one op's gradient: of one turn of a loop."""
        forward = self._forward(index)
        return forward is None or op.forward is None or op.forward is forward

    def _is_of_one_gradient(self, index: int, op: UnionOp) -> bool:
        """Whether an op of the step and one of the union are known to be parts of one op's gradient."""
        forward = self._forward(index)
        return forward is not None and op.forward is forward

    def _candidates(self, index: int, func: Any, place: int, role: UnionVariable | None) -> Sequence[int]:
        """The places of the union, from one on, at which an op of the step may be found."""
        forward = self._forward(index)
        tables: tuple[Sequence[int], ...]
        if forward is not None:  # of another turn's gradient it is no part
            known, unknown = self._places_of.get((func, forward), ()), self._places_of.get((func, None), ())
            tables = known, unknown if self._touches(index) else ()
        else:
            tables = (self._turns.places(func, role) or self._places.get(func, ()),)
        starts = [bisect_left(places, place) for places in tables]
        found = [places[start : start + _MOST_CANDIDATES] for places, start in zip(tables, starts, strict=True)]
        return found[0] if len(found) == 1 else sorted(chain(*found))

    def _is_only_there(self, index: int, op: UnionOp) -> bool:
        """Whether an op of the step and one of the union are the only ones of their place, or of one op's gradient."""
        func = self._observed.funcs[index]
        if op.func is func and self._is_of_one_gradient(index, op):
            num_theirs = self._num_of_forward[func, self._observed.forward[index]]
            return num_theirs == len(self._places_of[func, op.forward]) == 1
        call = func, self._observed.trace.ops[index].where
        return call == (op.func, op.where) and self._num_theirs[call] == self._num_ours[call] == 1

    def _agrees(self, index: int, place: int, *, may_lack: bool = False) -> bool:
        """Whether what comes after an op of the step is what comes after one of the union, or is among that."""
        coming = bisect_left(self._coming, index + 1)
        there = bisect_left(self._touching, place + 1)
        ours = [self._ops[p].func for p in self._touching[there : there + _LOOKAHEAD * (1 + may_lack)]]
        theirs = [self._observed.funcs[i] for i in self._coming[coming : coming + _LOOKAHEAD]]
        if may_lack:
            left = iter(ours)
            return all(func in left for func in theirs)
        length = min(len(ours), len(theirs))
        return ours[:length] == theirs[:length]

    def _compare(self, index: int, op: UnionOp) -> Match | None:
        occurrences = self._observed.occurrences[index]
        if len(occurrences) != len(op.operands):
            return self._compare_lists(index, op) or self._compare_small(index, op)
        if not are_one_to_one(op.operands, occurrences):
            return None
        num_exact, roles = 0, dict[int, UnionVariable]()
        operands = []
        is_changed = False
        for variable, other in zip(op.operands, occurrences, strict=True):
            role = roles.get(other) or self._role_in(index, other, op, variable)
            if role is None or not (role is variable or self._has_size(variable, other)):
                return None
            if role is variable:
                num_exact += self.roles.get(other) is variable
                roles.setdefault(other, role)
                operands.append(variable)
            elif self._may_stand_in(variable, role, op):
                roles[other] = variable
                operands.append(variable)
            elif role.is_born and variable.is_born and (role.is_new or is_born_later(role, variable)):
                is_changed = is_changed or self._replaced.get(variable) is not role
                # In a step that has both, it is this one.
                operands.append(role)
            else:
                return None
        if is_changed and not num_exact:
            return None
        is_exact = num_exact == len(occurrences) > 0
        has_stand_ins = any(self.roles.get(other) not in (None, role) for other, role in roles.items())
        is_certain = is_exact and any(variable.is_born for variable in op.operands)
        return Match(op, tuple(operands), is_exact, is_certain, has_stand_ins, roles=roles)

    def _role_in(self, index: int, other: int, op: UnionOp, variable: UnionVariable) -> UnionVariable | None:
        """What a variable of the step is so far; what is not known yet may be the one that is there."""
        role = self.roles.get(other)
        if role is not None:
            return role
        if not self._has_size(variable, other) or variable in self._taken:
            return None
        if other in self._births.at(index, is_inside=False):
            return variable if variable in op.between else None
        is_start = self._observed.start_serials[other] is not None
        return variable if is_start and not variable.is_born and not variable.is_persistent else None

    def _has_size(self, variable: UnionVariable, other: int) -> bool:
        """Whether a variable of the step has a size that one of the union may have in this step.

        What had one size with it in an earlier step has one in this step.
        """
        nbytes = self._observed.trace.variables[other].nbytes
        if not self._is_elastic:
            return nbytes == variable.nbytes
        alike = [sizes for size in variable.sizes.items() if (sizes := self._sizes_now.get(size))]
        return nbytes in set.intersection(*alike) if alike else variable.may_have(nbytes)

    def _note_role(self, other: int, variable: UnionVariable) -> None:
        self.roles[other] = variable
        self._taken.add(variable)
        if self._is_elastic:
            for size in variable.sizes.items():
                self._sizes_now.setdefault(size, set()).add(self._observed.trace.variables[other].nbytes)

    def _may_stand_in(self, variable: UnionVariable, role: UnionVariable, op: UnionOp) -> bool:
        """Whether another variable may be where this one is: the step has not made it."""
        if variable.birth is None or variable in self._taken or role.is_new or not role.is_born:
            return False
        return variable.birth.place < op.place

    def _compare_lists(self, index: int, op: UnionOp) -> Match | None:
        """Ops on lists, some of whose operands only one of the two has."""
        ours = list(op.operands)
        theirs = [self.roles.get(other) for other in self._observed.occurrences[index]]
        if not ours or not theirs or None in theirs:
            return None
        common = [role for role in theirs if role in ours]
        if len(set(common)) * 2 < min(len(ours), len(theirs)) or len(set(theirs)) < len(theirs):
            return None
        order = [ours.index(role) for role in common]
        if order != sorted(order) or len(set(ours)) < len(ours):
            return None
        merged: list[UnionVariable] = []
        at = 0
        for role in theirs:
            assert role is not None
            if role in ours:
                stop = ours.index(role) + 1
                merged += ours[at:stop]
                at = stop
            else:
                merged.append(role)
        return Match(op, (*merged, *ours[at:]), is_exact=True)

    def _compare_small(self, index: int, op: UnionOp) -> Match | None:
        """An op some of whose operands only one of the two has: the other one's are too small for variables."""
        theirs, ours = self._observed.occurrences[index], op.operands
        if not self._is_elastic or not ((ours and theirs) or self._is_only_there(index, op)):
            return None  # no operand tells that it is the same, nor does the place
        operands, roles, rest = list[UnionVariable](), dict[int, UnionVariable](), list(ours)
        for other in theirs:
            at = next((at for at, variable in enumerate(rest) if self._may_be(index, other, op, variable)), None)
            if at is not None and roles.setdefault(other, rest[at]) is rest[at]:
                operands += rest[: at + 1]
                del rest[: at + 1]
            elif at is None and len(theirs) > len(ours) and (role := self.roles.get(other)) is not None and role.is_new:
                operands.append(role)
            else:
                return None
        operands += rest
        if any(variable in self._taken or not variable.is_born for variable in {*ours} - {*roles.values()}):
            return None  # the step has it, or it is never too small
        return Match(op, tuple(operands), is_exact=bool(roles), is_certain=bool(roles), is_small=True, roles=roles)

    def _may_be(self, index: int, other: int, op: UnionOp, variable: UnionVariable) -> bool:
        """Whether a variable of the step is known to be this one of the union, or may be it, as nothing is known."""
        return (self.roles.get(other) or self._role_in(index, other, op, variable)) is variable

    # -- noting what is found

    def _take(self, index: int, match: Match) -> None:
        op = match.op
        for other, variable in match.roles.items():
            before = self.roles.get(other)
            if before is not variable:
                if before is not None:
                    self._taken.discard(before)
                    self._stood_in.append((other, op, before, variable))
                self._note_role(other, variable)
        self._note_written(index, op)
        self._pair(index, op, is_inside=False)
        self._pair(index, op, is_inside=True)
        if match.operands != op.operands:
            self._changed[op] = match.operands
            if len(match.operands) == len(op.operands):
                self._replaced.update(zip(op.operands, match.operands, strict=True))

    def _note_written(self, index: int, op: UnionOp) -> None:
        """Note what an op changes, as which it does so: by the end of the step that may stand in for something else."""
        uses = self._observed.trace.ops[index].uses
        written = [self.roles[use.variable] for use in uses if use.reads and use.writes]
        if written:
            self._written.append((op, written))

    def _pair(self, index: int, op: UnionOp, *, is_inside: bool) -> None:
        """What the step has born at a place, with what the union has there: of one size, in order."""
        born, there, at = self._births.at(index, is_inside=is_inside), op.born(is_inside=is_inside), 0
        if not (born or there):
            return
        found = set[UnionVariable]()
        for other in born:
            if other in self.roles:
                at = max(at, there.index(self.roles[other]) + 1) if self.roles[other] in there else at
                found.add(self.roles[other])
                continue
            is_only = self._is_elastic and len(born) == len(there) == 1
            same = next((i for i in range(at, len(there)) if is_only or self._is_born_as(there[i], other)), None)
            if same is None:
                variable = self._new_variable(other, op)
                self._added.append((op, is_inside, variable))
            else:
                variable, at = there[same], same + 1
            self._note_role(other, variable)
            found.add(variable)
        self._not_born += [variable for variable in there if variable not in found]

    def _is_born_as(self, variable: UnionVariable, other: int) -> bool:
        """Whether what the step has born is what the union has born there: the allocation of this number, or size."""
        if not self._is_elastic or not variable.ordinal or not (ordinal := self._ordinal(other)):
            return self._observed.trace.variables[other].nbytes == variable.nbytes
        return ordinal == variable.ordinal

    def _ordinal(self, other: int) -> int:
        origin = self._observed.origins[other]
        return origin[2] if origin is not None else 0

    def _new_op(self, index: int, func: Any) -> UnionOp:
        traced = self._observed.trace.ops[index]
        op = UnionOp(func=func, name=traced.name, where=traced.where, duration_ns=traced.duration_ns)
        op.forward = self._forward(index)
        for is_inside in (False, True):
            born = self._births.at(index, is_inside=is_inside)
            self.roles.update((other, self._new_variable(other, op)) for other in born)
            op.bear(tuple(self.roles[other] for other in born), is_inside=is_inside)
        op.operands = tuple(self._role(other) for other in self._observed.occurrences[index])
        written = [self._role(use.variable) for use in traced.uses if use.reads and use.writes]
        op.written = frozenset(written) if written else NO_VARIABLES
        return op

    def _role(self, other: int) -> UnionVariable:
        """What a variable of the step is, at last: a new one if the union has none."""
        if other not in self.roles:
            self.roles[other] = self._new_variable(other, None)
        return self.roles[other]

    def _new_variable(self, other: int, birth: UnionOp | None) -> UnionVariable:
        traced = self._observed.trace.variables[other]
        return UnionVariable(
            nbytes=traced.nbytes,
            kind=traced.kind,
            label=traced.label,
            evictable=traced.evictable,
            birth=birth,
            is_born=birth is not None,
            serial=self._observed.start_serials[other],
            ordinal=self._ordinal(other) if birth is not None else 0,
        )

    # -- carrying it out

    def carry_out(self, tail: UnionOp) -> list[UnionOp]:
        """Add to the union what it lacks. Its ops, in order; `tail` stands for the end of the step."""
        ops = interleaved(self._ops, self.found, self._is_new)
        for place, op in enumerate((*ops, tail)):
            op.place = place
        for at, is_inside, variable in self._added:
            self._insert(at, variable, is_inside=is_inside)
            variable.smallest = 0 if self._is_elastic else variable.nbytes  # what had the op before did not have it
        for op, operands in self._changed.items():
            op.operands = operands
            op.written = op.written.intersection(operands) if op.written else NO_VARIABLES
        for op, written in self._written:
            op.written = op.written.union(v for v in written if v in op.operands)
        self._pair_last(tail)
        self._pair_rest()
        for index, op in enumerate(self.found):
            traced = self._observed.trace.ops[index]
            op.duration_ns = min(op.duration_ns, traced.duration_ns)
            op.forward = op.forward or self._forward(index)
        for other, traced_variable in enumerate(self._observed.trace.variables):
            variable = self._role(other)
            death = self._births.death(other, self.found)
            variable.death = death if variable.is_new else later(variable.death, death)
            variable.evictable = variable.evictable and traced_variable.evictable
            variable.note_nbytes(traced_variable.nbytes, self._step)
            variable.num_seen += 1
        self._note_stand_ins()
        outlive_uses(ops, tail)
        return ops

    def _note_stand_ins(self) -> None:
        for other, op, before, variable in self._stood_in:
            before.note_nbytes(self._observed.trace.variables[other].nbytes, self._step)
            before.death = later(before.death, (op, FreePhase.AFTER))  # until then it is kept
            variable.is_replaceable = True
            if self._is_elastic:
                before.join(variable)
        if self._is_elastic:
            self._note_sizes()

    def _note_sizes(self) -> None:
        """What was not born has size 0; what always has an operand's size has it in a plan, too: one may stand in."""
        variables = self._observed.trace.variables
        for variable in self._not_born:
            variable.smallest = 0
        varying = {variables[other].nbytes: v for other, v in self.roles.items() if v.smallest < v.nbytes}
        for other, variable in self.roles.items():
            if variable.num_seen == 1:
                variable.twin = varying.get(variables[other].nbytes)
        for index, op in enumerate(self.found):
            for born in self._births.at(index, is_inside=True):
                nbytes = variables[born].nbytes
                for used in set(self._observed.occurrences[index]):
                    pair = self.roles[used], self.roles[born]
                    if variables[used].nbytes == nbytes and op.equal.setdefault(pair, nbytes) != nbytes:
                        pair[0].join(pair[1])

    def _pair_last(self, tail: UnionOp) -> None:
        num_added = len(self._added)
        self._pair(len(self.found), tail, is_inside=False)
        for *_, variable in self._added[num_added:]:
            self._insert(tail, variable, is_inside=False)

    def _insert(self, op: UnionOp, variable: UnionVariable, *, is_inside: bool) -> None:
        """Among what is born at a place; in an elastic union, by the numbers of the allocations."""
        there = op.born(is_inside=is_inside)
        at = bisect_right([v.ordinal for v in there], variable.ordinal) if self._is_elastic else len(there)
        op.bear((*there[:at], variable, *there[at:]), is_inside=is_inside)

    def _pair_rest(self) -> None:
        """What exists at the start and is only freed: by size, in order."""
        for other, serial in enumerate(self._observed.start_serials):
            if serial is None or other in self.roles:
                continue
            nbytes = self._observed.trace.variables[other].nbytes
            free = (v for v in self._starting if v not in self._taken and not v.is_persistent and v.nbytes == nbytes)
            if (variable := next(free, None)) is not None:
                self._note_role(other, variable)


def are_one_to_one(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> bool:
    """Whether in two rows of operands those are equal in one that are equal in the other."""
    return len(set(zip(ours, theirs, strict=True))) == len(set(ours)) == len(set(theirs))
