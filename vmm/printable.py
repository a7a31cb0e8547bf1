"""Text that others wrote, made safe to print: no control character reaches a terminal.

Names in a recording, lines of a compiler's output, a trace's labels can hold escape sequences, which would move the
cursor, recolour the screen or set its title; and marks that turn the order of what is shown around.
"""

from __future__ import annotations

import re

__all__ = ["printable"]

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks of direction
    "\u2028\u2029\ud800-\udfff]"  # further line ends; halves of characters, which cannot be encoded
)


def printable(text: str) -> str:
    """`text` with each control character as Python would write it in a string: `\\x1b` for the escape."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)
