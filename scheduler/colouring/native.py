"""The parts of a colouring that native/*.cpp has, too; who plans often compiles them and calls `use`.

This package plans without a compiler, and looks for none. Chunks are the same with the library and without it, so a
plan does not depend on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_IntArray = npt.NDArray[np.int64]

_DIRECTORY = Path(__file__).parents[1] / "native"
SOURCES = (_DIRECTORY / "walk.cpp", _DIRECTORY / "exchange.cpp", _DIRECTORY / "export.h")
"""What to compile into one shared library, as C++17; headers among them are included."""

_library: ctypes.CDLL | None = None


class _Walked(NamedTuple):
    chunks: list[_IntArray]
    cut: list[int]
    num_late: int
    missing: tuple[int, int] | None


def use(library: Path | None) -> None:
    """Colour by the library made from `SOURCES` from now on, in this process; with None, without one.

    Raises:
        OSError: It cannot be loaded, or is not made from these.
    """
    global _library
    if library is None:
        _library = None
        return
    found = ctypes.CDLL(str(library))
    try:
        for function in (found.scheduler_walk, found.scheduler_exchange):
            function.restype = ctypes.c_int64
    except AttributeError as error:
        raise OSError(f"{library}: {error}") from error
    _library = found


def is_used() -> bool:
    """Whether there is a library to colour by."""
    return _library is not None


def walk(
    starts: Sequence[int],
    stops: Sequence[int],
    written: Sequence[int],
    sizes: Sequence[int],
    families: Sequence[int],
    may_be_cut: Sequence[bool],
    *,
    num_ticks: int,
    num_chunks: int,
    late_price: int,
    give_way: bool,
    best_fit: bool,
) -> _Walked | None:
    """What `scheduler.colouring.walk` finds for these arcs; None without a library."""
    if _library is None:
        return None
    num_arcs, num_all = len(starts), sum(sizes)
    chunks, cut = np.empty(2 * num_all, dtype=np.int64), np.empty(num_arcs, dtype=np.int64)
    num_cut, num_late, short_arc = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int64()
    num_missing = _library.scheduler_walk(
        ctypes.c_int64(num_arcs),
        *(_pointer(_ints(column)) for column in (starts, stops, written, sizes, _dense(families))),
        _pointer(np.array(may_be_cut, dtype=np.uint8)),
        ctypes.c_int64(num_ticks),
        ctypes.c_int64(num_chunks),
        ctypes.c_int64(late_price),
        ctypes.c_bool(give_way),
        ctypes.c_bool(best_fit),
        _pointer(chunks),
        _pointer(cut),
        ctypes.byref(num_cut),
        ctypes.byref(num_late),
        ctypes.byref(short_arc),
    )
    _check(num_missing)
    which = cut[: num_cut.value].tolist()
    if num_missing:
        return _Walked([], which, num_late.value, (num_missing, short_arc.value))
    return _Walked(_split(chunks, [*sizes, *(sizes[index] for index in which)]), which, num_late.value, None)


def exchange(
    starts: Sequence[int],
    stops: Sequence[int],
    families: Sequence[int],
    chunks: Sequence[_IntArray],
    *,
    num_ticks: int,
    cyclic: bool,
    rounds: int,
    most_idle: int,
    most_units: int,
    most_trials: int,
) -> list[_IntArray] | None:
    """What `scheduler.colouring.exchange` makes of these holders; None without a library."""
    if _library is None:
        return None
    if not chunks:
        return []
    sizes = [len(own) for own in chunks]
    rows = np.concatenate(chunks).astype(np.int64)
    _check(
        _library.scheduler_exchange(
            ctypes.c_int64(len(chunks)),
            *(_pointer(_ints(column)) for column in (starts, stops, _dense(families), sizes)),
            _pointer(rows),
            ctypes.c_int64(num_ticks),
            ctypes.c_bool(cyclic),
            *(ctypes.c_int64(limit) for limit in (rounds, most_idle, most_units, most_trials)),
        )
    )
    return _split(rows, sizes)


def _ints(values: Sequence[int]) -> _IntArray:
    return np.array(values, dtype=np.int64)


def _dense(families: Sequence[int]) -> list[int]:
    """The same families, counted from 0."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(family, len(numbers)) for family in families]


def _pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    pointer = ctypes.c_void_p(array.ctypes.data)
    pointer.owner = array  # type: ignore[attr-defined]  # it lives as long
    return pointer


def _split(chunks: _IntArray, sizes: Sequence[int]) -> list[_IntArray]:
    ends = np.cumsum(sizes).tolist()
    return [chunks[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def _check(status: int) -> None:
    if status < 0:
        raise MemoryError("no memory to choose chunks in")
