"""Resident variables are copied to where a plan wants them: bytes, mappings and counts stay right."""

from __future__ import annotations

import random

import pytest
import torch

import ooc
from ooc.memory.relocation import relocate
from vmm.chunks import ChunkPool

CHUNK = 64 << 10


@pytest.mark.parametrize("seed", range(25))
def test_each_variable_has_its_bytes_wherever_it_went(seed: int) -> None:
    rng = random.Random(seed)
    num_chunks = rng.choice([14, 16, 24])
    with ooc.Session(num_chunks * CHUNK, chunk_nbytes=CHUNK, threshold_nbytes=1024, debug=True) as session:
        manager = session.engine.manager
        tensors = [torch.randn(rng.randint(1, 3) * CHUNK // 4 - rng.randint(0, 99)) for _ in range(6)]
        expected = [float(t.double().sum()) for t in tensors]  # also: an op has named each
        with session.engine.lock:
            session.engine.runner.absorb()
            records = [r for r in manager.records.values() if r.runs and r.seen]
            rng.shuffle(records)
            num_moved = rng.randint(0, len(records))
            order, targets, start = list(records[:num_moved]), {}, 0
            rng.shuffle(order)
            for record in order:  # the plan's chunks, from the first on: they overlap with what is there now
                count = manager.chunks_of(record.nbytes)
                targets[record.address] = ((start, count),)
                start += count
            others = [r for r in records[num_moved:] if min(first for first, _ in r.runs) < start]
            relocate(manager, targets, others, start)
            manager.retake_pool(ChunkPool(num_chunks))  # raises if two have the same chunk
            placed = [r for r in order if tuple(r.runs) == targets[r.address]]
            if 2 * start <= num_chunks and not others:
                assert placed == order
            assert not order or placed or others
        assert [float(t.double().sum()) for t in tensors] == expected
