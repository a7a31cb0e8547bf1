"""The books of free chunks against a model that is a plain set, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from vmm.chunks import ChunkPool, ChunksExhausted
from vmm.ranges import FreeRanges, Run

NUM_CHUNKS = 40


def chunks_of(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [chunk for first, length in runs for chunk in range(first, first + length)]


def runs_of(chunks: set[int]) -> list[tuple[int, int]]:
    """A set's chunks as maximal runs: the obvious way."""
    return [
        (first, next(n for n in range(1, NUM_CHUNKS + 2) if first + n not in chunks))
        for first in sorted(chunks)
        if first - 1 not in chunks
    ]


class PoolMachine(RuleBasedStateMachine):
    """Takes, claims and gives in any order; the model is the set of free chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ChunkPool(NUM_CHUNKS)
        self.free = set(range(NUM_CHUNKS))

    held = Bundle("held")

    @rule(target=held, num_chunks=st.integers(1, NUM_CHUNKS))
    def take(self, num_chunks: int) -> tuple[Run, ...]:
        if num_chunks > len(self.free):
            with pytest.raises(ChunksExhausted) as caught:
                self.pool.take(num_chunks)
            assert (caught.value.num_needed, caught.value.num_free) == (num_chunks, len(self.free))
            return ()
        lengths = sorted((length for _, length in runs_of(self.free)), reverse=True)
        taken = self.pool.take(num_chunks)
        chunks = chunks_of(taken)
        assert len(chunks) == len(set(chunks)) == num_chunks
        assert set(chunks) <= self.free
        fewest = next(n for n in range(1, len(lengths) + 1) if sum(lengths[:n]) >= num_chunks)
        assert len(taken) == fewest
        if fewest == 1:  # best fit: no shorter free run would have done
            assert min(length for length in lengths if length >= num_chunks) == next(
                length for first, length in runs_of(self.free) if first <= chunks[0] < first + length
            )
        self.free -= set(chunks)
        return taken

    @rule(target=held, runs=st.lists(st.tuples(st.integers(-2, NUM_CHUNKS + 1), st.integers(0, 6)), max_size=4))
    def take_exactly(self, runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        chunks = chunks_of(tuple(runs))
        possible = (
            len(chunks) == len(set(chunks)) and set(chunks) <= self.free and all(length > 0 for _, length in runs)
        )
        if not possible:
            with pytest.raises(ValueError, match="cannot take"):
                self.pool.take_exactly(runs)
            return ()
        self.pool.take_exactly(runs)
        self.free -= set(chunks)
        return tuple(runs)

    @rule(runs=consumes(held))
    def give(self, runs: tuple[tuple[int, int], ...]) -> None:
        self.pool.give(runs)
        self.free |= set(chunks_of(runs))

    @rule(runs=held, extra=st.integers(0, NUM_CHUNKS - 1), data=st.data())
    def give_wrongly(self, runs: tuple[tuple[int, int], ...], extra: int, data: st.DataObject) -> None:
        wrong = [*runs, (extra, 1)]
        wrong = data.draw(st.permutations(wrong))
        if extra in self.free or extra in chunks_of(runs):
            with pytest.raises(ValueError, match="cannot give"):
                self.pool.give(wrong)

    @invariant()
    def agrees(self) -> None:
        assert self.pool.num_free == len(self.free)
        assert self.pool.free_runs() == tuple(runs_of(self.free))
        assert [chunk for chunk in range(NUM_CHUNKS) if self.pool.is_free(chunk)] == sorted(self.free)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_foreign_chunks_are_refused() -> None:
    pool = ChunkPool(8)
    taken = pool.take(8)
    for run in ((8, 1), (-1, 1), (6, 4), (0, 0)):
        with pytest.raises(ValueError, match="cannot give"):
            pool.give([run])
    with pytest.raises(ValueError, match="not in the pool"):
        pool.is_free(8)
    with pytest.raises(ValueError, match="must not be negative"):
        ChunkPool(-1)
    assert ChunkPool(0).num_free == 0  # of a session that has given all memory back
    for num_chunks in (0, -1):
        with pytest.raises(ValueError, match="must be positive"):
            pool.take(num_chunks)
    assert pool.num_free == 0
    pool.give(taken)
    assert pool.free_runs() == ((0, 8),)


def test_exhaustion_says_what_is_missing() -> None:
    pool = ChunkPool(8)
    pool.take(6)
    with pytest.raises(ChunksExhausted, match="3 chunks are needed, 2 of the pool's 8 are free") as caught:
        pool.take(3)
    assert caught.value.num_chunks == 8
    assert pool.num_free == 2


def test_a_large_shattered_pool() -> None:
    """Every other chunk of 100,000 free: as many runs as there can be."""
    pool = ChunkPool(100_000)
    pool.take(100_000)
    pool.give((chunk, 1) for chunk in range(0, 100_000, 2))
    assert len(pool.free_runs()) == 50_000
    taken = pool.take(1000)
    assert len(taken) == 1000
    pool.give(taken)
    pool.give((chunk, 1) for chunk in range(1, 100_000, 2))
    assert pool.free_runs() == ((0, 100_000),)


def test_domains_grow_and_merge_with_what_is_free_at_their_end() -> None:
    ranges = FreeRanges(0, 0)
    assert (ranges.take(1), ranges.largest, ranges.total) == (None, 0, 0)
    ranges.extend(10)
    assert ranges.take(6) == 0
    ranges.extend(20)
    assert ranges.ranges() == ((6, 20),)
    assert ranges.largest == ranges.total == 14
    with pytest.raises(ValueError, match="cannot end"):
        ranges.extend(19)
    with pytest.raises(ValueError, match="not a range"):
        FreeRanges(3, 2)
