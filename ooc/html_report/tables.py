"""HTML tables, which a phone can show as one card a row, and the signs of verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

SYMBOLS = {"yes": "\u2713", "no": "\u2717", "unknown": "?"}


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], name: str, *, cards: bool = True) -> str:
    """A table with its title; empty without rows.

    With `cards` a narrow screen shows a row as a card, and beside each cell the name of its column.
    """
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
        f'<div class="{"table cards" if cards else "table"}" id="{name}"><h2>{escape(title)}</h2><div class="scroll">'
        f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )
