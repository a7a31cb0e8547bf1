"""Totals of what a session has moved and made again."""

from __future__ import annotations

import time


class Counters:
    """Totals of what was moved, which only ever grow. Sizes in bytes, times in nanoseconds.

    Attributes:
        num_in_parts: Ops that did not fit the budget, and ran in parts.
        num_crowded: Moves, or re-runs, for want of room; not those that make way for a plan, or give one up.
    """

    __slots__ = (
        "dropped_nbytes",
        "evicted_nbytes",
        "loaded_nbytes",
        "num_crowded",
        "num_faults",
        "num_in_parts",
        "num_reruns",
        "recompute_ns",
        "recomputed_nbytes",
        "relocate_ns",
        "relocated_nbytes",
        "stall_ns",
    )

    def __init__(self) -> None:
        self.loaded_nbytes = 0
        self.evicted_nbytes = 0
        self.dropped_nbytes = 0
        self.num_crowded = 0
        self.num_faults = 0
        self.num_in_parts = 0
        self.num_reruns = 0
        self.recompute_ns = 0
        self.recomputed_nbytes = 0
        self.relocate_ns = 0
        self.relocated_nbytes = 0
        self.stall_ns = 0

    def note_relocation(self, start_ns: int, nbytes: int) -> None:
        """Note that so many bytes of variables were moved within memory from `start_ns` until now."""
        self.relocated_nbytes += nbytes
        self.relocate_ns += time.monotonic_ns() - start_ns

    def copy(self) -> dict[str, int]:
        """The totals of now that are reported, by name."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "num_crowded"}
