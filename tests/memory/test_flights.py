"""Collectives under way: who is pinned until when, and whom we wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ooc.memory.flights import Flights
from ooc.memory.record import VariableRecord


class Landing:
    """A collective that ends when the test says so, or when it is waited for."""

    def __init__(self, name: str = "all_reduce", *, may_wait: bool = True) -> None:
        self.key = self
        self.name = name
        self.may_wait = may_wait
        self.has_ended = False
        self.num_waits = 0
        self.limits: list[float] = []

    def is_over(self) -> bool:
        return self.has_ended

    def wait(self) -> None:
        assert self.may_wait
        self.num_waits += 1
        self.has_ended = True

    def wait_at_most(self, timeout_s: float, /) -> bool:
        assert self.may_wait
        self.limits.append(timeout_s)
        return self.has_ended


def record(address: int = 0) -> VariableRecord:
    reservation: Any = SimpleNamespace(address=address)
    made = VariableRecord(nbytes=100, reservation=reservation, serial=0)
    made.born(())
    store(made)
    return made


def store(record: VariableRecord) -> None:
    """It is written out: the store's copy is current."""
    transfer: Any = None
    record.write_started(transfer)
    record.write_ended()


def test_operands_are_pinned_until_all_of_their_collectives_are_over() -> None:
    flights, a, b = Flights(), record(), record()
    first, second = Landing(), Landing()
    flights.begin(first, [a, b], [])
    flights.begin(second, [a], [])
    assert (a.pins, b.pins) == (2, 1)
    first.has_ended = True
    flights.poll()
    assert (a.pins, b.pins) == (1, 0)
    assert flights.holds(a)
    assert not flights.holds(b)
    flights.end(second)
    assert a.pins == 0
    assert not flights.holds(a)


def test_what_a_collective_writes_is_dirty_when_it_is_over_whatever_was_noted_before() -> None:
    flights, read, written = Flights(), record(), record()
    landing = Landing()
    flights.begin(landing, [read, written], [written])
    assert not written.stored
    store(written)
    landing.has_ended = True
    flights.poll()
    assert not written.stored
    assert read.stored


def test_memory_that_went_away_meanwhile_is_not_made_dirty() -> None:
    """Then the store has the only copy, and dirty would mean that it is lost."""
    flights, freed = Flights(), record()
    landing = Landing()
    flights.begin(landing, [freed], [freed])
    store(freed)
    freed.released()
    flights.end(landing)
    assert freed.stored


def test_a_send_is_never_waited_for() -> None:
    flights, a, b = Flights(), record(), record()
    send, reduce = Landing("send", may_wait=False), Landing()
    flights.begin(send, [a], [])
    flights.begin(reduce, [b], [])
    assert not flights.wait_for(a)
    assert flights.wait_any()
    assert reduce.num_waits == 1
    assert not flights.wait_any()
    assert not flights.settle()
    assert flights.names() == ["send"]
    send.has_ended = True
    assert flights.settle()


def test_waiting_takes_the_oldest_first() -> None:
    flights = Flights()
    landings = [Landing() for _ in range(3)]
    for landing in landings:
        flights.begin(landing, [record()], [])
    assert flights.wait_any()
    assert [landing.num_waits for landing in landings] == [1, 0, 0]
    landings[2].has_ended = True
    assert flights.wait_any()  # one is over by itself: no need to wait for the second
    assert [landing.num_waits for landing in landings] == [1, 0, 0]


def test_what_a_collective_keeps_alive_goes_at_the_next_look_not_when_the_program_waits() -> None:
    """Or a storage would be freed within `wait()` in one step, and by its owner in another."""
    flights, landing = Flights(), Landing()
    flights.begin(landing, [record()], [])
    flights.end(landing)
    assert flights
    flights.poll()
    assert not flights


def test_the_last_wait_has_a_limit() -> None:
    flights = Flights()
    flights.begin(Landing(), [record()], [])
    assert not flights.settle(timeout_s=0.01)


def test_who_can_do_without_waits_shorter_each_time_it_was_in_vain() -> None:
    flights, send, late = Flights(), Landing("send", may_wait=False), Landing()
    flights.begin(send, [record()], [])
    flights.begin(late, [record()], [])
    for _ in range(3):
        assert not flights.settle_soon()
    first, second, third = late.limits
    assert first > 5 * second > 25 * third > 0
    assert flights.names() == ["send", "all_reduce"]
    send.has_ended = late.has_ended = True
    assert flights.settle_soon()
    another = Landing()
    flights.begin(another, [record()], [])
    assert not flights.settle_soon()
    assert another.limits[0] > 5 * second
