"""Bytes in messages: readable, and exact where a limit was missed by little."""

from __future__ import annotations

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))


def format_nbytes(nbytes: int) -> str:
    """Bytes for people, in powers of 1024: `"512 B"`, `"96.0 MiB"`, `"-1.5 GiB"`.

    One decimal, except that the whole part keeps all its digits. Not for parsing back.
    """
    magnitude = abs(nbytes)
    if magnitude < 1 << 10:
        return f"{nbytes} B"
    for factor, unit in _UNITS:
        # 1023.96 KiB would print as "1024.0 KiB": from there on, take the next unit.
        if magnitude >= factor - factor // 20480:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes / (1 << 10):.1f} KiB"


def format_exactly(nbytes: int) -> str:
    """Both for people and to the byte: `"96.0 MiB (100663296 bytes)"`."""
    return f"{format_nbytes(nbytes)} ({nbytes} bytes)" if abs(nbytes) >= 1 << 10 else f"{nbytes} bytes"
