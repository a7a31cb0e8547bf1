"""PyTorch's caching rules a second time, slowly: lists of segments, searched from the start each time.

Written from the rules in the documentation of the allocator, without the data structures of the
model that it judges. No expandable segments, no private pools, no deferred frees.
"""

from __future__ import annotations

from ooc.fragmentation.settings import CachingSettings
from ooc.fragmentation.stream import ALLOC, EMPTY, FREE, Stream

MIB = 1 << 20


class Oracle:
    """Segments are lists of `[nbytes, buffer or None, age]`; `held()` is their sum."""

    def __init__(self, settings: CachingSettings, capacity: int | None) -> None:
        self.settings = settings
        self.capacity = capacity
        self.segments: list[dict] = []
        self.calls = {True: 0, False: 0}
        self.num_frees = self.num_retries = 0
        self.failed_at: int | None = None

    def replay(self, stream: Stream) -> list[int]:
        """Bytes held after each event."""
        held = []
        for index, (kind, buffer) in enumerate(zip(stream.kind.tolist(), stream.buffer.tolist(), strict=True)):
            if kind == ALLOC:
                self.alloc(index, buffer, int(stream.nbytes[buffer]), int(stream.pool[buffer]))
            elif kind == FREE:
                self.free(buffer)
            elif kind == EMPTY:
                self.release([s for s in self.segments if self.is_whole(s)])
            held.append(self.held())
        return held

    def held(self) -> int:
        return sum(part[0] for segment in self.segments for part in segment["parts"])

    def alloc(self, index: int, buffer: int, requested: int, stream: int) -> None:
        nbytes = self.rounded(requested)
        is_small = nbytes <= MIB
        collects = self.capacity is not None and self.settings.garbage_collection_threshold > 0
        if collects:
            self.calls[is_small] += 1
        found = self.best(nbytes, is_small, stream)
        if found is None:
            if collects:
                self.collect()
            size = self.segment_size(nbytes)
            if not self.room(size):
                enough = self.settings.max_split_nbytes is not None and self.release_oversize(nbytes, is_small, stream)
                if not enough or not self.room(size):
                    # Also where oversize blocks fell short of the request, whatever room they made.
                    self.num_retries += 1
                    self.release([s for s in self.segments if self.is_whole(s)])
            if not self.room(size):
                self.failed_at, self.capacity = index, None
            segment = {"small": is_small, "stream": stream, "parts": [[size, None, 0]]}
            self.segments.append(segment)
            found = segment, 0
        segment, at = found
        rest = segment["parts"][at][0] - nbytes
        limit = self.settings.max_split_nbytes
        splits = rest >= 512 if is_small else rest > MIB and (limit is None or nbytes < limit)
        if splits:
            segment["parts"][at : at + 1] = [[nbytes, buffer, 0], [rest, None, self.calls[is_small]]]
        else:
            segment["parts"][at][1] = buffer

    def free(self, buffer: int) -> None:
        for segment in self.segments:
            parts = segment["parts"]
            for at, part in enumerate(parts):
                if part[1] == buffer:
                    low = at - 1 if at > 0 and parts[at - 1][1] is None else at
                    high = at + 1 if at + 1 < len(parts) and parts[at + 1][1] is None else at
                    total = sum(p[0] for p in parts[low : high + 1])
                    parts[low : high + 1] = [[total, None, self.calls[segment["small"]]]]
                    return

    def best(self, nbytes: int, is_small: bool, stream: int) -> tuple[dict, int] | None:
        fitting = [
            (part[0], segment, at)
            for segment in self.segments
            if segment["small"] == is_small and segment["stream"] == stream
            for at, part in enumerate(segment["parts"])
            if part[1] is None and part[0] >= nbytes
        ]
        if not fitting:
            return None
        size, segment, at = min(fitting, key=lambda f: f[0])
        limit = self.settings.max_split_nbytes
        if limit is not None:
            if nbytes < limit and size >= limit:
                return None
            if nbytes >= limit and size - nbytes >= self.settings.max_non_split_rounding_nbytes:
                return None
        return segment, at

    def collect(self) -> None:
        limit = int(self.settings.garbage_collection_threshold * (self.capacity or 0))
        excess, given = self.held() - limit, 0
        while given < excess:
            whole = [s for s in self.segments if self.is_whole(s) and not s["small"]]
            ages = [self.calls[False] - s["parts"][0][2] for s in whole]
            if not whole:
                return
            old = [s for s, age in zip(whole, ages, strict=True) if age >= sum(ages) / len(ages)]
            given += sum(s["parts"][0][0] for s in old)
            self.release(old)

    def release_oversize(self, nbytes: int, is_small: bool, stream: int) -> bool:
        limit = self.settings.max_split_nbytes or 0
        wanted = max(nbytes, limit)
        free = sorted(
            (s["parts"][0][0], i)
            for i, s in enumerate(self.segments)
            if self.is_whole(s) and s["small"] == is_small and s["stream"] == stream and s["parts"][0][0] >= limit
        )
        enough = [entry for entry in free if entry[0] >= wanted]
        if enough:
            self.release([self.segments[enough[0][1]]])
            return True
        chosen, given = [], 0
        for size, i in reversed(free):
            if given >= wanted:
                break
            chosen.append(self.segments[i])
            given += size
        self.release(chosen)
        return given >= wanted

    def release(self, gone: list[dict]) -> None:
        self.num_frees += len(gone)
        self.segments = [s for s in self.segments if not any(s is g for g in gone)]

    def is_whole(self, segment: dict) -> bool:
        return len(segment["parts"]) == 1 and segment["parts"][0][1] is None

    def room(self, nbytes: int) -> bool:
        return self.capacity is None or self.held() + nbytes <= self.capacity

    def segment_size(self, nbytes: int) -> int:
        if nbytes <= MIB:
            return 2 * MIB
        return (
            self.settings.large_segment_nbytes if nbytes < 10 * MIB else (nbytes + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        )

    def rounded(self, requested: int) -> int:
        nbytes = max(requested, 512)
        power = 1
        while power * 2 <= nbytes:
            power *= 2
        megabytes = power // MIB
        divisions = self.settings.roundup_power2_divisions[min(max(megabytes.bit_length() - 1, 0), 15)]
        step = power // divisions if divisions > 1 and nbytes > 512 * divisions else 512
        return (nbytes + step - 1) // step * step
