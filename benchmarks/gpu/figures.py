"""What an item of the gate is, what it is given, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.gpu.child import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table. `is_good` is None where it is neither right nor wrong: a time."""

    variant: str
    metric: str
    unit: str
    value: float | None
    is_good: bool | None = None
    overran: bool = False
    """Time was up before it was known: not measured, and neither right nor wrong."""
    note: str = ""


class Overran(Exception):
    """An item's time was used up. `output` is what the process had told until then."""

    def __init__(self, message: str, *, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class Shell(Protocol):
    """Runs processes for an item. Raises `Overran` when the item's time is used up."""

    def train(self, order: Order) -> dict[str, Any]:
        """What `benchmarks.gpu.child` tells, or `{"error": ...}`."""

    def command(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Exit code and output. Raises FileNotFoundError."""


Measure = Callable[[Shell], Iterable[Figure]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something to measure. `limit_s` counts against the shard, whether it is needed or not."""

    name: str
    limit_s: int
    measure: Measure


def equal_steps(name: str, expected: Mapping[str, Any], answer: Mapping[str, Any], *, note: str) -> Figure:
    """How many of a run's steps have the digests of the run in core."""
    pairs = list(zip(expected["steps"], answer["steps"], strict=True))
    num_equal = sum(a["digest"] == b["digest"] for a, b in pairs)
    return Figure(
        variant=name,
        metric=f"steps bit for bit equal, of {len(pairs)}",
        unit="",
        value=num_equal,
        is_good=num_equal == len(pairs),
        note=note,
    )
