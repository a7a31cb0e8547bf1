"""The transfer engine: bytes arrive, order is kept, errors spread, and nothing is left behind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vmm.memory_cases import Memory, num_open_files, num_threads
from vmm.transfers import Segments, TransferEngine, TransferError

KIB, MIB = 1 << 10, 1 << 20
HELD_UP_NS = 30_000_000_000
"""Until the test sets other faults; only a broken engine sleeps so long."""


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(32 * MIB)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(descriptor, 32 * MIB)
    yield descriptor
    os.close(descriptor)


def test_a_round_trip_through_scattered_segments(engine: TransferEngine, memory: Memory, file: int) -> None:
    noise = random.Random(1).randbytes(8 * MIB)
    memory[: 8 * MIB] = noise
    pieces = [(memory.address + start, 64 * KIB) for start in range(0, 8 * MIB, 64 * KIB)]
    order = random.Random(2).sample(pieces, len(pieces))
    ticket = engine.submit_write(file, 4096, order)
    back = [(address + 16 * MIB, nbytes) for address, nbytes in order]
    engine.wait(engine.submit_read(file, 4096, back, after=[ticket]))
    assert memory[16 * MIB : 24 * MIB] == noise
    first = order[0][0] - memory.address
    assert os.pread(file, 64 * KIB, 4096) == noise[first : first + 64 * KIB]
    assert os.pread(file, 4096, 0) == bytes(4096)


def test_more_segments_than_one_call_takes(engine: TransferEngine, memory: Memory, file: int) -> None:
    num = 3 * os.sysconf("SC_IOV_MAX") + 7
    memory[: num * 512] = random.Random(3).randbytes(num * 512)
    segments = [(memory.address + index * 512, 512) for index in reversed(range(num))]
    engine.wait(engine.submit_write(file, 0, segments))
    expected = b"".join(memory[index * 512 : index * 512 + 512] for index in reversed(range(num)))
    assert os.pread(file, num * 512, 0) == expected
    assert engine.statistics("write").num_calls >= 4


@pytest.mark.parametrize("call_nbytes", [1, 999, 4096, 70_000])
def test_partial_transfers_are_continued(engine: TransferEngine, memory: Memory, file: int, call_nbytes: int) -> None:
    lengths = [5, 1000, 1, 4096, 300, 999]
    memory[:8192] = random.Random(4).randbytes(8192)
    starts = list(itertools.accumulate(lengths, initial=0))
    segments = [(memory.address + start, length) for start, length in zip(starts, lengths, strict=False)]
    engine.inject_faults(call_nbytes=call_nbytes)
    ticket = engine.submit_write(file, 77, segments)
    back = [(address + MIB, length) for address, length in segments]
    engine.wait(engine.submit_read(file, 77, back, after=[ticket]))
    assert memory[MIB : MIB + sum(lengths)] == memory[: sum(lengths)]
    statistics = engine.statistics("read")
    assert statistics.nbytes == sum(lengths)
    assert statistics.num_calls == sum(-(-length // call_nbytes) for length in lengths)


def test_threads_share_one_large_transfer(memory: Memory, file: int) -> None:
    def are_shared() -> bool:
        with TransferEngine(num_writers=4, num_readers=1, piece_nbytes=MIB) as engine:
            time.sleep(0.1)  # all threads asleep: each must be woken
            engine.inject_faults(delay_ns=20_000_000)
            engine.wait(engine.submit_write(file, 0, [(memory.address, 16 * MIB)]))
            statistics = engine.statistics("write")
            assert statistics.num_calls == 16
            # 16 calls of at least 20 ms each; were they in a row, call_ns and busy_ns would be equal.
            assert statistics.call_ns >= 16 * 20_000_000
            return statistics.call_ns > 2 * statistics.busy_ns

    # A machine with other work may run one thread for long while the others wait for their turn; not again and again.
    assert any(are_shared() for _ in range(30))


def test_a_job_waits_for_those_it_comes_after(engine: TransferEngine, memory: Memory, file: int) -> None:
    """Each round writes a value and reads it back twice; without order a read would see an older value."""
    engine.inject_faults(delay_ns=1_000_000)
    last: list[int] = []
    for value in range(1, 30):
        memory[value * 8192 : value * 8192 + 4096] = bytes([value]) * 4096
        write = engine.submit_write(file, 0, [(memory.address + value * 8192, 4096)], after=last)
        last = [
            engine.submit_read(file, 0, [(memory.address + value * 8192 + MIB * times, 4096)], after=[write])
            for times in (1, 2)
        ]
    engine.wait_all()
    for value in range(1, 30):
        for times in (1, 2):
            start = value * 8192 + MIB * times
            assert memory[start : start + 4096] == bytes([value]) * 4096
    records = {record.ticket: record for record in engine.take_records()}
    for write in range(1, 30 * 3 - 3, 3):
        assert records[write].stop_ns <= min(records[write + 1].start_ns, records[write + 2].start_ns)


def test_a_blocked_read_holds_up_no_other(memory: Memory, file: int) -> None:
    with TransferEngine(num_writers=1, num_readers=1) as engine:
        engine.inject_faults(direction="write", delay_ns=HELD_UP_NS)
        write = engine.submit_write(file, 0, [(memory.address, 4096)])
        blocked = [engine.submit_read(file, 0, [(memory.address + MIB, 4096)], after=[write]) for _ in range(5)]
        free = engine.submit_read(file, 8192, [(memory.address + 2 * MIB, 4096)])
        engine.wait(free)
        assert not any(engine.done(ticket) for ticket in (write, *blocked))
        engine.inject_faults()
        engine.wait_all()
        stops = {record.ticket: record.stop_ns for record in engine.take_records()}
        assert all(stops[free] < stops[ticket] for ticket in blocked)


def test_ready_jobs_are_served_in_ticket_order(memory: Memory, file: int) -> None:
    """`early` becomes ready after `late`, and is served before: it was submitted before."""
    with TransferEngine(num_writers=1, num_readers=1) as engine:
        engine.inject_faults(delay_ns=HELD_UP_NS)
        write = engine.submit_write(file, 0, [(memory.address, 4096)])
        first = engine.submit_read(file, 8192, [(memory.address + 4096, 4096)])
        early = engine.submit_read(file, 0, [(memory.address + 8192, 4096)], after=[write])
        late = [engine.submit_read(file, 8192, [(memory.address + 12288, 4096)]) for _ in range(6)]
        engine.inject_faults(direction="read", delay_ns=HELD_UP_NS)
        engine.wait(write)
        assert not engine.done(first)  # the one reader has it
        engine.inject_faults()
        engine.wait_all()
        order = [record.ticket for record in engine.take_records() if record.direction == "read"]
        assert order == [first, early, *late]


def test_a_delay_ends_with_other_faults(engine: TransferEngine, memory: Memory, file: int) -> None:
    engine.inject_faults(direction="write", delay_ns=HELD_UP_NS)
    held = engine.submit_write(file, 0, [(memory.address, 4096)])
    engine.wait(engine.submit_read(file, 8192, [(memory.address + MIB, 4096)]))  # the other direction is as ever
    assert not engine.done(held)
    engine.inject_faults(direction="read", delay_ns=HELD_UP_NS)
    engine.wait(held)
    engine.inject_faults()


def test_done_and_wait_agree(engine: TransferEngine, memory: Memory, file: int) -> None:
    engine.inject_faults(delay_ns=HELD_UP_NS)
    ticket = engine.submit_write(file, 0, [(memory.address, 4096)])
    assert not engine.done(ticket)
    assert not engine.has_finished(ticket)
    assert engine.num_pending == 1
    engine.inject_faults(delay_ns=30_000_000)
    engine.wait(ticket)
    assert engine.done(ticket)
    assert engine.has_finished(ticket)
    ring = engine._ring
    ring[ticket % len(ring)] += len(ring)  # a later one's, which has taken its place
    assert engine.has_finished(ticket)
    assert not engine.has_finished(engine.submit_read(file, 0, [(memory.address, 4096)]))  # delayed, too
    engine.wait_all()
    engine.wait(ticket)
    assert engine.num_pending == 0


def test_waiting_lets_other_python_threads_run(engine: TransferEngine, memory: Memory, file: int) -> None:
    engine.inject_faults(delay_ns=HELD_UP_NS)
    ticket = engine.submit_write(file, 0, [(memory.address, 4096)])
    waits = threading.Event()
    seen = []

    def count() -> None:
        waits.wait()
        while not engine.done(ticket):
            seen.append(time.monotonic_ns())
            time.sleep(0.001)
            if len(seen) == 10:
                engine.inject_faults()

    thread = threading.Thread(target=count)
    thread.start()
    waits.set()
    engine.wait(ticket)
    thread.join()
    assert len(seen) >= 10  # with the GIL held it would be 1


def test_an_error_names_the_place(engine: TransferEngine, memory: Memory, file: int) -> None:
    engine.inject_faults(fail_call=1, error=errno.ENOSPC)
    ticket = engine.submit_write(file, 12288, [(memory.address, 8192)])
    with pytest.raises(TransferError, match="No space left") as caught:
        engine.wait(ticket)
    error = caught.value
    assert isinstance(error, OSError)
    assert (error.errno, error.offset, error.nbytes, error.direction) == (errno.ENOSPC, 12288, 8192, "write")
    assert error.ticket == error.failed_ticket == ticket
    assert "12288" in str(error)
    assert engine.done(ticket)
    with pytest.raises(TransferError):  # and again
        engine.wait(ticket)


def test_real_errors_are_reported(engine: TransferEngine, memory: Memory, file: int, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="Input/output error"):  # past the end of the file
        engine.wait(engine.submit_read(file, 32 * MIB - 4096, [(memory.address, 8192)]))
    with pytest.raises(TransferError) as caught:
        engine.wait(engine.submit_write(file, 0, [(4096, 8192)]))  # nothing is mapped there
    assert caught.value.errno == errno.EFAULT
    (tmp_path / "read-only").write_bytes(bytes(8192))
    descriptor = os.open(tmp_path / "read-only", os.O_RDONLY)
    with pytest.raises(TransferError) as caught:
        engine.wait(engine.submit_write(descriptor, 0, [(memory.address, 8192)]))
    assert caught.value.errno == errno.EBADF
    os.close(descriptor)


def test_dependents_fail_with_the_error_of_the_first(engine: TransferEngine, memory: Memory, file: int) -> None:
    engine.inject_faults(fail_call=1, direction="write", delay_ns=10_000_000)
    write = engine.submit_write(file, 4096, [(memory.address, 4096)])
    read = engine.submit_read(file, 4096, [(memory.address + 4096, 4096)], after=[write])
    after_read = engine.submit_write(file, 8192, [(memory.address + 4096, 4096)], after=[read])
    other = engine.submit_read(file, 0, [(memory.address + 8192, 4096)])
    for ticket in (write, read, after_read):
        with pytest.raises(TransferError) as caught:
            engine.wait(ticket)
        error = caught.value
        assert (error.errno, error.failed_ticket, error.offset, error.direction) == (errno.EIO, write, 4096, "write")
        assert error.ticket == ticket
    engine.wait(other)
    with pytest.raises(TransferError, match=f"which ticket {other + 1} waited for"):
        engine.wait(engine.submit_read(file, 0, [(memory.address, 4096)], after=[read]))  # after it is known


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EINTR])
def test_every_call_may_fail_and_a_retry_works(memory: Memory, file: int, error: int) -> None:
    """A chain of writes and reads; for each k its k-th call fails. EINTR is no failure."""
    memory[: 4 * MIB] = random.Random(5).randbytes(4 * MIB)
    with TransferEngine(piece_nbytes=MIB) as engine:
        for fail_call in itertools.count(1):
            engine.inject_faults(fail_call=fail_call, error=error)
            before = [engine.statistics(way).num_calls for way in ("write", "read")]
            tickets = [engine.submit_write(file, 0, [(memory.address, 2 * MIB)])]
            tickets.append(engine.submit_write(file, 2 * MIB, [(memory.address + 2 * MIB, 2 * MIB)]))
            tickets.append(engine.submit_read(file, 0, [(memory.address + 8 * MIB, 4 * MIB)], after=tickets))
            failed = []
            for ticket in tickets:
                try:
                    engine.wait(ticket)
                except TransferError as raised:
                    failed.append((ticket, raised.errno))
            engine.wait_all()
            calls = [engine.statistics(way).num_calls for way in ("write", "read")]
            assert engine.num_pending == 0
            engine.inject_faults()
            if failed:
                assert error != errno.EINTR
                assert all(code == error for _, code in failed)
                assert tickets[2] == failed[-1][0]
            memory[8 * MIB : 12 * MIB] = bytes(4 * MIB)
            tickets = [engine.submit_write(file, 0, [(memory.address, 4 * MIB)])]
            engine.wait(engine.submit_read(file, 0, [(memory.address + 8 * MIB, 4 * MIB)], after=tickets))
            assert memory[8 * MIB : 12 * MIB] == memory[: 4 * MIB]
            if fail_call > 8:
                assert not failed
                assert [b - a for a, b in zip(before, calls, strict=True)] == [4, 4]
                break


def test_wrong_arguments(engine: TransferEngine, memory: Memory, file: int) -> None:
    for segments in ([], [(0, 5)], [(memory.address, 0)], [(memory.address, -1)]):
        with pytest.raises(ValueError, match="segment"):
            engine.submit_write(file, 0, segments)
    with pytest.raises(ValueError, match="offset=-1"):
        engine.submit_read(file, -1, [(memory.address, 4096)])
    for ticket in (0, -3, 999):
        with pytest.raises(ValueError, match="never given out"):
            engine.done(ticket)
        with pytest.raises(ValueError, match="never given out"):
            engine.wait(ticket)
        with pytest.raises(ValueError, match="never given out"):
            engine.submit_write(file, 0, [(memory.address, 4096)], after=[ticket])
    for options in ({"num_writers": 0}, {"num_readers": 0}, {"piece_nbytes": 100}, {"piece_nbytes": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            TransferEngine(**options)
    assert engine.num_pending == 0


def test_prepared_segments_can_be_used_again(engine: TransferEngine, memory: Memory, file: int) -> None:
    segments = Segments([(memory.address, 4096), (memory.address + 8192, 512)])
    assert segments.nbytes == 4608
    for value in (b"a", b"b"):
        memory[:512] = value * 512
        engine.wait(engine.submit_write(file, 0, segments))
        assert os.pread(file, 1, 0) == value


def test_records_and_statistics(engine: TransferEngine, memory: Memory, file: int) -> None:
    start = time.monotonic_ns()
    write = engine.submit_write(file, 0, [(memory.address, 8192)])
    engine.wait(write)
    engine.inject_faults(fail_call=1)
    read = engine.submit_read(file, 0, [(memory.address, 4096)])
    engine.wait_all()
    one, other = engine.take_records()
    assert (one.ticket, one.direction, one.nbytes, one.error) == (write, "write", 8192, 0)
    assert (other.ticket, other.direction, other.nbytes, other.error) == (read, "read", 4096, errno.EIO)
    assert start <= one.submit_ns <= one.start_ns <= one.stop_ns <= other.submit_ns <= time.monotonic_ns()
    assert engine.take_records() == ()
    statistics = engine.statistics("write")
    assert (statistics.num_jobs, statistics.nbytes, statistics.num_calls) == (1, 8192, 1)
    assert 0 < statistics.busy_ns <= statistics.call_ns
    assert (engine.statistics("read").num_jobs, engine.statistics("read").nbytes) == (1, 0)


def test_dropping_the_cache_leaves_no_pages(engine: TransferEngine, memory: Memory, file: int) -> None:
    memory[: 4 * MIB] = random.Random(6).randbytes(4 * MIB)
    engine.wait(engine.submit_write(file, 0, [(memory.address, 4 * MIB)], drop_cache=True))
    assert num_cached_pages(file, 4 * MIB) == 0
    engine.wait(engine.submit_read(file, 0, [(memory.address + 8 * MIB, 4 * MIB)], drop_cache=True))
    assert memory[8 * MIB : 12 * MIB] == memory[: 4 * MIB]
    assert num_cached_pages(file, 4 * MIB) == 0
    engine.wait(engine.submit_read(file, 0, [(memory.address + 8 * MIB, 4 * MIB)]))
    assert num_cached_pages(file, 4 * MIB) > 0  # else the two assertions above would say nothing


def num_cached_pages(descriptor: int, nbytes: int) -> int:
    """Pages of the file in the page cache, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    view = mmap.mmap(descriptor, nbytes)
    handle = ctypes.c_char.from_buffer(view)
    found = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(ctypes.addressof(handle)), ctypes.c_size_t(nbytes), found) == 0
    del handle
    view.close()
    return sum(page & 1 for page in found)


def test_closing_cancels_what_has_not_begun(memory: Memory, file: int) -> None:
    engine = TransferEngine(num_writers=1, num_readers=1)
    engine.inject_faults(delay_ns=HELD_UP_NS)
    first = engine.submit_write(file, 0, [(memory.address, 4096)])
    while not engine.statistics("write").busy_ns:
        time.sleep(0.001)
    second = engine.submit_write(file, 0, [(memory.address, 4096)])
    third = engine.submit_read(file, 0, [(memory.address, 4096)], after=[second])
    seen: list[BaseException] = []

    def wait() -> None:
        try:
            engine.wait(third)
        except OSError as error:
            seen.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    engine.close()
    waiter.join()
    engine.close()
    assert [type(error) for error in seen] == [TransferError]
    engine.wait(first)
    for ticket in (second, third):
        with pytest.raises(TransferError, match="canceled"):
            engine.wait(ticket)
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit_write(file, 0, [(memory.address, 4096)])
    assert "closed" in repr(engine)


def test_two_hundred_cycles_leave_nothing(memory: Memory, file: int) -> None:
    def cycle(*, closes: bool) -> None:
        engine = TransferEngine(num_writers=1, num_readers=1)
        ticket = engine.submit_write(file, 0, [(memory.address, 4096)])
        engine.submit_read(file, 0, [(memory.address, 4096)], after=[ticket])
        if closes:
            engine.wait_all()
            engine.close()

    cycle(closes=True)
    gc.collect()
    files, threads = num_open_files(), num_threads()
    resident = [resident_nbytes()]
    for _ in range(2):
        for index in range(100):
            cycle(closes=index % 2 == 0)  # the others are closed when they are dropped
        resident.append(resident_nbytes())
    assert num_open_files() == files
    assert num_threads() == threads
    # What grows does so in both halves; malloc may come to what it keeps in one.
    assert min(later - earlier for earlier, later in itertools.pairwise(resident)) < 2 * MIB


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_many_jobs_from_many_threads(engine: TransferEngine, memory: Memory, file: int) -> None:
    """Each thread keeps to its own part of file and memory; every byte must come back."""
    num_each, failures = 200, []

    def work(part: int) -> None:
        rng = random.Random(part)
        base = part * MIB
        for round_index in range(num_each):
            data = rng.randbytes(4096)
            place = rng.randrange(0, MIB // 4, 4096)
            memory[base : base + 4096] = data
            write = engine.submit_write(file, base + place, [(memory.address + base, 4096)])
            read = engine.submit_read(file, base + place, [(memory.address + base + MIB // 2, 4096)], after=[write])
            engine.wait(read)
            if memory[base + MIB // 2 : base + MIB // 2 + 4096] != data:
                failures.append((part, round_index))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert engine.statistics("read").num_jobs == 6 * num_each


def test_a_forked_child_is_refused(engine: TransferEngine, memory: Memory, file: int) -> None:
    engine.inject_faults(delay_ns=HELD_UP_NS)
    ticket = engine.submit_write(file, 0, [(memory.address, 4096)])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            refused = 0
            for call in (
                lambda: engine.submit_write(file, 0, [(memory.address, 4096)]),
                lambda: engine.done(ticket),
                lambda: engine.wait(ticket),
                lambda: engine.wait_all(),
                lambda: engine.statistics("write"),
            ):
                try:
                    call()
                except RuntimeError as error:
                    refused += "forked" in str(error)
            engine.close()
            code = 0 if refused == 5 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.inject_faults()
    engine.wait(ticket)


SCRIPT = """
import ctypes, mmap, os, sys, threading
from vmm.transfers import TransferEngine
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
memory = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
engine = TransferEngine()
engine.inject_faults(delay_ns=int(sys.argv[2]))
ticket = engine.submit_write(file, 0, [(address, 4096)])
late = engine.submit_write(file, 4096, [(address, 4096)], after=[ticket])
print("submitted", flush=True)
"""


def start_script(tail: str, path: Path, delay_ns: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT + tail, str(path), str(delay_ns)]
    pipe = subprocess.PIPE
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=root)


def test_exit_without_close_does_not_hang(tmp_path: Path) -> None:
    process = start_script("", tmp_path / "data", 100_000_000)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (0, "submitted\n", "")


def test_exit_while_a_daemon_thread_waits_does_not_crash(tmp_path: Path) -> None:
    tail = "threading.Thread(target=lambda: [engine.wait(late) for _ in range(9)], daemon=True).start()\n"
    process = start_script(tail, tmp_path / "data", 100_000_000)
    process.communicate(timeout=600)
    assert process.returncode == 0


def test_ctrl_c_is_heard_while_waiting(tmp_path: Path) -> None:
    tail = (
        "try: print('waiting', flush=True); engine.wait(late)\n"
        "except KeyboardInterrupt: print('done' if engine.done(late) else 'interrupted')\n"
    )
    process = start_script(tail, tmp_path / "data", HELD_UP_NS)
    assert process.stdout is not None
    assert process.stdout.readline() == "submitted\n"
    assert process.stdout.readline() == "waiting\n"  # before this line Ctrl-C would end the script
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (0, "interrupted\n", "")


def test_signals_go_to_pythons_thread(engine: TransferEngine, memory: Memory, file: int) -> None:
    """The engine's threads block every signal: none of their calls is interrupted by ours."""
    masks = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("ooc-"):
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            masks.append(int(status["SigBlk"].strip(), 16))
    assert len(masks) == 5  # two writers, two readers, and who waits for the kernel's queue
    assert all(mask >> (signal.SIGINT - 1) & 1 and mask >> (signal.SIGALRM - 1) & 1 for mask in masks)
    engine.wait(engine.submit_write(file, 0, [(memory.address, 4096)]))
    assert fcntl.fcntl(file, fcntl.F_GETFD) >= 0
