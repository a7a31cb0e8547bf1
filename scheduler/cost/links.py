"""Two transfer links in virtual time: the simulator's model of the store.

Each way serves one transfer at a time: a fixed latency, then bytes at the link's rate. Where the
machine states a shared rate, both rates shrink in proportion while both ways move bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import ceil, floor

from scheduler.plan import Machine


def least_busy_ns(machine: Machine, loaded_nbytes: int, evicted_nbytes: int) -> int:
    """The least time in which both links together can move these bytes, latency aside.

    With a shared rate, the shorter of the two either overlaps the longer at the slowed rate, or
    takes its turn alone, whichever is faster.
    """
    load_s = loaded_nbytes / machine.load_bytes_per_s
    evict_s = evicted_nbytes / machine.evict_bytes_per_s
    shorter, longer = sorted((load_s, evict_s))
    overlapped = min(2.0, 1.0 / slowdown(machine))
    return floor((longer - shorter + shorter * overlapped) * 1e9)


def slowdown(machine: Machine) -> float:
    """The factor on both rates while both links are busy."""
    if machine.shared_bytes_per_s is None:
        return 1.0
    return min(1.0, machine.shared_bytes_per_s / (machine.load_bytes_per_s + machine.evict_bytes_per_s))


def while_both_busy(machine: Machine) -> Machine:
    """The machine with each way's rate as it is while both are busy; the same one where they share nothing."""
    scale = slowdown(machine)
    if scale == 1.0:
        return machine
    rates = machine.load_bytes_per_s * scale, machine.evict_bytes_per_s * scale
    return replace(machine, load_bytes_per_s=rates[0], evict_bytes_per_s=rates[1])


@dataclass(slots=True, kw_only=True, eq=False)
class LinkTransfer:
    """One load or write. Mutable: the links fill in when it started and stopped.

    Attributes:
        after: Writes that must be done before it may start.
    """

    variable: int
    nbytes: int
    is_load: bool
    after: list[LinkTransfer] = field(default_factory=list)
    start_ns: int | None = None
    stop_ns: int | None = None


class Links:
    """The out-link and the in-link, and the clock that they share.

    Times given to the methods must not go backwards.
    """

    def __init__(self, machine: Machine) -> None:
        self.now_ns = 0
        self._latency_ns = machine.latency_ns
        self._in = _Lane(machine.load_bytes_per_s)
        self._out = _Lane(machine.evict_bytes_per_s)
        self._slowdown = slowdown(machine)
        self._writes: deque[LinkTransfer] = deque()
        self._loads: list[LinkTransfer] = []
        self._may_start = False  # whether a load may be ready that was not when last looked for

    @property
    def backlog(self) -> tuple[tuple[int, bool, int, float], ...]:
        """What is under way or waits, in order: variable, direction, and the latency and bytes that are left."""
        lanes = ((lane.current, lane.latency_left_ns, lane.left_nbytes) for lane in (self._out, self._in))
        running = [(t, latency_ns, nbytes) for t, latency_ns, nbytes in lanes if t is not None]
        waiting = [(t, self._latency_ns, float(t.nbytes)) for t in (*self._writes, *self._loads)]
        return tuple((t.variable, t.is_load, left_ns, left) for t, left_ns, left in (*running, *waiting))

    def issue(self, transfer: LinkTransfer, at_ns: int) -> None:
        """Queue a transfer at time `at_ns`."""
        self.advance(at_ns)
        if transfer.is_load:
            self._loads.append(transfer)
            self._may_start = True
        else:
            self._writes.append(transfer)

    def advance(self, until_ns: int) -> None:
        """Let the links work until `until_ns`."""
        if self._in.current is None and self._out.current is None and not self._writes and not self._loads:
            self.now_ns = max(self.now_ns, until_ns)
            return
        while self.now_ns < until_ns and self._step(until_ns):
            pass
        self.now_ns = max(self.now_ns, until_ns)

    def wait(self, transfer: LinkTransfer) -> int:
        """Let the links work until `transfer` is done; returns when that is."""
        while transfer.stop_ns is None:
            if not self._step(None):
                raise AssertionError(f"the transfer of variable {transfer.variable} waits for ever")
        return transfer.stop_ns

    def drain(self) -> int:
        """Let the links finish everything; returns when they are idle."""
        while self._step(None):
            pass
        return self.now_ns

    def _step(self, until_ns: int | None) -> bool:
        """Go to the next event, at most to `until_ns`. False if both lanes are idle."""
        self._start_idle()
        out_lane, in_lane = self._out, self._in
        out_busy, in_busy = out_lane.current is not None, in_lane.current is not None
        if not (out_busy or in_busy):
            return False
        scale = self._slowdown if out_lane.in_flight and in_lane.in_flight else 1.0
        elapsed_ns = out_lane.remaining_ns(scale) if out_busy else in_lane.remaining_ns(scale)
        if out_busy and in_busy:
            elapsed_ns = min(elapsed_ns, in_lane.remaining_ns(scale))
        if until_ns is not None:
            elapsed_ns = min(elapsed_ns, until_ns - self.now_ns)
        self.now_ns += elapsed_ns
        if out_busy:
            out_lane.progress(elapsed_ns, scale, self.now_ns)
            self._may_start |= out_lane.current is None
        if in_busy:
            in_lane.progress(elapsed_ns, scale, self.now_ns)
            self._may_start |= in_lane.current is None
        return True

    def _start_idle(self) -> None:
        if self._out.current is None and self._writes:
            self._out.start(self._writes.popleft(), self._latency_ns, self.now_ns)
        if self._in.current is None and self._may_start:
            self._may_start = False
            for position, load in enumerate(self._loads):
                while load.after and load.after[-1].stop_ns is not None:
                    load.after.pop()
                if not load.after:
                    self._in.start(self._loads.pop(position), self._latency_ns, self.now_ns)
                    break


class _Lane:
    """One direction: the transfer under way, and what is left of it."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_ns = bytes_per_s / 1e9
        self.current: LinkTransfer | None = None
        self.latency_left_ns = 0
        self.left_nbytes = 0.0

    @property
    def in_flight(self) -> bool:
        """Whether bytes move now."""
        return self.current is not None and self.latency_left_ns == 0

    def start(self, transfer: LinkTransfer, latency_ns: int, now_ns: int) -> None:
        self.current = transfer
        self.latency_left_ns = latency_ns
        self.left_nbytes = float(transfer.nbytes)
        transfer.start_ns = now_ns

    def remaining_ns(self, scale: float) -> int:
        """Time to the end of the present phase."""
        return self.latency_left_ns or ceil(self.left_nbytes / (self.bytes_per_ns * scale))

    def progress(self, elapsed_ns: int, scale: float, now_ns: int) -> None:
        if self.latency_left_ns:
            self.latency_left_ns -= elapsed_ns
            return
        self.left_nbytes -= elapsed_ns * self.bytes_per_ns * scale
        if self.left_nbytes <= 0 and self.current is not None:
            self.current.stop_ns = now_ns
            self.current = None
