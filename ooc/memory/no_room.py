"""The pool's refusal."""

from __future__ import annotations


class NoRoom(Exception):
    """The pool cannot give so many chunks, since what remains is pinned. The caller knows what they are for."""

    def __init__(self, *, num_needed: int, num_free: int, num_pinned: int) -> None:
        super().__init__(f"{num_needed} chunks needed, {num_free} free, {num_pinned} pinned")
        self.num_needed = num_needed
        self.num_free = num_free
        self.num_pinned = num_pinned
