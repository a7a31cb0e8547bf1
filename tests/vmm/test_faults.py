"""Guarded ranges: a touch is served from the file; what is not ours is passed on."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmm.addresses import AddressSpace, Reservation
from vmm.faults import GUARDED, SERVED, FaultTable, Guard
from vmm.posix import PosixDriver
from vmm.store import FileStore, Slot

ROOT = Path(__file__).parent.parent.parent
CHUNK = 64 << 10
NBYTES = 100_000


class Guarded:
    """A driver, a store and a table, and variables that are away with guarded ranges."""

    def __init__(self, directory: Path | None, num_chunks: int = 32) -> None:
        self.driver = PosixDriver(num_chunks, CHUNK, arena_nbytes=1 << 30)
        self.space = AddressSpace(self.driver)
        self.store = FileStore(directory, allow_memory=True)
        self.table = FaultTable(self.driver.arena, self.store.descriptor, self.store.engine.finished_ring)

    def away(self, letter: int, *, runs: tuple[tuple[int, int], ...] = ((0, 2),)) -> tuple[Reservation, Slot]:
        """A variable full of `letter` in the store, whose reservation shows other bytes."""
        reservation = self.space.reserve(NBYTES)
        self.space.map(reservation, runs)
        ctypes.memset(reservation.address, letter, NBYTES)
        slot = self.store.allocate(NBYTES)
        self.store.write(slot, [(self.driver.view_address + runs[0][0] * CHUNK, NBYTES)]).wait()
        ctypes.memset(reservation.address, ord("x"), 2 * CHUNK)
        return reservation, slot

    def guard(self, *variables: tuple[Reservation, Slot], ticket: int = 0) -> list[int]:
        """Guard them; their entries."""
        guards = [
            Guard(self.table.new_entry(), r.address, s.capacity_nbytes, r.num_chunks * CHUNK, s.offset, ticket, True)
            for r, s in sorted(variables, key=lambda pair: pair[0].address)
        ]
        self.table.guard(guards)
        return [guard.entry for guard in guards]

    def close(self) -> None:
        self.table.close()
        self.store.close()
        self.driver.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path)
    yield made
    made.close()


def test_a_touch_shows_the_stored_bytes_and_a_write_reaches_the_file(guarded: Guarded) -> None:
    reservation, slot = guarded.away(ord("a"))
    (entry,) = guarded.guard((reservation, slot))
    before = guarded.table.num_served
    assert guarded.table.state(entry) == GUARDED
    assert ctypes.string_at(reservation.address + NBYTES - 3, 3) == b"aaa"
    assert guarded.table.state(entry) == SERVED
    assert guarded.table.num_served == before + 1
    ctypes.memset(reservation.address + 5, ord("b"), 2)
    assert guarded.table.lift(entry, unprotects=True) == SERVED
    guarded.space.note_file(reservation, guarded.store.descriptor, slot.offset, slot.capacity_nbytes)
    guarded.space.map(reservation, ((0, 2),))
    assert ctypes.string_at(reservation.address, 8) == b"xxxxxxxx"
    guarded.store.read(slot, [(guarded.driver.view_address, NBYTES)]).wait()
    assert ctypes.string_at(reservation.address, 8) == b"aaaaabba"


def test_lifting_an_untouched_guard_gives_the_chunks_back(guarded: Guarded) -> None:
    reservation, slot = guarded.away(ord("a"))
    (entry,) = guarded.guard((reservation, slot))
    assert guarded.table.lift(entry, unprotects=True) == GUARDED
    assert guarded.table.num_guards == 0
    assert ctypes.string_at(reservation.address, 3) == b"xxx"


def test_neighbours_are_protected_by_one_call(guarded: Guarded) -> None:
    variables = [guarded.away(ord("a"), runs=((2 * i, 2),)) for i in range(8)]
    before = guarded.table.num_calls
    guarded.guard(*variables)
    assert guarded.table.num_calls == before + 1
    for reservation, _ in variables:
        assert ctypes.string_at(reservation.address, 2) == b"aa"


def test_a_touch_waits_for_the_write(guarded: Guarded) -> None:
    reservation, slot = guarded.away(ord("a"))
    ctypes.memset(guarded.driver.view_address + 8 * CHUNK, ord("n"), 2 * CHUNK)
    guarded.store.engine.inject_faults(delay_ns=30_000_000)
    transfer = guarded.store.write(slot, [(guarded.driver.view_address + 8 * CHUNK, NBYTES)])
    guarded.guard((reservation, slot), ticket=transfer.ticket)
    assert ctypes.string_at(reservation.address, 4) == b"nnnn"
    assert transfer.done()


def test_stray_and_direct_access_see_each_other(guarded: Guarded) -> None:
    """The kernel's rule: direct reads write dirty pages back first, direct writes drop cached pages after."""
    slot = guarded.store.allocate(NBYTES)
    reservation = guarded.space.reserve(NBYTES)
    view = guarded.driver.view_address
    ctypes.memset(view, 0, 2 * CHUNK)
    guarded.store.write(slot, [(view, NBYTES)]).wait()
    guarded.space.map_file(reservation, guarded.store.descriptor, slot.offset, slot.capacity_nbytes)
    for turn in range(40):
        letter = 1 + 2 * turn
        ctypes.memset(reservation.address, letter, NBYTES)
        guarded.store.read(slot, [(view, NBYTES)]).wait()
        assert ctypes.string_at(view, NBYTES) == bytes([letter]) * NBYTES
        ctypes.memset(view, letter + 1, NBYTES)
        guarded.store.write(slot, [(view, NBYTES)]).wait()
        assert ctypes.string_at(reservation.address, NBYTES) == bytes([letter + 1]) * NBYTES


def test_many_threads_touch_while_guards_come_and_go(guarded: Guarded) -> None:
    """Every read is of the stored bytes or of the chunks behind the guard, and none is killed."""
    variables = [guarded.away(ord("a") + i, runs=((2 * i, 2),)) for i in range(8)]
    wrong: list[bytes] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for i, (reservation, _) in enumerate(variables):
                seen = ctypes.string_at(reservation.address + NBYTES // 2, 1)
                if seen not in (b"x", bytes([ord("a") + i])):
                    wrong.append(seen)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    before = guarded.table.num_served
    try:
        for turn in range(150):
            num_served = guarded.table.num_served
            entries = guarded.guard(*variables)
            while turn % 10 == 0 and guarded.table.num_served == num_served:
                time.sleep(0.0002)  # until a reader has met a guard
            for entry, (reservation, slot) in zip(entries, variables, strict=True):
                if guarded.table.lift(entry, unprotects=True) == SERVED:
                    guarded.space.note_file(reservation, guarded.store.descriptor, slot.offset, slot.capacity_nbytes)
                    guarded.space.map(reservation, ((2 * variables.index((reservation, slot)), 2),))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert guarded.table.num_served > before
    assert guarded.table.num_guards == 0


def test_faulthandler_is_put_back(guarded: Guarded) -> None:
    wrapped = faulthandler.enable
    guarded.table.close()
    assert faulthandler.enable is not wrapped
    assert faulthandler.enable.__name__ == "enable"


SCRIPT = """
import ctypes, faulthandler, os, sys, threading
from tests.vmm.test_faults import Guarded, NBYTES
how = sys.argv[1].split(",")
if "before" in how: faulthandler.enable()
g = Guarded(None)
variable = g.away(97)
g.guard(variable)
if "after" in how: faulthandler.enable()
if "off" in how: g.table.is_serving = False
address = variable[0].address
if "fork" in how:
    pid = os.fork()
    if pid == 0:
        ctypes.string_at(address, 1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    print("child", os.WTERMSIG(status), flush=True)
if "thread" in how:
    thread = threading.Thread(target=lambda: print("served", ctypes.string_at(address, 1), flush=True))
    thread.start()
    thread.join()
elif "off" not in how:
    print("served", ctypes.string_at(address, 1), flush=True)
if "behind" in how: ctypes.string_at(address + NBYTES + 8192, 1)
if "null" in how: ctypes.string_at(8, 1)
if "closed" in how:
    g.close()
    ctypes.string_at(8, 1)
if "off" in how: ctypes.string_at(address, 1)
if "signal" in how: os.kill(os.getpid(), 11)
print("alive", flush=True)
g.close()
"""


def _run(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, cwd=ROOT, timeout=600, check=False
    )


@pytest.mark.parametrize("how", ["plain", "before", "after", "before,after", "before,thread", "after,thread"])
def test_served_touches_leave_no_trace_in_faulthandler(how: str) -> None:
    done = _run(how)
    assert done.returncode == 0, done.stderr
    assert "served b'a'" in done.stdout
    assert "alive" in done.stdout
    assert "Fatal" not in done.stderr


@pytest.mark.parametrize("where", ["null", "behind", "off", "closed", "signal"])
@pytest.mark.parametrize("handler", ["plain", "before", "after"])
def test_other_faults_kill_as_they_did(where: str, handler: str) -> None:
    done = _run(f"{handler},{where}")
    assert done.returncode == -signal.SIGSEGV
    assert "alive" not in done.stdout
    assert ("Fatal Python error: Segmentation fault" in done.stderr) == (handler != "plain")
    assert ("ooc: a touch of 0x" in done.stderr) == (where in ("behind", "off"))


def test_a_forked_child_is_not_served() -> None:
    done = _run("fork")
    assert done.returncode == 0, done.stderr
    assert f"child {int(signal.SIGSEGV)}" in done.stdout
    assert "forked" in done.stderr


def test_the_page_is_what_slots_are_aligned_to() -> None:
    with FileStore(None, allow_memory=True) as store:
        assert store.allocate(1).capacity_nbytes % mmap.PAGESIZE == 0
