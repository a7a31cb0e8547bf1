"""`window`: the schedule-window policy of the window-scheduling-and-virtual-addressing paper, to the letter.

The step is read as one sequence of variables, op after op, each op's distinct variables in
operand order. A window of at most `window_nbytes` of that sequence slides ahead of execution:

- what enters the window is loaded, if the memory allows;
- what an op used and the window does not hold any more is written out right after the op;
- what is written out counts in full until it is *waited for*; waits are oldest first, and only
  when memory is needed.

If an op's own variables do not fit because the window ran ahead, the walk goes back and lets the
guilty occurrence enter later (BACKTRACK). It fails exactly if some op's own variables exceed the
budget.

The paper's wait is our `Evicted.release_op`. Where the paper is silent, variables that no op may
be without (`Variable.evictable`, and those allocated between two ops until they can be written)
are taken out of the budget for the ops that they touch, and a variable that dies only after
its last use counts as one that is still needed. In a cyclic trace every step starts and ends with
all variables away, except those that never can be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any, Final, TypeAlias, assert_never

from scheduler.budget import BudgetTooSmall, budget_too_small, first_op_to_end_after
from scheduler.colouring.colouring import Shortage
from scheduler.cost.evaluate import estimate, evaluate
from scheduler.plan import Born, Dies, Evicted, Kept, Loaded, Machine, Residency, Start, Stop
from scheduler.residency_builder import ordered
from scheduler.trace import Trace

# Window lengths tried, in budgets. The paper gives none. On random traces and synthetic training
# steps the best one lay between an eighth of the budget and twice the budget.
_WINDOWS_PER_BUDGET = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)

# Up to so many ops, the plan of each length is coloured: of a step of 10,000 ops that takes a second each.
_MOST_OPS_COLOURED = 4_000

# Ops between two snapshots, at least, and variables for each op between them: a backtrack repeats at most that many
# ops, and copying the state of 5,000 variables costs about as much as walking 64 ops.
_SNAPSHOT_EVERY = 64
_VARIABLES_PER_OP_BETWEEN = 80


class Whereabouts(Enum):
    """Where a variable is; which sum counts it."""

    NONE = "not allocated yet"
    HOST = "away"
    IN = "in memory, counted in I"
    OUT = "written out, not waited for, counted in O"
    DEAD = "freed"


def schedule(trace: Trace, machine: Machine, *, window_nbytes: int) -> tuple[Residency, ...]:
    """Window scheduling.

    Args:
        trace: The step.
        machine: The budget; rates do not matter here.
        window_nbytes: Length of the window, in bytes of the variable sequence (repeats count).

    Raises:
        BudgetTooSmall: Some op's variables together exceed the budget.
    """
    walk = WindowWalk(trace, machine, window_nbytes)
    walk.run()
    return ordered([*_residencies(walk), *_always_resident(trace)], trace)


def tune(trace: Trace, machine: Machine, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Choose `window_nbytes` by simulation, unless it is given; for a long step by estimates, of fewer lengths."""
    if "window_nbytes" in parameters:
        return dict(parameters)
    is_long = len(trace.ops) > _MOST_OPS_COLOURED
    ranks = []
    for factor in _WINDOWS_PER_BUDGET[::2] if is_long else _WINDOWS_PER_BUDGET:
        window_nbytes = int(machine.budget_nbytes * factor)
        proposal = schedule(trace, machine, window_nbytes=window_nbytes)
        if is_long:
            s = estimate(proposal, trace, machine)
            ranks.append((s.duration_ns, s.loaded_nbytes + s.evicted_nbytes, 0, window_nbytes))
            continue
        outcome = evaluate(proposal, trace, machine)
        if not isinstance(outcome, Shortage):
            ranks.append((*outcome.rank, window_nbytes))
    return {**parameters, "window_nbytes": min(ranks)[-1] if ranks else 0}


class WindowAct(Enum):
    """What the walk decides, in order; the plan is read off the list of acts."""

    BIRTH = "allocated in op"
    LOAD = "load issued before op"
    EVICT = "write reserved after op"
    WITHDRAW = "that write cancelled before op"
    RELEASE = "write waited for before op"
    DEATH = "freed in op, or between it and the next"


Decision: TypeAlias = tuple[WindowAct, int, int]
"""One act on one variable, at one op. A plain tuple: a walk makes tens of thousands."""


@dataclass(slots=True)
class WindowState:
    """Everything that changes during the walk but is undone by a backtrack.

    Attributes:
        where: `st[v]`.
        count: `cnt[v]`, occurrences of v in the window.
        head: Next position of the sequence to enter.
        window_nbytes: P.
        num_in, num_out: I and O, in chunks.
        fifo: Variables written out and not waited for, in order of reservation.
    """

    where: list[Whereabouts]
    count: list[int]
    head: int = 0
    window_nbytes: int = 0
    num_in: int = 0
    num_out: int = 0
    fifo: dict[int, None] = field(default_factory=dict)

    def copy(self) -> WindowState:
        """An independent copy."""
        return WindowState(
            where=self.where.copy(),
            count=self.count.copy(),
            head=self.head,
            window_nbytes=self.window_nbytes,
            num_in=self.num_in,
            num_out=self.num_out,
            fifo=self.fifo.copy(),
        )


# By names of this module: the walk asks for them hundreds of thousands of times.
_NONE: Final = Whereabouts.NONE
_HOST: Final = Whereabouts.HOST
_IN: Final = Whereabouts.IN
_OUT: Final = Whereabouts.OUT
_DEAD: Final = Whereabouts.DEAD
_BIRTH: Final = WindowAct.BIRTH
_LOAD: Final = WindowAct.LOAD
_EVICT: Final = WindowAct.EVICT
_WITHDRAW: Final = WindowAct.WITHDRAW
_RELEASE: Final = WindowAct.RELEASE
_DEATH: Final = WindowAct.DEATH


class WindowWalk:
    """The algorithm. Letters A, B, C name its stages for each op, as in the paper's order of work.

    Attributes:
        operands: V_i for each op.
        room: M for each op: the budget less what cannot be away around that op.
        stop: For each position of the sequence, the first op at which it may enter; only grows.
        state: The walk's present state.
        decisions: What was decided so far.
    """

    def __init__(self, trace: Trace, machine: Machine, window_nbytes: int) -> None:
        self.trace = trace
        self.machine = machine
        self.limit_nbytes = window_nbytes
        self.nbytes = [v.nbytes for v in trace.variables]
        self.chunks = [machine.chunks_of(v.nbytes) for v in trace.variables]
        layout = _Layout(trace)
        self.operands = layout.operands
        self.fixed = layout.fixed
        self.dying = layout.dying
        self.room = [machine.num_chunks - sum(self.chunks[v] for v in fixed) for fixed in self.fixed]
        self.sequence = [v for operands in self.operands for v in operands]
        self.ends = list(accumulate(len(operands) for operands in self.operands))
        self.stop = [0] * len(self.sequence)
        self.last_use = {v: index for index, operands in enumerate(self.operands) for v in operands}
        self.state = WindowState(
            where=[_HOST if v.birth_tick is None else _NONE for v in trace.variables],
            count=[0] * len(trace.variables),
        )
        self.decisions: list[Decision] = []
        self._entered_at = [0] * len(self.sequence)
        self._snapshots: list[tuple[WindowState, int]] = []
        self._snapshot_every = max(_SNAPSHOT_EVERY, len(trace.variables) // _VARIABLES_PER_OP_BETWEEN)

    def run(self) -> None:
        """Walk all ops. Raises `BudgetTooSmall`."""
        index = 0
        while index < len(self.trace.ops):
            if index % self._snapshot_every == 0:
                del self._snapshots[index // self._snapshot_every :]
                self._snapshots.append((self.state.copy(), len(self.decisions)))
            missing = self._swap_in(index)
            if missing is None:
                missing = self._make_outputs(index)
            if missing is not None:
                index = self._backtrack(index, missing)
                continue
            self._swap_out(index)
            index += 1
        while self.state.fifo:
            self._wait_oldest(len(self.trace.ops))

    def _swap_in(self, index: int) -> int | None:
        """A: let the window run ahead. Returns the chunks of an operand that does not fit, if one does not."""
        s = self.state
        where, count, nbytes, chunks, entered_at = s.where, s.count, self.nbytes, self.chunks, self._entered_at
        end, room, head, window_nbytes = self.ends[index], self.room[index], s.head, s.window_nbytes
        missing = None
        sequence, num_uses = self.sequence, len(self.sequence)
        while head < num_uses:
            v = sequence[head]
            own = head < end
            if not own and (window_nbytes + nbytes[v] > self.limit_nbytes or self.stop[head] > index):
                break
            if where[v] is _OUT:
                self._withdraw(v, index)
            elif where[v] is _HOST:
                if s.num_in + chunks[v] > room:
                    missing = chunks[v] if own else None
                    break
                while s.num_in + s.num_out + chunks[v] > room:
                    self._wait_oldest(index)
                self.decisions.append((_LOAD, v, index))
                s.num_in += chunks[v]
                where[v] = _IN
            count[v] += 1
            window_nbytes += nbytes[v]
            entered_at[head] = index
            head += 1
        s.head, s.window_nbytes = head, window_nbytes
        return missing

    def _make_outputs(self, index: int) -> int | None:
        """B: room for what the op allocates. Returns the chunks of that, if they do not fit."""
        s = self.state
        where, fixed = s.where, self.fixed[index]
        born = [v for v in self.operands[index] if where[v] is _NONE and v not in fixed]
        if not born and s.num_in + s.num_out <= self.room[index]:
            return None
        need = sum([self.chunks[v] for v in born])
        while s.num_in + s.num_out + need > self.room[index] and s.fifo:
            self._wait_oldest(index)
        if s.num_in + s.num_out + need > self.room[index]:
            return need
        for v in born:
            self._bear(v, index)
        return None

    def _swap_out(self, index: int) -> None:
        """C: write out what the window does not hold any more."""
        s = self.state
        where, count, dying = s.where, s.count, self.dying[index]
        for v in self.operands[index]:
            if where[v] is _NONE:  # allocated before the op, writable only now
                self._bear(v, index)
            count[v] -= 1
            s.window_nbytes -= self.nbytes[v]
            if count[v] == 0 and not (v in dying and self.last_use[v] == index):
                self.decisions.append((_EVICT, v, index))
                s.fifo[v] = None
                s.num_in -= self.chunks[v]
                s.num_out += self.chunks[v]
                where[v] = _OUT
        for v in dying:
            self._bury(v, index)

    def _bear(self, v: int, index: int) -> None:
        self.decisions.append((_BIRTH, v, index))
        self.state.num_in += self.chunks[v]
        self.state.where[v] = _IN

    def _bury(self, v: int, index: int) -> None:
        s = self.state
        if s.where[v] is _NONE:  # lived between two ops, outside the walk's sums
            self.decisions.append((_BIRTH, v, index))
        elif s.where[v] is _IN:
            s.num_in -= self.chunks[v]
        elif s.where[v] is _OUT:
            s.num_out -= self.chunks[v]
            del s.fifo[v]
        if s.where[v] is not _HOST:
            self.decisions.append((_DEATH, v, index))
        s.where[v] = _DEAD

    def _withdraw(self, v: int, index: int) -> None:
        s = self.state
        self.decisions.append((_WITHDRAW, v, index))
        del s.fifo[v]
        s.num_out -= self.chunks[v]
        s.num_in += self.chunks[v]
        s.where[v] = _IN

    def _wait_oldest(self, index: int) -> None:
        s = self.state
        v = next(iter(s.fifo))
        del s.fifo[v]
        self.decisions.append((_RELEASE, v, index))
        s.num_out -= self.chunks[v]
        s.where[v] = _HOST

    def _backtrack(self, index: int, missing: int) -> int:
        """Let the latest entries that make room enter after op `index`; returns the op to walk again from."""
        s = self.state
        free = self.room[index] - s.num_in
        left: dict[int, int] = {}
        for position in range(s.head - 1, self.ends[index] - 1, -1):
            v = self.sequence[position]
            count = left.get(v, s.count[v])
            if count == 1 and s.where[v] is _IN:
                free += self.chunks[v]
            left[v] = count - 1
            if free >= missing:
                self.stop[position] = index + 1
                return self._restore(self._entered_at[position])
        raise self._too_small()

    def _restore(self, index: int) -> int:
        number = index // self._snapshot_every
        state, num_decisions = self._snapshots[number]
        self.state = state.copy()
        del self.decisions[num_decisions:]
        return number * self._snapshot_every

    def _too_small(self) -> BudgetTooSmall:
        """The error for the op with the largest sum of operands."""
        at_once = [
            [*operands, *(v for v in fixed if v not in operands)]
            for operands, fixed in zip(self.operands, self.fixed, strict=True)
        ]
        sums = [sum(self.chunks[v] for v in variables) for variables in at_once]
        worst = max(range(len(sums)), key=lambda index: (sums[index], -index))
        return budget_too_small(
            self.trace,
            self.machine,
            tick=self.trace.ops[worst].start_tick,
            variables=at_once[worst],
            smallest_num_chunks=sums[worst],
        )


class _Layout:
    """The trace as the algorithm sees it.

    Attributes:
        operands: For each op its evictable variables: operands, results, temporaries, and what is allocated
            unseen in it, or between the op before and it.
        fixed: For each op, variables that cannot be away from its start to the next op's start and
            are not under the walk's control: never evictable, or allocated between ops and not yet writable.
        dying: For each op, variables freed from its start to the next op's start.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.starts = trace.op_starts
        evictable = [v.evictable for v in trace.variables]
        self.operands = [[u.variable for u in op.uses if evictable[u.variable]] for op in trace.ops]
        self.fixed: list[set[int]] = [set() for _ in trace.ops]
        self.dying: list[list[int]] = [[] for _ in trace.ops]
        for v, variable in enumerate(trace.variables if trace.ops else ()):
            if not variable.evictable:
                born, dead = trace.lifetime(v)
                for index in range(self._zone(born), self._zone(dead - 1) + 1):
                    self.fixed[index].add(v)
                continue
            if variable.death_tick is not None:
                self.dying[self._zone(variable.death_tick)].append(v)
            if variable.birth_tick is not None:
                self._add_birth(v, variable.birth_tick)

    def _zone(self, tick: int) -> int:
        """The op whose time, from its start to the next op's start, holds `tick` (op 0 begins with the step)."""
        return max(bisect_right(self.starts, tick) - 1, 0)

    def _add_birth(self, v: int, born: int) -> None:
        zone = self._zone(born)
        if self.trace.ops[zone].stop_tick <= born:  # between two ops
            writable = first_op_to_end_after(self.trace, born)
            last = self._zone(self.trace.lifetime(v)[1] - 1)
            if zone < writable:
                for index in range(zone, min(writable, last) + 1):
                    self.fixed[index].add(v)
            if last < writable:
                return
            zone = writable
        if v not in self.operands[zone]:
            self.operands[zone].append(v)


def _residencies(walk: WindowWalk) -> Iterator[Residency]:
    """The plan's acts, read off the walk's decisions."""
    starts: dict[int, Start] = {}
    write_ops: dict[int, int] = {}
    for act, v, op_index in walk.decisions:
        if act is _BIRTH:
            starts[v] = Born()
        elif act is _LOAD:
            starts[v] = Loaded(op_index)
        elif act is _EVICT:
            write_ops[v] = op_index
        elif act is _WITHDRAW:
            del write_ops[v]
        elif act is _RELEASE:
            stop = Evicted(write_op=write_ops.pop(v), release_op=op_index)
            yield Residency(variable=v, start=starts.pop(v), stop=stop)
        elif act is _DEATH:
            write_ops.pop(v, None)
            yield Residency(variable=v, start=starts.pop(v), stop=Dies())
        else:
            assert_never(act)


def _always_resident(trace: Trace) -> Iterator[Residency]:
    """What can never be away: one residency for its whole life."""
    for v, variable in enumerate(trace.variables):
        if variable.evictable:
            continue
        carried_in: Start = Kept() if trace.cyclic else Loaded(0)
        carried_out: Stop = Kept() if trace.cyclic else Evicted(write_op=len(trace.ops) - 1, release_op=len(trace.ops))
        yield Residency(
            variable=v,
            start=carried_in if variable.birth_tick is None else Born(),
            stop=carried_out if variable.death_tick is None else Dies(),
        )
