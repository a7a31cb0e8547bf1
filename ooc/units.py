"""Bytes, times and rates as people write them.

The module that knows KiB, MiB and GiB (`vmm.sizes` writes them). Everything inside works with integer bytes
(`*_nbytes`); text becomes a number here, at the edge, and a number becomes text here, in reports and errors.
"""

from __future__ import annotations

import operator
import re
from fractions import Fraction
from typing import SupportsIndex

from vmm.sizes import format_exactly, format_nbytes

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "TIB",
    "format_duration",
    "format_exactly",
    "format_nbytes",
    "format_rate",
    "parse_nbytes",
]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_FACTORS: dict[str, int] = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_AMBIGUOUS = frozenset("kmgt")
_PATTERN = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(?P<unit>[a-z]*)", re.ASCII)


def parse_nbytes(value: str | SupportsIndex, *, what: str = "size") -> int:
    """Bytes from an integer or from text with a unit.

    `KiB MiB GiB TiB` are powers of 1024, `kB MB GB TB` powers of 1000, in any case of letters;
    text that is a bare integer counts bytes. A fraction is exact and rounds down to a whole byte.

    Args:
        value: An integer number of bytes, or text such as `"12GiB"`, `"1.5 GiB"`, `"400MB"`.
        what: What the number is, for the error message: "budget", "chunk size".

    Returns:
        A positive number of bytes.

    Raises:
        ValueError: Text that is not a size, a unit that could mean two things (`"12G"`), or a
            size below one byte.
        TypeError: Neither an integer nor text. A float is refused, because 0.5 may be meant as a
            share and 1e9 may not be whole.
    """
    if isinstance(value, str):
        nbytes = _parse_text(value, what)
    else:
        if isinstance(value, bool):
            raise TypeError(f"{what} {value!r} is a bool; give bytes as an integer, or text such as '400MiB'")
        try:
            nbytes = operator.index(value)
        except TypeError:
            raise TypeError(
                f"{what} {value!r} is a {type(value).__name__}; give bytes as an integer, or text such as '400MiB'"
            ) from None
    if nbytes <= 0:
        raise ValueError(f"{what} {value!r} is {nbytes} bytes; it must be at least 1")
    return nbytes


def format_duration(duration_s: float) -> str:
    """Seconds for people, to three digits: `"12.3 us"`, `"4.56 ms"`, `"1.23 s"`, `"2 min 05 s"`."""
    magnitude = abs(duration_s)
    if magnitude == 0:
        return "0 s"
    if magnitude >= 59.95:
        minutes, seconds = divmod(round(magnitude), 60)
        sign = "-" if duration_s < 0 else ""
        if minutes < 60:
            return f"{sign}{minutes} min {seconds:02d} s"
        return f"{sign}{minutes // 60} h {minutes % 60:02d} min"
    # As above: 999.6 us is "1.00 ms", not "1000 us".
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if magnitude >= 0.9995 * factor:
            return f"{_three_digits(duration_s / factor)} {unit}"
    return f"{_three_digits(duration_s / 1e-9)} ns"


def format_rate(bytes_per_s: float) -> str:
    """A transfer rate for people, in powers of 1000 as links and disks are sold: `"3.40 GB/s"`."""
    magnitude = abs(bytes_per_s)
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if magnitude >= 0.9995 * factor:
            return f"{_three_digits(bytes_per_s / factor)} {unit}"
    return f"{_three_digits(bytes_per_s)} B/s"


def _parse_text(text: str, what: str) -> int:
    stripped = text.strip()
    match = _PATTERN.fullmatch(stripped.lower())
    unit = match["unit"] if match else ""
    if match is None or (unit and unit not in _FACTORS and unit not in _AMBIGUOUS):
        raise ValueError(
            f"{what} {text!r} is not a size. Options: a number with a unit (B, KiB, MiB, GiB, TiB, kB, MB, GB, TB), "
            "for example '400MiB' or '1.5GiB', or a bare integer, which counts bytes"
        )
    number = match["number"]
    if unit in _AMBIGUOUS:
        letter = unit.upper()
        raise ValueError(
            f"{what} {text!r} could mean two sizes. Options: '{number}{letter}iB' (powers of 1024) "
            f"or '{number}{letter if unit != 'k' else 'k'}B' (powers of 1000)"
        )
    if not unit and "." in number:
        raise ValueError(f"{what} {text!r} has a fraction but no unit. Options: '{number}MiB' or '{number}GiB'")
    nbytes = int(Fraction(number) * _FACTORS[unit or "b"])
    if nbytes == 0:
        raise ValueError(f"{what} {text!r} is 0 bytes; it must be at least 1")
    return nbytes


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"
