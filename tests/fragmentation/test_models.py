"""Allocator models: cases by hand, to the byte; what holds for every model; their settings."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.fragmentation import (
    ALLOCATORS,
    CachingSettings,
    Stream,
    analysis,
    make_report,
    parse_settings,
    to_document,
)
from ooc.fragmentation.allocators import model
from ooc.fragmentation.planned import MAX_PLANNED_BUFFERS, planned_events
from ooc.fragmentation.segments import round_request, segment_nbytes
from ooc.fragmentation.settings import BadSettings
from ooc.fragmentation.stream import ALLOC, EMPTY, FREE, RELEASE
from tests.fragmentation.caching_oracle import Oracle
from tests.fragmentation.cases import BY_HAND, KIB, MIB, caching, check, stream_of

# -- by hand, to the byte ------------------------------------------------------------------------


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
    assert "ooc run --budget 22MiB --chunk 2MiB train.py (peak 22.0 MiB, " in text
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
    assert "ooc run --budget 19200KiB" in report.advice[1]  # 15 of 16 parts, in chunks of 64 KiB


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
