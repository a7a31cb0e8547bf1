"""Moving memory to and from files on threads of their own, without the GIL.

The work is done by native/transfer_engine.h; this is its door. A submitted job has a ticket, a number;
it may wait for earlier tickets. `submit_*` and `done` cost a few microseconds and never block.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from vmm.native_build import build

__all__ = [
    "DROP_CACHE",
    "Direction",
    "Job",
    "Segments",
    "TransferEngine",
    "TransferError",
    "TransferRecord",
    "TransferStatistics",
]

Direction = Literal["write", "read"]

_KINDS: dict[Direction, int] = {"write": 0, "read": 1}
_DIRECTIONS: tuple[Direction, Direction] = ("write", "read")
_EITHER_KIND = 2
DROP_CACHE = 1
"""A flag of native jobs: sync what was written, and drop it from the page cache."""
_PIECE_NBYTES = 4 << 20
_WAIT_SLICE_NS = 100_000_000
"""A wait comes back to Python this often, so that Ctrl-C is heard."""
_NUM_RECORDS = 16384


class TransferError(OSError):
    """A read or write failed, or waited for one that did. `errno` is the system's.

    Attributes:
        ticket: The job that was asked about.
        failed_ticket: The job whose own I/O failed: `ticket` itself, or one that it waited for.
        direction: What the failed job did.
        offset: Where in the file the failed call was.
        nbytes: How much was left to move there.
    """

    def __init__(
        self, code: int, *, ticket: int, failed_ticket: int, direction: Direction, offset: int, nbytes: int
    ) -> None:
        text = f"{os.strerror(code)}: {direction} of {nbytes} bytes at offset {offset} of the file"
        text += f" (ticket {failed_ticket})"
        if ticket != failed_ticket:
            text += f", which ticket {ticket} waited for"
        super().__init__(code, text)
        self.ticket = ticket
        self.failed_ticket = failed_ticket
        self.direction = direction
        self.offset = offset
        self.nbytes = nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRecord:
    """One finished job. Times are of the monotonic clock (`time.monotonic_ns`).

    Attributes:
        ticket: Its ticket.
        direction: Which way.
        nbytes: Its size.
        submit_ns: When it was submitted.
        start_ns: When its first call began.
        stop_ns: When it was finished.
        error: Its errno; 0 if it succeeded.
    """

    ticket: int
    direction: Direction
    nbytes: int
    submit_ns: int
    start_ns: int
    stop_ns: int
    error: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStatistics:
    """One direction's totals since the engine was made.

    Attributes:
        num_jobs: Jobs finished, failed ones too.
        nbytes: Bytes moved.
        num_calls: System calls.
        num_queued: Of the jobs, those that the kernel's own queue did, without a thread of ours.
        busy_ns: Time during which at least one call was under way: `nbytes / busy_ns` is the rate.
        call_ns: Time summed over calls: `call_ns / busy_ns` is how many were under way on average.
    """

    num_jobs: int
    nbytes: int
    num_calls: int
    num_queued: int
    busy_ns: int
    call_ns: int


class Segments:
    """Memory of one transfer, prepared once and submitted many times (saves about a microsecond)."""

    __slots__ = ("_array", "address", "nbytes", "num")

    def __init__(self, segments: Sequence[tuple[int, int]]) -> None:
        """Take `(address, nbytes)` pairs in the order of the file's bytes."""
        self.nbytes = 0
        """Bytes of all of them."""
        flat: list[int] = []
        for address, nbytes in segments:
            if address <= 0 or nbytes <= 0:
                raise ValueError(f"segment of {nbytes} bytes at {address:#x}: must be memory")
            self.nbytes += nbytes
            flat += (address, nbytes)
        if not flat:
            raise ValueError("a transfer needs at least one segment")
        self.num = len(segments)
        """How many there are."""
        self._array = (ctypes.c_uint64 * len(flat))(*flat)
        self.address = ctypes.addressof(self._array)
        """Where native code finds them, while this object lives."""


class Job(NamedTuple):
    """A transfer as native code submits it: see `TransferEngine.native_calls`."""

    kind: int
    descriptor: int
    offset: int
    segments: Segments
    flags: int


class TransferEngine:
    """Threads that write and threads that read.

    Each direction has its own threads, so writes never wait for reads. A job that waits for others
    (`after`) holds up nobody; ready jobs are served in ticket order. The memory of a job belongs to
    the engine until the job is done. In a forked child every call raises.

    Args:
        num_writers: Threads that write.
        num_readers: Threads that read.
        piece_nbytes: Larger jobs are cut into pieces of this size, which the threads share; a
            multiple of 4096, for files opened with O_DIRECT.
        kernel_queue: Let the kernel's asynchronous I/O do small jobs (512 KiB) on files opened with O_DIRECT, where it
            has that: waking a thread costs more than they do. Without, the threads do all.
    """

    def __init__(
        self,
        *,
        num_writers: int = 2,
        num_readers: int = 2,
        piece_nbytes: int = _PIECE_NBYTES,
        kernel_queue: bool = True,
    ) -> None:
        if num_writers < 1 or num_readers < 1:
            raise ValueError(f"num_writers={num_writers}, num_readers={num_readers}: at least one each way")
        if piece_nbytes <= 0 or piece_nbytes % 4096:
            raise ValueError(f"piece_nbytes={piece_nbytes}: must be a positive multiple of 4096")
        self._lib = _library()
        self._num_threads = (num_writers, num_readers)
        code = ctypes.c_int()
        handle = self._lib.open(num_writers, num_readers, piece_nbytes, kernel_queue, ctypes.byref(code))
        if not handle:
            raise OSError(
                code.value, f"{os.strerror(code.value)}: cannot start {num_writers} + {num_readers} transfer threads"
            )
        self._handle: int = handle
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _close_and_free, self._lib, handle)
        self._finalizer.atexit = False  # at exit `_close_all` joins the threads; other threads may still hold us
        _live_engines.add(self)
        address, length = self.finished_ring
        self._ring = (ctypes.c_int64 * length).from_address(address)

    def __repr__(self) -> str:
        writers, readers = self._num_threads
        return f"<TransferEngine {writers} writers, {readers} readers{', closed' if self._is_closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit_write(
        self,
        descriptor: int,
        offset: int,
        segments: Segments | Sequence[tuple[int, int]],
        after: Sequence[int] = (),
        *,
        drop_cache: bool = False,
    ) -> int:
        """Write memory to `[offset, offset + nbytes)` of a file. Returns the ticket.

        Args:
            descriptor: An open file; it must stay open until the job is done.
            offset: Where in the file, in bytes.
            segments: `(address, nbytes)` pairs. With O_DIRECT all of them multiples of 4096.
            after: Tickets to wait for first. If one of them fails, this job fails with its error.
            drop_cache: Sync what was written and drop it from the page cache.
        """
        return self._submit(0, descriptor, offset, segments, after, drop_cache)

    def submit_read(
        self,
        descriptor: int,
        offset: int,
        segments: Segments | Sequence[tuple[int, int]],
        after: Sequence[int] = (),
        *,
        drop_cache: bool = False,
    ) -> int:
        """Read `[offset, offset + nbytes)` of a file into memory. As `submit_write`."""
        return self._submit(1, descriptor, offset, segments, after, drop_cache)

    def done(self, ticket: int) -> bool:
        """Whether the job is over, well or not. Never blocks, never raises its error."""
        state: int = self._lib.state(self._handle, ticket)
        if state < 0:
            raise self.refusal(state, f"done({ticket})")
        return state != 0

    def has_finished(self, ticket: int) -> bool:
        """As `done`, in a tenth of the time if it was over not long ago. For who looks at none of its bytes then."""
        last: int = self._ring[ticket % len(self._ring)]
        return last in (ticket, -ticket) or self.done(ticket)

    def wait(self, ticket: int) -> None:
        """Block, without the GIL, until the job is over.

        Raises:
            TransferError: It failed, or one that it waited for did.
        """
        state: int = self._lib.state(self._handle, ticket)
        while state == 0:
            state = self._lib.wait(self._handle, ticket, _WAIT_SLICE_NS)
        if state == 2:
            raise self._failure(ticket)
        if state < 0:
            raise self.refusal(state, f"wait({ticket})")

    def wait_all(self) -> None:
        """Block until no job is pending. Raises nothing for failed ones: ask `wait` about each."""
        state = 0
        while state == 0:
            state = self._lib.wait_idle(self._handle, _WAIT_SLICE_NS)
        if state < 0:
            raise self.refusal(state, "wait_all()")

    @staticmethod
    def job(direction: Direction, descriptor: int, offset: int, segments: Segments, *, drop_cache: bool = False) -> Job:
        """What `submit_write` or `submit_read` would submit, for native code to do so."""
        return Job(_KINDS[direction], descriptor, offset, segments, DROP_CACHE if drop_cache else 0)

    @property
    def native_calls(self) -> tuple[int, int, int]:
        """Addresses of the functions that submit and wait, and what they take as their first argument."""
        return self._lib.submit_address, self._lib.wait_address, self._handle

    @property
    def num_pending(self) -> int:
        """Jobs submitted and not over."""
        return int(self._read_statistics().num_pending)

    def statistics(self, direction: Direction) -> TransferStatistics:
        """Totals of one direction."""
        kind = _KINDS[direction]
        raw = self._read_statistics()
        return TransferStatistics(
            num_jobs=raw.num_jobs[kind],
            nbytes=raw.nbytes[kind],
            num_calls=raw.num_calls[kind],
            num_queued=raw.num_queued[kind],
            busy_ns=raw.busy_ns[kind],
            call_ns=raw.call_ns[kind],
        )

    @property
    def finished_ring(self) -> tuple[int, int]:
        """Address and length of 64-bit numbers that a signal handler may read at any time.

        At a ticket modulo the length is the last ticket that was finished there, negative if it failed.
        """
        length = ctypes.c_int64()
        address: int = self._lib.finished(self._handle, ctypes.byref(length))
        return address, length.value

    def take_records(self) -> tuple[TransferRecord, ...]:
        """Jobs finished since the last call, in order of their ends; the newest 16384 are kept."""
        raw = (_Record * _NUM_RECORDS)()
        count = self._lib.take_records(self._handle, raw, _NUM_RECORDS)
        if count < 0:
            raise self.refusal(count, "take_records()")
        return tuple(
            TransferRecord(
                ticket=record.ticket,
                direction=_DIRECTIONS[record.kind],
                nbytes=record.nbytes,
                submit_ns=record.submit_ns,
                start_ns=record.start_ns,
                stop_ns=record.stop_ns,
                error=record.error,
            )
            for record in raw[:count]
        )

    def inject_faults(
        self,
        *,
        fail_call: int = 0,
        error: int = errno.EIO,
        direction: Direction | None = None,
        delay_ns: int = 0,
        call_nbytes: int = 0,
        num_failures: int = 1,
    ) -> None:
        """For tests: make I/O misbehave from now on. Without arguments: no more.

        Args:
            fail_call: The k-th system call from now fails (counted from 1); 0: none.
            error: Its errno.
            direction: Count and delay only calls of this direction; None: all.
            delay_ns: Sleep this long before each call. Other faults, and closing, end a delay that is under way: so a
                test can hold calls up for as long as it needs, however slow the machine is.
            call_nbytes: Let a call move at most this many bytes, so that transfers are partial; 0: no limit.
            num_failures: So many calls in a row fail, from `fail_call` on.
        """
        kind = _EITHER_KIND if direction is None else _KINDS[direction]
        faults = _Faults(fail_call, error, kind, delay_ns, call_nbytes, num_failures)
        state = self._lib.set_faults(self._handle, ctypes.byref(faults))
        if state < 0:
            raise self.refusal(state, "inject_faults()")

    def close(self) -> None:
        """End the threads, after the calls under way. What has not begun fails with ECANCELED. Idempotent.

        In a forked child it does nothing: the threads are the parent's.
        """
        self._is_closed = True
        _live_engines.discard(self)
        self._lib.close(self._handle)

    def _submit(
        self,
        kind: int,
        descriptor: int,
        offset: int,
        segments: Segments | Sequence[tuple[int, int]],
        after: Sequence[int],
        drop_cache: bool,
    ) -> int:
        if not isinstance(segments, Segments):
            segments = Segments(segments)
        predecessors = (ctypes.c_int64 * len(after))(*after) if after else None
        flags = DROP_CACHE if drop_cache else 0
        ticket: int = self._lib.submit(
            self._handle, kind, descriptor, offset, flags, segments._array, segments.num, predecessors, len(after)
        )
        if ticket < 0:
            raise self.refusal(ticket, f"submit_{_DIRECTIONS[kind]}(offset={offset}, after={list(after)})")
        return ticket

    def _read_statistics(self) -> _Statistics:
        raw = _Statistics()
        state = self._lib.statistics(self._handle, ctypes.byref(raw))
        if state < 0:
            raise self.refusal(state, "statistics()")
        return raw

    def _failure(self, ticket: int) -> TransferError:
        raw = _Failure()
        self._lib.failure(self._handle, ticket, ctypes.byref(raw))
        return TransferError(
            raw.error or errno.EIO,
            ticket=ticket,
            failed_ticket=raw.ticket,
            direction=_DIRECTIONS[raw.kind],
            offset=raw.offset,
            nbytes=raw.nbytes,
        )

    def refusal(self, state: int, what: str) -> Exception:
        """What to raise for a negative answer of the library, to whoever called it."""
        code = -state
        if code == errno.ECHILD:
            return RuntimeError(f"{what}: this process was forked from the one whose threads these are")
        if code == errno.ESHUTDOWN:
            return RuntimeError(f"{what}: the transfer engine is closed")
        if code == errno.ENOENT:
            return ValueError(f"{what}: a ticket that was never given out")
        if code == errno.ENOMEM:
            return MemoryError(what)
        return ValueError(f"{what}: {os.strerror(code)}")


class _Failure(ctypes.Structure):
    _fields_ = (
        ("error", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("ticket", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
    )


class _Record(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("ticket", "kind", "nbytes", "submit_ns", "start_ns", "stop_ns", "error")
    )


class _Statistics(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64 * 2)
            for name in ("num_jobs", "nbytes", "num_calls", "num_queued", "busy_ns", "call_ns")
        ),
        ("num_pending", ctypes.c_int64),
        ("num_records_lost", ctypes.c_int64),
    )


class _Faults(ctypes.Structure):
    _fields_ = (
        ("calls_until_failure", ctypes.c_int64),
        ("error", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("delay_ns", ctypes.c_int64),
        ("call_nbytes", ctypes.c_int64),
        ("num_failures", ctypes.c_int64),
    )


class _Library:
    """The library's functions with their types."""

    def __init__(self, path: Path) -> None:
        # Calls that may block or join let go of the GIL; the short ones keep it, which is cheaper,
        # and safe since no thread of the engine ever wants it.
        blocking, short = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        handle, number, wide, pointer = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self.open = _function(blocking, "open", ctypes.c_void_p, number, number, wide, number, pointer)
        self.submit = _function(
            short, "submit", wide, handle, number, number, wide, number, pointer, number, pointer, number
        )
        self.state = _function(short, "state", wide, handle, wide)
        self.failure = _function(short, "failure", wide, handle, wide, pointer)
        self.finished = _function(short, "finished", ctypes.c_void_p, handle, pointer)
        self.statistics = _function(short, "statistics", wide, handle, pointer)
        self.take_records = _function(short, "take_records", wide, handle, pointer, wide)
        self.set_faults = _function(short, "set_faults", wide, handle, pointer)
        self.wait = _function(blocking, "wait", wide, handle, wide, wide)
        self.wait_idle = _function(blocking, "wait_idle", wide, handle, wide)
        self.close = _function(blocking, "close", wide, handle)
        self.free = _function(blocking, "free", None, handle)
        self.submit_address = ctypes.cast(self.submit, pointer).value or 0
        self.wait_address = ctypes.cast(self.wait, pointer).value or 0


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, f"ooc_transfers_{name}")
    function.restype = result
    function.argtypes = arguments
    return function


@functools.cache
def _library() -> _Library:
    native = Path(__file__).parent / "native"
    sources = ("transfers.cpp", "transfer_engine.h", "transfer_jobs.h", "kernel_queue.h")
    return _Library(build("transfers", [native / name for name in sources]))


def _close_and_free(library: _Library, handle: int) -> None:
    library.close(handle)
    library.free(handle)


_live_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for engine in list(_live_engines):
        with contextlib.suppress(Exception):
            engine.close()
