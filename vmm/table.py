"""The native table behind torch's allocators (native/table.h), as Python sees it: its state and its log."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

ALLOC: Final = 0
FREE: Final = 1

MODE_OFF: Final = 0
MODE_DEMAND: Final = 1
MODE_PLANNED: Final = 2
MODE_RERUN: Final = 3

SERVED_APART: Final = 1
"""`cold_allocate`'s answer for an allocation that is not the session's: torch's own allocator serves it (CPU only)."""

GRANULE_NBYTES: Final = 1 << 16
"""Arena addresses of variables are multiples of this; the smallest chunk."""

_DRAIN_CAPACITY = 4096
_NOWHERE = (1 << 32) - 1
"""No step position: `counted_position` while nothing is counted."""

PLANNED_ALLOC_DTYPE: Final = np.dtype(
    [("capacity", "u8"), ("variable", "u4"), ("dead_start", "u4"), ("dead_stop", "u4"), ("ordinal", "u4")]
)
"""numpy layout of `PlannedAlloc` in native/allocator.h."""

RERUN_ALLOC_DTYPE: Final = np.dtype([("capacity", "u8"), ("address", "u8"), ("served", "u8")])
"""numpy layout of `RerunAlloc` in native/allocator.h."""
_EVENT_DTYPE = np.dtype(
    {
        "names": ["address", "nbytes", "kind", "position", "ordinal"],
        "formats": ["u8", "u8", "u2", "u4", "u2"],
        "offsets": [0, 8, 16, 20, 18],
        "itemsize": 24,
    }
)
"""numpy layout of `Event` in native/allocator.h, in the order of `Event` below."""


def between_ops(index: int) -> int:
    """The step position right before op `index` begins, or where op `index - 1` has ended.

    A step position is one number that orders what happens in a step: `2i + 1` inside op i, `2i` between op i - 1 and
    op i. Native code sets and compares it; on this side nobody but this file looks into it.
    """
    return 2 * index


def inside_op(index: int) -> int:
    """The step position inside op `index`; see `between_ops`."""
    return 2 * index + 1


def op_at(position: int) -> int:
    """The op inside which, or right before which, a step position is."""
    return position // 2


class Event(NamedTuple):
    """One entry of the allocator's log.

    Attributes:
        address: Start of the storage.
        nbytes: As requested; for a free 0, or a detached variable's size.
        kind: `ALLOC` or `FREE`.
        position: When in the step: `inside_op(i)` or `between_ops(i)`.
        ordinal: For an allocation on the session's thread, which one it is at this position, from 1 on; those below
            the threshold are counted, too. Else 0.
    """

    address: int
    nbytes: int
    kind: int
    position: int
    ordinal: int = 0


class EventLog:
    """Entries of the allocator's log, kept as they came: most of a planned step's are never looked at.

    A tuple for each would be a thousand objects a step for the cycle collector to follow.

    Args:
        events: What it begins with.
    """

    __slots__ = ("_events", "_rows")

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self._events = list(events)
        self._rows: list[npt.NDArray[Any]] = []

    def __repr__(self) -> str:
        return f"<EventLog of {len(self)} events>"

    def __len__(self) -> int:
        return len(self._events) + sum(map(len, self._rows))

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Keep rows of the native log, which nobody else changes."""
        self._rows.append(rows)

    def take(self) -> list[Event]:
        """All of them, oldest first; it is empty then."""
        found, rows = self._events, self._rows
        self._events, self._rows = [], []
        for some in rows:
            found.extend(map(Event._make, some.tolist()))
        return found


class AllocatorState(ctypes.Structure):
    """`State` of native/table.h: what native code and Python both read and set.

    Its `position` says where the step is (see `between_ops`), for the log and for who asks; use the properties and
    setters below instead.
    """

    _fields_ = (
        ("arena_start", ctypes.c_uint64),
        ("arena_stop", ctypes.c_uint64),
        ("threshold", ctypes.c_uint64),
        ("mode", ctypes.c_int32),
        ("session_open", ctypes.c_int32),
        ("cold_allocate", ctypes.c_void_p),
        ("plan", ctypes.c_void_p),
        ("owner_thread", ctypes.c_uint64),
        ("position", ctypes.c_uint32),
        ("window_next", ctypes.c_uint32),
        ("window_stop", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("num_planned", ctypes.c_uint64),
        ("num_cold", ctypes.c_uint64),
        ("cold_ns", ctypes.c_uint64),
        ("num_late_frees", ctypes.c_uint64),
        ("num_events", ctypes.c_uint64),
        ("rerun_allocs", ctypes.c_void_p),
        ("rerun_next", ctypes.c_uint32),
        ("rerun_stop", ctypes.c_uint32),
        ("num_rerun_alive", ctypes.c_uint64),
        ("counted_position", ctypes.c_uint32),
        ("num_counted", ctypes.c_uint32),
        ("detached", ctypes.c_void_p),
        ("num_detached", ctypes.c_uint64),
        ("quick_allocate", ctypes.c_void_p),
        ("live_nbytes", ctypes.c_uint64),
        ("peak_live_nbytes", ctypes.c_uint64),
    )

    if TYPE_CHECKING:
        arena_start: int
        arena_stop: int
        threshold: int
        mode: int
        session_open: int
        cold_allocate: int | None
        plan: int | None
        owner_thread: int
        position: int
        window_next: int
        window_stop: int
        num_planned: int
        num_cold: int
        cold_ns: int
        num_late_frees: int
        num_events: int
        rerun_allocs: int | None
        rerun_next: int
        rerun_stop: int
        num_rerun_alive: int
        counted_position: int
        num_counted: int
        quick_allocate: int | None
        live_nbytes: int
        peak_live_nbytes: int

    @property
    def is_inside_op(self) -> bool:
        """Whether an op of the step is running."""
        return self.position % 2 == 1

    @property
    def op_index(self) -> int:
        """The op that is running, or between ops the one that comes next."""
        return self.position // 2

    def restart(self) -> None:
        """A period begins: op 0 comes next, and allocations are counted anew."""
        self.set_between(0)
        self.counted_position = _NOWHERE

    def set_between(self, index: int) -> None:
        """Op `index` comes next."""
        self.position = 2 * index

    def set_inside(self, index: int) -> None:
        """Op `index` begins."""
        self.position = 2 * index + 1


class PlanTables(ctypes.Structure):
    """`PlanTables` of native/allocator.h: what native code needs to replay a plan.

    Whoever installs one keeps it and its arrays alive.
    """

    _fields_ = (
        ("allocs", ctypes.c_void_p),
        ("must_be_dead", ctypes.c_void_p),
        ("variable_address", ctypes.c_void_p),
        ("variable_alive", ctypes.c_void_p),
        ("variable_nbytes", ctypes.c_void_p),
        ("num_variables", ctypes.c_uint32),
        ("is_elastic", ctypes.c_uint32),
    )


_COLD = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)


class AllocatorTable:
    """A library that holds the table.

    Attributes:
        state: The native state; its fields may be read and, where native/allocator.h says so, set.
    """

    is_of_host = True
    """Whether it serves torch's host memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.vmm_allocator_state.restype = ctypes.POINTER(AllocatorState)
        library.vmm_allocator_drain.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        library.vmm_allocator_drain.restype = ctypes.c_uint64
        library.vmm_allocator_this_thread.restype = ctypes.c_uint64
        library.vmm_allocator_is_alive.argtypes = (ctypes.c_uint64,)
        library.vmm_allocator_bind.argtypes = (ctypes.c_uint64, ctypes.c_int64, ctypes.c_int)
        library.vmm_allocator_detach.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
        library.vmm_allocator_detach_rest.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        library.vmm_allocator_detach_rest.restype = ctypes.c_uint64
        library.vmm_allocator_adopt.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
        library.vmm_allocator_this_thread.argtypes = ()
        library.vmm_allocator_this_thread.restype = ctypes.c_uint64
        self._library = library
        self.state: AllocatorState = library.vmm_allocator_state().contents
        self._buffer = np.empty(_DRAIN_CAPACITY, dtype=_EVENT_DTYPE)
        self._buffer_address: int = self._buffer.ctypes.data  # each look at it takes microseconds
        self._cold: Any = None
        self.detached: dict[int, int] = {}
        """Address and bytes of variables that outlived their sessions and are still alive."""

    def __repr__(self) -> str:
        state = self.state
        return f"<{type(self).__name__} mode={state.mode}, {state.num_planned} planned, {state.num_cold} cold>"

    @property
    def arena(self) -> tuple[int, int]:
        """`[start, stop)` of the addresses that it routes."""
        return self.state.arena_start, self.state.arena_stop

    @property
    def state_address(self) -> int:
        """Where the native state lies, for the dispatch extension."""
        return ctypes.addressof(self.state)

    @property
    def this_thread_function(self) -> int:
        """Address of the native function that identifies the calling thread."""
        return ctypes.cast(self._library.vmm_allocator_this_thread, ctypes.c_void_p).value or 0

    @property
    def log_functions(self) -> tuple[int, int]:
        """Addresses of the native functions that copy and that take the log's oldest events (native/births.h)."""
        functions = self._library.vmm_allocator_peek, self._library.vmm_allocator_drain
        found = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
        return found[0], found[1]

    def open(self, *, threshold_nbytes: int, cold_allocate: Callable[[int], int]) -> None:
        """Route allocations of at least `threshold_nbytes` to `cold_allocate(nbytes) -> address` (0: no memory;
        `SERVED_APART`: none of ours).

        It is called on any thread, with the GIL, while the op that allocates waits. It must not raise.
        """
        self.drain()
        self._cold = _COLD(cold_allocate)
        self.state.threshold = threshold_nbytes
        self.state.cold_allocate = ctypes.cast(self._cold, ctypes.c_void_p).value
        self.state.plan = None
        self.state.owner_thread = self._library.vmm_allocator_this_thread()
        self.state.restart()
        self._library.vmm_allocator_begin_count()
        self.state.session_open = 1
        self.state.mode = MODE_DEMAND

    @contextlib.contextmanager
    def rerunning(self, allocs: Sequence[tuple[int, int]]) -> Iterator[npt.NDArray[Any]]:
        """Within the block the calling thread runs one op again: only `allocs` serve its large allocations.

        What they serve is nobody's: no event is logged for it, and its free does nothing.

        Args:
            allocs: `(nbytes, address)` of each, in the order in which the op made them when it ran first.

        Yields:
            A `RERUN_ALLOC_DTYPE` row of each; `served` says what the op has asked for there.
        """
        state = self.state
        rows = np.array([(nbytes, address, 0) for nbytes, address in allocs] or [(0, 0, 0)], dtype=RERUN_ALLOC_DTYPE)
        mode, owner = state.mode, state.owner_thread
        state.rerun_allocs, state.rerun_next, state.rerun_stop = rows.ctypes.data, 0, len(allocs)
        state.owner_thread = self._library.vmm_allocator_this_thread()
        state.mode = MODE_RERUN
        try:
            yield rows[: len(allocs)]
        finally:
            state.mode, state.owner_thread = mode, owner
            state.rerun_next = state.rerun_stop = 0

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Within the block torch's allocations on the host are not the session's, whatever their size."""
        mode = self.state.mode
        if self.is_of_host:
            self.state.mode = MODE_OFF
        try:
            yield
        finally:
            self.state.mode = mode

    def adopt(self, address: int, nbytes: int) -> bool:
        """Let what a re-run was given at `address`, and what is still there, be a variable of `nbytes` bytes.

        Its memory is the caller's to manage from here on; its birth and its free are logged.

        Returns:
            Whether there is such a storage. Usually there is none: what a re-run allocates ends with it.
        """
        return bool(self._library.vmm_allocator_adopt(address, nbytes))

    def close(self) -> None:
        """Send allocations to where they went before. What is still alive is freed by address later."""
        self.state.mode = MODE_OFF
        self.state.plan = None
        self.state.session_open = 0
        self.state.cold_allocate = self.state.quick_allocate = None

    def pause(self) -> None:
        """Send allocations to where they would go without a session, until `resume`. No plan may be in replay."""
        self.state.mode = MODE_OFF

    def resume(self) -> None:
        """Route allocations to the session again, on demand."""
        self.state.mode = MODE_DEMAND

    def drain(self) -> list[Event]:
        """Take the log's entries, oldest first."""
        found: list[Event] = []
        while self.state.num_events:
            count = self._library.vmm_allocator_drain(self._buffer_address, _DRAIN_CAPACITY)
            events = [Event(*row) for row in self._buffer[:count].tolist()]  # mostly few: numpy's own ways take longer
            if self.detached:
                events = [e for e in events if e.kind == ALLOC or self.detached.pop(e.address, None) is None]
            found += events
            if count < _DRAIN_CAPACITY:
                break
        return found

    def drain_to(self, log: EventLog) -> list[int]:
        """Move the log's entries to `log`, as `drain`.

        Returns:
            The addresses of what was freed.
        """
        freed: list[int] = []
        while self.state.num_events:
            count = self._library.vmm_allocator_drain(self._buffer_address, _DRAIN_CAPACITY)
            rows = self._buffer[:count].copy()
            here = rows["address"][rows["kind"] != ALLOC].tolist()
            gone = (
                [address for address in here if self.detached.pop(address, None) is not None] if self.detached else []
            )
            if gone:
                rows = rows[~np.isin(rows["address"], np.array(gone, dtype=np.uint64))]
                here = [address for address in here if address not in gone]
            log.append(rows)
            freed += here
            if count < _DRAIN_CAPACITY:
                break
        return freed

    def is_alive(self, address: int) -> bool:
        """Whether the storage that starts at this address of the arena is alive."""
        return bool(self._library.vmm_allocator_is_alive(address))

    def bind(self, address: int, variable: int, *, is_born: bool = False) -> bool:
        """Bind the live variable at `address` to a variable of the installed plan, so that its free is noted.

        Args:
            address: Where the live variable starts.
            variable: Index of the plan's variable; -1: of none.
            is_born: It is not alive yet: the allocation that is being served gets this address.

        Returns:
            Whether that was noted. If not, the variable is alive no more: a storage may be freed at any moment, by
            the cycle collector or on another thread.
        """
        return bool(self._library.vmm_allocator_bind(address, variable, is_born))

    def detach(self, address: int, nbytes: int) -> bool:
        """Detach the live variable at `address` from its session: `nbytes` there are unmapped when it is freed.

        Returns:
            Whether it is alive. If not, its memory is the caller's to unmap.
        """
        if not self._library.vmm_allocator_detach(address, nbytes):
            return False
        self.detached[address] = nbytes
        return True

    def detach_rest(self) -> None:
        """Detach what is still alive and was not detached: a session that ended badly, or that gave its tensors up.

        There is no memory at their addresses, which nobody else gets until they are freed: else a free that comes
        late would be taken for that of another session's variable.
        """
        found = np.empty(_DRAIN_CAPACITY, dtype=np.uint64)
        while count := self._library.vmm_allocator_detach_rest(found.ctypes.data, len(found)):
            self.detached.update(dict.fromkeys(found[:count].tolist(), GRANULE_NBYTES))
