"""What an item of the gate is, what it is given, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from benchmarks.gpu.child import Order
from ooc.cli.trial import NO_ALGORITHM


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


def train_in_core(shell: Shell, order: Order) -> tuple[Order, dict[str, Any]]:
    """What others are compared with, and the order for them: torch warns where an op has no deterministic algorithm."""
    answer = shell.train(order)
    if NO_ALGORITHM in answer.get("error", ""):
        order = replace(order, warns=True)
        answer = shell.train(order)
    return order, answer


def share_nbytes(expected: Mapping[str, Any], share: float, chunk_nbytes: int, *, least: int = 2) -> int:
    """This share of the peak of a run in core, in whole chunks, of which there are `least`."""
    return max(int(expected["peak_nbytes"] * share) // chunk_nbytes, least) * chunk_nbytes


def failed(name: str, answer: Mapping[str, Any], *, may_be_too_small: bool = False) -> Figure:
    """What did not train. A budget that one op does not fit may be a fact of the op's, and no fault."""
    is_good = None if may_be_too_small and answer.get("is_too_small") else False
    return Figure(variant=name, metric="trains", unit="", value=None, is_good=is_good, note=answer["error"])


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
