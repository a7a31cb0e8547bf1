"""How a call of an op is cut into parts: what of each operand and result belongs to a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Given = Mapping[str, Any]
"""An op's arguments by name; only those that it was given."""
Whole = Sequence[Tensor | None]
"""An op's results without data; where a result is an operand, that operand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Along:
    """Cut along one dimension: the part is `narrow(dim, start, stop - start)`, copied."""

    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Cut a dense tensor's elements, in the order in which they lie: `unit` of them to a position.

    The part of n positions has the shape `(*lead, n, *tail)`, contiguous.
    """

    unit: int = 1
    lead: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """An operand has positions of its own along one dimension: `length` of them from `first` on.

    A part gets a copy of those that lie within it, and None in place of the operand if none do.
    """

    dim: int
    first: int
    length: int

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """From where to where, in the operand's own positions, a part lies; empty or reversed: it has none of them."""
        return max(start - self.first, 0), min(stop - self.first, self.length)


Stretch = Along | Blocks
"""Of every operand or result that is cut so, a part has as many positions as of the others."""
Cut = Stretch | Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How one call of an op is cut.

    Attributes:
        length: Positions along which it is cut; 0: it runs once, with results of its own.
        granule: Cuts are at multiples of this.
        operands: By argument name (`tensors.3` in a list), those of which a part is a copy of a slice. Others are in
            memory as a whole.
        written: Those of them that the op writes: the part's copy is written back. None of them has a section.
        overwritten: Those of them whose bytes the op does not read.
        unread: Arguments of which only the shape matters: they need not be in memory.
        is_view: It touches no bytes of any operand, and gets them as they are.
        results: For each result how it is cut; None: it is what the last part returns (nothing, or without elements).
        part: Runs one part, from the arguments with copies in place of slices, `start` and `stop`. None: the op itself.
        fill: As `part`, for results that are in memory as a whole: it writes what the part adds to them.
    """

    length: int = 0
    granule: int = 1
    operands: Mapping[str, Cut] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    overwritten: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()
    is_view: bool = False
    results: Sequence[Stretch | None] = ()
    part: Callable[[dict[str, Any], int, int], Any] | None = None
    fill: Callable[[dict[str, Any], Sequence[Tensor], int, int], None] | None = None


Rule = Callable[[Any, Given, Whole], Split | None]


def outermost(tensor: Tensor, *, but: int | None = None) -> int | None:
    """The dimension, but for one, whose positions lie furthest apart; None: it has no elements but in that one."""
    dims = [dim for dim, length in enumerate(tensor.shape) if length > 1 and dim != but]
    return max(dims, key=lambda dim: (tensor.stride(dim), -dim), default=None)
