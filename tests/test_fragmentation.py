"""Where memory went: readers, allocator models and the report.

No snapshot recorded on a real GPU is among these files yet. The snapshot here is written by hand in
PyTorch's format, with segments and blocks worked out on paper; the profiles are PyTorch's own, of
CPU runs (tests/data/README.md).
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from torch.profiler import ProfilerActivity, profile

from ooc.cli import main as ooc_main
from ooc.fragmentation import (
    ALLOCATORS,
    BadFile,
    CachingSettings,
    Stream,
    analysis,
    make_report,
    parse_settings,
    read_streams,
    to_document,
)
from ooc.fragmentation.allocators import model
from ooc.fragmentation.caching import replay_caching
from ooc.fragmentation.cli import main
from ooc.fragmentation.planned import MAX_PLANNED_BUFFERS, planned_events
from ooc.fragmentation.replay import Replay, mapped_in
from ooc.fragmentation.segments import round_request, segment_nbytes
from ooc.fragmentation.settings import BadSettings
from ooc.fragmentation.stream import ALLOC, EMPTY, FREE, RELEASE
from ooc.fragmentation.unpickler import MAX_OPEN_MARKS, load_plain
from tests.caching_oracle import Oracle
from tests.scheduler.random_traces import random_trace

DATA = Path(__file__).parent / "data"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PROFILES = ("kineto_cnn_cpu.json.gz", "kineto_encoder_cpu.json.gz")


def stream_of(events: list[tuple[int, int]], sizes: list[int], pools: list[int] | None = None) -> Stream:
    """A stream from `(kind, buffer)` pairs."""
    return Stream(
        source="test",
        device="test",
        kind=np.array([kind for kind, _ in events], dtype=np.int8),
        buffer=np.array([buffer for _, buffer in events], dtype=np.int64),
        nbytes=np.array(sizes, dtype=np.int64),
        pool=np.array(pools or [0] * len(sizes), dtype=np.int64),
        stack=lambda buffer: (f"buffer {'ABCDEFGH'[buffer % 8]}",),
    ).validate()


def caching(stream: Stream, capacity: int | None = None, conf: str = "") -> Replay:
    return replay_caching(stream, capacity, parse_settings(conf), name="caching")


# -- by hand, to the byte ------------------------------------------------------------------------

# A 3 MiB, B 4 MiB and C 12 MiB come; A goes; D of 5 MiB comes.
#
# Caching: A is large and under 10 MiB, so a segment of 20 MiB is taken: A [0, 3), B [3, 7), and C gets all
# of [7, 20), because what would remain of the 13 MiB, 1 MiB, is not more than 1 MiB. A leaves a hole of
# 3 MiB; D does not fit into it, so a second segment of 20 MiB is taken: D [0, 5), 15 MiB free behind it.
# Then: held 40; live 4 + 12 + 5 = 21; handed out 4 + 13 + 5 = 22, so internal 1; external 3 + 15 = 18.
BY_HAND = stream_of([(ALLOC, 0), (ALLOC, 1), (ALLOC, 2), (FREE, 0), (ALLOC, 3)], [3 * MIB, 4 * MIB, 12 * MIB, 5 * MIB])


def test_caching_by_hand() -> None:
    replay = caching(BY_HAND)
    assert [n // MIB for n in replay.reserved_nbytes.tolist()] == [20, 20, 20, 20, 40]
    peak = analysis.moment(replay, BY_HAND, replay.peak_event)
    assert (peak.event_index, peak.live_nbytes, peak.internal_nbytes, peak.external_nbytes) == (
        4,
        21 * MIB,
        1 * MIB,
        18 * MIB,
    )
    assert (peak.num_holes, peak.largest_free_nbytes, peak.trapped_nbytes) == (2, 15 * MIB, 18 * MIB)
    assert (replay.num_device_allocs, replay.num_device_frees, replay.num_retries) == (2, 0, 0)


def test_the_failed_request_by_hand() -> None:
    """In 32 MiB the second segment does not fit: 3 MiB free of 20, and B is what keeps them apart from nothing."""
    report = make_report(BY_HAND, capacity=32 * MIB)
    own = report.reference_summary
    assert own is not None
    failure = own.replay.failure
    assert failure is not None
    assert (failure.event_index, failure.nbytes, failure.needed_nbytes) == (4, 5 * MIB, 20 * MIB)
    assert (failure.reserved_nbytes, failure.allocated_nbytes) == (20 * MIB, 17 * MIB)
    assert failure.largest_free_nbytes == 3 * MIB
    assert own.replay.num_retries == 1  # it asked again after giving back what it could: nothing
    assert own.replay.peak_reserved_nbytes == 40 * MIB  # what it would have taken
    (culprit,) = report.culprits
    assert (culprit.stack, culprit.nbytes, culprit.adjoining_free_nbytes) == (("buffer B",), 4 * MIB, 3 * MIB)
    assert report.does_not_fit
    text = "\n".join(report.advice)
    assert "ooc run --budget SIZE --chunk 2MiB (peak 22.0 MiB)" in text
    assert "expandable_segments" not in text  # two pages of 20 MiB do not fit either


def test_other_models_by_hand() -> None:
    """Expandable: two pages of 20 MiB. Planners: B, C and D live together, A where D comes later: 21 MiB.

    Chunks of 2 MiB: at most 2 + 6 + 3 = 11 in use; of 64 KiB: 64 + 192 + 80 = 336; of 20 MiB: 3.
    """
    peaks = {name: model(name, CachingSettings())(BY_HAND, None).peak_reserved_nbytes for name in ALLOCATORS}
    assert peaks == {
        "caching": 40 * MIB,
        "expandable": 40 * MIB,
        "first-fit-by-size": 21 * MIB,
        "melon": 21 * MIB,
        # Slots are never split: A's 3 MiB are too small for D, which goes on top of 19 MiB.
        "nntrainer": 24 * MIB,
        "chunked-64KiB": 21 * MIB,
        "chunked-2MiB": 22 * MIB,
        "chunked-20MiB": 60 * MIB,
    }


def test_a_request_that_fits_no_allocator() -> None:
    report = make_report(BY_HAND, capacity=20 * MIB)
    assert report.does_not_fit
    assert "No allocator can fit this: 21.0 MiB are live at once, 1.0 MiB more" in report.advice[0]
    assert "ooc run --budget 20MiB" in report.advice[1]


@pytest.mark.parametrize(
    ("nbytes", "divisions", "block", "segment"),
    [
        (1, 0, 512, 2 * MIB),
        (512, 0, 512, 2 * MIB),
        (513, 0, 1024, 2 * MIB),
        (MIB, 0, MIB, 2 * MIB),
        (MIB + 1, 0, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 0, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 0, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 0, 10 * MIB + 512, 12 * MIB),
        # Between 4096 and 8192 in 4 steps of 1024; up to 512 * 4 bytes the divisions do not apply.
        (5000, 4, 5120, 2 * MIB),
        (1200, 4, 1536, 2 * MIB),
        (5120, 4, 5120, 2 * MIB),
        (9 * MIB, 2, 12 * MIB, 12 * MIB),
    ],
)
def test_rounding(nbytes: int, divisions: int, block: int, segment: int) -> None:
    chosen = CachingSettings(roundup_power2_divisions=(divisions,) * 16)
    assert round_request(nbytes, chosen) == block
    assert segment_nbytes(block, chosen) == segment


def test_small_and_large_pools_are_apart_and_streams_too() -> None:
    """Free memory of one pool or CUDA stream is never handed to another: four segments for four buffers."""
    events = [(kind, buffer) for buffer in range(4) for kind in (ALLOC, FREE)]
    replay = caching(stream_of(events, [MIB, 2 * MIB, MIB, 2 * MIB], [0, 0, 1, 1]))
    assert replay.num_device_allocs == 4
    assert replay.peak_reserved_nbytes == 44 * MIB


def test_max_split_size() -> None:
    """A block of 40 MiB, free. By default a request of 25 MiB splits it; above max_split_size it stays whole."""
    stream = stream_of([(ALLOC, 0), (FREE, 0), (ALLOC, 1)], [40 * MIB, 25 * MIB])
    assert caching(stream).peak_reserved_nbytes == 40 * MIB
    assert caching(stream, None, "max_split_size_mb:32").peak_reserved_nbytes == 66 * MIB
    # Within 64 MiB it goes back first: oversize blocks are released one by one before everything is.
    limited = caching(stream, 64 * MIB, "max_split_size_mb:32")
    assert (limited.failure, limited.num_device_frees, limited.num_retries) == (None, 1, 0)


def test_oversize_blocks_stay_whole_and_serve_only_what_is_near() -> None:
    """At max_split_size 32: a free block of 40 MiB serves 32 MiB whole; one of 52, 20 MiB more, does not."""
    near = caching(stream_of([(ALLOC, 0), (FREE, 0), (ALLOC, 1)], [40 * MIB, 32 * MIB]), None, "max_split_size_mb:32")
    assert (near.peak_reserved_nbytes, int(near.allocated_nbytes[-1])) == (40 * MIB, 40 * MIB)
    far = caching(stream_of([(ALLOC, 0), (FREE, 0), (ALLOC, 1)], [52 * MIB, 32 * MIB]), None, "max_split_size_mb:32")
    assert far.peak_reserved_nbytes == 84 * MIB


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_freed_block_merges_with_both_neighbours(order: tuple[int, int]) -> None:
    """Two of 9 MiB and 2 MiB behind them fill a segment of 20; all free, they serve 19 MiB."""
    events = [(ALLOC, 0), (ALLOC, 1), *((FREE, buffer) for buffer in order), (ALLOC, 2)]
    assert caching(stream_of(events, [9 * MIB, 9 * MIB, 19 * MIB])).peak_reserved_nbytes == 20 * MIB


def test_garbage_collection() -> None:
    """40 MiB, free since long; 20 MiB, free since now. Held 60 of 100, threshold 0.5: the older one goes back."""
    stream = stream_of(
        [(ALLOC, 0), (ALLOC, 1), (FREE, 0), (ALLOC, 2), (FREE, 1), (ALLOC, 3)],
        [40 * MIB, 20 * MIB, 10 * MIB, 50 * MIB],
    )
    # Buffer 2 splits the block of 40 MiB, so nothing is wholly free but the 20 MiB when buffer 3 comes.
    plain = caching(stream, 120 * MIB)
    collected = caching(stream, 120 * MIB, "garbage_collection_threshold:0.4")
    assert (plain.num_device_frees, int(plain.reserved_nbytes[-1])) == (0, 110 * MIB)
    assert (collected.num_device_frees, int(collected.reserved_nbytes[-1])) == (1, 90 * MIB)
    assert collected.num_retries == 0


def test_free_segments_go_back_before_it_fails() -> None:
    stream = stream_of([(ALLOC, 0), (FREE, 0), (ALLOC, 1)], [30 * MIB, 40 * MIB])
    replay = caching(stream, 50 * MIB)
    assert (replay.failure, replay.num_retries, replay.num_device_frees) == (None, 1, 1)
    assert replay.reserved_nbytes.tolist() == [30 * MIB, 30 * MIB, 40 * MIB]


def test_memory_in_use_by_another_cuda_stream_is_waited_for() -> None:
    """Buffer 0 was given back, but another CUDA stream uses it until after buffer 1: on a retry it is waited for."""
    stream = stream_of([(ALLOC, 0), (RELEASE, 0), (ALLOC, 1), (FREE, 0)], [30 * MIB, 40 * MIB])
    assert caching(stream).peak_reserved_nbytes == 70 * MIB
    limited = caching(stream, 50 * MIB)
    assert (limited.failure, limited.peak_reserved_nbytes) == (None, 40 * MIB)
    assert limited.death.tolist() == [2, 4]
    assert analysis.live_in(limited, stream).tolist() == [30 * MIB, 30 * MIB, 40 * MIB, 40 * MIB]


def test_expandable_segments_grow_in_place_and_unmap_whole_pages() -> None:
    """30 MiB need two pages of 20 MiB. Freed, then 50 MiB: it grows by one page to 60 and moves nothing.

    In a caching allocator the 30 MiB segment would be kept beside one of 50. Then 31 MiB of the small pool
    (two buffers of 1 MiB fill a page of 2 MiB, so 16 pages) do not fit into 64 MiB beside
    the 60: the large pages, wholly free by then, are unmapped.
    """
    sizes = [30 * MIB, 50 * MIB] + [MIB] * 31
    events = [(ALLOC, 0), (FREE, 0), (ALLOC, 1), (FREE, 1), *((ALLOC, i) for i in range(2, 33))]
    replay = caching(stream_of(events, sizes), 64 * MIB, "expandable_segments:True")
    assert replay.failure is None
    assert replay.reserved_nbytes[:4].tolist() == [40 * MIB, 40 * MIB, 60 * MIB, 60 * MIB]
    assert (replay.num_unmaps, replay.num_maps) == (3, 3 + 16)
    assert int(replay.reserved_nbytes[-1]) == 32 * MIB
    assert replay.address is not None
    assert replay.address[0] == replay.address[1]
    assert caching(stream_of(events[:3], sizes[:2])).peak_reserved_nbytes == 80 * MIB


def test_expandable_segments_keep_the_pages_of_live_buffers() -> None:
    """30 MiB, 5 MiB behind it, 25 MiB behind that: [0, 30), [30, 35), [35, 60), three pages of 20 MiB.

    First and third are freed; the buffer between keeps the page [20, 40). A retry unmaps the pages [0, 20) and
    [40, 60). The 60 MiB asked for then find 55 MiB of room nowhere in the mapped part, so they begin at the lowest
    unmapped place that is followed by enough: 35 MiB, where 5 MiB are still mapped, and three more pages come.
    """
    events = [(ALLOC, 0), (ALLOC, 1), (ALLOC, 2), (FREE, 0), (FREE, 2), (ALLOC, 3)]
    stream = stream_of(events, [30 * MIB, 5 * MIB, 25 * MIB, 60 * MIB])
    replay = caching(stream, 80 * MIB, "expandable_segments:True")
    assert replay.failure is None
    assert (replay.num_retries, replay.num_maps, replay.num_unmaps) == (1, 3 + 3, 2)
    assert int(replay.reserved_nbytes[-1]) == 80 * MIB
    assert replay.address is not None
    assert int(replay.address[3] - replay.address[0]) == 35 * MIB
    check(replay, stream)


def test_chunks_are_kept() -> None:
    stream = stream_of([(ALLOC, 0), (FREE, 0), (ALLOC, 1)], [10 * MIB, MIB])
    replay = model("chunked-2MiB", CachingSettings())(stream, None)
    assert replay.reserved_nbytes.tolist() == [10 * MIB] * 3
    assert replay.allocated_nbytes.tolist() == [10 * MIB, 0, 2 * MIB]


def test_exactly_the_capacity_is_enough() -> None:
    report = make_report(stream_of([(ALLOC, 0)], [20 * MIB]), capacity=20 * MIB)
    assert not report.does_not_fit
    assert report.advice == ("PyTorch, caching best fit: it fits, with 0 B to spare.",)


def test_a_long_stream_is_planned_around_its_peak() -> None:
    num = 3 * MAX_PLANNED_BUFFERS
    events = [event for i in range(num) for event in ((ALLOC, i), (FREE, i))]
    sizes = [1024] * num
    sizes[num // 2] = 4 * MIB
    stream = stream_of(events, sizes)
    first, last = planned_events(stream)
    assert first < num < last
    assert len(np.unique(stream.buffer[first:last])) <= MAX_PLANNED_BUFFERS
    replay = model("first-fit-by-size", CachingSettings())(stream, None)
    assert (replay.first_event, replay.last_event) == (first, last)
    assert replay.peak_reserved_nbytes == 4 * MIB
    all_live = stream_of([(ALLOC, i) for i in range(MAX_PLANNED_BUFFERS + 1)], [512] * (MAX_PLANNED_BUFFERS + 1))
    report = make_report(all_live, names=("melon", "chunked-2MiB"))
    assert "4001 buffers are live at the peak" in report.missing["melon"]


# -- what holds for every model ------------------------------------------------------------------


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Random programs on up to two CUDA streams, with deferred frees, failed attempts and emptied caches."""
    sizes: list[int] = []
    pools: list[int] = []
    events: list[tuple[int, int]] = []
    live: list[int] = []
    released: list[int] = []
    size = st.one_of(
        st.integers(1, 4096), st.integers(200 * KIB, 3 * MIB), st.integers(9 * MIB, 11 * MIB), st.integers(1, 70 * MIB)
    )
    for _ in range(draw(st.integers(1, 40))):
        act = draw(st.integers(0, 6))
        if act == 6 and sizes:
            events.append((EMPTY, 0))
            continue
        if act <= 2 or not live:
            sizes.append(draw(size))
            pools.append(draw(st.integers(0, 1)))
            events.append((ALLOC, len(sizes) - 1))
            live.append(len(sizes) - 1)
            continue
        buffer = draw(st.sampled_from(live))
        if act == 3 and buffer not in released:
            events.append((RELEASE, buffer))
            released.append(buffer)
        else:
            live.remove(buffer)
            events.append((FREE, buffer))
    return stream_of(events, sizes, pools)


CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:32,garbage_collection_threshold:0.6",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:8,>:2],large_segment_size_mb:40",
)


def check(replay: Replay, stream: Stream) -> None:
    """What must hold at every event, worked out from the placements alone."""
    live = analysis.live_in(replay, stream)
    assert (replay.reserved_nbytes >= replay.allocated_nbytes).all()
    assert (replay.allocated_nbytes >= live).all()
    if replay.address is None:
        return
    placed = replay.address >= 0
    assert (replay.block_nbytes[placed] >= stream.nbytes[placed]).all()
    for event in range(replay.first_event, replay.last_event):
        at = event - replay.first_event
        alive = np.flatnonzero(placed & (stream.birth <= event) & (replay.death > event))
        order = alive[np.argsort(replay.address[alive])]
        starts, stops = replay.address[order], replay.address[order] + replay.block_nbytes[order]
        assert (stops[:-1] <= starts[1:]).all(), "two live buffers overlap"
        assert int(replay.block_nbytes[alive].sum()) == replay.allocated_nbytes[at]
        assert int(stream.nbytes[alive].sum()) == live[at]
        ranges = mapped_in(replay, event)
        assert sum(high - low for low, high in ranges) == replay.reserved_nbytes[at]
        joined = analysis._joined(ranges, replay)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            assert any(low <= start and stop <= high for low, high in joined), "a live buffer lies outside"
        holes = analysis.holes_of(replay, stream, event)
        assert sum(hole.nbytes for hole in holes) == replay.reserved_nbytes[at] - replay.allocated_nbytes[at]


@settings(max_examples=120, deadline=None)
@given(stream=streams(), conf=st.sampled_from(CONFIGURATIONS), capacity=st.none() | st.integers(30, 300))
def test_caching_models_keep_their_books(stream: Stream, conf: str, capacity: int | None) -> None:
    limit = None if capacity is None else capacity * MIB
    replay = caching(stream, limit, conf)
    check(replay, stream)
    again = caching(stream, limit, conf)
    assert (replay.reserved_nbytes == again.reserved_nbytes).all()
    assert (replay.address == again.address).all()
    if replay.failure is None:
        assert limit is None or replay.peak_reserved_nbytes <= limit
    else:
        assert limit is not None
        before = replay.reserved_nbytes[: replay.failure.event_index]
        assert int(before.max(initial=0)) <= limit
        assert replay.failure.reserved_nbytes + replay.failure.needed_nbytes > limit or "expandable" in conf


BOUNDARY_SIZES = (1, 512, 1024, 2048, 4095, 512 * KIB, MIB - 512, MIB, MIB + 512, 3 * MIB, 9 * MIB, 10 * MIB - 512)
BOUNDARY_SIZES += (10 * MIB, 11 * MIB, 12 * MIB, 19 * MIB, 19 * MIB - 512, 20 * MIB, 32 * MIB, 40 * MIB, 52 * MIB)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), conf=st.sampled_from([c for c in CONFIGURATIONS if "expandable" not in c]))
def test_the_caching_model_does_what_a_slow_one_does(data: st.DataObject, conf: str) -> None:
    """Sizes at the rules' boundaries, held in a capacity that often does not suffice."""
    sizes: list[int] = []
    pools: list[int] = []
    events: list[tuple[int, int]] = []
    live: list[int] = []
    for choice in data.draw(st.lists(st.integers(0, 99), min_size=5, max_size=60)):
        if choice < 55 or not live:
            sizes.append(BOUNDARY_SIZES[choice % len(BOUNDARY_SIZES)])
            pools.append(int(choice in (3, 4, 30, 31)))
            live.append(len(sizes) - 1)
            events.append((ALLOC, live[-1]))
        else:
            events.append((FREE, live.pop(choice % len(live))))
    stream = stream_of(events, sizes, pools)
    capacity = data.draw(st.sampled_from([None, 40 * MIB, 64 * MIB, 100 * MIB, 160 * MIB]))
    oracle = Oracle(parse_settings(conf), capacity)
    held = oracle.replay(stream)
    replay = caching(stream, capacity, conf)
    assert replay.reserved_nbytes.tolist() == held
    assert (replay.num_device_frees, replay.num_retries) == (oracle.num_frees, oracle.num_retries)
    assert (replay.failure.event_index if replay.failure else None) == oracle.failed_at


@settings(max_examples=60, deadline=None)
@given(stream=streams())
def test_planned_models_keep_their_books(stream: Stream) -> None:
    for name in ALLOCATORS[2:]:
        replay = model(name, CachingSettings())(stream, None)
        check(replay, stream)
        assert replay.peak_reserved_nbytes >= stream.wanted_nbytes
        limit = replay.peak_reserved_nbytes
        assert model(name, CachingSettings())(stream, limit).failure is None
        tight = model(name, CachingSettings())(stream, limit - 1)
        assert tight.failure is not None
        assert tight.failure.capacity_nbytes == limit - 1


@settings(max_examples=40, deadline=None)
@given(stream=streams(), capacity=st.none() | st.integers(1, 300))
def test_every_report_is_whole(stream: Stream, capacity: int | None) -> None:
    report = make_report(stream, capacity=None if capacity is None else capacity * MIB)
    document = json.loads(json.dumps(to_document(report)))
    assert document["fits"] is (None if capacity is None else not report.does_not_fit)
    assert [row["allocator"] for row in document["allocators"]] == list(ALLOCATORS)
    for row in document["allocators"]:
        for moment in (row["at_peak"], row["at_worst"]):
            assert min(moment["live_nbytes"], moment["internal_nbytes"], moment["external_nbytes"]) >= 0
    assert report.advice


# -- settings ------------------------------------------------------------------------------------


def test_settings_are_read_as_pytorch_reads_them() -> None:
    """The example of PyTorch's own test of its parser: gaps in the list keep no divisions."""
    chosen = parse_settings("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1], max_split_size_mb:40")
    mebibytes = (32, 64, 128, 256, 512, 1024, 2048)
    assert [chosen.divisions(m * MIB) for m in mebibytes] == [8, 8, 2, 4, 2, 4, 1]
    assert chosen.max_split_nbytes == 40 * MIB
    assert parse_settings("backend:native,expandable_segments:False") == CachingSettings()


@pytest.mark.parametrize("conf", CONFIGURATIONS)
def test_settings_survive_being_written(conf: str) -> None:
    assert parse_settings(parse_settings(conf).text()) == parse_settings(conf)


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("max_split_size_mb:10", "less than a large segment of 20 MiB"),
        ("max_split_size_mb", "key:value"),
        ("max_split_size_mb:x", "'x' is not a value"),
        ("garbage_collection_threshold:1.5", r"\[0, 1\)"),
        ("expandable_segments:maybe", "'maybe' is not a value"),
        ("roundup_power2_divisions:[3:4]", "not a power of two"),
        ("frobnicate:1", "unknown allocator setting 'frobnicate'"),
    ],
)
def test_bad_settings_are_named(conf: str, message: str) -> None:
    with pytest.raises(BadSettings, match=message):
        parse_settings(conf)


# -- snapshots -----------------------------------------------------------------------------------

BASE = 0x7F0000000000
LATER = BASE + 64 * MIB


def frame(name: str) -> dict[str, Any]:
    return {"filename": "/home/me/train.py", "line": 7, "name": name}


def event(action: str, address: int, size: int, name: str = "", **more: Any) -> dict[str, Any]:
    found = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "compile_context": "N/A"}
    return {**found, "user_metadata": "", "frames": [frame(name)] if name else [], **more}


def block(size: int, requested: int, name: str = "") -> dict[str, Any]:
    state = "active_allocated" if name else "inactive"
    return {"size": size, "requested_size": requested, "state": state, "frames": [frame(name)] if name else []}


def segment(address: int, blocks: list[dict[str, Any]], kind: str = "large", **more: Any) -> dict[str, Any]:
    total = sum(b["size"] for b in blocks)
    at = address
    for b in blocks:
        b["address"], at = at, at + b["size"]
    return {
        "device": 0,
        "address": address,
        "total_size": total,
        "allocated_size": sum(b["size"] for b in blocks if b["state"] != "inactive"),
        "active_size": sum(b["size"] for b in blocks if b["state"] != "inactive"),
        "requested_size": sum(b["requested_size"] for b in blocks if b["state"] != "inactive"),
        "stream": 0,
        "segment_type": kind,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
        **more,
    }


def snapshot() -> dict[str, Any]:
    """The program of `BY_HAND` as PyTorch would dump it, then 9 MiB that the device could not give any more.

    B is freed when another CUDA stream was still using it, so its two free events are apart.
    """
    trace = [
        event("segment_alloc", BASE, 20 * MIB),
        event("alloc", BASE, 3 * MIB - 100, "A"),
        event("alloc", BASE + 3 * MIB, 4 * MIB, "B"),
        event("alloc", BASE + 7 * MIB, 12 * MIB, "C"),
        event("free_requested", BASE, 3 * MIB - 100),
        event("free_completed", BASE, 3 * MIB - 100),
        event("segment_alloc", LATER, 20 * MIB),
        event("alloc", LATER, 5 * MIB, "D"),
        event("free_requested", BASE + 3 * MIB, 4 * MIB),
        event("segment_alloc", LATER + 32 * MIB, 2 * MIB),
        event("alloc", LATER + 32 * MIB, 1000, "E"),
        event("free_completed", BASE + 3 * MIB, 4 * MIB),
        {**event("oom", 0, 16 * MIB, "F"), "device_free": 3 * MIB},
        event("snapshot", 0, 0),
    ]
    del trace[-2]["addr"]
    return {
        "segments": [
            segment(BASE, [block(7 * MIB, 0), block(13 * MIB, 12 * MIB, "C")]),
            segment(LATER, [block(5 * MIB, 5 * MIB, "D"), block(15 * MIB, 0)]),
            segment(LATER + 32 * MIB, [block(1024, 1000, "E"), block(2 * MIB - 1024, 0)], "small"),
        ],
        "device_traces": [trace],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
        },
        "external_annotations": [],
    }


def written(document: Any, directory: Path, protocol: int = 4) -> Path:
    path = directory / "snapshot.pickle"
    path.write_bytes(pickle.dumps(document, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_snapshot_replays_to_its_own_segments(tmp_path: Path, protocol: int) -> None:
    """Every figure that the file tells is met exactly: peak 42 MiB held; 17 MiB + 1000 live at the end."""
    (stream,) = read_streams(written(snapshot(), tmp_path, protocol))
    assert stream.device == "cuda:0"
    assert stream.peak_live_nbytes == 21 * MIB + 1000
    assert stream.settings == CachingSettings()
    replay = caching(stream)
    pairs = analysis.meets_record(replay, stream)
    assert set(pairs) == {"end_live_nbytes", "reserved_at_failure_nbytes"}
    assert all(recorded == replayed for recorded, replayed in pairs.values())
    # The request that failed needs a further segment of 16 MiB: without a limit the replay gets it.
    assert stream.recorded.peak_reserved_nbytes == stream.recorded.end_reserved_nbytes == 42 * MIB
    assert stream.recorded.num_device_allocs == 3
    assert replay.reserved_nbytes[-3] == 42 * MIB
    assert replay.num_device_allocs == 4
    assert stream.stack(1) == ("B at /home/me/train.py:7",)
    # Only B's two free events are apart.
    assert stream.kind.tolist() == [ALLOC, ALLOC, ALLOC, FREE, ALLOC, RELEASE, ALLOC, FREE, ALLOC, FREE]


def test_a_recorded_failure_gives_the_capacity_and_the_advice(tmp_path: Path) -> None:
    """Held 42 MiB and 3 free on the device: 45. Of 33 MiB live with the request, chunks of 64 KiB hold all."""
    (stream,) = read_streams(written(snapshot(), tmp_path))
    report = make_report(stream)
    assert (report.capacity_nbytes, report.capacity_source) == (45 * MIB, "recorded")
    own = report.reference_summary
    assert own is not None
    failure = own.replay.failure
    assert failure is not None
    assert (failure.nbytes, failure.reserved_nbytes) == (16 * MIB, 42 * MIB)
    assert failure.largest_free_nbytes == 15 * MIB
    assert stream.stack(failure.buffer) == ("F at /home/me/train.py:7",)
    # Free: [0, 7) before C, [5, 20) behind D, and the rest of the small segment behind E.
    assert {c.stack[0][0]: c.adjoining_free_nbytes for c in report.culprits} == {
        "C": 7 * MIB,
        "D": 15 * MIB,
        "E": 2 * MIB - 1024,
    }
    assert any("chunk 64KiB" in line for line in report.advice)


@pytest.mark.parametrize("num_lost", range(1, 13))
def test_a_ring_that_lost_its_beginning(tmp_path: Path, num_lost: int) -> None:
    """Whatever the trace has lost, the segments at the end lead back to where it begins, and the replay ends there."""
    document = snapshot()
    document["device_traces"][0] = [e for e in document["device_traces"][0] if e["action"] != "oom"][num_lost:]
    (stream,) = read_streams(written(document, tmp_path))
    replay = caching(stream)
    assert stream.recorded.end_live_nbytes == int(stream.live_nbytes[-1]) == 17 * MIB + 1000
    assert stream.recorded.end_reserved_nbytes == int(replay.reserved_nbytes[-1]) == 42 * MIB
    check(replay, stream)
    ends = analysis.moment(replay, stream, stream.num_events - 1)
    # Once all that happened was before, sizes are as PyTorch left them: C holds 13 MiB for its 12.
    assert (ends.internal_nbytes, ends.largest_free_nbytes) == (MIB + 24, 15 * MIB)
    if num_lost > 1:
        assert any("older than the recording" in note for note in stream.notes)


def test_a_snapshot_without_history_is_a_still_picture(tmp_path: Path) -> None:
    document = snapshot()
    document["device_traces"] = [[]]
    (stream,) = read_streams(written(document, tmp_path))
    replay = caching(stream)
    assert (replay.peak_reserved_nbytes, stream.peak_live_nbytes) == (42 * MIB, 17 * MIB + 1000)
    assert "no history was recorded" in "".join(stream.notes)
    assert analysis.moment(replay, stream, replay.peak_event).external_nbytes == 42 * MIB - 18 * MIB - 1024


def test_devices_and_private_pools(tmp_path: Path) -> None:
    document = snapshot()
    private = [event("segment_alloc", BASE, 20 * MIB), event("alloc", BASE, 2 * MIB, "G")]
    private += [event("free_requested", BASE, 2 * MIB), event("free_completed", BASE, 2 * MIB)]
    private.append(event("alloc", BASE + 40 * MIB, 2 * MIB, "H", segment_pool_id=(0, 7)))
    document["device_traces"].append(private)
    first, second = read_streams(written(document, tmp_path))
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert caching(second).num_device_allocs == 2  # a graph's pool takes nothing from the other
    assert second.recorded.end_live_nbytes == 0


# -- pickles that are no snapshots ---------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/this-must-not-exist-ooc",)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5) | st.tuples(inner)
    ),
    max_leaves=30,
)


@settings(max_examples=150, deadline=None)
@given(value=PLAIN, protocol=st.integers(2, 5))
def test_plain_pickles_are_read_as_python_reads_them(value: Any, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol=protocol)) == value
    assert load_plain(pickle._dumps(value, protocol=protocol)) == value  # type: ignore[attr-defined]


@settings(max_examples=150, deadline=None)
@given(noise=st.binary(max_size=60), at=st.integers(0, 400))
def test_damaged_pickles_are_refused_or_read(noise: bytes, at: int) -> None:
    """Whatever the bytes: an object of plain kinds, or BadFile."""
    data = pickle.dumps(snapshot())
    for damaged in (data[:at] + noise + data[at + len(noise) :], b"\x80\x04" + noise, data[:at]):
        try:
            load_plain(damaged)
        except BadFile:
            continue


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_in_a_pickle_is_refused_by_name(tmp_path: Path, protocol: int) -> None:
    document = snapshot()
    document["segments"].append(Evil())
    with pytest.raises(BadFile, match=r"refused: the pickle asks for '(posix|nt)\.system'.*Nothing was run"):
        read_streams(written(document, tmp_path, protocol))
    assert not Path("/tmp/this-must-not-exist-ooc").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04c__builtin__\neval\n.", "asks for '__builtin__.eval'"),
        (b"\x80\x04(i__builtin__\neval\n.", "asks for '__builtin__.eval'"),
        (b"\x80\x04\x82\x01.", "opcode EXT1"),
        (b"\x80\x04]}b.", "opcode BUILD"),
        (b"\x80\x04]]R.", "opcode REDUCE"),
        (b"\x80\x04Pid\n.", "opcode PERSID"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40), "opcode BYTEARRAY8"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.", "cut off"),
        (b"\x80\x04X" + struct.pack("<I", 1 << 31) + b"x.", "cut off"),
        (b"\x80\x02]r" + struct.pack("<I", 0x7FFFFFFF) + b".", "memo entry 2147483647 when 0 exist"),
        (b"\x80\x04\x8b" + struct.pack("<i", 1 << 20) + b"\1" * (1 << 20) + b".", "integer of 1048576 bytes"),
        (b"\x80\x04\x8b" + struct.pack("<i", -5) + b".", "cut off"),
        (b"\x80\x04" + b"(" * 100_000, f"deeper than {MAX_OPEN_MARKS}"),
        (b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".", "more than 65536 objects"),
        (b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.", "a dict key at byte .* is a tuple"),
        (b"\x80\x06N.", "pickle protocol 6; this reads 2 to 5"),
        (b"\x80\x04K\x01K\x02a.", "appends to a int"),
        (b"\x80\x04h\x05.", "cut off"),
        (b"\x80\x04NN.", "objects left over"),
        (b"\x80\x04a.", "cut off"),
        (b"\x80\x04\x8c\x01\xff.", "not UTF-8"),
        (b"\x80\x04\xfe.", "unknown 0xfe"),
    ],
)
def test_hostile_pickles(data: bytes, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        load_plain(data)


def test_a_list_that_refers_to_itself_many_times(tmp_path: Path) -> None:
    """10,000 traces that are one list of 10,000 events: a hundred million events in a small file."""
    one = [event("alloc", BASE + 512 * i, 512) for i in range(10_000)]
    document = {"segments": [], "device_traces": [one] * 10_000}
    with pytest.raises(BadFile, match="claims 100000000 events"):
        read_streams(written(document, tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: [d], "the pickle is a list"),
        (lambda _: {"model": {}}, "no list 'segments', but model"),
        (lambda _: 3, "the pickle is a int"),
        (lambda d: {**d, "segments": [], "device_traces": []}, "the snapshot is empty"),
        (lambda d: {**d, "segments": [{**d["segments"][0], "total_size": 5}]}, "has 5 bytes, but its blocks have"),
        (lambda d: {**d, "segments": [{}]}, "KeyError"),
        (lambda d: {**d, "device_traces": [[{"action": "alloc"}]]}, "event 0 of device_traces.0. .* KeyError: 'addr'"),
        (lambda d: {**d, "device_traces": [[event("alloc", BASE, -5)]]}, "has -5 bytes"),
        (lambda d: {**d, "device_traces": [[event("alloc", BASE, 1 << 70)]]}, "larger than any memory"),
        (lambda d: {**d, "device_traces": [[{**event("alloc", BASE, 1), "size": 1.5}]]}, "is a float, not an int"),
        (lambda d: {**d, "device_traces": [7]}, "is a int, not a list"),
        (lambda d: {**d, "allocator_settings": {"max_split_size": 5}}, "allocator_settings cannot be read"),
    ],
)
def test_pickles_that_are_no_snapshots(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        read_streams(written(change(snapshot()), tmp_path))


def test_an_unknown_event_is_counted(tmp_path: Path) -> None:
    document = snapshot()
    document["device_traces"][0].append(event("segment_teleport", BASE, 1))
    (stream,) = read_streams(written(document, tmp_path))
    assert "1 events of the unknown kind 'segment_teleport' were passed over" in stream.notes


# -- profiles ------------------------------------------------------------------------------------


def recorded_events(path: Path) -> list[dict[str, Any]]:
    """The memory events, read by json as a whole."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [e for e in json.loads(text)["traceEvents"] if e["name"] == "[memory]"]
    return sorted(events, key=lambda e: e["ts"])


@pytest.mark.parametrize("name", PROFILES)
def test_recorded_profiles_replay_exactly(name: str) -> None:
    events = recorded_events(DATA / name)
    totals = [e["args"]["Total Allocated"] for e in events]
    (stream,) = read_streams(DATA / name)
    assert stream.device == "cpu"
    shift = stream.num_initial
    assert stream.live_nbytes[shift:].tolist() == totals
    assert stream.peak_live_nbytes == max(totals)
    for allocator in ALLOCATORS:
        check(model(allocator, CachingSettings())(stream, None), stream)


def test_a_fresh_profile_replays_exactly(tmp_path: Path) -> None:
    """Recorded here and now; a second session in one process begins with what the first one left."""
    kept = []
    for session in range(2):
        path = tmp_path / f"trace{session}.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
            weight = torch.ones(300, 300, requires_grad=True)
            hidden = torch.relu(torch.ones(200, 300) @ weight)
            hidden.sum().backward()
            kept.append((weight, hidden))
            del weight
            if session == 1:
                kept.clear()
        profiler.export_chrome_trace(str(path))
        totals = [e["args"]["Total Allocated"] for e in recorded_events(path)]
        (stream,) = read_streams(path)
        assert stream.live_nbytes[stream.num_initial :].tolist() == totals
        assert stream.peak_live_nbytes == stream.recorded.peak_live_nbytes == max(totals)
        assert stream.recorded.end_live_nbytes == int(stream.live_nbytes[-1])
        product = int(np.flatnonzero(stream.nbytes == 200 * 300 * 4)[0])
        assert any(
            "test_fragmentation.py" in text
            for buffer in range(product, stream.num_buffers)
            for text in stream.stack(buffer)
        )
    assert stream.num_initial > 0
    assert "are older than the profile" in "".join(stream.notes)


def kineto(events: list[tuple[int, int, int]], **more: Any) -> dict[str, Any]:
    """A CUDA profile from `(bytes, address, total)`."""
    listed = [
        {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "pid": 1,
            "tid": 1,
            "ts": 10.0 + i,
            "args": {
                "Total Reserved": 0,
                "Total Allocated": total,
                "Bytes": n,
                "Device Id": 0,
                "Device Type": 1,
                "Addr": a,
            },
        }
        for i, (n, a, total) in enumerate(events)
    ]
    return {"schemaVersion": 1, "traceEvents": listed, **more}


def test_cuda_profiles(tmp_path: Path) -> None:
    """9 bytes existed before: 5 of them are freed, 4 never seen again."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(kineto([(1024, 7, 1033), (-5, 3, 1028), (-1024, 7, 4)])))
    (stream,) = read_streams(path)
    assert stream.device == "cuda:0"
    assert stream.num_initial == 2
    assert stream.live_nbytes[2:].tolist() == [1033, 1028, 4]
    assert stream.recorded.peak_live_nbytes == stream.peak_live_nbytes == 1033
    assert "rounded" in "".join(stream.notes)


def test_a_profile_with_a_failed_request(tmp_path: Path) -> None:
    """30 MiB live in 30 held, then 40 MiB fail. In 64 MiB the replay fails there too, at the recorded 30 held."""
    document = kineto([(30 * MIB, 7, 30 * MIB)])
    failed = {"Bytes": 40 * MIB, "Total Allocated": 30 * MIB, "Total Reserved": 30 * MIB}
    failed |= {"Device Type": 1, "Device Id": 0}
    document["traceEvents"].append({"name": "[OutOfMemory]", "pid": 1, "tid": 1, "ts": 20.0, "args": failed})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    (stream,) = read_streams(path)
    assert (stream.peak_live_nbytes, stream.wanted_nbytes) == (30 * MIB, 70 * MIB)
    replay = caching(stream, 64 * MIB)
    assert replay.failure is not None
    assert (replay.failure.event_index, replay.failure.nbytes) == (1, 40 * MIB)
    assert analysis.meets_record(replay, stream)["reserved_at_failure_nbytes"] == (30 * MIB, 30 * MIB)


@pytest.mark.parametrize("piece", [1, 7, 64, 4096])
def test_profiles_are_read_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ooc.fragmentation import read_kineto

    document = {"a": [1, 2.5e3, {"b": [None, True]}], "traceEvents": [{"x": '[,]{}\\"'}, []], "n": -12, "s": "\u00e9"}
    text = json.dumps(document, indent=1)
    monkeypatch.setattr(read_kineto, "PIECE_CHARS", piece)
    found: dict[str, Any] = {}
    for key, value in read_kineto._Reader(io.StringIO(text)).items():
        if isinstance(document[key], list):
            found.setdefault(key, []).append(value)
        else:
            found[key] = value
    assert found == document


# -- our own trace -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_our_own_traces(seed: int, tmp_path: Path) -> None:
    trace = random_trace(seed)
    path = tmp_path / "trace.json"
    path.write_text(trace.to_json())
    if not trace.variables:
        with pytest.raises(BadFile, match="no variables"):
            read_streams(path)
        return
    (stream,) = read_streams(path)
    assert stream.peak_live_nbytes == trace.peak_nbytes()
    assert sorted(stream.nbytes.tolist()) == sorted(v.nbytes for v in trace.variables)
    check(caching(stream), stream)


# -- files that are something else, and the command ----------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"hello", "neither a pickle nor JSON"),
        (b"PK\x03\x04" + bytes(30), "a zip archive"),
        (b"{", "not JSON"),
        (b'{"traceEvents": [{"name": "x"}', "cut off"),
        (b'{"traceEvents": [{"name": "[mem', "cut off"),
        (b'{"traceEvents": []}', "no traceEvents"),
        (b'{"traceEvents": [{"name": "x"}]}', "1 events, none of them '.memory.'"),
        (b'{"traceEvents": [3]}', "is a int, not an object"),
        (b'{"traceEvents": [{"name": "[memory]", "ts": 1, "args": {}}]}', "KeyError: 'Device Type'"),
        (b'{"a": 1} {"b": 2}', "something follows"),
        (b'{"schema": "ooc.plan"}', "of the kind 'ooc.plan'"),
        (b'{"schema": "ooc.trace", "schema_version": 99}', "schema version 99"),
        (b'{"schema": "ooc.trace", "schema_version": 1}', "not a complete trace"),
        (b"[" * 100_000, "not JSON"),
        (b'{"traceEvents": ' + b"[" * 100_000, "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (gzip.compress(b'{"traceEvents": [{"name": "x"}' * 50, mtime=0)[:-20], "damaged or cut off"),
        (b"\x1f\x8b not gzip at all", "damaged"),
    ],
)
def test_files_that_are_something_else(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=message) as caught:
        read_streams(path)
    assert str(path) in str(caught.value)
    assert main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_cut_off_snapshot(tmp_path: Path) -> None:
    data = pickle.dumps(snapshot())
    path = tmp_path / "cut.pickle"
    for length in range(2, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(BadFile, match=r"cut off|damaged"):
            read_streams(path)


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_command_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = snapshot()
    document["device_traces"][0] = [e for e in document["device_traces"][0] if e["action"] != "oom"]
    path = str(written(document, tmp_path))
    assert ooc_main(["fragmentation", "--json", path]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is None
    assert main(["--json", "--capacity", "42MiB", path]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["devices"] == ["cuda:0"]
    recorded = found["allocators"][0]["recorded"]
    assert all(pair["recorded"] == pair["replayed"] for pair in recorded.values())
    names = {"end_live_nbytes", "peak_reserved_nbytes", "end_reserved_nbytes", "num_device_allocs", "num_device_frees"}
    assert set(recorded) == names
    assert main(["--capacity", "41MiB", path]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["--capacity", "41MiB", "--allocator", "chunked-64KiB", path]) == 0
    capsys.readouterr()
    # Segments of 12 MiB: A and B share one, C fills one, D gets the 5 MiB behind B, E's has 2 MiB: 26 MiB.
    assert main(["--json", "--capacity", "41MiB", "--alloc-conf", "large_segment_size_mb:12", path]) == 0
    assert json.loads(capsys.readouterr().out)["allocators"][0]["peak_reserved_nbytes"] == 26 * MIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allocator", "best"], "Options: caching, expandable"),
        (["--capacity", "16G"], "'16GiB'"),
        (["--alloc-conf", "x:1"], "unknown allocator setting"),
        (["--device", "cuda:7"], "Options: cpu"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, str(DATA / PROFILES[0])]) == 2
    assert message in capsys.readouterr().err


def test_the_example_in_the_readme(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parent.parent
    monkeypatch.chdir(root)
    assert pickle.loads((DATA / "snapshot_by_hand.pickle").read_bytes()) == snapshot()
    text = (root / "ooc" / "fragmentation" / "README.md").read_text()
    command, _, shown = text.split("```\n$ ooc ")[1].split("```")[0].partition("\n")
    assert ooc_main(command.split()) == 1
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


def test_the_table_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "out.png"
    assert main([str(written(snapshot(), tmp_path)), "--png", str(picture)]) == 1
    text = capsys.readouterr().out
    for words in (
        "First request that does not fit",
        "F at /home/me/train.py:7",
        "What lies between the free blocks",
        "D at /home/me/train.py:7",
        "What would have fitted:",
        "capacity 45.0 MiB (as recorded",
    ):
        assert words in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    pixels = imread(picture)
    assert pixels.shape[0] > 500
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20  # something was drawn
    assert main([str(DATA / PROFILES[1]), "--png", str(tmp_path / "no" / "such" / "dir.png")]) == 2
