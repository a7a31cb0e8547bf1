"""Re-runs: which ops may run again, what bringing a variable back that way takes, and what it costs.

A re-run right before op `i` runs a set of earlier ops of the step again, in the order of the trace
(`scheduler.plan.Recomputed`). It is sound if every op of it sees, bit for bit, what it saw the
first time, and changes nothing that anybody else sees:

- each of its ops is `replayable`, and makes no memory that can never be away (a library's workspace
  would be made twice);
- what an op reads is either made by the re-run, by exactly the writes that had happened to it when
  the op first ran (then that copy is read), or resident, and not written by any op between then and `i`;
- what an op writes is fresh: allocated by the op itself, or earlier in the re-run. An in-place op can
  therefore run again, but only together with the op that allocates what it changes.

So bringing a variable back means running *all* ops that wrote it so far, and making whatever is
missing of what they read in the same way, recursively.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scheduler.plan import Machine, Recomputed, Residency
from scheduler.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Everything that is run again right before one op.

    Attributes:
        before_op: The op.
        ops: In the order of the trace, each once.
        made: Variables that it brings back.
        sources: Variables that it reads from the pool.
        duration_ns: The ops' own time, and what running each again takes beside.
        num_scratch_chunks: Chunks for what it allocates and does not keep, at its worst moment.
    """

    before_op: int
    ops: tuple[int, ...]
    made: tuple[int, ...]
    sources: tuple[int, ...]
    duration_ns: int
    num_scratch_chunks: int


class ReplayGraph:
    """Who makes, writes and reads what, for questions about re-runs.

    Attributes:
        maker: For each variable, the op inside which it is allocated; None if there is none.
        births: For each op, the variables allocated inside it.
        writers: For each variable, the ops that write it, in order; its maker is one of them.
        may_rerun: For each op, whether it may run again.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.maker: list[int | None] = [None] * len(trace.variables)
        self.births: list[list[int]] = [[] for _ in trace.ops]
        self._starts = starts = trace.op_starts
        for v, variable in enumerate(trace.variables):
            if variable.birth_tick is None:
                continue
            index = bisect_right(starts, variable.birth_tick) - 1
            if index >= 0 and variable.birth_tick < trace.ops[index].stop_tick:
                self.maker[v] = index
                self.births[index].append(v)
        written: list[set[int]] = [set() if maker is None else {maker} for maker in self.maker]
        for index, op in enumerate(trace.ops):
            for use in op.uses:
                if use.writes:
                    written[use.variable].add(index)
        self.writers = [sorted(own) for own in written]
        self._expiry: dict[tuple[int, int], int] = {}
        self._num_ops = len(trace.ops)
        self.may_rerun = [
            op.replayable and all(trace.variables[v].evictable for v in born)
            for op, born in zip(trace.ops, self.births, strict=True)
        ]

    def is_written(self, variable: int, start_op: int, stop_op: int) -> bool:
        """Whether an op in `[start_op, stop_op)` writes the variable."""
        own = self.writers[variable]
        first = bisect_left(own, start_op)
        return first < len(own) and own[first] < stop_op

    def may_ever_return(self, variable: int) -> bool:
        """Whether each op that writes the variable may run again; False also if no op makes it."""
        return self.maker[variable] is not None and all(self.may_rerun[op] for op in self.writers[variable])

    def expiry(self, variable: int, until: int) -> int:
        """The last op before which the variable can be made again, as it is before op `until`; -1 if none.

        This counts only on what nobody can discard: variables that cannot be made again themselves, as
        long as they live unchanged. So it stays true whatever else is discarded later.
        """
        key = variable, bisect_left(self.writers[variable], until)
        waiting = [key]
        while waiting:
            v, num_writers = waiting[-1]
            if (v, num_writers) in self._expiry:
                waiting.pop()
                continue
            sources = self._sources(v, num_writers)
            missing = [s[:2] for s in sources or () if s[:2] not in self._expiry]
            if missing:
                waiting.extend(missing)
                continue
            self._expiry[v, num_writers] = self._expiry_of(sources)
            waiting.pop()
        return self._expiry[key]

    def _sources(self, variable: int, num_writers: int) -> list[tuple[int, int, bool]] | None:
        """What the first writes of a variable read: `(variable, its writes before that, whether changed in place)`."""
        writers = self.writers[variable][:num_writers]
        if self.maker[variable] is None or not writers or not all(self.may_rerun[op] for op in writers):
            return None
        return [
            (use.variable, bisect_left(self.writers[use.variable], op), use.writes)
            for op in writers
            for use in self.trace.ops[op].uses
            if self.maker[use.variable] != op and use.variable != variable
        ]

    def _expiry_of(self, sources: list[tuple[int, int, bool]] | None) -> int:
        if sources is None:
            return -1
        found = self._num_ops - 1
        for v, num_writers, in_place in sources:
            last = self._expiry[v, num_writers]
            if last < 0 and not in_place:  # cannot be made again, so it is somewhere as long as it lives
                last = self._last_op_unchanged(v, num_writers)
            found = min(found, last)
        return found

    def _last_op_unchanged(self, variable: int, num_writers: int) -> int:
        """The last op before which the variable is alive with just its first writes."""
        later = self.writers[variable][num_writers : num_writers + 1]
        dead = self.trace.variables[variable].death_tick
        last = self._num_ops - 1 if dead is None else bisect_left(self._starts, dead) - 1
        return min([last, *later])

    def ops_for(
        self, variables: Iterable[int], before_op: int, is_resident: Callable[[int], bool], most_ops: int | None = None
    ) -> tuple[int, ...] | None:
        """The ops that bring `variables` back right before op `before_op`.

        Args:
            variables: What is wanted, with all writes of ops before `before_op`.
            before_op: The op.
            is_resident: Whether a variable is in the pool at that op's start; asked for sources.
            most_ops: Give up beyond this many.

        Returns:
            The ops in order; None if it cannot be done (or takes more than `most_ops`).
        """
        ops: set[int] = set()
        needed_until: dict[int, int] = {}  # variable to make again -> all its writes before this op are needed
        waiting: list[tuple[int, int, bool]] = [(v, before_op, True) for v in variables]
        while waiting:
            v, until, must_remake = waiting.pop()
            if not must_remake and is_resident(v) and not self.is_written(v, until, before_op):
                continue
            if self.maker[v] is None:
                return None
            needed_until[v] = max(needed_until.get(v, 0), until)
            for op in self.writers[v]:
                if op >= needed_until[v] or op in ops:
                    continue
                if not self.may_rerun[op] or (most_ops is not None and len(ops) >= most_ops):
                    return None
                ops.add(op)
                for use in self.trace.ops[op].uses:
                    if self.maker[use.variable] != op:
                        waiting.append((use.variable, op, use.writes))
        return tuple(sorted(ops))

    def rerun(self, before_op: int, ops: Sequence[int], kept: Iterable[int], machine: Machine) -> Rerun:
        """The re-run of `ops` that keeps `kept`."""
        made = set(kept)
        born = {v for op in ops for v in self.births[op]}
        sources = self._read_from_pool(ops)
        return Rerun(
            before_op=before_op,
            ops=tuple(ops),
            made=tuple(sorted(made)),
            sources=tuple(sorted(sources)),
            duration_ns=sum(self.trace.ops[op].own_ns + machine.rerun_op_ns for op in ops),
            num_scratch_chunks=self._scratch_chunks(ops, born - made, machine),
        )

    def _read_from_pool(self, ops: Sequence[int]) -> set[int]:
        """What a re-run of `ops` reads that it does not make in the state in which the op saw it."""
        found: set[int] = set()
        num_writes: dict[int, int] = {}
        for op in ops:
            for use in self.trace.ops[op].uses:
                v, own = use.variable, self.writers[use.variable]
                if self.maker[v] != op and num_writes.get(v) != bisect_left(own, op):
                    found.add(v)
                elif use.writes:
                    num_writes[v] = bisect_right(own, op)
            for v in self.births[op]:
                num_writes[v] = 1
        return found

    def _scratch_chunks(self, ops: Sequence[int], transient: set[int], machine: Machine) -> int:
        """The most chunks that `transient` variables hold at once.

        Each is there from its allocation to its free, if it is freed inside the op that makes it, else to
        the end of the last op of the re-run that uses it. Ops run one after another, so the ticks of
        the trace serve as the re-run's clock.
        """
        last_use = {use.variable: op for op in ops for use in self.trace.ops[op].uses}
        change: dict[int, int] = {}
        for op in ops:
            for v in self.births[op]:
                if v not in transient:
                    continue
                start, stop = self.trace.lifetime(v)
                if stop >= self.trace.ops[op].stop_tick:
                    stop = self.trace.ops[max(op, last_use.get(v, op))].stop_tick
                chunks = machine.chunks_of(self.trace.variables[v].nbytes)
                change[start] = change.get(start, 0) + chunks
                change[stop] = change.get(stop, 0) - chunks
        held = most = 0
        for tick in sorted(change):
            held += change[tick]
            most = max(most, held)
        return most


def reruns_of(residencies: Iterable[Residency], trace: Trace, machine: Machine) -> tuple[Rerun, ...]:
    """The re-runs that `residencies` ask for, in order of op."""
    ops: dict[int, set[int]] = {}
    kept: dict[int, list[int]] = {}
    for residency in residencies:
        if isinstance(residency.start, Recomputed):
            ops.setdefault(residency.start.before_op, set()).update(residency.start.ops)
            kept.setdefault(residency.start.before_op, []).append(residency.variable)
    if not ops:
        return ()
    graph = ReplayGraph(trace)
    return tuple(graph.rerun(op, sorted(ops[op]), kept[op], machine) for op in sorted(ops))
