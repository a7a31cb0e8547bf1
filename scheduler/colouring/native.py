"""The parts of a colouring that native/*.cpp has, too; who plans often compiles them and calls `use`.

This package plans without a compiler, and looks for none. Chunks are the same with the library and without it, so a
plan does not depend on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.budget import IntArray
from scheduler.colouring.arcs import Arc, Walked

_DIRECTORY = Path(__file__).parents[1] / "native"
SOURCES = (_DIRECTORY / "walk.cpp", _DIRECTORY / "exchange.cpp", _DIRECTORY / "export.h")
"""What to compile into one shared library, as C++17; headers among them are included."""

_library: ctypes.CDLL | None = None


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
    arcs: Sequence[Arc],
    may_be_cut: Sequence[bool],
    *,
    num_ticks: int,
    num_chunks: int,
    late_price: int,
    give_way: bool,
    best_fit: bool,
) -> Walked | None:
    """What `scheduler.colouring.walk` finds for these arcs; None without a library."""
    if _library is None:
        return None
    columns = zip(*((arc.start, arc.stop, arc.written, arc.num_chunks) for arc in arcs), strict=True)
    starts, stops, written, sizes = columns if arcs else ((), (), (), ())
    families = _dense([arc.family for arc in arcs])
    chunks, cut = np.empty(2 * sum(sizes), dtype=np.int64), np.empty(len(arcs), dtype=np.int64)
    num_cut, num_late, short_arc = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int64()
    num_missing = _library.scheduler_walk(
        ctypes.c_int64(len(arcs)),
        *(_pointer(_ints(column)) for column in (starts, stops, written, sizes, families)),
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
        missing = (num_missing, short_arc.value)
        return Walked(chunks=[], cut=which, num_late=num_late.value, missing=missing)
    all_sizes = [*sizes, *(sizes[index] for index in which)]
    return Walked(chunks=_split(chunks, all_sizes), cut=which, num_late=num_late.value)


def exchange(
    starts: Sequence[int],
    stops: Sequence[int],
    families: Sequence[int],
    chunks: Sequence[IntArray],
    *,
    num_ticks: int,
    cyclic: bool,
    rounds: int,
    most_idle: int,
    most_units: int,
    most_trials: int,
) -> list[IntArray] | None:
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


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _dense(families: Sequence[int]) -> list[int]:
    """The same families, counted from 0."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(family, len(numbers)) for family in families]


def _pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    pointer = ctypes.c_void_p(array.ctypes.data)
    pointer.owner = array  # type: ignore[attr-defined]  # it lives as long
    return pointer


def _split(chunks: IntArray, sizes: Sequence[int]) -> list[IntArray]:
    return [chunks[start:stop] for start, stop in pairwise([0, *np.cumsum(sizes).tolist()])]


def _check(status: int) -> None:
    if status < 0:
        raise MemoryError("no memory to choose chunks in")
