"""Recordings of steps that were seen once: most of those in a program whose steps vary never come again.

Building a step's trace takes a third of the time that recording it takes, so it is put off until there are signs of a
second one: the same ops, with as many operands, and the same allocations.
"""

from __future__ import annotations

from collections.abc import Iterable

from ooc.tracing.recorder import RecordedStep

_MOST_RECORDINGS = 64
_MOST_OPS = 1 << 16
"""Of all recordings together: an op takes about 100 bytes."""
_MOST_SIGNATURES = 1024


class FirstSightings:
    """Keeps recordings until a second one has the same signature."""

    def __init__(self) -> None:
        self._waiting: dict[int, RecordedStep] = {}  # by signature, the newest last
        self._repeated: dict[int, None] = {}

    def __repr__(self) -> str:
        return f"<FirstSightings: {len(self._waiting)} waiting, {len(self._repeated)} repeated>"

    def __len__(self) -> int:
        """Recordings that are kept."""
        return len(self._waiting)

    def note(self, recording: RecordedStep, *, is_kept: bool = True) -> list[RecordedStep]:
        """Note a step. Those that are to be learned from now: none, this one, or an earlier one and this one.

        `is_kept`: it may be learned from when a second one comes; else only the second one may.
        """
        signature = recording.signature
        if not self.has(recording):
            if is_kept:
                self._waiting[signature] = recording
                self._forget()
            else:
                self._note_repeated(signature)
            return []
        earlier = self._waiting.pop(signature, None)
        self._note_repeated(signature)
        return [recording] if earlier is None else [earlier, recording]

    def _note_repeated(self, signature: int) -> None:
        self._repeated.pop(signature, None)
        self._repeated[signature] = None
        while len(self._repeated) > _MOST_SIGNATURES:
            del self._repeated[next(iter(self._repeated))]

    def has(self, recording: RecordedStep) -> bool:
        """Whether one with the same signature has been noted."""
        return recording.signature in self._waiting or recording.signature in self._repeated

    def recordings(self) -> Iterable[RecordedStep]:
        """Those that are kept, the oldest first."""
        return self._waiting.values()

    def _forget(self) -> None:
        num_ops = sum(recording.num_ops for recording in self._waiting.values())
        while len(self._waiting) > 1 and (len(self._waiting) > _MOST_RECORDINGS or num_ops > _MOST_OPS):
            num_ops -= self._waiting.pop(next(iter(self._waiting))).num_ops


def name_of(recording: RecordedStep) -> str:
    """What stands for its sequence's key until that is known."""
    return f"seen once: {recording.signature:x}"
