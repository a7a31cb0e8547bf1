"""Any bytes of a slot, by whole blocks and by the rest, as others read and write the same slot."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmm.files import BLOCK_NBYTES, anonymous_memory
from vmm.slot_parts import SlotParts
from vmm.store import FileStore

SLOT_NBYTES = 9 * BLOCK_NBYTES


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path, direct=request.param, allow_memory=True) as opened:
        yield opened


def bytes_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def test_random_pieces_read_and_written_by_all_ways(store: FileStore) -> None:
    """Parts, whole transfers, and a mapping of the file see each other's bytes at once."""
    chooser = random.Random(5)
    parts = SlotParts(store)
    slot = store.allocate(SLOT_NBYTES)
    parts.begin(slot)
    truth = bytearray(SLOT_NBYTES)
    shown = mmap.mmap(store.descriptor, SLOT_NBYTES, offset=slot.offset)
    with anonymous_memory(SLOT_NBYTES) as (address, _):
        for _ in range(150):
            step = chooser.choice((1, 8, 512, BLOCK_NBYTES))
            points = sorted(chooser.sample(range(0, SLOT_NBYTES + 1, step), 2 * chooser.randint(1, 3)))
            pieces = [(a, b - a) for a, b in zip(points[::2], points[1::2], strict=True)]
            total = sum(nbytes for _, nbytes in pieces)
            noise = os.urandom(total)
            act = chooser.choice(("part", "part", "whole", "touch"))
            if act == "part":
                ctypes.memmove(address, noise, total)
                parts.write(slot, pieces, address)
                place = 0
                for offset, nbytes in pieces:
                    truth[offset : offset + nbytes] = noise[place : place + nbytes]
                    place += nbytes
            elif act == "whole":
                truth = bytearray(os.urandom(SLOT_NBYTES))
                ctypes.memmove(address, bytes(truth), SLOT_NBYTES)
                store.write(slot, [(address, SLOT_NBYTES)]).wait()
            else:
                offset, nbytes = pieces[0]
                truth[offset : offset + nbytes] = shown[offset : offset + nbytes] = noise[:nbytes]
            expected = b"".join(bytes(truth[offset : offset + nbytes]) for offset, nbytes in pieces)
            ctypes.memset(address, 0, SLOT_NBYTES)
            parts.read(slot, pieces, address)
            assert bytes_at(address, total) == expected, act
            store.read(slot, [(address, SLOT_NBYTES)]).wait()
            assert bytes_at(address, SLOT_NBYTES) == truth, act
            assert shown[:] == truth, act
    shown.close()
    parts.close()


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_small_pieces_are_read_in_few_calls(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chooser, nbytes = random.Random(seed), 3 << 20
    parts, slot = SlotParts(store), store.allocate(nbytes)
    pieces, place, num_far = [], chooser.randrange(BLOCK_NBYTES), 0
    while place < nbytes - 2 * BLOCK_NBYTES:
        length = chooser.choice((1, 8, 60, 500, BLOCK_NBYTES))
        pieces.append((place, length))
        is_far = chooser.random() < 0.01
        num_far += is_far
        place += length + (chooser.randrange(BLOCK_NBYTES, 4 * BLOCK_NBYTES) if is_far else chooser.randrange(1, 3000))
    calls, preadv = [], os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    with anonymous_memory(nbytes) as (address, _):
        noise = os.urandom(nbytes)
        ctypes.memmove(address, noise, nbytes)
        store.write(slot, [(address, nbytes)]).wait()
        ctypes.memset(address, 0, nbytes)
        parts.read(slot, pieces, address)
        expected = b"".join(noise[offset : offset + length] for offset, length in pieces)
        assert bytes_at(address, len(expected) + 100) == expected + bytes(100)
    assert len(pieces) > 1000
    assert len(calls) <= num_far + 1 + 2 * (nbytes >> 20)
    assert max(calls) <= 1 << 20  # the memory that it takes meanwhile
    parts.close()


def test_a_new_slot_can_be_read_and_is_copied_whole(store: FileStore) -> None:
    parts = SlotParts(store)
    first, second = store.allocate(3 << 20), store.allocate(3 << 20)
    parts.begin(first)
    parts.begin(second)
    with anonymous_memory(3 << 20) as (address, nbytes):
        store.read(first, [(address, nbytes)]).wait()
        assert not any(bytes_at(address, BLOCK_NBYTES))  # that block was written
        noise = os.urandom(nbytes - 5)
        ctypes.memmove(address, noise, len(noise))
        parts.write(first, [(5, len(noise))], address)
        parts.copy(first, second)
        parts.read(second, [(5, len(noise))], address)
        assert bytes_at(address, len(noise)) == noise
    parts.close()
    parts.close()


def test_slots_are_compared_as_far_as_asked(store: FileStore) -> None:
    nbytes = (1 << 20) + 3 * BLOCK_NBYTES  # more than is compared at once
    parts, slots = SlotParts(store), [store.allocate(nbytes) for _ in range(2)]
    with anonymous_memory(nbytes) as (address, _):
        ctypes.memmove(address, os.urandom(nbytes), nbytes)
        for slot in slots:
            store.write(slot, [(address, nbytes)]).wait()
        assert parts.are_equal(*slots, nbytes)
        for place, equal_nbytes in (
            (nbytes - 1, nbytes - BLOCK_NBYTES),
            ((1 << 20) - 1, (1 << 20) - BLOCK_NBYTES),
            (0, 0),
        ):
            shown = mmap.mmap(store.descriptor, nbytes, offset=slots[1].offset)
            shown[place] ^= 1  # in the page cache alone
            shown.close()
            assert not parts.are_equal(*slots, place + 1)
            assert parts.are_equal(*slots, equal_nbytes)


def test_a_file_that_is_too_short_is_an_error(store: FileStore) -> None:
    parts = SlotParts(store)
    slot = store.allocate(SLOT_NBYTES)
    os.ftruncate(store.descriptor, slot.offset + 100)
    with anonymous_memory(BLOCK_NBYTES) as (address, _), pytest.raises(OSError, match="ends at"):
        parts.read(slot, [(50, 100)], address)
    parts.close()


def test_a_write_that_is_under_way_comes_first(store: FileStore) -> None:
    """Whoever reads a part of a slot sees what was last written to it; a write of a part comes after it."""
    parts = SlotParts(store)
    slot = store.allocate(SLOT_NBYTES)
    parts.begin(slot)
    with anonymous_memory(SLOT_NBYTES) as (address, _), anonymous_memory(BLOCK_NBYTES) as (other, _):
        for value, act in ((1, parts.read), (2, parts.read), (3, parts.write)):
            ctypes.memset(address, value, SLOT_NBYTES)
            store.engine.inject_faults(direction="write", delay_ns=100_000_000)
            under_way = store.write(slot, [(address, SLOT_NBYTES)])
            store.engine.inject_faults()
            ctypes.memset(other, 9, BLOCK_NBYTES)
            act(slot, [(BLOCK_NBYTES, BLOCK_NBYTES)], other)
            assert under_way.done()
            assert bytes_at(other, BLOCK_NBYTES) == bytes([value if act == parts.read else 9]) * BLOCK_NBYTES
        store.read(slot, [(address, SLOT_NBYTES)]).wait()
        assert bytes_at(address, SLOT_NBYTES)[BLOCK_NBYTES - 1 : 2 * BLOCK_NBYTES + 1] == (
            b"\x03" + b"\x09" * BLOCK_NBYTES + b"\x03"
        )
    parts.close()
