"""What a plan costs: a discrete-event run of compute and two links.

The simulator plays a coloured plan as an executor does, in virtual nanoseconds:

- before each op come its `host_ns`, in which links work and nothing computes;
- loads are issued in order right before `before_op`; a load starts once every write that it waits
  for is done: those of the previous occupants of its chunks, and its own eviction's;
- the in-link serves loads one at a time in order of issue, but a load that still waits for a
  write may be overtaken; the out-link serves writes one at a time, in order of issue;
- a re-run starts once the loads issued before its op of what it reads are done, and once the writes are
  done whose chunks it takes; it keeps compute busy for the time of its ops, and its op comes after it;
- an op starts once the loads of its variables are done, and once the writes are done whose chunks
  a variable born with it takes;
- before the first op come the copies at the border, once the writes are done out of the chunks that they fill and
  the loads of what they copy; compute is busy with them;
- with `Machine.shared_bytes_per_s`, both links slow down in proportion while both are busy.

A cyclic trace is run for several periods; the last one is reported. A period counts at least the
time that its own transfers keep a link busy, so that a backlog cannot hide in the pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from scheduler.cost.actions import RerunWork, StepActions, step_actions
from scheduler.cost.links import Links, LinkTransfer, least_busy_ns
from scheduler.plan import Discarded, Dropped, Plan, Residency, occupied_ticks
from scheduler.trace import Trace

_NUM_PERIODS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """One thing that took time.

    Attributes:
        kind: `"op"`, `"stall"`, `"recompute"`, `"relocate"`, `"load"` or `"evict"`.
        index: Op index for ops and stalls, and for the op before which a re-run happens; variable for
            transfers; 0 for the copies at the border.
        start_ns, stop_ns: Virtual time since the period's start; transfers may begin before it.
    """

    kind: str
    index: int
    start_ns: int
    stop_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What one step costs under a plan.

    Attributes:
        duration_ns: The step's time; `stall_ns` of it is not compute.
        recompute_ns: Compute spent on ops that are run again.
        relocate_ns: Compute spent on `relocated_nbytes` of copies at the border; its wait is not in it.
        op_stall_ns: Wait before each op, a re-run's wait included.
        op_start_ns: Start of each op since the step's start.
        loaded_nbytes, evicted_nbytes: Bytes moved in and out; `dropped_nbytes`: freed without a write;
            `discarded_nbytes`: freed without a copy anywhere, to be recomputed.
        peak_nbytes: Most chunk bytes held at once.
        memory_curve: `(time, bytes held from then on)` wherever it changes; empty unless asked for with the timeline.
        timeline: Ops, stalls and transfers in order of start; likewise.
    """

    duration_ns: int
    stall_ns: int
    op_stall_ns: tuple[int, ...]
    op_start_ns: tuple[int, ...]
    loaded_nbytes: int
    evicted_nbytes: int
    dropped_nbytes: int
    peak_nbytes: int
    memory_curve: tuple[tuple[int, int], ...]
    timeline: tuple[TimelineEntry, ...]
    recompute_ns: int = 0
    discarded_nbytes: int = 0
    relocate_ns: int = 0
    relocated_nbytes: int = 0


def simulate(plan: Plan, trace: Trace, *, with_timeline: bool = True) -> Simulation:
    """Run `plan` in virtual time. The plan must be legal; if it is not coloured, waits for chunks are a guess,
    and nothing is said of memory.
    """
    run = _Run(plan, trace)
    for _ in range(_NUM_PERIODS if trace.cyclic else 1):
        before = run.backlog()
        run.play_step()
        if run.backlog() == before:
            break  # the next period would be the same
    return run.result(with_timeline=with_timeline)


class _Run:
    """The state of a run: the compute clock, the links, and who waits for what."""

    def __init__(self, plan: Plan, trace: Trace) -> None:
        self.plan = plan
        self.trace = trace
        self.actions: StepActions = step_actions(plan, trace)
        self.links = Links(plan.machine)
        self.now_ns = 0
        self.period_start_ns = 0
        self.load_of: dict[int, LinkTransfer] = {}  # residency -> its load, this step's or the last's
        self.write_of: dict[int, LinkTransfer] = {}
        self.transfers: list[LinkTransfer] = []  # those issued in the present period
        self.op_start_ns: list[int] = []
        self.op_stall_ns: list[int] = []
        self.relocate_ns = int(self.actions.border.nbytes / plan.machine.copy_bytes_per_s * 1e9)
        self.relocate_span = 0, 0
        self.rerun_spans: dict[int, tuple[int, int]] = {}  # op -> start and stop of the re-run before it

    def play_step(self) -> None:
        """One step; the records of the step before are forgotten."""
        self.period_start_ns = self.now_ns
        self.transfers, self.op_start_ns, self.op_stall_ns = [], [], []
        kept = {r: self.load_of[s] for r, s in self.actions.kept_from.items() if s in self.load_of}
        wait_ns = self._relocate() if self.actions.border.nbytes else 0
        self.load_of.update(kept)
        for index, op in enumerate(self.trace.ops):
            self.now_ns += op.host_ns
            for r in self.actions.loads[index]:
                self._issue_load(r)
            self.links.advance(self.now_ns)
            stall_ns = self._rerun(index, self.actions.reruns[index]) if index in self.actions.reruns else 0
            stall_ns, wait_ns = stall_ns + wait_ns, 0
            start_ns = self._ready_ns(index)
            self.op_stall_ns.append(start_ns - self.now_ns + stall_ns)
            self.op_start_ns.append(start_ns - self.period_start_ns)
            self.now_ns = start_ns + op.own_ns
            self.links.advance(self.now_ns)
            for r in self.actions.writes[index]:
                self._issue_write(r)

    def backlog(self) -> tuple[object, ...]:
        """What the links have yet to do: all that a period knows of those before it, the clock apart."""
        loads = tuple(sorted(r for r, load in self.load_of.items() if load.stop_ns is None))
        writes = tuple(sorted(r for r, write in self.write_of.items() if write.stop_ns is None))
        return loads, writes, self.links.backlog

    def _relocate(self) -> int:
        """Copy at the border; returns how long that had to wait."""
        border, start_ns = self.actions.border, self.now_ns
        transfers = [*(self.write_of.get(r) for r in border.waits_for), *(self.load_of.get(r) for r in border.loads)]
        for transfer in transfers:
            if transfer is not None:
                start_ns = max(start_ns, self.links.wait(transfer))
        stall_ns = start_ns - self.now_ns
        self.relocate_span = start_ns - self.period_start_ns, start_ns + self.relocate_ns - self.period_start_ns
        self.now_ns = start_ns + self.relocate_ns
        self.links.advance(self.now_ns)
        return stall_ns

    def _rerun(self, index: int, work: RerunWork) -> int:
        """Run again what comes before op `index`; returns how long that had to wait."""
        start_ns = self.now_ns
        writes = [before for r in work.made for before in self.actions.waits_for[r]]
        for before in (*writes, *work.scratch_waits_for):
            if before in self.write_of:
                start_ns = max(start_ns, self.links.wait(self.write_of[before]))
        for r in work.sources:
            if r in self.load_of:
                start_ns = max(start_ns, self.links.wait(self.load_of[r]))
        stall_ns = start_ns - self.now_ns
        self.now_ns = start_ns + work.duration_ns
        self.links.advance(self.now_ns)
        self.rerun_spans[index] = (start_ns - self.period_start_ns, self.now_ns - self.period_start_ns)
        return stall_ns

    def _ready_ns(self, index: int) -> int:
        """When the op's variables are loaded and its births have their chunks."""
        ready_ns, actions = self.now_ns, self.actions
        transfers = [self.write_of.get(before) for r in actions.births[index] for before in actions.waits_for[r]]
        transfers += [self.load_of.get(r) for r in actions.uses[index]]
        for transfer in transfers:
            if transfer is not None:  # most are done: no call for those
                stop_ns = self.links.wait(transfer) if transfer.stop_ns is None else transfer.stop_ns
                ready_ns = max(ready_ns, stop_ns)
        return ready_ns

    def _issue_load(self, r: int) -> None:
        writes = [self.write_of.get(before) for before in self.actions.waits_for[r]]
        under_way = [write for write in writes if write is not None and write.stop_ns is None]
        self.load_of[r] = self._transfer(r, is_load=True, after=under_way)

    def _issue_write(self, r: int) -> None:
        self.write_of[r] = self._transfer(r, is_load=False, after=[])

    def _transfer(self, r: int, *, is_load: bool, after: list[LinkTransfer]) -> LinkTransfer:
        variable = self.plan.residencies[r].variable
        nbytes = self.trace.variables[variable].nbytes
        transfer = LinkTransfer(variable=variable, nbytes=nbytes, is_load=is_load, after=after)
        self.links.issue(transfer, self.now_ns)
        self.transfers.append(transfer)
        return transfer

    def result(self, *, with_timeline: bool) -> Simulation:
        """Records of the last step played."""
        loaded = sum(t.nbytes for t in self.transfers if t.is_load)
        evicted = sum(t.nbytes for t in self.transfers if not t.is_load)
        compute_end_ns = self.now_ns - self.period_start_ns
        self.links.drain()
        if self.trace.cyclic:
            duration_ns = max(compute_end_ns, least_busy_ns(self.plan.machine, loaded, evicted))
        else:
            stops = [t.stop_ns - self.period_start_ns for t in self.transfers if t.stop_ns is not None]
            duration_ns = max([compute_end_ns, *stops])
        is_coloured = any(r.chunks for r in self.plan.residencies)
        change = self._memory_changes() if is_coloured else {}
        curve = list(accumulate(change.values()))
        recompute_ns = sum(work.duration_ns for work in self.actions.reruns.values())
        return Simulation(
            duration_ns=duration_ns,
            stall_ns=duration_ns - self.trace.duration_ns - recompute_ns - self.relocate_ns,
            op_stall_ns=tuple(self.op_stall_ns),
            op_start_ns=tuple(self.op_start_ns),
            loaded_nbytes=loaded,
            evicted_nbytes=evicted,
            dropped_nbytes=self._nbytes(r for r in self.plan.residencies if isinstance(r.stop, Dropped)),
            peak_nbytes=max(curve, default=0),
            memory_curve=tuple((self._time_of(tick), held) for tick, held in zip(change, curve, strict=True))
            if with_timeline
            else (),
            timeline=self._timeline() if with_timeline else (),
            recompute_ns=recompute_ns,
            discarded_nbytes=self._nbytes(r for r in self.plan.residencies if isinstance(r.stop, Discarded)),
            relocate_ns=self.relocate_ns,
            relocated_nbytes=self.actions.border.nbytes,
        )

    def _nbytes(self, residencies: Iterable[Residency]) -> int:
        return sum(self.trace.variables[r.variable].nbytes for r in residencies)

    def _memory_changes(self) -> dict[int, int]:
        """Bytes of chunks taken less given back, by tick, in order."""
        machine = self.plan.machine
        change: dict[int, int] = {0: 0}
        for r in self.plan.residencies:
            start, stop = occupied_ticks(r, self.trace)
            nbytes = sum(count for _, count in r.chunks) * machine.chunk_nbytes
            change[start] = change.get(start, 0) + nbytes
            if stop < self.trace.num_ticks:
                change[stop] = change.get(stop, 0) - nbytes
        for room in self.plan.scratch:
            tick = self.trace.ops[room.before_op].start_tick
            nbytes = sum(count for _, count in room.chunks) * machine.chunk_nbytes
            change[tick] = change.get(tick, 0) + nbytes
            change[tick + 1] = change.get(tick + 1, 0) - nbytes
        return dict(sorted(change.items()))

    def _time_of(self, tick: int) -> int:
        """When a tick happens; the ticks within an op are spread evenly over it."""
        index = bisect_right(self.trace.op_starts, tick) - 1
        if index < 0:
            return 0
        op = self.trace.ops[index]
        inside = min(tick, op.stop_tick) - op.start_tick
        return self.op_start_ns[index] + op.own_ns * inside // (op.stop_tick - op.start_tick)

    def _timeline(self) -> tuple[TimelineEntry, ...]:
        entries = []
        border_ns, end_ns = self.relocate_span
        if end_ns > border_ns:
            entries.append(TimelineEntry(kind="relocate", index=0, start_ns=border_ns, stop_ns=end_ns))
            if border_ns:
                entries.append(TimelineEntry(kind="stall", index=0, start_ns=0, stop_ns=border_ns))
        for index, op in enumerate(self.trace.ops):
            start_ns, stall_ns = self.op_start_ns[index], self.op_stall_ns[index]
            rerun = self.rerun_spans.get(index)
            if rerun is not None:
                entries.append(TimelineEntry(kind="recompute", index=index, start_ns=rerun[0], stop_ns=rerun[1]))
                stall_ns = start_ns - rerun[1]
            elif index == 0:
                stall_ns -= border_ns
            if stall_ns:
                entries.append(TimelineEntry(kind="stall", index=index, start_ns=start_ns - stall_ns, stop_ns=start_ns))
            entries.append(TimelineEntry(kind="op", index=index, start_ns=start_ns, stop_ns=start_ns + op.own_ns))
        for t in self.transfers:
            if t.start_ns is not None and t.stop_ns is not None:
                kind = "load" if t.is_load else "evict"
                start_ns, stop_ns = t.start_ns - self.period_start_ns, t.stop_ns - self.period_start_ns
                entries.append(TimelineEntry(kind=kind, index=t.variable, start_ns=start_ns, stop_ns=stop_ns))
        return tuple(sorted(entries, key=lambda e: (e.start_ns, e.stop_ns, e.kind, e.index)))
