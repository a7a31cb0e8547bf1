"""Which chunks of the pool are free.

With virtual addresses any set of free chunks will do, so this is a count with names. It still
prefers few contiguous runs: each run is one mapping of the process and one segment of a transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vmm.ranges import FreeRanges, Run

__all__ = ["ChunkPool", "ChunksExhausted"]


class ChunksExhausted(RuntimeError):
    """More chunks were asked for than are free.

    Attributes:
        num_needed: Chunks asked for.
        num_free: Chunks free.
        num_chunks: Chunks in the pool.
    """

    def __init__(self, *, num_needed: int, num_free: int, num_chunks: int) -> None:
        super().__init__(
            f"{num_needed} chunks are needed, {num_free} of the pool's {num_chunks} are free.\n"
            "  Options: evict something first; a larger budget."
        )
        self.num_needed = num_needed
        self.num_free = num_free
        self.num_chunks = num_chunks


class ChunkPool:
    """The books of `num_chunks` chunks, all free at first. None at all while a session has lent its memory."""

    def __init__(self, num_chunks: int) -> None:
        if num_chunks < 0:
            raise ValueError(f"num_chunks={num_chunks}: must not be negative")
        self._num_chunks = num_chunks
        self._free = FreeRanges(0, num_chunks)

    def __repr__(self) -> str:
        return f"<ChunkPool {self.num_free} of {self._num_chunks} chunks free, largest run {self._free.largest}>"

    @property
    def num_chunks(self) -> int:
        """Chunks in the pool."""
        return self._num_chunks

    @property
    def num_free(self) -> int:
        """Chunks that nobody has taken."""
        return self._free.total

    def free_runs(self) -> tuple[Run, ...]:
        """The free chunks, in order."""
        return tuple(Run(start, stop - start) for start, stop in self._free.ranges())

    def is_free(self, chunk: int) -> bool:
        """Whether nobody has taken `chunk`."""
        if not 0 <= chunk < self._num_chunks:
            raise ValueError(f"chunk {chunk} is not in the pool of {self._num_chunks}")
        return self._free.is_free(chunk)

    def take(self, num_chunks: int) -> tuple[Run, ...]:
        """Take any `num_chunks` free chunks, in as few runs as possible.

        One run if some free run is long enough (the shortest such), else the longest free runs
        and the best fit for what is left.

        Raises:
            ChunksExhausted: Fewer are free. Nothing was taken.
        """
        if num_chunks <= 0:
            raise ValueError(f"num_chunks={num_chunks}: must be positive")
        if num_chunks > self._free.total:
            raise ChunksExhausted(num_needed=num_chunks, num_free=self._free.total, num_chunks=self._num_chunks)
        taken = []
        left = num_chunks
        while left:
            start = self._free.take(left)
            run = Run(start, left) if start is not None else Run(*self._free.take_longest())
            taken.append(run)
            left -= run.length
        return tuple(taken)

    def take_if_free(self, runs: Sequence[tuple[int, int]]) -> bool:
        """Take these chunks if all of them are free, and each is named once; else nothing is taken."""
        return self._take_or_find_taken(runs) is None

    def take_exactly(self, runs: Sequence[tuple[int, int]]) -> None:
        """Take these chunks.

        Raises:
            ValueError: One of them is not in the pool or is taken, or is named twice. Nothing was taken.
        """
        taken = self._take_or_find_taken(runs)
        if taken is not None:
            first, length = taken
            raise ValueError(
                f"cannot take chunks [{first}, {first + length}): not all of them are free "
                f"(pool of {self._num_chunks}, {self._free.total} free)"
            )

    def _take_or_find_taken(self, runs: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """Take these chunks; or nothing, and return the first run of which that is not possible."""
        for index, (first, length) in enumerate(runs):
            if length <= 0 or not self._free.take_at(first, length):
                for done_first, done_length in runs[:index]:
                    self._free.give(done_first, done_length)
                return first, length
        return None

    def give(self, runs: Iterable[tuple[int, int]]) -> None:
        """Give chunks back.

        Raises:
            ValueError: One of them is not in the pool, is free already, or is named twice. Nothing was given.
        """
        done: list[tuple[int, int]] = []
        try:
            for run in runs:
                self._free.give(*run)
                done.append(run)
        except ValueError as error:
            for first, length in done:
                self._free.take_at(first, length)
            raise ValueError(f"cannot give chunks back: {error}") from None
