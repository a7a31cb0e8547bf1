"""Guarded ranges: addresses that show nothing until somebody touches them, then a part of a file. And still moves.

A variable that is away is always in the store's file. Where its addresses would show something
else (inside a plan they alias other variables' chunks), its range is guarded: the first touch, by
any thread and any code, maps the file there (native/faults.cpp). One table serves the process.

What is moved *still* may be written by any thread at any time: a write that comes meanwhile waits, and is made where
the bytes are then. A system call that would write there fails meanwhile (EFAULT).
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from vmm.native_build import build
from vmm.syscalls import MmapCall
from vmm.transfers import Job, TransferEngine

__all__ = ["GUARDED", "LIFTED", "SERVED", "FaultTable", "Guard", "MoveFailed"]

LIFTED: Final = 0
GUARDED: Final = 1
SERVED: Final = 2

_CAPACITY = 1 << 16


class Guard(NamedTuple):
    """A range to guard.

    Attributes:
        entry: From `FaultTable.new_entry`; names it until it is lifted.
        address: Its start.
        nbytes: Bytes that a touch is served in, whole pages.
        span_nbytes: Bytes that are protected, at least `nbytes`.
        offset: Where its bytes are in the file.
        ticket: A write to that part of the file that must be over first; 0 if none is under way.
        protects: Whether the range must be protected now; False if it shows nothing already.
    """

    entry: int
    address: int
    nbytes: int
    span_nbytes: int
    offset: int
    ticket: int
    protects: bool


class MoveFailed(Exception):
    """The transfer of a still move failed, or could not begin. The addresses show what they showed.

    Attributes:
        ticket: Its ticket, which `TransferEngine.wait` says more about; negative: it could not begin.
    """

    def __init__(self, ticket: int) -> None:
        super().__init__(f"the transfer of a still move failed (ticket {ticket})")
        self.ticket = ticket


class FaultTable:
    """The process's table of guarded ranges, over one arena and one file.

    Python calls are made by one thread at a time; touches come from any thread at any time.
    `faulthandler` may be enabled before or after: its handler stays behind ours, and prints its
    traceback for faults that are not ours.

    Args:
        arena: `[start, stop)`; faults elsewhere are passed on.
        descriptor: The file; open until `close`.
        finished: Address and length of the ring of finished tickets (`TransferEngine.finished_ring`).

    Raises:
        OSError: The handler cannot be installed.
    """

    def __init__(self, arena: tuple[int, int], descriptor: int, finished: tuple[int, int]) -> None:
        self._library = _library()
        self._free: list[int] = []
        self._num_entries = 0
        self._num_calls = 0
        self._is_serving = True
        self._is_open = True
        self._library.open(*arena, descriptor, *finished)
        self._install()
        self._enable, self._disable = faulthandler.enable, faulthandler.disable
        faulthandler.enable = self._then_install(self._enable)
        faulthandler.disable = self._then_install(self._disable)

    def __repr__(self) -> str:
        state = f"{self.num_guards} guards, {self.num_served} served" if self._is_open else "closed"
        return f"<FaultTable {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_guards(self) -> int:
        """Ranges guarded now, served ones included."""
        return self._num_entries - len(self._free)

    @property
    def num_served(self) -> int:
        """Touches served in this process, each the first of its range."""
        return int(self._library.num_served())

    @property
    def num_calls(self) -> int:
        """System calls made so far to protect ranges and to make them accessible again."""
        return self._num_calls

    @property
    def is_serving(self) -> bool:
        """Whether touches are served. If not they go to the handler before ours, as any fault does."""
        return self._is_serving

    @is_serving.setter
    def is_serving(self, value: bool) -> None:
        if value != self._is_serving:
            self._is_serving = value
            self._library.set_serving(value)

    def new_entry(self) -> int:
        """A name for a range to guard.

        Raises:
            MemoryError: There are 65,536 of them already.
        """
        if self._free:
            return self._free.pop()
        if self._num_entries == _CAPACITY:
            raise MemoryError(f"no more than {_CAPACITY} ranges can be guarded")
        self._num_entries += 1
        return self._num_entries - 1

    def guard(self, guards: Sequence[Guard]) -> None:
        """Let touches of these ranges, sorted by address, be served. Neighbours take one call.

        Raises:
            OSError: The kernel refused (mappings). None of them is guarded; their entries are free.
        """
        rows = array("q", [field for guard in guards for field in guard])
        address, _ = rows.buffer_info()
        self._install()  # somebody may have put another handler in front
        result = self._library.guard(address, len(guards))
        if result < 0:
            self._free.extend(guard.entry for guard in guards)
            raise OSError(-result, f"cannot guard {len(guards)} ranges: {os.strerror(-result)}")
        self._num_calls += result

    def lift(self, entry: int, *, unprotects: bool) -> int:
        """End a guard. With `unprotects` the range is accessible again.

        Returns:
            `GUARDED`, or `SERVED` if the range shows the file now (and may have been written to).
        """
        result: int = self._library.lift(entry, unprotects)
        if result < 0:
            raise OSError(-result, f"cannot make a guarded range accessible: {os.strerror(-result)}")
        self._free.append(entry)
        self._num_calls += unprotects and result == GUARDED
        return result

    def move(self, span: tuple[int, int], engine: TransferEngine, job: Job, shown: Sequence[MmapCall]) -> int:
        """Move bytes while nobody can write to a range, and let it show where they are then. Keeps the GIL throughout.

        Args:
            span: Address and bytes of the range, whole pages. It can be read and written now.
            engine: Does the transfer.
            job: The transfer. Nothing that it would have to wait for is under way.
            shown: What the range shows afterwards.

        Returns:
            The transfer's ticket.

        Raises:
            MoveFailed: The transfer failed; the range shows what it showed.
            OSError: The kernel refused a call. What the range shows is the caller's to put back.
            MemoryError: As `new_entry`.
        """
        submit, wait, handle = engine.native_calls
        segments, num_segments = job.segments.address, job.segments.num
        move = _Move(submit, wait, handle, segments, job.offset, num_segments, job.kind, job.descriptor, job.flags)
        rows = array("q", [field for call in shown for field in call])
        ticket = ctypes.c_int64()
        self._install()
        entry = self.new_entry()
        result = self._library.move(
            entry, *span, ctypes.byref(move), rows.buffer_info()[0], len(shown), ctypes.byref(ticket)
        )
        self._free.append(entry)
        if result > 0:
            raise MoveFailed(ticket.value)
        if result < 0:
            raise OSError(-result, f"cannot move memory that was given out: {os.strerror(-result)}")
        return ticket.value

    def state(self, entry: int) -> int:
        """`GUARDED` or `SERVED`."""
        return int(self._library.state(entry))

    def close(self) -> None:
        """Serve nothing any more and put the handler before ours back, if ours is in front. Idempotent."""
        if not self._is_open:
            return
        self.become_inherited()
        self._library.close()
        self._library.uninstall()

    def become_inherited(self) -> None:
        """In a forked child: the table is the parent's. The handler stays, and names a fault in the arena."""
        self._is_open = False
        if getattr(faulthandler.enable, "__self_table__", None) is self:
            faulthandler.enable = self._enable
        if getattr(faulthandler.disable, "__self_table__", None) is self:
            faulthandler.disable = self._disable

    def _install(self) -> None:
        code = self._library.install()
        if code:
            raise OSError(code, f"cannot install a handler of SIGSEGV: {os.strerror(code)}")

    def _then_install(self, function: Any) -> Any:
        """faulthandler puts its handler in front of ours, and would report a touch that we serve."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                if self._is_open:
                    self._install()

        wrapper.__self_table__ = self  # type: ignore[attr-defined]
        return wrapper


class _Move(ctypes.Structure):
    _fields_ = (
        ("submit", ctypes.c_void_p),
        ("wait", ctypes.c_void_p),
        ("engine", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_segments", "kind", "descriptor", "flags")),
    )


class _FaultsLibrary:
    """The native functions. They keep the GIL: most are short, and during a still move nobody may have it."""

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))
        number, wide, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self.install = _function(library, "install", number)
        self.uninstall = _function(library, "uninstall", None)
        self.open = _function(library, "open", None, ctypes.c_uint64, ctypes.c_uint64, number, pointer, ctypes.c_uint64)
        self.close = _function(library, "close", None)
        self.set_serving = _function(library, "set_serving", None, number)
        self.num_served = _function(library, "num_served", ctypes.c_uint64)
        self.guard = _function(library, "guard", wide, pointer, wide)
        self.lift = _function(library, "lift", wide, wide, number)
        self.move = _function(
            library, "move", wide, wide, ctypes.c_uint64, ctypes.c_uint64, pointer, pointer, wide, pointer
        )
        self.state = _function(library, "state", wide, wide)


def _function(library: ctypes.PyDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, f"vmm_faults_{name}")
    function.restype = result
    function.argtypes = arguments
    return function


@functools.cache
def _library() -> _FaultsLibrary:
    return _FaultsLibrary(build("faults", [Path(__file__).parent / "native" / "faults.cpp"]))
