"""The program on a trace itself: a binary for each gap in place of one for each node and stage.

Between two uses of a variable POET's `kept` columns of that variable are all equal in some optimum, unless a re-run in
between reads it: a schedule that keeps it for a part of a gap only costs the same, and takes no more memory, if it
gives it up at once and brings it back right before its next use. So the columns of a gap merge into one, ops need
not be merged into nodes nor nodes into stages, and what no op of the step makes (parameters, gradients, optimizer
state) can be paged like everything else. Where `program` counts such memory as taken throughout, most of a
training step's memory cannot be given up, and there often is no schedule at all.

Per gap: `away` (comes back by a load, or never) and `again` (comes back by a re-run right before its next use; costs
nothing if there is none). Per group of gaps of one chain without a write in between: `written` (once; after that the
store's copy is current). Per op and later op, where a gap that may come back by a re-run ends: `rerun`, as POET's
`R`, tied to what it reads: in memory, run again as well, or loaded for it (`fetched`). Memory at each tick is at most
the budget; a re-run's outputs count at its op, all at once.

What the program does not see, so that its bound is one for its own choices only: that one re-run may bring back
several variables for later uses, that a variable may be kept just until a re-run in its gap has read it, and re-runs of
many ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from scheduler.chains import Chain, Gap
from scheduler.milp.from_trace import Power
from scheduler.milp.highs import Columns, Rows, run_highs
from scheduler.milp.program import Status
from scheduler.plan import Machine
from scheduler.reruns import ReplayGraph
from scheduler.selection import Selection
from scheduler.trace import Trace

# A re-run of more ops than this is not considered: the ops next to the variable in the step come first.
_MOST_OPS = 16

# Columns of re-runs beyond which fewer ops each are considered. Root relaxations then take seconds.
_MOST_RERUNS = 12_000


@dataclass(frozen=True, kw_only=True)
class GapRequest:
    """What is asked of the program.

    Attributes:
        power: What work costs; the objective is the step's energy.
        deadline_ns: Ops and re-runs, loads, and writes each take at most this in all; None for no limit.
        not_kept: Variables that must not start the step in memory, where they can be away then.
        node_limit: Branch-and-bound nodes; the same everywhere, unlike a limit in seconds.
        time_limit_s: A safety net. Where it strikes, the answer depends on the machine, and says so.
        relative_gap: A choice proven to be this close to the best is good enough.
    """

    power: Power
    deadline_ns: int | None = None
    not_kept: frozenset[int] = frozenset()
    node_limit: int = 50
    time_limit_s: float | None = 120.0
    relative_gap: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class GapChoice:
    """An answer.

    Attributes:
        status: How the solve ended; `was_cut_off`: by the time limit.
        paged, rerun: `(variable, op of its next use)` of the gaps away by either way; ops of the next step count on,
            twice the number of ops if there is no next use.
        kept: Variables in memory at the step's start.
        joules: The step's energy; `bound`: what no choice of the program can beat, as proven. Both leave out the
            latency of transfers, as `scheduler.profiles.energy_j` does.
    """

    status: Status
    was_cut_off: bool = False
    paged: frozenset[tuple[int, int]] = frozenset()
    rerun: frozenset[tuple[int, int]] = frozenset()
    kept: frozenset[int] = frozenset()
    joules: float | None = None
    bound: float | None = None


def choose_gaps(
    trace: Trace, machine: Machine, chains: tuple[Chain, ...], graph: ReplayGraph, request: GapRequest
) -> GapChoice:
    """The gaps whose absence takes the least energy, by HiGHS."""
    return _GapProgram(trace, machine, chains, graph, request).solve()


@dataclass
class _Here:
    """A gap's part within the step, of one of the chain's two variables."""

    start_tick: int
    stop_tick: int
    gap: int


@dataclass
class _GapProgram:
    trace: Trace
    machine: Machine
    chains: tuple[Chain, ...]
    graph: ReplayGraph
    request: GapRequest
    columns: Columns = field(default_factory=Columns)
    rows: Rows = field(default_factory=Rows)

    def __post_init__(self) -> None:
        selection = Selection(self.trace, self.chains)
        self.gaps = selection.gaps
        self.need = selection.occupancy.held - self.machine.num_chunks
        self.away = self.columns.add(len(self.gaps), whole=True)
        self.again = self.columns.add(len(self.gaps), whole=True)
        power, moved = self.request.power, sum(gap.nbytes for gap in self.gaps)
        own_j = self.trace.duration_ns / 1e9 * power.compute_w
        self.unit = max(own_j + moved / self.machine.load_bytes_per_s * power.load_w, 1e-12)
        self.columns.constant = own_j / self.unit
        self.scratch: dict[int, list[tuple[int, float]]] = {}  # op -> columns, and their chunks there
        self.compute: list[tuple[int, float]] = []  # columns, and seconds of compute, load and write
        self.loads: list[tuple[int, float]] = []
        self.writes: list[tuple[int, float]] = []
        self.here = self._parts()
        self._write_paging()
        self._write_boundary()
        self._write_reruns()
        self._write_memory()
        self._write_deadline()

    # -- the program ---------------------------------------------------------------------------

    def _parts(self) -> list[list[_Here]]:
        """For each variable, where its gaps lie in the step."""
        found: list[list[_Here]] = [[] for _ in self.trace.variables]
        whole = self.trace.num_ticks
        for index, gap in enumerate(self.gaps):
            chain = self.chains[gap.chain]
            for v, start, stop in (
                (chain.variable, gap.start_tick, min(gap.stop_tick, whole)),
                (chain.heir, max(gap.start_tick, whole) - whole, gap.stop_tick - whole),
            ):
                if start < stop:
                    found[v].append(_Here(start, stop, index))
        return found

    def _write_paging(self) -> None:
        """What a gap away costs: a load, and a write shared by all gaps since the last change."""
        power, machine = self.request.power, self.machine
        for index, gap in enumerate(self.gaps):
            if gap.forced:
                self.columns.floor(self.away[index], 1.0)
                self.columns.fix(self.again[index : index + 1], 0.0)
            elif not self._may_come_again(gap):
                self.columns.fix(self.again[index : index + 1], 0.0)
            self.rows.add([(self.away[index], 1.0), (self.again[index], 1.0)], upper=1.0)
            if gap.latest_load is not None:
                load_s = gap.nbytes / machine.load_bytes_per_s
                self.columns.set_cost(self.away[index : index + 1], load_s * power.load_w / self.unit)
                self.loads.append((int(self.away[index]), load_s))
        groups: dict[tuple[int, int], list[int]] = {}
        for index, gap in enumerate(self.gaps):
            chain = self.chains[gap.chain]
            num_writes = gap.num_writes % max(chain.num_writes, 1) if chain.is_cycle else gap.num_writes
            if chain.num_writes and (chain.is_cycle or num_writes or not chain.starts_away):
                groups.setdefault((gap.chain, num_writes), []).append(index)
        for own in groups.values():
            written = self.columns.add(1)
            evict_s = self.gaps[own[0]].nbytes / machine.evict_bytes_per_s
            self.columns.set_cost(written, evict_s * power.evict_w / self.unit)
            self.writes.append((int(written[0]), evict_s))
            for index in own:
                self.rows.add([(written[0], 1.0), (self.away[index], -1.0)], lower=0.0)

    def _may_come_again(self, gap: Gap) -> bool:
        """Whether the walk may discard the chain's bytes in this gap."""
        chain = self.chains[gap.chain]
        v = self.trace.variables[chain.variable]
        if v.birth_tick is None or v.death_tick is None or gap.earliest_release > len(self.trace.ops):
            return False
        last = gap.latest_load
        if last is None:
            last = int(np.searchsorted(self.trace.op_starts, v.death_tick)) - 1
        return self.graph.expiry(chain.variable, gap.earliest_release) >= last

    def _write_boundary(self) -> None:
        """What must not start the step in memory."""
        for v in self.request.not_kept:
            for part in self.here[v]:
                if part.start_tick == 0 and not self.gaps[part.gap].forced:
                    self.columns.floor(int(self.away[part.gap]), 1.0)

    def _write_reruns(self) -> None:
        """A gap comes again if the ops that made its bytes run again, and these if they have what they read."""
        ends: dict[int, list[int]] = {}
        for index, gap in enumerate(self.gaps):
            if gap.latest_load is not None and not gap.forced and self._may_come_again(gap):
                ends.setdefault(gap.latest_load, []).append(index)
        most_ops = max(min(_MOST_OPS, _MOST_RERUNS // max(len(ends), 1)), 1)
        for op, own in ends.items():
            _Reruns(self, op, own, most_ops).write()

    def _write_memory(self) -> None:
        """At each tick the gaps that are away hold at least what is beyond the budget."""
        breaks = {0, self.trace.num_ticks}
        for parts in self.here:
            for part in parts:
                breaks |= {part.start_tick, part.stop_tick}
        cuts = sorted(breaks)
        covers: list[set[int]] = [set() for _ in cuts]
        at = {tick: i for i, tick in enumerate(cuts)}
        for parts in self.here:
            for part in parts:
                for i in range(at[part.start_tick], at[part.stop_tick]):
                    covers[i].add(part.gap)
        spans = [(covers[i], int(self.need[a:b].max())) for i, (a, b) in enumerate(pairwise(cuts))]
        for cover, need in _undominated([span for span in spans if span[1] > 0]):
            self._write_row(cover, float(need), [], tight=True)
        for op, terms in self.scratch.items():
            tick = self.trace.ops[op].start_tick
            cover = {part.gap for parts in self.here for part in parts if part.start_tick <= tick < part.stop_tick}
            self._write_row(cover, float(self.need[tick]), terms, tight=False)

    def _write_row(self, cover: set[int], need: float, terms: list[tuple[int, float]], *, tight: bool) -> None:
        own: list[tuple[Any, float]] = [(column, -chunks) for column, chunks in terms]
        for index in sorted(cover):
            if self.gaps[index].forced:
                continue  # `need` knows
            chunks = float(self.gaps[index].num_chunks)
            chunks = min(chunks, need) if tight else chunks
            own += [(self.away[index], chunks), (self.again[index], chunks)]
        self.rows.add(own, lower=need)

    def _write_deadline(self) -> None:
        if self.request.deadline_ns is None:
            return
        unit = max(self.trace.duration_ns / 1e9, 1e-12)
        deadline_s = self.request.deadline_ns / 1e9
        own_s = self.trace.duration_ns / 1e9
        self.rows.add([(c, s / unit) for c, s in self.compute], upper=(deadline_s - own_s) / unit)
        for terms in (self.loads, self.writes):
            self.rows.add([(c, s / unit) for c, s in terms], upper=deadline_s / unit)

    # -- the answer ----------------------------------------------------------------------------

    def solve(self) -> GapChoice:
        request = self.request
        answer = run_highs(
            self.columns,
            self.rows,
            relative_gap=request.relative_gap,
            node_limit=request.node_limit,
            time_limit_s=request.time_limit_s,
        )
        if answer.is_infeasible:
            return GapChoice(status=Status.INFEASIBLE)
        bound = None if answer.bound is None else answer.bound * self.unit
        if answer.values is None or answer.objective is None:
            return GapChoice(status=Status.NONE, was_cut_off=answer.was_cut_off, bound=bound)
        away, again = answer.values[self.away] > 0.5, answer.values[self.again] > 0.5
        at_start = {part.gap for parts in self.here for part in parts if part.start_tick == 0}
        gone = {self.gaps[g].chain for g in at_start if away[g] or again[g]}
        return GapChoice(
            status=Status.OPTIMAL if answer.is_optimal else Status.INCUMBENT,
            was_cut_off=answer.was_cut_off,
            paged=frozenset(self._key(i) for i in np.flatnonzero(away).tolist()),
            rerun=frozenset(self._key(i) for i in np.flatnonzero(again).tolist()),
            kept=frozenset(c.heir for i, c in enumerate(self.chains) if not c.starts_away and i not in gone),
            joules=answer.objective * self.unit,
            bound=bound,
        )

    def _key(self, index: int) -> tuple[int, int]:
        gap, num_ops = self.gaps[index], len(self.trace.ops)
        chain = self.chains[gap.chain]
        if gap.earliest_release > num_ops:  # all of it lies in the next step
            load = 2 * num_ops if gap.latest_load is None else gap.latest_load - num_ops
            return chain.heir, load
        return chain.variable, 2 * num_ops if gap.latest_load is None else gap.latest_load


def _undominated(spans: list[tuple[set[int], int]]) -> list[tuple[set[int], int]]:
    """Without the spans whose row follows from a neighbour's: covered by more gaps, and needing no more."""
    kept: list[tuple[set[int], int]] = []
    for cover, need in spans:
        while kept and kept[-1][1] <= need and kept[-1][0] >= cover:
            kept.pop()
        if not (kept and need <= kept[-1][1] and cover >= kept[-1][0]):
            kept.append((cover, need))
    return kept


class _Reruns:
    """The columns and rows of what may run again right before one op."""

    def __init__(self, program: _GapProgram, op: int, ends: list[int], most_ops: int) -> None:
        self.program = program
        self.op = op
        self.ends = ends
        self.trace, self.graph = program.trace, program.graph
        self.tick = self.trace.ops[op].start_tick
        wanted = [program.chains[program.gaps[i].chain].variable for i in ends]
        self.ops = self._near(wanted, most_ops)
        self.pinned = set(wanted)
        self.column: dict[int, int] = {}
        self.fetched: dict[int, int] = {}

    def _near(self, wanted: list[int], most_ops: int) -> set[int]:
        """Ops that may have to run again for `wanted`, the nearest first."""
        found: set[int] = set()
        waiting = [(v, self.op) for v in wanted]
        while waiting and len(found) < most_ops:
            v, until = waiting.pop(0)
            for op in self.graph.writers[v]:
                if op < until and op not in found and self.graph.may_rerun[op]:
                    found.add(op)
                    waiting += [(use.variable, op) for use in self.trace.ops[op].uses]
        return found

    def write(self) -> None:
        program, power = self.program, self.program.request.power
        for op in sorted(self.ops):
            column = int(program.columns.add(1, whole=True)[0])
            self.column[op] = column
            seconds = self.trace.ops[op].duration_ns / 1e9
            program.columns.set_cost(np.array([column]), seconds * power.compute_w / program.unit)
            program.compute.append((column, seconds))
            chunks = sum(
                program.machine.chunks_of(self.trace.variables[v].nbytes)
                for v in self.graph.births[op]
                if v not in self.pinned
            )
            if chunks:
                program.scratch.setdefault(self.op, []).append((column, float(chunks)))
        for index in self.ends:
            variable = program.chains[program.gaps[index].chain].variable
            self._require(int(program.again[index]), self._writers(variable, self.op))
        for op in sorted(self.ops):
            for use in self.trace.ops[op].uses:
                if program.graph.maker[use.variable] != op:
                    self._tie(op, use.variable, in_place=use.writes)
        program.scratch.setdefault(self.op, [])

    def _writers(self, variable: int, until: int) -> list[int]:
        return [op for op in self.graph.writers[variable] if op < until]

    def _require(self, column: int, ops: list[int]) -> None:
        """`column` only if all of `ops` run again."""
        program = self.program
        if not ops or any(op not in self.column for op in ops):
            program.columns.fix(np.array([column]), 0.0)
            return
        for op in ops:
            program.rows.add([(column, 1.0), (self.column[op], -1.0)], upper=0.0)

    def _tie(self, op: int, variable: int, *, in_place: bool) -> None:
        """`op` runs again only with `variable` as it was: made again up to there, or in memory unchanged."""
        program, writers = self.program, self._writers(variable, op)
        start, stop = self.trace.lifetime(variable)
        is_there = start <= self.tick < stop and not self.graph.is_written(variable, op, self.op)
        if in_place or not is_there:
            if self.graph.maker[variable] is None:
                program.columns.fix(np.array([self.column[op]]), 0.0)
            else:
                self._require(self.column[op], writers)
            return
        gap = next((p.gap for p in program.here[variable] if p.start_tick <= self.tick < p.stop_tick), None)
        if gap is None:
            return  # in memory, whatever is chosen
        can_be_made = self.graph.maker[variable] is not None and bool(writers)
        can_be_made = can_be_made and all(w in self.column for w in writers)
        own = [(self.column[op], 1.0), (int(program.away[gap]), 1.0), (int(program.again[gap]), 1.0)]
        own.append((self._fetch(gap), -1.0))
        if not can_be_made:
            program.rows.add(own, upper=1.0)
            return
        for writer in writers:
            program.rows.add([*own, (self.column[writer], -1.0)], upper=1.0)

    def _fetch(self, gap: int) -> int:
        """A column: the gap's bytes are loaded for this re-run, in the middle of the gap."""
        if gap not in self.fetched:
            program = self.program
            column = int(program.columns.add(1)[0])
            self.fetched[gap] = column
            load_s = program.gaps[gap].nbytes / program.machine.load_bytes_per_s
            program.columns.set_cost(np.array([column]), load_s * program.request.power.load_w / program.unit)
            program.loads.append((column, load_s))
            program.rows.add([(column, 1.0), (int(program.away[gap]), -1.0)], upper=0.0)
            program.scratch.setdefault(self.op, []).append((column, float(program.gaps[gap].num_chunks)))
        return self.fetched[gap]
