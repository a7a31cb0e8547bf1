"""Variables that something outside the ops still reads or writes: operands of collectives under way.

A collective returns before it has happened; its backend's threads touch the operands later. Until it is over they
are *in flight*: pinned where they are, neither written out nor dropped. What it wrote is dirty when it is over.
See ooc/DESIGN.md, "Collectives". Knows nothing of torch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from ooc.memory.record import State, VariableRecord

_POLL_S = 0.001
"""Between two looks, where waiting has a limit: a collective over loopback takes about as long."""
_PATIENCE_S = 2.0
"""For what is waited for only so that a plan may begin or go on: who is late costs less than a step on demand."""
_LESS_PATIENCE = 10
"""So many times less where that was in vain."""


class Landing(Protocol):
    """How to know that a collective is over."""

    name: str
    """For messages: the op."""

    key: Any
    """What the program waits for."""

    may_wait: bool
    """Whether we may wait for it. Not for a send or a receive: only the program knows when that can end."""

    def is_over(self) -> bool:
        """Whether its operands are touched no more. Never blocks."""

    def wait(self) -> None:
        """Block until it is over, well or not (its failure is told to the program by the program's own wait)."""

    def wait_at_most(self, timeout_s: float, /) -> bool:
        """The same, for so long at most where its backend has such a wait. Whether it is over."""


class Flight:
    """A collective under way.

    Attributes:
        landing: Tells when it is over, and keeps alive what it needs.
        records: Its operands and results.
        written: Those of them that it writes.
    """

    __slots__ = ("landing", "records", "written")

    def __init__(self, landing: Landing, records: Sequence[VariableRecord], written: Sequence[VariableRecord]) -> None:
        self.landing = landing
        self.records = tuple(records)
        self.written = tuple(written)

    def __repr__(self) -> str:
        return f"<Flight of {len(self.records)} variables in {self.landing.name}>"


class Flights:
    """The collectives under way in one session. One thread at a time (the session's lock).

    False if there are none, which is all that most steps ever ask.
    """

    def __init__(self) -> None:
        self._flights: list[Flight] = []
        self._held: Counter[int] = Counter()  # by a record's identity
        self._ended: list[Flight] = []
        self.waited_for: list[int] = []
        """Addresses of what the program has waited for since an op was told of it. The list itself stays the same."""
        self.num_flights = 0
        """Collectives so far that had operands of the session's."""
        self.num_waits = 0
        """How often an act of ours had to wait for one."""
        self.wait_ns = 0
        """For how long."""
        self._patience_s = _PATIENCE_S

    def __repr__(self) -> str:
        return f"<Flights: {len(self._flights)} under way, {self.num_flights} so far>"

    def __bool__(self) -> bool:
        return bool(self._flights or self._ended)

    def lists(self) -> tuple[list[Flight], list[Flight]]:
        """The lists themselves that are not empty where `poll` has something to do."""
        return self._flights, self._ended

    def begin(self, landing: Landing, records: Sequence[VariableRecord], written: Sequence[VariableRecord]) -> Flight:
        """A collective has been launched: its operands stay."""
        flight = Flight(landing, records, written)
        for record in flight.records:
            record.pin()
            self._held[id(record)] += 1
        for record in flight.written:
            _note_written(record)
        self._flights.append(flight)
        self.num_flights += 1
        return flight

    def holds(self, record: VariableRecord) -> bool:
        """Whether the record is in flight, for all that is known without looking."""
        return id(record) in self._held

    def name_of(self, record: VariableRecord) -> str:
        """The op in which a record is in flight; empty if it is in none."""
        return next((flight.landing.name for flight in self._flights if record in flight.records), "")

    def poll(self) -> None:
        """Let go of those that are over, and of what those that ended since the last look kept alive."""
        self._ended.clear()
        if self._flights:
            for flight in [flight for flight in self._flights if flight.landing.is_over()]:
                self._land(flight)
            self._ended.clear()

    def end(self, key: Any) -> None:
        """The program itself has waited for this one. What it keeps alive goes at the next `poll`."""
        for flight in [flight for flight in self._flights if flight.landing.key is key]:
            self._land(flight)

    def wait_for(self, record: VariableRecord, *, is_needed: bool = True) -> bool:
        """Wait until a record is in no flight. False: it is in one that must not be waited for.

        Args:
            record: The record.
            is_needed: Without, only so long as `settle_soon` waits.
        """
        if not self.holds(record):
            return True
        self.poll()
        flights = [flight for flight in self._flights if record in flight.records]
        if is_needed:
            for flight in flights:
                self._wait(flight)
        else:
            self._wait_soon(flights)
        return not self.holds(record)

    def wait_any(self) -> bool:
        """Wait for the one that was launched first, of those that may be waited for. False: there is none."""
        before = len(self._flights)
        self.poll()
        if len(self._flights) < before:
            return True
        return any(self._wait(flight) for flight in self._flights[:])

    def settle(self, *, timeout_s: float | None = None) -> bool:
        """Wait for all that may be waited for. Whether none is left.

        Args:
            timeout_s: Give up after so long.
        """
        if self:
            self.poll()
            for flight in self._flights[:]:
                if timeout_s is None:
                    self._wait(flight)
                elif flight.landing.may_wait:
                    timeout_s = self._look_at_most(flight, timeout_s)
            self._ended.clear()
        return not self._flights

    def settle_soon(self) -> bool:
        """As `settle`, for whoever can do without, and so for some seconds at most; less where that was in vain.

        The program may be about to do what another rank waits for before it joins: to wait for ever would hang.
        """
        if not self:
            return True
        self.poll()
        self._wait_soon(self._flights[:])
        self._ended.clear()
        return not self._flights

    def names(self) -> list[str]:
        """The ops of those under way."""
        return [flight.landing.name for flight in self._flights]

    def statistics(self) -> dict[str, int]:
        """As plain data, for the report."""
        return {"num_collectives": self.num_flights, "num_waits": self.num_waits, "wait_ns": self.wait_ns}

    def _wait(self, flight: Flight, timeout_s: float | None = None) -> bool:
        if not flight.landing.may_wait:
            return False
        is_over = True
        started = time.monotonic_ns()
        if timeout_s is None:
            flight.landing.wait()
        else:
            is_over = flight.landing.wait_at_most(timeout_s)
        self.num_waits += 1
        self.wait_ns += time.monotonic_ns() - started
        if is_over:
            self._land(flight)
        return is_over

    def _wait_soon(self, flights: Sequence[Flight]) -> None:
        deadline = time.monotonic() + self._patience_s
        are_over = True
        for flight in flights:
            if flight.landing.may_wait:
                are_over = self._wait(flight, max(deadline - time.monotonic(), _POLL_S)) and are_over
        self._patience_s = _PATIENCE_S if are_over else self._patience_s / _LESS_PATIENCE

    def _look_at_most(self, flight: Flight, timeout_s: float) -> float:
        """Look again and again: this has a limit whatever the backend. Returns what is left of the time."""
        deadline = time.monotonic() + timeout_s
        while not flight.landing.is_over():
            if time.monotonic() >= deadline:
                return 0.0
            time.sleep(_POLL_S)
        self._land(flight)
        return max(deadline - time.monotonic(), 0.0)

    def _land(self, flight: Flight) -> None:
        self._flights.remove(flight)
        self._ended.append(flight)
        for record in flight.records:
            record.unpin()
            self._held[id(record)] -= 1
            if not self._held[id(record)]:
                del self._held[id(record)]
        for record in flight.written:
            _note_written(record)


def _note_written(record: VariableRecord) -> None:
    if record.state is State.RESIDENT:  # else it was freed meanwhile, and its addresses may be another's
        record.written()
