"""HTML tables that a phone shows as one card a row, and the signs of verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

SYMBOLS = {"yes": "\u2713", "no": "\u2717", "unknown": "?"}


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], name: str) -> str:
    """A table with its title; empty without rows. Each cell knows its column's name, which narrow screens show."""
    body = "".join(
        "<tr>"
        + "".join(f'<td data-label="{escape(text)}">{escape(cell)}</td>' for text, cell in zip(head, row, strict=True))
        + "</tr>"
        for row in rows
    )
    if not body:
        return ""
    columns = "".join(f"<th>{escape(text)}</th>" for text in head)
    return (
        f'<div class="table" id="{name}"><h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{columns}</tr>'
        f"</thead><tbody>{body}</tbody></table></div></div>"
    )
