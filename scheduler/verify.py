"""The checker: is a plan legal for a trace?

`verify` re-derives everything from the trace and the residencies. It shares no code with the
planners, prefers the obvious to the fast, and reports every rule that a plan breaks.

What it takes for granted is the meaning of the acts in `scheduler.plan` and `occupied_ticks`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise

import numpy as np

from scheduler.plan import (
    Born,
    Dies,
    Discarded,
    Dropped,
    Evicted,
    Kept,
    Loaded,
    Plan,
    PlanError,
    Recomputed,
    Residency,
    occupied_ticks,
)
from scheduler.trace import Trace

_MAX_LISTED = 20


class IllegalPlan(PlanError):
    """A plan that breaks rules; `violations` lists them, each with the variable and the place."""

    def __init__(self, violations: list[str]) -> None:
        self.violations = tuple(violations)
        listed = "".join(f"\n  - {line}" for line in violations[:_MAX_LISTED])
        more = f"\n  ... and {len(violations) - _MAX_LISTED} more" if len(violations) > _MAX_LISTED else ""
        super().__init__(f"the plan breaks {len(violations)} rule(s):{listed}{more}")


def verify(plan: Plan, trace: Trace) -> None:
    """Check `plan` against `trace`. Returns if it is legal; raises `IllegalPlan` (a `PlanError`) if not."""
    checker = _Checker(plan, trace)
    checker.check_form()
    if not checker.violations:  # the rules below assume well-formed residencies
        checker.check_order()
        checker.check_uses()
        checker.check_evictions()
        checker.check_drops()
        checker.check_boundary()
        checker.check_not_evictable()
        checker.check_reruns()
        checker.check_chunks()
    if checker.violations:
        raise IllegalPlan(checker.violations)


class _Checker:
    def __init__(self, plan: Plan, trace: Trace) -> None:
        self.plan = plan
        self.trace = trace
        self.violations: list[str] = []
        self.by_variable: list[list[Residency]] = [[] for _ in trace.variables]
        self.writers: list[list[int]] = [[] for _ in trace.variables]
        for index, op in enumerate(trace.ops):
            for use in op.uses:
                if use.writes:
                    self.writers[use.variable].append(index)

    def fail(self, message: str) -> None:
        self.violations.append(message)

    def name(self, variable: int) -> str:
        label = self.trace.variables[variable].label
        return f"variable {variable} ({label})" if label else f"variable {variable}"

    def ticks(self, residency: Residency) -> tuple[int, int]:
        return occupied_ticks(residency, self.trace)

    # -- each residency by itself ------------------------------------------------------------

    def check_form(self) -> None:
        if self.plan.trace_fingerprint != self.trace.fingerprint():
            self.fail(f"made for trace {self.plan.trace_fingerprint}, not for {self.trace.fingerprint()}")
        for residency in self.plan.residencies:
            if not 0 <= residency.variable < len(self.trace.variables):
                self.fail(f"unknown variable {residency.variable}")
                continue
            count = len(self.violations)
            self.check_start(residency)
            self.check_stop(residency)
            if len(self.violations) == count:
                self.check_interval(residency)
            self.check_chunk_list(residency)
            self.by_variable[residency.variable].append(residency)

    def check_start(self, residency: Residency) -> None:
        who, v = self.name(residency.variable), self.trace.variables[residency.variable]
        match residency.start:
            case Born():
                if v.birth_tick is None:
                    self.fail(f"{who} is born in the plan, but exists when the step starts")
            case Loaded(before_op=op):
                if not 0 <= op < len(self.trace.ops):
                    self.fail(f"{who} is loaded before op {op}; the trace has {len(self.trace.ops)} ops")
            case Recomputed(before_op=op, ops=ops):
                if not 0 <= op < len(self.trace.ops):
                    self.fail(f"{who} is recomputed before op {op}; the trace has {len(self.trace.ops)} ops")
                elif not ops or list(ops) != sorted(set(ops)) or not 0 <= ops[0] <= ops[-1] < op:
                    self.fail(f"{who} is recomputed before op {op} by ops {ops}, which are not earlier ops in order")
            case Kept():
                if not self.trace.cyclic:
                    self.fail(f"{who} starts kept, but the trace is not cyclic: it starts away")
                elif v.birth_tick is not None:
                    self.fail(f"{who} starts kept, but is born within the step")

    def check_stop(self, residency: Residency) -> None:
        who, v = self.name(residency.variable), self.trace.variables[residency.variable]
        num_ops = len(self.trace.ops)
        match residency.stop:
            case Dies():
                if v.death_tick is None:
                    self.fail(f"{who} dies in the plan, but is alive at the end of the step")
            case Evicted(write_op=write, release_op=release):
                if not -num_ops <= write < release <= num_ops:
                    self.fail(f"{who} is written after op {write} and released at op {release} of {num_ops}")
                elif write < 0 and residency.start != Kept():
                    self.fail(f"{who} is written in the step before, after op {write}, but does not start kept")
            case Dropped(after_op=op):
                if not 0 <= op < num_ops:
                    self.fail(f"{who} is dropped after op {op}; the trace has {num_ops} ops")
            case Discarded(after_op=op):
                if not 0 <= op < num_ops:
                    self.fail(f"{who} is discarded after op {op}; the trace has {num_ops} ops")
            case Kept():
                if not self.trace.cyclic:
                    self.fail(f"{who} is kept at the end, but the trace is not cyclic: it must end away")
                elif v.death_tick is not None:
                    self.fail(f"{who} is kept at the end, but dies within the step")

    def check_interval(self, residency: Residency) -> None:
        start, stop = self.ticks(residency)
        born, dead = self.trace.lifetime(residency.variable)
        if start >= stop:
            self.fail(f"{self.name(residency.variable)} has an empty residency [{start}, {stop})")
        if start >= dead and isinstance(residency.start, Recomputed) and isinstance(residency.stop, Discarded):
            return  # made again after its free, for re-runs to read
        if start < born or stop > dead:
            self.fail(
                f"{self.name(residency.variable)} is resident in [{start}, {stop}), outside its life [{born}, {dead})"
            )

    def check_chunk_list(self, residency: Residency) -> None:
        who, machine = self.name(residency.variable), self.plan.machine
        needed = machine.chunks_of(self.trace.variables[residency.variable].nbytes)
        held = residency.chunk_indices()
        if any(count < 1 for _, count in residency.chunks):
            self.fail(f"{who} has an empty run in {residency.chunks}")
        if len(held) != needed:
            self.fail(f"{who} holds {len(held)} chunks; its bytes need {needed}")
        if len(set(held)) != len(held):
            self.fail(f"{who} holds a chunk twice in {residency.chunks}")
        if any(not 0 <= chunk < machine.num_chunks for chunk in held):
            self.fail(f"{who} holds chunks {residency.chunks} outside the pool of {machine.num_chunks}")

    # -- each variable by itself -------------------------------------------------------------

    def check_order(self) -> None:
        keys = [(self.ticks(r)[0], r.variable) for r in self.plan.residencies]
        if keys != sorted(keys):
            self.fail("the residencies are not ordered by start and variable")
        for variable, stays in enumerate(self.by_variable):
            who = self.name(variable)
            for before, after in pairwise(stays):
                if self.ticks(before)[1] > self.ticks(after)[0]:
                    self.fail(f"{who} has overlapping residencies {self.ticks(before)} and {self.ticks(after)}")
                is_ghost = isinstance(before.stop, Dies) and isinstance(after.start, Recomputed)
                if not isinstance(before.stop, Evicted | Dropped | Discarded) and not is_ghost:
                    self.fail(f"{who}: {before.stop} is not its last stop, but nothing is in the store after it")
                if not isinstance(after.start, Loaded | Recomputed):
                    self.fail(f"{who}: {after.start} is not its first start, but it is away before it")
                if isinstance(before.stop, Discarded) and isinstance(after.start, Loaded):
                    self.fail(f"{who} is loaded before op {after.start.before_op}, but was discarded, not written out")
            if stays and isinstance(stays[-1].stop, Discarded) and self.trace.variables[variable].death_tick is None:
                self.fail(f"{who} is discarded for good, but is alive at the end of the step")
            if self.trace.variables[variable].birth_tick is None:
                continue
            if not stays or not isinstance(stays[0].start, Born):
                self.fail(f"{who} is born within the step, but its first residency is not born")

    def check_uses(self) -> None:
        # In order of start and never two at once, or `check_order` has said so: one by bisection is the only one.
        spans = [[self.ticks(stay) for stay in stays] for stays in self.by_variable]
        for index, op in enumerate(self.trace.ops):
            for use in op.uses:
                born, dead = self.trace.lifetime(use.variable)
                needs = max(op.start_tick, born), min(op.stop_tick, dead)
                own = spans[use.variable]
                at = bisect_right(own, needs[0], key=lambda span: span[0]) - 1
                if at < 0 or own[at][1] < needs[1]:
                    self.fail(f"op {index} ({op.name}) uses {self.name(use.variable)}, which is not resident then")

    def write_ops(self, residency: Residency) -> list[int]:
        """Ops that write the variable while this residency holds it."""
        start, stop = self.ticks(residency)
        ops, own = self.trace.ops, self.writers[residency.variable]
        first = bisect_right(own, start, key=lambda index: ops[index].stop_tick)
        return own[first : bisect_left(own, stop, key=lambda index: ops[index].start_tick)]

    def check_evictions(self) -> None:
        for residency in self.plan.residencies:
            if not isinstance(residency.stop, Evicted):
                continue
            who, write = self.name(residency.variable), residency.stop.write_op
            if write < 0:
                self.check_write_before(residency, write + len(self.trace.ops))
                continue
            late = [op for op in self.write_ops(residency) if op > write]
            if late:
                self.fail(f"{who} is written out after op {write}, but op {late[0]} changes it later")
            at_end = write == len(self.trace.ops) - 1  # what is allocated after the last op is written at the end
            if self.trace.ops[write].stop_tick <= self.ticks(residency)[0] and not at_end:
                self.fail(f"{who} is written out after op {write}, before it is in the pool")

    def check_write_before(self, residency: Residency, write: int) -> None:
        """Check a write right after op `write` of the step before, of what is released in this one."""
        who = self.name(residency.variable)
        if self.trace.variables[residency.variable].becomes != residency.variable:
            self.fail(f"{who} is written in the step before it is released, but is another variable there")
            return
        held = self.by_variable[residency.variable][-1]  # up to the end: `check_boundary` says so if not
        if self.trace.ops[write].stop_tick <= self.ticks(held)[0]:
            self.fail(f"{who} is written after op {write} of the step before, when it is not in the pool")
        late = [op for op in self.write_ops(held) if op > write]
        if late:
            self.fail(f"{who} is written after op {write} of the step before, but op {late[0]} changes it later there")
        changed = self.write_ops(residency)
        if changed:
            self.fail(f"{who} is written in the step before, but op {changed[0]} changes it before it is released")

    # -- clean or dirty ----------------------------------------------------------------------

    def check_drops(self) -> None:
        ends_clean = self.kept_and_clean()
        for residency in self.plan.residencies:
            if isinstance(residency.stop, Dropped) and not self.is_clean(residency, ends_clean):
                self.fail(f"{self.name(residency.variable)} is dropped, but the store has no current copy of it")

    def is_clean(self, residency: Residency, starts_clean: set[int]) -> bool:
        """Does the store have the residency's bytes at its stop? `starts_clean`: variables kept clean."""
        if self.write_ops(residency):
            return False
        match residency.start:
            case Born():
                return False
            case Loaded():
                return True
            case Recomputed():  # the same bytes again: current if the store's copy was, when they went
                stays = self.by_variable[residency.variable]
                before = stays.index(residency) - 1
                return before >= 0 and isinstance(stays[before].stop, Evicted | Dropped)
            case Kept():
                return residency.variable in starts_clean

    def kept_and_clean(self) -> set[int]:
        """Variables that start kept with a current copy in the store: the least fixpoint over the boundary."""
        clean: set[int] = set()
        while True:
            found = {
                heir
                for variable, stays in enumerate(self.by_variable)
                if (heir := self.trace.variables[variable].becomes) is not None
                and stays
                and isinstance(stays[-1].stop, Kept)
                and self.is_clean(stays[-1], clean)
            }
            if found == clean:
                return clean
            clean = found

    # -- the step boundary -------------------------------------------------------------------

    def check_boundary(self) -> None:
        kept: list[tuple[Residency, Residency]] = []
        for variable, v in enumerate(self.trace.variables):
            if v.becomes is None:
                continue
            stays, heirs = self.by_variable[variable], self.by_variable[v.becomes]
            ends = stays[-1] if stays and isinstance(stays[-1].stop, Kept) else None
            starts = heirs[0] if heirs and isinstance(heirs[0].start, Kept) else None
            pair = f"{self.name(variable)} and its heir {v.becomes}"
            if (ends is None) != (starts is None):
                self.fail(f"{pair}: only one of the two is kept over the step boundary")
            elif ends is not None and starts is not None:
                kept.append((ends, starts))
                if v.becomes != variable and self.trace.lifetime(v.becomes)[1] > self.trace.lifetime(variable)[0]:
                    self.fail(f"{pair} are alive at once (double-buffered), so they must be away at the boundary")
        self.check_border_copies(kept)

    def check_border_copies(self, kept: list[tuple[Residency, Residency]]) -> None:
        """Copy on paper, chunk by chunk: nothing is overwritten that is still needed, and all arrives where it starts.

        Args:
            kept: Pairs of the last residency of a step and the first of the next, of the same bytes.
        """
        if self.plan.border_copies and not self.trace.cyclic:
            self.fail("there are copies at the step's border, but the trace is not cyclic")
            return
        held: dict[int, tuple[Residency, int]] = {}
        for ends, starts in kept:
            for place, chunk in enumerate(ends.chunk_indices()):
                held[chunk] = starts, place
        num_chunks = self.plan.machine.num_chunks
        for copy in self.plan.border_copies:
            which = f"the copy of {copy.num_chunks} chunks from {copy.source} to {copy.target} at the border"
            first, last = min(copy.source, copy.target), max(copy.source, copy.target)
            if copy.num_chunks < 1 or first < 0 or last + copy.num_chunks > num_chunks:
                self.fail(f"{which} leaves the pool of {num_chunks} chunks, or is of none")
                return
            if first + copy.num_chunks > last:
                self.fail(f"{which} overlaps itself")
                return
            for offset in range(copy.num_chunks):
                source, target = copy.source + offset, copy.target + offset
                if target in held:
                    self.fail(f"{which} overwrites chunk {target}, which holds {self.name(held[target][0].variable)}")
                    return
                if source not in held:
                    self.fail(f"{which} copies chunk {source}, in which nothing is kept")
                    return
                held[target] = held.pop(source)
        for ends, starts in kept:
            pair = f"{self.name(ends.variable)} and its heir {starts.variable}"
            if ends.chunk_indices() == starts.chunk_indices():
                continue
            if not self.trace.variables[ends.variable].evictable or not self.trace.variables[starts.variable].evictable:
                self.fail(f"{pair} must not change chunks, but do: {ends.chunks} and {starts.chunks}")
        for ends, starts in kept:
            arrived = all(held.get(chunk) == (starts, place) for place, chunk in enumerate(starts.chunk_indices()))
            if not arrived:
                self.fail(
                    f"{self.name(ends.variable)} and its heir {starts.variable} are kept in different chunks: "
                    f"{ends.chunks} and {starts.chunks}, and no copies bring them there"
                )

    def check_not_evictable(self) -> None:
        for variable, v in enumerate(self.trace.variables):
            if v.evictable:
                continue
            who, stays = self.name(variable), self.by_variable[variable]
            if len(stays) != 1:
                self.fail(f"{who} must never be away, but has {len(stays)} residencies")
                continue
            starts = stays[0].start in (Born(), Kept())
            stops = stays[0].stop in (Dies(), Kept())
            if not self.trace.cyclic:  # a step taken alone starts and ends with everything outside
                starts = starts or stays[0].start == Loaded(0)
                stops = stops or self.ticks(stays[0])[1] == self.trace.num_ticks
            if not (starts and stops):
                self.fail(f"{who} must never be away, but {stays[0].start} .. {stays[0].stop} is not its whole life")

    # -- re-runs -----------------------------------------------------------------------------

    def check_reruns(self) -> None:
        runs: dict[int, list[Residency]] = {}
        for residency in self.plan.residencies:
            if isinstance(residency.start, Recomputed):
                runs.setdefault(residency.start.before_op, []).append(residency)
        scratch = {room.before_op: self.scratch_chunks(room.chunks) for room in self.plan.scratch}
        if [room.before_op for room in self.plan.scratch] != sorted(scratch):
            self.fail("the scratch rooms are not in order of op, one an op")
        for index in sorted(set(scratch) - set(runs)):
            self.fail(f"there is scratch room before op {index}, but no re-run")
        for index, made in sorted(runs.items()):
            needed = self.check_rerun(index, made)
            held = scratch.get(index, [])
            if len(held) != needed:
                self.fail(f"the re-run before op {index} holds {len(held)} chunks of scratch; it needs {needed}")
            if len(set(held)) != len(held) or any(not 0 <= c < self.plan.machine.num_chunks for c in held):
                self.fail(f"the scratch before op {index} repeats a chunk or leaves the pool: {held}")

    def scratch_chunks(self, runs: tuple[tuple[int, int], ...]) -> list[int]:
        return [chunk for first, count in runs for chunk in range(first, first + count)]

    def check_rerun(self, index: int, made: list[Residency]) -> int:
        """Run the ops again on paper: for each variable, by how many of its writes it has been made.

        Returns the chunks of scratch that the re-run needs.
        """
        ops = sorted({op for r in made if isinstance(r.start, Recomputed) for op in r.start.ops})
        kept = {r.variable for r in made}
        tick = self.trace.ops[index].start_tick
        num_writes: dict[int, int] = {}
        for op in ops:
            if not self.trace.ops[op].replayable:
                self.fail(f"op {op} ({self.trace.ops[op].name}) is run again before op {index}, but is not replayable")
            for v in self.born_in(op):
                num_writes[v] = 0
                if not self.trace.variables[v].evictable:
                    self.fail(f"op {op} is run again before op {index}, but makes {self.name(v)}, which stays for good")
            for use in self.trace.ops[op].uses:
                v, first_seen = use.variable, self.writes_before(use.variable, op)
                if num_writes.get(v) == first_seen:  # made by the re-run as the op saw it
                    num_writes[v] += use.writes
                elif use.writes:
                    self.fail(f"op {op}, run again before op {index}, changes {self.name(v)}, which it did not make")
                elif first_seen != self.writes_before(v, index):
                    self.fail(f"op {op}, run again before op {index}, reads {self.name(v)}, which was changed since")
                elif not any(
                    self.ticks(s)[0] <= tick < self.ticks(s)[1] and s not in made for s in self.by_variable[v]
                ):
                    self.fail(f"op {op}, run again before op {index}, reads {self.name(v)}, which is not resident then")
        for v in sorted(kept):
            if num_writes.get(v) != self.writes_before(v, index):
                self.fail(f"the re-run before op {index} does not make the present state of {self.name(v)}")
        return self.scratch_needed(ops, kept)

    def writes_before(self, variable: int, index: int) -> int:
        return sum(op < index for op in self.writers[variable])

    def born_in(self, op: int) -> list[int]:
        start, stop = self.trace.ops[op].start_tick, self.trace.ops[op].stop_tick
        births = ((v, variable.birth_tick) for v, variable in enumerate(self.trace.variables))
        return [v for v, birth in births if birth is not None and start <= birth < stop]

    def scratch_needed(self, ops: list[int], kept: set[int]) -> int:
        """Chunks of what `ops` allocate and do not keep, at the worst tick of any of the ops."""
        stays: list[tuple[int, int, int]] = []
        for op in ops:
            window = self.trace.ops[op].stop_tick
            for v in self.born_in(op):
                born, dead = self.trace.lifetime(v)
                users = [other for other in ops if any(use.variable == v for use in self.trace.ops[other].uses)]
                gone = dead if dead < window else self.trace.ops[max([op, *users])].stop_tick
                if v not in kept:
                    stays.append((born, gone, self.plan.machine.chunks_of(self.trace.variables[v].nbytes)))
        return max((sum(n for born, gone, n in stays if born <= t < gone) for t, _, _ in stays), default=0)

    # -- the pool ----------------------------------------------------------------------------

    def check_chunks(self) -> None:
        rooms = [(room, self.trace.ops[room.before_op].start_tick) for room in self.plan.scratch]
        chunks = [stay.chunk_indices() for stay in self.plan.residencies]
        chunks += [tuple(self.scratch_chunks(room.chunks)) for room, _ in rooms]
        if not chunks:
            return
        holders = [self.name(stay.variable) for stay in self.plan.residencies]
        holders += [f"the scratch of op {room.before_op}" for room, _ in rooms]
        held = [np.array(own, dtype=np.int64) for own in chunks]
        owner = np.repeat(np.arange(len(held)), [len(own) for own in held])
        chunk = np.concatenate(held)
        spans = [self.ticks(stay) for stay in self.plan.residencies] + [(tick, tick + 1) for _, tick in rooms]
        ticks = np.array(spans, dtype=np.int64)
        order = np.lexsort((ticks[owner, 0], chunk))
        owner, chunk = owner[order], chunk[order]
        clash = (chunk[1:] == chunk[:-1]) & (ticks[owner[1:], 0] < ticks[owner[:-1], 1])
        for position in np.flatnonzero(clash):
            first, second = owner[position], owner[position + 1]
            self.fail(
                f"chunk {chunk[position]} is held by {holders[first]} in {spans[first]} "
                f"and by {holders[second]} in {spans[second]}"
            )
