"""The fake CUDA driver finds races, and only races."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vmm.fake_cases import GRANULE, Mapped, access, value
from vmm.cuda import CudaDriver
from vmm.testing.fake_cuda import FakeCuda, RuleBroken


def test_the_host_is_part_of_the_order(fake: FakeCuda) -> None:
    mapped = Mapped(fake)
    host = value(fake.cuMemHostAlloc(64, 0))
    fake.host_touch(host, 64, is_write=True)
    fake.cuMemcpyHtoDAsync(mapped.address, host, 64, 0)  # queued after the write: in order
    fake.host_touch(host, 64, is_write=False)  # two reads
    assert fake.races == ()
    fake.host_touch(host + 60, 1, is_write=True, name="too early")
    (race,) = fake.races
    assert (race.second.name, race.first.is_write) == ("too early", False)
    assert "nothing orders: copy to device" in str(race)
    fake.cuStreamSynchronize(0)
    fake.host_touch(host, 64, is_write=True)
    assert len(fake.races) == 1


def test_two_aliases_within_one_launch_are_a_race(fake: FakeCuda) -> None:
    mapped = Mapped(fake)
    fake.cuMemMap(mapped.at(4), GRANULE, 0, mapped.handles[1], 0)
    fake.cuMemSetAccess(mapped.at(4), GRANULE, access(), 1)
    fake.launch(0, int, reads=[(mapped.at(1), 64)], writes=[(mapped.at(1), 8)], name="in place")
    fake.launch(0, int, reads=[(mapped.at(1), 64), (mapped.at(4), 64)], name="two reads")
    fake.launch(0, int, reads=[(mapped.at(1), 64)], writes=[(mapped.at(4) + 64, 64)], name="neighbours")
    assert fake.races == ()
    fake.launch(0, int, reads=[(mapped.at(1), 64)], writes=[(mapped.at(4) + 63, 64)], name="both")
    (race,) = fake.races
    assert race.first.act_id == race.second.act_id
    assert str(race).startswith("two aliases within one launch: both reads 64 bytes")


class Paging:
    """Out and in again: a variable's bytes leave by one stream and return by another, its chunks used meanwhile.

    Each wait, record and host wait of the schedule has a name; `without` leaves one of them out.
    """

    STEPS = (
        "record produced",
        "wait produced",
        "record left",
        "wait left",
        "record reused",
        "wait reused",
        "record loaded",
        "wait loaded",
        "record consumed",
        "host wait",
    )

    def __init__(self, without: str = "", *, seed: int = 0, eagerness: float = 0.3) -> None:
        self.without = without
        self.fake = FakeCuda(total_nbytes=8 * GRANULE, seed=seed, eagerness=eagerness)
        self.driver = CudaDriver(2, GRANULE, bindings=self.fake)
        self.result: list[bytes] = []
        calls = self.driver.calls
        self.events = {name: calls.create_event() for name in ("produced", "left", "reused", "loaded", "consumed")}

    def step(self, name: str, stream: int) -> None:
        if name == self.without:
            return
        verb, _, event = name.partition(" ")
        if verb == "record":
            self.driver.calls.record(self.events[event], stream)
        else:
            self.driver.calls.wait_event(stream, self.events[event])

    def run(self) -> None:
        fake, driver, calls = self.fake, self.driver, self.driver.calls
        compute, outward, inward = (calls.create_stream() for _ in range(3))
        host = value(fake.cuMemHostAlloc(2 * GRANULE, 0))
        one, other = driver.reserve(2), driver.reserve(1)
        driver.map(one, [(0, 2)])
        driver.map(other, [(1, 1)])
        self.fill(compute, one, 2, b"1", "produce")
        self.step("record produced", compute)
        self.step("wait produced", outward)
        calls.copy_to_host(host, driver.view_address, 2 * GRANULE, outward)
        self.step("record left", outward)
        self.step("wait left", compute)
        self.fill(compute, other, 1, b"2", "reuse")
        self.step("record reused", compute)
        self.step("wait reused", inward)  # and so, by way of compute, for the way out
        calls.copy_to_device(driver.view_address, host, 2 * GRANULE, inward)
        self.step("record loaded", inward)
        self.step("wait loaded", compute)
        read = [(one, 2 * GRANULE)]
        fake.launch(compute, lambda: self.result.append(ctypes.string_at(one, 2 * GRANULE)), reads=read, name="consume")
        self.step("record consumed", compute)
        if self.without != "host wait":
            calls.synchronize_event(self.events["consumed"])
        driver.unmap(one, 2)
        driver.unmap(other, 1)

    def fill(self, stream: int, address: int, num_chunks: int, letter: bytes, name: str) -> None:
        nbytes = num_chunks * GRANULE
        self.fake.launch(
            stream, lambda: ctypes.memset(address, letter[0], nbytes), writes=[(address, nbytes)], name=name
        )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("eagerness", [0.0, 0.3, 0.9])
def test_a_correct_schedule_has_no_race_and_the_right_bytes(seed: int, eagerness: float) -> None:
    paging = Paging(seed=seed, eagerness=eagerness)
    paging.run()
    assert paging.result == [b"1" * (2 * GRANULE)]
    assert paging.fake.races == ()
    paging.driver.close()
    paging.fake.close()


@pytest.mark.parametrize("without", Paging.STEPS)
def test_without_any_one_wait_or_record_the_fault_is_found(without: str) -> None:
    """Whatever the work's order happens to be: the detector does not depend on it."""
    for seed in range(3):
        paging = Paging(without, seed=seed, eagerness=0.5 * (seed % 2))
        try:
            paging.run()
        except RuleBroken as error:
            broken = str(error)
        else:
            broken = ""
        is_about_unmap = without in ("record consumed", "host wait")
        assert ("has not observed the end of" in broken) == is_about_unmap or paging.fake.races
        assert bool(paging.fake.races) == (not is_about_unmap)
        paging.fake.cuCtxSynchronize()
        paging.driver.close()
        paging.fake.close()


NUM_STREAMS, NUM_CHUNKS, NUM_CELLS = 3, 3, 2
Statement = tuple[Any, ...]
cells = st.tuples(st.integers(0, 1), st.integers(0, NUM_CHUNKS - 1), st.integers(0, NUM_CELLS - 1))
"""An alias, a chunk, and which eight bytes of it."""
statements = st.one_of(
    st.tuples(
        st.just("launch"),
        st.integers(0, NUM_STREAMS - 1),
        st.lists(cells, max_size=2),
        st.lists(cells, max_size=2),
    ),
    st.tuples(st.just("record"), st.integers(0, NUM_STREAMS - 1), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.integers(0, NUM_STREAMS - 1), st.integers(0, 2)),
    st.tuples(st.just("synchronise"), st.integers(0, 2)),
    st.tuples(st.just("drain"), st.integers(0, NUM_STREAMS - 1)),
)


def ordered_pairs(program: list[Statement]) -> set[tuple[int, int]]:
    """By reachability in the graph of acts, as a rival to clocks: which launches come before which."""
    before: list[set[int]] = []  # by node: all nodes before it
    stream_last: list[set[int]] = [set() for _ in range(NUM_STREAMS)]
    recorded: list[set[int]] = [set() for _ in range(3)]
    host: set[int] = set()
    for node, statement in enumerate(program):
        before.append(set())
        match statement:
            case ("launch", stream, *_):
                before[node] = stream_last[stream] | host
                stream_last[stream] = before[node] | {node}
            case ("record", stream, event):
                recorded[event] = set(stream_last[stream]) | host
            case ("wait", stream, event):
                stream_last[stream] |= recorded[event]
            case ("synchronise", event):
                host |= recorded[event]
            case ("drain", stream):
                host |= stream_last[stream]
    return {(first, node) for node, earlier in enumerate(before) for first in earlier}


def conflicting_pairs(program: list[Statement]) -> set[tuple[int, int]]:
    """Launches that touch the same bytes, one of them writing; a launch with itself if through two aliases."""
    found: set[tuple[int, int]] = set()
    touches = [
        (node, alias, cell, is_write)
        for node, statement in enumerate(program)
        if statement[0] == "launch"
        for is_write in (False, True)
        for alias, *cell in statement[3 if is_write else 2]
    ]
    for one, other in itertools.combinations(touches, 2):
        if one[2] == other[2] and (one[3] or other[3]) and (one[0] != other[0] or one[1] != other[1]):
            found.add((one[0], other[0]))
    return found


def mixed(node: int, read: list[int]) -> int:
    return hash((node, *read)) & 0xFFFF_FFFF


@settings(max_examples=300, deadline=None)
@given(program=st.lists(statements, min_size=4, max_size=24), seed=st.integers(0, 1000))
def test_exactly_the_unordered_conflicts_of_random_schedules_are_found(program: list[Statement], seed: int) -> None:
    fake = FakeCuda(total_nbytes=8 * GRANULE, seed=seed, eagerness=random.Random(seed).choice([0, 0.2, 0.7]))
    driver = CudaDriver(NUM_CHUNKS, GRANULE, bindings=fake)
    aliases = [driver.view_address, driver.reserve(NUM_CHUNKS)]
    driver.map(aliases[1], [(chunk, 1) for chunk in range(NUM_CHUNKS)])
    calls = driver.calls
    streams = [calls.create_stream() for _ in range(NUM_STREAMS)]
    events = [calls.create_event() for _ in range(3)]
    expected: dict[tuple[int, int], int] = {}

    def place(cell: tuple[int, int, int]) -> tuple[int, int]:
        return aliases[cell[0]] + cell[1] * GRANULE + 8 * cell[2], 8

    def kernel(node: int, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> None:
        read = [ctypes.c_uint64.from_address(at).value for at, _ in reads]
        for at, _ in writes:
            ctypes.c_uint64.from_address(at).value = mixed(node, read)

    for node, statement in enumerate(program):
        match statement:
            case ("launch", stream, reads, writes):
                places = [place(cell) for cell in reads], [place(cell) for cell in writes]
                function = functools.partial(kernel, node, *places)
                fake.launch(streams[stream], function, reads=places[0], writes=places[1], name=str(node))
                result = mixed(node, [expected.get(cell[1:], 0) for cell in reads])
                expected |= {cell[1:]: result for cell in writes}
            case ("record", stream, event):
                calls.record(events[event], streams[stream])
            case ("wait", stream, event):
                calls.wait_event(streams[stream], events[event])
            case ("synchronise", event):
                calls.synchronize_event(events[event])
            case ("drain", stream):
                fake.cuStreamSynchronize(streams[stream])
    fake.cuCtxSynchronize()
    found = {(int(race.first.name), int(race.second.name)) for race in fake.races}
    assert found == conflicting_pairs(program) - ordered_pairs(program)
    if not found:
        for cell, number in expected.items():
            assert ctypes.c_uint64.from_address(place((0, *cell))[0]).value == number
    driver.close()
    fake.close()


def test_long_runs_forget_what_cannot_matter() -> None:
    fake = FakeCuda(total_nbytes=4 * GRANULE)
    fake.cuInit(0)
    mapped = Mapped(fake)
    one, other, event = value(fake.cuStreamCreate(1)), value(fake.cuStreamCreate(1)), value(fake.cuEventCreate(2))
    for _ in range(500):
        fake.launch(one, int, writes=[(mapped.address, 64)])
        fake.cuEventRecord(event, one)
        fake.cuStreamWaitEvent(other, event, 0)
        fake.launch(other, int, reads=[(mapped.address, 64)])
        fake.cuEventRecord(event, other)
        fake.cuStreamWaitEvent(one, event, 0)
    assert fake.races == ()
    assert max(len(accesses) for accesses in fake._detector._blocks.values()) <= 65
    fake.launch(one, int, writes=[(mapped.address + 63, 2)])
    fake.launch(other, int, reads=[(mapped.address, 64)])
    assert len(fake.races) == 1
    fake.close()


@pytest.mark.parametrize("first_writes", [False, True])
def test_what_can_still_matter_is_not_forgotten(first_writes: bool) -> None:
    """An early access, many later ones that order or meet nothing, then one that races with the first alone."""
    fake = FakeCuda(total_nbytes=4 * GRANULE)
    fake.cuInit(0)
    mapped = Mapped(fake)
    first, many, last = (value(fake.cuStreamCreate(1)) for _ in range(3))
    started, done = value(fake.cuEventCreate(2)), value(fake.cuEventCreate(2))
    cell = [(mapped.address, 64)]
    fake.launch(first, int, name="first", **({"writes": cell} if first_writes else {"reads": cell}))
    fake.cuEventRecord(started, first)
    if first_writes:  # the many come after it, but do not conflict with the last
        fake.cuStreamWaitEvent(many, started, 0)
    for _ in range(200):
        fake.launch(many, int, reads=cell)
    fake.cuEventRecord(done, many)
    if not first_writes:  # the last comes after the many, and they not after the first
        fake.cuStreamWaitEvent(last, done, 0)
    fake.launch(last, int, name="last", **({"reads": cell} if first_writes else {"writes": cell}))
    assert [(race.first.name, race.second.name) for race in fake.races] == [("first", "last")]
    fake.close()


def test_what_was_overwritten_in_part_is_not_forgotten() -> None:
    fake = FakeCuda(total_nbytes=4 * GRANULE)
    fake.cuInit(0)
    mapped = Mapped(fake)
    one, other = value(fake.cuStreamCreate(1)), value(fake.cuStreamCreate(1))
    fake.launch(one, int, writes=[(mapped.at(1), 64)], name="all")
    for _ in range(100):
        fake.launch(one, int, writes=[(mapped.at(1) + 8, 56)])
    fake.launch(other, int, writes=[(mapped.at(1), 8)], name="start")
    assert [race.first.name for race in fake.races if race.second.name == "start"] == ["all"]
    fake.launch(one, int, writes=[(mapped.at(2), 64)], name="all")
    for _ in range(100):
        fake.launch(one, int, writes=[(mapped.at(2), 56)])
    fake.launch(other, int, writes=[(mapped.at(2) + 56, 8)], name="end")
    assert [race.first.name for race in fake.races if race.second.name == "end"] == ["all"]
    fake.close()
