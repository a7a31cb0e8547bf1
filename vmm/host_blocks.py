"""Pinned host memory in blocks of one size, under an exact budget."""

from __future__ import annotations

from collections.abc import Sequence

from vmm.cuda_calls import CudaCalls
from vmm.driver import MemoryFault
from vmm.pinning import PinnedPiece, Pinning
from vmm.ranges import FreeRanges, Run
from vmm.sizes import format_exactly, format_nbytes

__all__ = ["HostBlocks"]

_PIECE_NBYTES = 256 << 20
"""One call pins this much; a call for all of it would fail as a whole. No copy may cross from one piece to the next:
to the driver each is an allocation of its own. 4 GiB in 0.25 s on a machine with an H100 and 16 cores."""


class HostBlocks:
    """Blocks of pinned memory, all pinned when this is made, so that a failure shows before training.

    Args:
        calls: The driver's calls.
        budget_nbytes: At most this much is pinned; whole blocks.
        block_nbytes: Size of one.
        piece_nbytes: Bytes pinned by one call, whole blocks; for tests.

    Raises:
        MemoryFault: The host cannot pin so much. Nothing is left behind.
    """

    def __init__(
        self, calls: CudaCalls, *, budget_nbytes: int, block_nbytes: int, piece_nbytes: int = _PIECE_NBYTES
    ) -> None:
        if block_nbytes <= 0:
            raise ValueError(f"block_nbytes={block_nbytes}: must be positive")
        if budget_nbytes < 0:
            raise ValueError(f"budget_nbytes={budget_nbytes}: must not be negative")
        self._calls = calls
        self._block_nbytes = block_nbytes
        self._num_blocks = budget_nbytes // block_nbytes
        self._per_piece = max(piece_nbytes // block_nbytes, 1)
        self._free = FreeRanges(0, self._num_blocks)
        self._pieces: list[PinnedPiece] = []
        self._pinning = Pinning(calls)
        try:
            left = self._num_blocks
            while left:
                count = min(left, self._per_piece)
                self._pieces.append(self._pin(count * block_nbytes, budget_nbytes))
                left -= count
        except BaseException:
            self.close()
            raise
        finally:
            self._pinning.close()

    def __repr__(self) -> str:
        return f"<HostBlocks {self.num_free} of {self._num_blocks} blocks of {self._block_nbytes} bytes free>"

    @property
    def block_nbytes(self) -> int:
        """Size of one block."""
        return self._block_nbytes

    @property
    def num_blocks(self) -> int:
        """Blocks that exist."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody has taken."""
        return self._free.total

    def take(self, num_blocks: int) -> tuple[Run, ...] | None:
        """Take free blocks, in as few runs as possible; None, and nothing taken, if fewer are free."""
        if num_blocks > self._free.total:
            return None
        taken = []
        while num_blocks:
            start = self._free.take(num_blocks)
            run = Run(start, num_blocks) if start is not None else Run(*self._free.take_longest())
            taken.append(run)
            num_blocks -= run.length
        return tuple(taken)

    def give(self, runs: Sequence[Run]) -> None:
        """Give blocks back. Whoever takes them next must not write before their last use is over."""
        for run in runs:
            self._free.give(*run)

    def segments(self, runs: Sequence[Run], nbytes: int) -> list[tuple[int, int]]:
        """The first `nbytes` of these blocks as `(address, nbytes)`; neighbours in one piece together."""
        found: list[tuple[int, int]] = []
        for run in runs:
            block, stop = run.first, run.first + run.length
            while block < stop and nbytes:
                piece, within = divmod(block, self._per_piece)
                count = min(stop - block, self._per_piece - within)
                length = min(nbytes, count * self._block_nbytes)
                found.append((self._pieces[piece].address + within * self._block_nbytes, length))
                nbytes -= length
                block += count
        return found

    def close(self) -> None:
        """Unpin all of it; the host must have seen the end of every transfer. Idempotent."""
        while self._pieces:
            self._pinning.give(self._pieces[-1])
            self._pieces.pop()

    def _pin(self, nbytes: int, budget_nbytes: int) -> PinnedPiece:
        try:
            return self._pinning.take(nbytes)
        except MemoryFault as fault:
            pinned = len(self._pieces) * self._per_piece * self._block_nbytes
            raise MemoryFault(
                f"the host cannot pin {format_exactly(budget_nbytes)} (host_budget): {format_nbytes(pinned)} were "
                f"pinned, {format_nbytes(nbytes)} more were refused.\n  {fault}\n"
                "  Options: a smaller host_budget, with a store directory on a fast disk for the rest; a higher limit "
                "on locked memory (ulimit -l); end other processes that pin memory."
            ) from fault
