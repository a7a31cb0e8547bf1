"""Sizes of PyTorch's caching allocator: of blocks, of segments, and of the limit that a failure shows."""

from __future__ import annotations

from ooc.fragmentation.settings import CachingSettings
from ooc.fragmentation.stream import OutOfMemory, Stream
from ooc.units import MIB

MIN_BLOCK_NBYTES = 512
SMALL_NBYTES = MIB
"""The largest small request; also what must remain of a large block to split it."""
SMALL_SEGMENT_NBYTES = 2 * MIB
MIN_LARGE_ALLOC_NBYTES = 10 * MIB
LARGE_ROUNDING_NBYTES = 2 * MIB


def round_request(nbytes: int, settings: CachingSettings) -> int:
    """Bytes of the block that a request of `nbytes` needs."""
    if nbytes < MIN_BLOCK_NBYTES:
        return MIN_BLOCK_NBYTES
    divisions = settings.divisions(nbytes)
    if divisions > 1 and nbytes > MIN_BLOCK_NBYTES * divisions:
        floor = 1 << (nbytes.bit_length() - 1)
        step = floor >> (divisions.bit_length() - 1)
        return floor << 1 if step == 0 else -(-nbytes // step) * step
    return -(-nbytes // MIN_BLOCK_NBYTES) * MIN_BLOCK_NBYTES


def segment_nbytes(block_nbytes: int, settings: CachingSettings) -> int:
    """Bytes of the segment that is taken from the device for a block."""
    if block_nbytes <= SMALL_NBYTES:
        return SMALL_SEGMENT_NBYTES
    if block_nbytes < MIN_LARGE_ALLOC_NBYTES:
        return settings.large_segment_nbytes
    return -(-block_nbytes // LARGE_ROUNDING_NBYTES) * LARGE_ROUNDING_NBYTES


def is_below_device(stream: Stream) -> bool:
    """Whether the first failure of which it is known met a limit below the device's memory.

    That is so if the device had room for what was needed: then it was `set_per_process_memory_fraction` that refused.
    """
    failure = _first_known(stream)
    if failure is None or failure.device_free_nbytes is None:
        return False
    settings = stream.settings or CachingSettings()
    needed = segment_nbytes(failure.nbytes, settings)
    if settings.expandable_segments and failure.nbytes > SMALL_NBYTES:
        needed = -(-failure.nbytes // settings.large_segment_nbytes) * settings.large_segment_nbytes
    return failure.device_free_nbytes >= needed


def recorded_capacity(stream: Stream) -> int | None:
    """What the process could have had when it first ran out of memory, in bytes; None: it did not, as far as is known.

    Held, plus what the device had left. Of a limit below the device's memory, the most that refuses the request, but
    not less than was ever held: a captured graph's request is refused after segments went back for nothing.
    """
    failure = _first_known(stream)
    if failure is None or failure.device_free_nbytes is None:
        return None
    if is_below_device(stream):
        refuses = failure.reserved_nbytes + segment_nbytes(failure.nbytes, stream.settings or CachingSettings()) - 1
        return max(refuses, stream.recorded.peak_reserved_nbytes or 0)
    return failure.reserved_nbytes + failure.device_free_nbytes


def _first_known(stream: Stream) -> OutOfMemory | None:
    return next((failure for failure in stream.failures if failure.device_free_nbytes is not None), None)
