"""The file store: round trips, reuse of space, failed transfers, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.shared_memory import shared_memory, shared_memory_beyond
from tests.vmm.memory_cases import Memory, fill, num_open_files, num_threads
from vmm.store import FileStore, Slot, StoreError
from vmm.transfers import TransferError

MIB = 1 << 20


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileStore]:
    """Both ways of transfer; pytest's directory may be in memory, which is fine here."""
    with FileStore(tmp_path, direct=request.param, allow_memory=True, growth_nbytes=MIB) as made:
        yield made


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(8 * MIB)
    yield made
    made.close()


def test_round_trips_of_any_length(store: FileStore, memory: Memory) -> None:
    slots = []
    for seed, nbytes in enumerate((1, 511, 4096, 4097, 100_000, 3 * MIB)):
        slot = store.allocate(nbytes)
        noise = fill(memory, nbytes, seed)
        store.write(slot, [(memory.address, nbytes)]).wait()
        slots.append((slot, nbytes, noise))
    for slot, nbytes, noise in slots:
        memory[: 4 * MIB] = bytes(4 * MIB)
        transfer = store.read(slot, [(memory.address, nbytes)])
        transfer.wait()
        assert transfer.done()
        assert memory[:nbytes] == noise
        assert transfer.nbytes == slot.capacity_nbytes == -(-nbytes // 4096) * 4096


def test_scattered_memory(store: FileStore, memory: Memory) -> None:
    noise = fill(memory, MIB, 7)
    slot = store.allocate(MIB)
    pieces = [(memory.address + start, 65536) for start in range(0, MIB, 65536)]
    random.Random(8).shuffle(pieces)
    prepared = store.segments(pieces)
    store.write(slot, prepared)
    store.read(slot, [(address + MIB, nbytes) for address, nbytes in pieces]).wait()
    assert memory[MIB : 2 * MIB] == noise


def test_a_read_sees_the_last_write(store: FileStore, memory: Memory) -> None:
    """The store orders a slot's transfers, whatever the caller waits for."""
    store.engine.inject_faults(delay_ns=1_000_000)
    slot = store.allocate(4096)
    for value in range(1, 40):
        memory[value * 4096 : value * 4096 + 4096] = bytes([value]) * 4096
        store.write(slot, [(memory.address + value * 4096, 4096)])
        store.read(slot, [(memory.address + MIB + value * 8192, 4096)])
        store.read(slot, [(memory.address + MIB + value * 8192 + 4096, 4096)])
    store.wait_all()
    for value in range(1, 40):
        start = MIB + value * 8192
        assert memory[start : start + 8192] == bytes([value]) * 8192


def test_transfers_wait_for_others(store: FileStore, memory: Memory) -> None:
    """A load into chunks that another eviction still writes out."""
    store.engine.inject_faults(direction="write", delay_ns=5_000_000)
    one, other = store.allocate(4096), store.allocate(4096)
    memory[:4096] = b"1" * 4096
    store.write(one, [(memory.address, 4096)]).wait()
    for _ in range(20):
        memory[:4096] = b"2" * 4096
        eviction = store.write(other, [(memory.address, 4096)])
        store.read(one, [(memory.address, 4096)], after=[eviction]).wait()
        assert memory[:4096] == b"1" * 4096
        store.read(other, [(memory.address, 4096)]).wait()
        assert memory[:4096] == b"2" * 4096


def test_a_failed_write_fails_its_reads_and_can_be_repeated(store: FileStore, memory: Memory) -> None:
    slot = store.allocate(MIB)
    noise = fill(memory, MIB, 9)
    for fail_call in itertools.count(1):
        store.engine.inject_faults(fail_call=fail_call, error=errno.EIO, direction="write")
        num_calls = store.statistics("write").num_calls
        write = store.write(slot, [(memory.address, MIB)])
        read = store.read(slot, [(memory.address + MIB, MIB)])
        store.wait_all()
        if fail_call > store.statistics("write").num_calls - num_calls:  # it has fewer: this time none failed
            write.wait()
            read.wait()
            break
        for transfer in (write, read):
            with pytest.raises(TransferError) as caught:
                transfer.wait()
            assert (caught.value.errno, caught.value.failed_ticket) == (errno.EIO, write.ticket)
        with pytest.raises(TransferError):
            store.read(slot, [(memory.address + MIB, MIB)]).wait()
        store.write(slot, [(memory.address, MIB)]).wait()
        memory[MIB : 2 * MIB] = bytes(MIB)
        store.read(slot, [(memory.address + MIB, MIB)]).wait()
        assert memory[MIB : 2 * MIB] == noise
    assert fail_call > 1


def test_a_failed_read_loses_nothing(store: FileStore, memory: Memory) -> None:
    slot = store.allocate(MIB)
    noise = fill(memory, MIB, 10)
    store.write(slot, [(memory.address, MIB)]).wait()
    store.engine.inject_faults(fail_call=1, direction="read")
    with pytest.raises(TransferError, match=f"read of .* at offset {slot.offset}"):
        store.read(slot, [(memory.address + MIB, MIB)]).wait()
    store.read(slot, [(memory.address + MIB, MIB)]).wait()
    assert memory[MIB : 2 * MIB] == noise


class StoreMachine(RuleBasedStateMachine):
    """Allocate, free, write and read in any order with slow transfers; the model is each slot's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(2 * MIB)
        self.model: dict[Slot, bytes | None] = {}
        self.reads: list[tuple[int, bytes]] = []
        self.num_buffers = 0

    slots = Bundle("slots")

    @initialize(is_direct=st.booleans())
    def make(self, is_direct: bool) -> None:
        self.store = FileStore("/var/tmp", direct=is_direct, allow_memory=True, growth_nbytes=32768)
        self.store.engine.inject_faults(delay_ns=100_000)

    def buffer(self) -> int:
        """A piece of memory that no transfer uses any more."""
        self.num_buffers += 1
        if self.num_buffers % 32 == 0:
            self.settle()
        return self.num_buffers % 32 * 65536

    @rule(target=slots, nbytes=st.integers(1, 40_000))
    def allocate(self, nbytes: int) -> Slot:
        slot = self.store.allocate(nbytes)
        assert slot.offset % 4096 == slot.capacity_nbytes % 4096 == 0
        self.model[slot] = None
        return slot

    @rule(slot=consumes(slots))
    def free(self, slot: Slot) -> None:
        self.store.free(slot)
        assert slot.is_freed
        del self.model[slot]

    @rule(slot=slots, seed=st.integers(0, 255))
    def write(self, slot: Slot, seed: int) -> None:
        start = self.buffer()
        data = bytes([seed]) * slot.nbytes
        self.memory[start : start + slot.nbytes] = data
        self.store.write(slot, [(self.memory.address + start, slot.nbytes)])
        self.model[slot] = data

    @rule(slot=slots)
    def read(self, slot: Slot) -> None:
        data = self.model[slot]
        start = self.buffer()
        segments = [(self.memory.address + start, slot.nbytes)]
        if data is None:
            with pytest.raises(ValueError, match="before anything was written"):
                self.store.read(slot, segments)
            return
        self.store.read(slot, segments)
        self.reads.append((start, data))

    @rule()
    def settle(self) -> None:
        self.store.wait_all()
        for start, data in self.reads:
            assert self.memory[start : start + len(data)] == data
        self.reads.clear()

    @invariant()
    def extents_are_apart(self) -> None:
        extents = sorted((slot.offset, slot.capacity_nbytes) for slot in self.model)
        for (offset, nbytes), (following, _) in itertools.pairwise(extents):
            assert offset + nbytes <= following
        if extents:
            assert sum(extents[-1]) <= self.store.file_nbytes == os.fstat(self.store.descriptor).st_size
        assert self.store.num_slots == len(self.model) if hasattr(self, "store") else True

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.settle()
            for slot in list(self.model):
                self.store.free(slot)
            self.store.allocate(1)  # which also takes in what was waiting for transfers
            assert self.store.used_nbytes == 4096
            self.store.close()
        self.memory.close()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_freed_space_is_used_again(store: FileStore) -> None:
    slots = [store.allocate(128 << 10) for _ in range(8)]
    assert store.file_nbytes == MIB
    for _ in range(100):
        for slot in slots[::2] + slots[1::2]:
            store.free(slot)
        slots = [store.allocate(nbytes) for nbytes in (512 << 10, 256 << 10, 256 << 10)]
        for slot in slots:
            store.free(slot)
        slots = [store.allocate(128 << 10) for _ in range(8)]
    assert store.file_nbytes == MIB
    assert store.used_nbytes == MIB


def test_space_of_a_freed_slot_waits_for_its_transfers(store: FileStore, memory: Memory) -> None:
    store.engine.inject_faults(delay_ns=30_000_000_000)  # until other faults are set
    slot = store.allocate(MIB)
    write = store.write(slot, [(memory.address, MIB)])
    store.free(slot)
    assert store.used_nbytes == MIB
    second = store.allocate(MIB)
    assert second.offset != slot.offset
    store.engine.inject_faults()
    write.wait()
    store.free(second)
    assert store.allocate(2 * MIB).offset == 0
    with pytest.raises(ValueError, match="freed"):
        store.read(slot, [(memory.address, MIB)])


def test_reserving_ahead(store: FileStore) -> None:
    store.reserve(5 * MIB)
    assert store.file_nbytes == 5 * MIB
    assert os.fstat(store.descriptor).st_blocks * 512 >= 5 * MIB
    store.reserve(5 * MIB)
    store.allocate(5 * MIB)
    assert store.file_nbytes == 5 * MIB


def test_wrong_arguments(store: FileStore, memory: Memory, tmp_path: Path) -> None:
    slot = store.allocate(5000)
    assert "empty" in repr(slot)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="must be positive"):
            store.allocate(nbytes)
    with pytest.raises(ValueError, match="before anything was written"):
        store.read(slot, [(memory.address, 5000)])
    with pytest.raises(ValueError, match="room for 8192"):
        store.write(slot, [(memory.address, 8193)])
    with pytest.raises(ValueError, match="multiple of 4096"):
        store.write(slot, [(memory.address, 100), (memory.address, 100)])
    with pytest.raises(ValueError, match="at least 1048576"):
        store.measure((memory.address, 4096))
    with FileStore(tmp_path, allow_memory=True) as other, pytest.raises(ValueError, match="not a slot"):
        other.free(slot)
    with pytest.raises(ValueError, match="growth_nbytes"):
        FileStore(tmp_path, allow_memory=True, growth_nbytes=5)
    store.free(slot)
    with pytest.raises(ValueError, match="freed"):
        store.free(slot)


def test_measure_gives_rates_and_keeps_the_slots(store: FileStore, memory: Memory) -> None:
    slot = store.allocate(MIB)
    noise = fill(memory, MIB, 13)
    store.write(slot, [(memory.address, MIB)]).wait()
    speed = store.measure()
    speed_in_memory = store.measure((memory.address + 2 * MIB, 2 * MIB))
    for measured in (speed, speed_in_memory):
        for rate in (
            measured.write_bytes_per_s,
            measured.read_bytes_per_s,
            measured.write_together_bytes_per_s,
            measured.read_together_bytes_per_s,
        ):
            assert 1e5 < rate < 1e12
    assert store.num_slots == 1
    store.read(slot, [(memory.address + 4 * MIB, MIB)]).wait()
    assert memory[4 * MIB : 5 * MIB] == noise


def test_a_closed_store_refuses(tmp_path: Path, memory: Memory) -> None:
    store = FileStore(tmp_path, allow_memory=True)
    slot = store.allocate(4096)
    store.close()
    store.close()
    assert "closed" in repr(store)
    with pytest.raises(StoreError, match="closed"):
        store.write(slot, [(memory.address, 4096)])
    with pytest.raises(StoreError, match="closed"):
        store.allocate(4096)


def test_two_hundred_cycles_leave_nothing(tmp_path: Path, memory: Memory) -> None:
    def cycle(*, closes: bool) -> None:
        store = FileStore(tmp_path, allow_memory=True, num_threads=1, growth_nbytes=4096)
        slot = store.allocate(4096)
        store.write(slot, [(memory.address, 4096)])
        store.read(slot, [(memory.address, 4096)])
        if closes:
            store.close()

    cycle(closes=True)
    gc.collect()  # what earlier tests have left
    files, threads = num_open_files(), num_threads()
    for index in range(200):
        cycle(closes=index % 2 == 0)  # the others are closed when they are dropped
    assert (num_open_files(), num_threads()) == (files, threads)
    assert list(tmp_path.iterdir()) == []


def test_kill_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom vmm.store import FileStore\nfrom vmm.posix import PosixDriver\n"
        "driver = PosixDriver(16, 65536)\nstore = FileStore(sys.argv[1], allow_memory=True)\n"
        "slot = store.allocate(1 << 20)\nstore.write(slot, [(driver.view_address, 1 << 20)])\n"
        "print('under way', flush=True)\ntime.sleep(60)\n"
    )
    root = Path(__file__).resolve().parents[2]
    before = shared_memory()
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    assert process.stdout.readline() == "under way\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list(tmp_path.iterdir()) == []
    assert shared_memory_beyond(before) == []
