"""From replays to answers: how much is lost, to what, and what would have fitted.

Three sums split what an allocator holds, at every event: *live* (requested and in use), *internal*
loss (rounding: handed out, never asked for) and *external* loss (held, not handed out):

    reserved = live + internal + external

External loss is *trapped* where a live buffer lies in the same segment, so that the segment cannot be given
back, and *releasable* where a whole segment (or a whole page of an expandable one) is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np

from ooc.fragmentation.allocators import MAX_TRIAL_EVENTS, Trial, model, trials
from ooc.fragmentation.replay import Replay, alive_in, mapped_in
from ooc.fragmentation.settings import CachingSettings
from ooc.fragmentation.stream import IntArray, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One replay's memory after one event.

    Attributes:
        event_index: After which event.
        live_nbytes, internal_nbytes, external_nbytes: Sum to the bytes held.
        largest_free_nbytes: The largest free block; None where addresses mean nothing.
        num_holes: Free blocks.
        trapped_nbytes: Free bytes in segments that also hold live buffers; None as above.
    """

    event_index: int
    live_nbytes: int
    internal_nbytes: int
    external_nbytes: int
    largest_free_nbytes: int | None
    num_holes: int | None
    trapped_nbytes: int | None


class CapacityVerdict(Enum):
    """What the report says in one word."""

    FITS = "fits"
    """Within the capacity."""
    FAILS = "does not fit"
    """Some request cannot be served within the capacity."""
    UNKNOWN = "no capacity given"
    """There is nothing to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One allocator's row."""

    replay: Replay
    outcome: CapacityVerdict
    peak: Moment
    worst: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsTrialResult:
    """What other settings of PyTorch's allocator would have done."""

    trial: Trial
    peak_reserved_nbytes: int
    num_retries: int
    fits: bool | None


def live_in(replay: Replay, stream: Stream) -> IntArray:
    """Requested bytes live after each event that the replay covers."""
    if (replay.death == stream.death).all():
        return stream.live_nbytes[replay.first_event : replay.last_event]
    # Some buffers went early, while the allocator waited for other CUDA streams.
    change = np.zeros(stream.num_events + 1, dtype=np.int64)
    np.add.at(change, stream.birth, stream.nbytes)
    np.add.at(change, replay.death, -stream.nbytes)
    return np.cumsum(change)[replay.first_event : replay.last_event]


def moment(replay: Replay, stream: Stream, event_index: int) -> Moment:
    """What the replay holds after an event that it covers; before the first, nothing."""
    at = event_index - replay.first_event
    if not 0 <= at < len(replay.reserved_nbytes):
        return Moment(
            event_index=event_index,
            live_nbytes=0,
            internal_nbytes=0,
            external_nbytes=0,
            largest_free_nbytes=0,
            num_holes=0,
            trapped_nbytes=0,
        )
    live = int(live_in(replay, stream)[at])
    allocated, reserved = int(replay.allocated_nbytes[at]), int(replay.reserved_nbytes[at])
    holes = None if replay.address is None else holes_of(replay, stream, event_index)
    return Moment(
        event_index=event_index,
        live_nbytes=live,
        internal_nbytes=allocated - live,
        external_nbytes=reserved - allocated,
        largest_free_nbytes=None if holes is None else max((h.nbytes for h in holes), default=0),
        num_holes=None if holes is None else len(holes),
        trapped_nbytes=None if holes is None else sum(h.nbytes for h in holes if h.has_neighbour),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """A free block, and the buffers next to it in its segment (None at the segment's ends)."""

    address: int
    nbytes: int
    before: int | None
    after: int | None

    @property
    def has_neighbour(self) -> bool:
        """Does a live buffer keep its segment from being given back?"""
        return self.before is not None or self.after is not None


def holes_of(replay: Replay, stream: Stream, event_index: int) -> list[Hole]:
    """The free blocks after an event, by address."""
    assert replay.address is not None
    alive = alive_in(replay, stream, event_index)
    alive = alive[np.argsort(replay.address[alive], kind="stable")]
    starts = replay.address[alive]
    stops = starts + replay.block_nbytes[alive]
    found = []
    for low, high in _joined(mapped_in(replay, event_index), replay):
        first, last = np.searchsorted(starts, [low, high])
        at, before = low, None
        for i in range(int(first), int(last)):
            if starts[i] > at:
                found.append(Hole(address=at, nbytes=int(starts[i]) - at, before=before, after=int(alive[i])))
            at, before = int(stops[i]), int(alive[i])
        if at < high:
            found.append(Hole(address=at, nbytes=high - at, before=before, after=None))
    return found


def _joined(ranges: list[tuple[int, int]], replay: Replay) -> list[tuple[int, int]]:
    """Pages of one expandable segment are one range; cudaMalloc's segments never join."""
    if replay.num_maps == 0:
        return ranges
    joined: list[tuple[int, int]] = []
    for low, high in ranges:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def summarise(replay: Replay, stream: Stream, capacity: int | None) -> Summary:
    """One row of the report."""
    judged = CapacityVerdict.FITS if replay.failure is None else CapacityVerdict.FAILS
    return Summary(
        replay=replay,
        outcome=CapacityVerdict.UNKNOWN if capacity is None else judged,
        peak=moment(replay, stream, replay.peak_event),
        worst=moment(replay, stream, replay.worst_event),
    )


def try_settings(stream: Stream, settings: CachingSettings, capacity: int | None) -> list[SettingsTrialResult]:
    """Other settings of the caching allocator on this stream; empty for streams that are too long."""
    if stream.num_events > MAX_TRIAL_EVENTS:
        return []
    results = []
    for trial in trials(settings):
        if trial.settings.garbage_collection_threshold and capacity is None:
            continue  # without a capacity it never collects
        replay = model("caching", trial.settings)(stream, capacity)
        results.append(
            SettingsTrialResult(
                trial=trial,
                peak_reserved_nbytes=replay.peak_reserved_nbytes,
                num_retries=replay.num_retries,
                fits=None if capacity is None else replay.failure is None,
            )
        )
    return results


def curve(replay: Replay, stream: Stream, num_points: int = 400) -> list[dict[str, int]]:
    """Live, handed out and held over time in at most `num_points` points.

    Of each stretch, the event at which most is held.
    """
    held = replay.reserved_nbytes
    live = live_in(replay, stream)
    edges = np.linspace(0, len(held), min(num_points, len(held)) + 1).astype(np.int64)
    points = []
    for start, stop in pairwise(edges):
        at = int(start) + int(held[start:stop].argmax())
        points.append(
            {
                "event": replay.first_event + at,
                "live_nbytes": int(live[at]),
                "allocated_nbytes": int(replay.allocated_nbytes[at]),
                "reserved_nbytes": int(held[at]),
            }
        )
    return points


def mean_external_fraction(replay: Replay) -> float:
    """Share of the held bytes not handed out, averaged over the events at which anything is held."""
    held = replay.reserved_nbytes
    some = held > 0
    if not some.any():
        return 0.0
    return float(np.mean(1.0 - replay.allocated_nbytes[some] / held[some]))


def meets_record(replay: Replay, stream: Stream) -> dict[str, tuple[int, int]]:
    """Figures of the file beside those of the replay: `{name: (recorded, replayed)}`.

    Live bytes concern every replay; held bytes and calls only that of the allocator and the settings
    that were recorded. Once the replay goes on where the program stopped, only what came before counts.
    """
    recorded = stream.recorded
    pairs: dict[str, tuple[int | None, int]] = {
        "peak_live_nbytes": (recorded.peak_live_nbytes, stream.peak_live_nbytes),
        "end_live_nbytes": (recorded.end_live_nbytes, int(stream.live_nbytes[-1]) if stream.num_events else 0),
    }
    used = stream.settings or CachingSettings()
    is_own = replay.allocator in ("caching", "expandable") and replay.settings == used.text()
    if is_own and stream.failures:
        first = stream.failures[0]
        failed_there = replay.failure is not None and replay.failure.event_index == first.event_index
        before = int(replay.reserved_nbytes[first.event_index - 1]) if first.event_index else 0
        held = replay.failure.reserved_nbytes if failed_there and replay.failure is not None else before
        pairs["reserved_at_failure_nbytes"] = (first.reserved_nbytes, held)
    elif is_own and replay.failure is None:
        end = int(replay.reserved_nbytes[-1]) if stream.num_events else 0
        pairs["peak_reserved_nbytes"] = (recorded.peak_reserved_nbytes, replay.peak_reserved_nbytes)
        pairs["end_reserved_nbytes"] = (recorded.end_reserved_nbytes, end)
        pairs["num_device_allocs"] = (recorded.num_device_allocs, replay.num_device_allocs)
        pairs["num_device_frees"] = (recorded.num_device_frees, replay.num_device_frees)
    return {name: (truth, found) for name, (truth, found) in pairs.items() if truth is not None}
