"""The kernel's own queue for small jobs: the same bytes, order and errors as by the engine's threads."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vmm.memory_cases import Memory, num_threads
from vmm.transfers import TransferEngine, TransferError

KIB, MIB = 1 << 10, 1 << 20
FILE_NBYTES = 16 * MIB


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(FILE_NBYTES)
    made[:FILE_NBYTES] = random.Random(1).randbytes(FILE_NBYTES)
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is all on the disk, so that no write needs room, and no read has to wait for the page cache."""
    with open(tmp_path / "data", "wb") as made:
        made.write(bytes(FILE_NBYTES))
        made.flush()
        os.fsync(made.fileno())
        os.posix_fadvise(made.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return tmp_path / "data"


@pytest.fixture
def file(path: Path) -> Iterator[int]:
    """The file, opened with O_DIRECT, on a system whose queue takes it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT in {path.parent}: {error}")
    memory = Memory(4 * KIB)
    with TransferEngine() as engine:
        engine.wait(engine.submit_read(descriptor, 0, [(memory.address, 4 * KIB)]))
        takes = engine.statistics("read").num_queued
    memory.close()
    if not takes:
        os.close(descriptor)
        pytest.skip("the kernel's queue is not to be had here, or does not take this file system")
    yield descriptor
    os.close(descriptor)


def num_queued(engine: TransferEngine) -> int:
    return sum(engine.statistics(way).num_queued for way in ("write", "read"))


def test_bytes_arrive_in_order(engine: TransferEngine, memory: Memory, file: int) -> None:
    """Writes and reads over each other's places, each after those that it must come after."""
    rng = random.Random(2)
    block = 32 * KIB
    num_places = 4 * MIB // block
    held: dict[int, tuple[int, list[int], bytes]] = {}  # by place: its last write, reads since, its bytes
    expected: list[tuple[int, int, bytes]] = []
    num_reads = 0
    for _ in range(3000):
        place = rng.randrange(num_places)
        nbytes = rng.randrange(4 * KIB, block + 1, 4 * KIB)
        if place in held and rng.random() < 0.5:
            write, reads, data = held[place]
            target = 4 * MIB + (num_reads % 256) * block
            num_reads += 1
            while len(expected) > 8:  # so that the queue is not full all the time
                wait, start, known = expected.pop(0)
                engine.wait(wait)
                assert memory[start : start + len(known)] == known
            ticket = engine.submit_read(file, place * block, [(memory.address + target, len(data))], after=[write])
            reads.append(ticket)
            expected.append((ticket, target, data))
        else:
            start = rng.randrange(0, 4 * MIB - block, 4 * KIB)
            half = nbytes // (8 * KIB) * 4 * KIB
            segments = [(memory.address + start + half, nbytes - half), (memory.address + start, half)]
            data = memory[start + half : start + nbytes] + memory[start : start + half]
            after = [held[place][0], *held[place][1]] if place in held else []
            ticket = engine.submit_write(file, place * block, [s for s in segments if s[1]], after=after)
            held[place] = ticket, [], data
    for wait, start, known in expected:
        engine.wait(wait)
        assert memory[start : start + len(known)] == known
    engine.wait_all()
    assert num_queued(engine) > 0
    assert sum(engine.statistics(way).num_jobs for way in ("write", "read")) == 3000


@pytest.mark.parametrize("why", ["large", "page cache", "not wanted", "dropped from the cache", "faults"])
def test_what_is_left_to_the_threads(why: str, memory: Memory, path: Path, file: int) -> None:
    nbytes = MIB if why == "large" else 64 * KIB
    descriptor = os.open(path, os.O_RDWR) if why == "page cache" else os.dup(file)
    with TransferEngine(kernel_queue=why != "not wanted") as engine:
        if why == "faults":
            engine.inject_faults(call_nbytes=4 * KIB)
        write = engine.submit_write(
            descriptor, 0, [(memory.address, nbytes)], drop_cache=why == "dropped from the cache"
        )
        engine.wait(engine.submit_read(file, 0, [(memory.address + 2 * MIB, 4 * KIB)], after=[write]))
        assert engine.statistics("write").num_queued == 0
        assert memory[2 * MIB : 2 * MIB + 4 * KIB] == memory[: 4 * KIB]
    os.close(descriptor)


@pytest.mark.parametrize("offset", [FILE_NBYTES, FILE_NBYTES - 8 * KIB])
def test_errors_are_those_of_the_threads(offset: int, memory: Memory, file: int) -> None:
    """A read that ends past the end of the file, wholly or in part: who waits for it learns of it, too."""
    seen = []
    for kernel_queue in (True, False):
        with TransferEngine(kernel_queue=kernel_queue) as engine:
            read = engine.submit_read(file, offset, [(memory.address, 64 * KIB)])
            after = engine.submit_write(file, 0, [(memory.address, 4 * KIB)], after=[read])
            for ticket in (read, after):
                with pytest.raises(TransferError) as caught:
                    engine.wait(ticket)
                error = caught.value
                seen.append((error.errno, error.failed_ticket, error.direction, error.offset, error.nbytes))
            assert num_queued(engine) == 0
    assert seen[:2] == seen[2:]
    assert seen[0] == (errno.EIO, 1, "read", FILE_NBYTES, 64 * KIB - (FILE_NBYTES - offset))


def test_a_descriptor_that_is_closed_is_an_error(engine: TransferEngine, memory: Memory, file: int) -> None:
    closed = os.dup(file)
    os.close(closed)
    with pytest.raises(TransferError) as caught:
        engine.wait(engine.submit_read(closed, 0, [(memory.address, 4 * KIB)]))
    assert caught.value.errno == errno.EBADF


@pytest.mark.usefixtures("file")
def test_places_that_the_file_does_not_have_yet(engine: TransferEngine, memory: Memory, tmp_path: Path) -> None:
    """Room must be found for them, which the kernel does not do at once: the threads do it."""
    descriptor = os.open(tmp_path / "sparse", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.truncate(descriptor, 4 * MIB)
    tickets = [
        engine.submit_write(descriptor, start, [(memory.address + start, 64 * KIB)])
        for start in range(0, 4 * MIB, 64 * KIB)
    ]
    back = engine.submit_read(descriptor, 0, [(memory.address + 4 * MIB, 4 * MIB)], after=tickets)
    engine.wait(back)
    assert memory[4 * MIB : 8 * MIB] == memory[: 4 * MIB]
    os.close(descriptor)


def test_memory_that_cannot_be_read_is_an_error(engine: TransferEngine, file: int) -> None:
    gone = Memory(64 * KIB)
    address = gone.address
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(address), ctypes.c_size_t(64 * KIB), 0) == 0
    with pytest.raises(TransferError) as caught:
        engine.wait(engine.submit_write(file, 0, [(address, 64 * KIB)]))
    assert caught.value.errno == errno.EFAULT
    assert protect(ctypes.c_void_p(address), ctypes.c_size_t(64 * KIB), 3) == 0
    gone.close()


def test_more_at_once_than_the_queue_takes(engine: TransferEngine, memory: Memory, file: int) -> None:
    num, block = 400, 16 * KIB
    tickets = [engine.submit_write(file, i * block, [(memory.address + i * block, block)]) for i in range(num)]
    engine.wait_all()
    assert all(engine.has_finished(ticket) for ticket in tickets)
    assert os.pread(os.open(f"/proc/self/fd/{file}", os.O_RDONLY), num * block, 0) == memory[: num * block]
    assert [engine.statistics("write").num_jobs, engine.num_pending] == [num, 0]
    assert engine.statistics("write").nbytes == num * block


@pytest.mark.parametrize("end", [TransferEngine.close, lambda engine: None], ids=["closed", "dropped"])
def test_many_engines_leave_nothing(end: Callable[[TransferEngine], None], memory: Memory, file: int) -> None:
    """Each is ended while its jobs are under way."""
    threads, contexts = num_threads(), num_contexts()
    for turn in range(40):
        engine = TransferEngine(num_writers=1, num_readers=1)
        for index in range(turn % 20):
            engine.submit_write(file, index * 64 * KIB, [(memory.address + index * 64 * KIB, 64 * KIB)])
        end(engine)
        del engine
    assert num_threads() == threads
    deadline = time.monotonic() + 60
    while num_contexts() > contexts and time.monotonic() < deadline:  # other tests' engines count, too
        time.sleep(0.01)
    assert num_contexts() <= contexts


def num_contexts() -> int:
    """Requests that all queues of this machine have room for."""
    return int(Path("/proc/sys/fs/aio-nr").read_text())


def test_a_fork_goes_on_without_the_queue(engine: TransferEngine, memory: Memory, file: int) -> None:
    tickets = [engine.submit_write(file, i * 64 * KIB, [(memory.address, 64 * KIB)]) for i in range(16)]
    child = os.fork()
    if child == 0:
        try:
            engine.submit_read(file, 0, [(memory.address, 4 * KIB)])
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(3)
    for ticket in tickets:
        engine.wait(ticket)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.wait(engine.submit_read(file, 0, [(memory.address + MIB, 64 * KIB)]))
    assert memory[MIB : MIB + 64 * KIB] == memory[: 64 * KIB]


def test_engines_one_after_another(memory: Memory, file: int) -> None:
    """The kernel's context of the one before serves the next; a fork, where it is not one, makes its own."""
    for turn in range(4):
        assert_queues(memory, file, turn)
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            assert_queues(memory, file, 5)
            assert_queues(memory, file, 6)
            failed = 0
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_queues(memory, file, 7)


def assert_queues(memory: Memory, file: int, turn: int) -> None:
    """An engine has small jobs done by the kernel, which leaves none behind for the next one's."""
    start = turn * 64 * KIB
    with TransferEngine() as engine:
        for _ in range(2):  # the second finds what the first has left
            tickets = [engine.submit_write(file, start, [(memory.address + start, 64 * KIB)])]
            tickets.append(engine.submit_read(file, start, [(memory.address + 8 * MIB, 64 * KIB)], after=tickets))
            engine.wait_all()
            assert memory[8 * MIB : 8 * MIB + 64 * KIB] == memory[start : start + 64 * KIB]
        assert num_queued(engine) > 0
        engine.submit_write(file, start, [(memory.address + start, 64 * KIB)])  # under way as it closes
