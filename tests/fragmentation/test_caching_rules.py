"""Rules of PyTorch's caching allocator that a comparison with the real one (torch 2.13) brought to light, by hand.

Each of these the model had wrong, or did not know. The comparison itself needs a CUDA build of torch: see
tests/data/README.md.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from ooc.fragmentation import CachingSettings, Stream, analysis, make_report, parse_settings
from ooc.fragmentation.allocators import model
from ooc.fragmentation.caching import replay_caching
from ooc.fragmentation.ranges import Ranges
from ooc.fragmentation.read_snapshot import read_snapshot
from ooc.fragmentation.replay import Replay
from ooc.fragmentation.segments import recorded_capacity
from ooc.fragmentation.settings import BadSettings
from ooc.fragmentation.stream import ALLOC, EMPTY, FREE, RELEASE, PrivatePool
from tests.fragmentation.cases import BASE, MIB, block, caching, event, segment, snapshot, stream_of

FAR = BASE + (1 << 32)
FARTHER = FAR + (1 << 32)


def held(replay: Replay) -> list[int]:
    return [nbytes // MIB for nbytes in replay.reserved_nbytes.tolist()]


def read(**changes: Any) -> Stream:
    (stream,) = read_snapshot(pickle.dumps({**snapshot(), **changes}))
    return stream


# -- of free blocks of one size ------------------------------------------------------------------


def test_of_equal_blocks_that_of_the_oldest_segment_is_taken() -> None:
    """Small segments P, Q and R hold two of 1 MiB each. P goes back; S comes, where P lay, and is younger than Q and R.

    Half of S, Q and R is free: Q's half is taken first, although S has the lowest address.
    """
    events = [(ALLOC, b) for b in range(6)] + [(FREE, 0), (FREE, 1), (EMPTY, 0), (ALLOC, 6), (ALLOC, 7)]
    events += [(FREE, 7), (FREE, 5), (FREE, 3), (ALLOC, 8), (ALLOC, 9), (ALLOC, 10)]
    replay = caching(stream_of(events, [MIB] * 11))
    assert replay.address is not None
    address = replay.address.tolist()
    assert address[6] == address[0]  # S lies where P lay
    assert address[8:] == [address[3], address[5], address[7]]


# -- a request that is made again ----------------------------------------------------------------

# A of 3 MiB and B of 4 fill the beginning of a segment of 20. B's 4 MiB were waited for when the device was full, and
# then C of 4 MiB came: the real allocator has looked at its cache before and asks the device.
WAITED = [(ALLOC, 0), (ALLOC, 1), (ALLOC, 2), (RELEASE, 1), (FREE, 1), (EMPTY, 0), (ALLOC, 3)]
WAITED_SIZES = [3 * MIB, 4 * MIB, 12 * MIB, 4 * MIB]


def test_what_was_waited_for_does_not_serve_the_request_that_waited() -> None:
    assert held(caching(stream_of(WAITED, WAITED_SIZES))) == [20] * 7
    again = caching(stream_of(WAITED, WAITED_SIZES, retried=frozenset({3})))
    assert held(again) == [20] * 6 + [40]
    assert again.num_retries == 1


def test_other_settings_do_not_repeat_the_recorded_request() -> None:
    stream = stream_of(WAITED, WAITED_SIZES, retried=frozenset({3}))
    assert held(caching(stream, None, "max_split_size_mb:64")) == [20] * 7
    assert held(caching(stream, None, "expandable_segments:True")) == [20] * 7


def test_a_snapshot_says_which_request_was_made_again() -> None:
    """P of 30 MiB is free, on another stream, which also uses B. C of 4 MiB finds the device full at 60 MiB.

    So B is waited for, P's segment goes back, and C gets one of its own, although B's place would do by now.
    """
    b = BASE + 3 * MIB
    trace = [
        event("segment_alloc", BASE, 20 * MIB),
        *(event("alloc", a, n) for a, n in ((BASE, 3 * MIB), (b, 4 * MIB), (b + 4 * MIB, 12 * MIB))),
        event("segment_alloc", FAR, 30 * MIB, stream=1),
        *(event(action, FAR, 30 * MIB, stream=1) for action in ("alloc", "free_requested", "free_completed")),
        event("free_requested", b, 4 * MIB),
        event("snapshot", 0, 0),
        event("free_completed", b, 4 * MIB),
        event("segment_free", FAR, 30 * MIB, stream=1),
        event("segment_alloc", FARTHER, 20 * MIB),
        event("alloc", FARTHER, 4 * MIB),
    ]
    ended = [block(3 * MIB, 3 * MIB, "A"), block(4 * MIB, 0), block(13 * MIB, 12 * MIB, "D")]
    stream = read(
        device_traces=[trace],
        segments=[segment(BASE, ended), segment(FARTHER, [block(4 * MIB, 4 * MIB, "C"), block(16 * MIB, 0)])],
    )
    assert stream.kind.tolist() == [ALLOC, ALLOC, ALLOC, ALLOC, FREE, RELEASE, FREE, EMPTY, ALLOC]
    assert stream.retried == {4}
    replay = replay_caching(stream, None, stream.settings or CachingSettings(), name="caching")
    assert held(replay) == [20, 20, 20, 50, 50, 50, 50, 20, 40]
    pairs = analysis.meets_record(replay, stream)
    assert len(pairs) == 5 and all(recorded == replayed for recorded, replayed in pairs.values()), pairs


# -- segments that the allocator picks -----------------------------------------------------------


def test_segments_that_were_picked_go_back_in_the_replay() -> None:
    """With a threshold, A's segment of 30 MiB goes back for C, B's of 40 stays: the file says so, no capacity does."""
    trace = []
    for address, size in ((BASE, 30 * MIB), (FAR, 40 * MIB)):
        trace += [event("segment_alloc", address, size), event("alloc", address, size)]
    for address, size in ((BASE, 30 * MIB), (FAR, 40 * MIB)):
        trace += [event("free_requested", address, size), event("free_completed", address, size)]
    trace += [event("segment_free", BASE, 30 * MIB)]
    trace += [event("segment_alloc", FARTHER, 50 * MIB), event("alloc", FARTHER, 50 * MIB)]
    document = snapshot()
    document["allocator_settings"]["garbage_collection_threshold"] = 0.5
    stream = read(
        allocator_settings=document["allocator_settings"],
        device_traces=[trace],
        segments=[segment(FAR, [block(40 * MIB, 0)]), segment(FARTHER, [block(50 * MIB, 50 * MIB, "C")])],
    )
    assert dict(stream.returned) == {2: (1,)}
    assert EMPTY not in stream.kind
    replay = replay_caching(stream, None, stream.settings or CachingSettings(), name="caching")
    assert held(replay) == [30, 70, 70, 70, 90]
    # At another capacity the model picks by its own rules.
    limited = replay_caching(stream, 90 * MIB, stream.settings or CachingSettings(), name="caching")
    assert held(limited)[-1] == 50


@pytest.mark.parametrize("conf", ["", "garbage_collection_threshold:0.5"])
def test_oversize_blocks_of_expandable_segments_stay(conf: str) -> None:
    """Only whole pages go back, and only all of them: the model used to look for a segment of its own."""
    settings = ",".join(filter(None, ["expandable_segments:True,max_split_size_mb:20", conf]))
    events = [(ALLOC, 0), (ALLOC, 1), (FREE, 0), (ALLOC, 2)]
    replay = caching(stream_of(events, [40 * MIB, 5 * MIB, 50 * MIB]), 90 * MIB, settings)
    assert (replay.failure, replay.num_retries) == (None, 1)
    # A's two pages go back. C takes the rest of B's page and two more.
    assert held(replay) == [40, 60, 60, 60]


def test_a_fraction_is_judged_by_the_request_and_not_by_the_pages() -> None:
    """25 MiB hold two pages of 20; 20 MiB more need one page, which fits below 60 MiB, and not below 59."""
    events, sizes = [(ALLOC, 0), (ALLOC, 1)], [25 * MIB, 20 * MIB]
    conf = "expandable_segments:True"
    assert caching(stream_of(events, sizes), 60 * MIB, conf).failure is None
    assert caching(stream_of(events, sizes), 59 * MIB, f"{conf},per_process_memory_fraction:0.5").failure is not None
    # 40 held and 20 asked for are 60: allowed, and so is a page that goes beyond.
    more = caching(stream_of(events, [25 * MIB, 19 * MIB]), 60 * MIB, f"{conf},per_process_memory_fraction:0.5")
    assert (more.failure, held(more)) == (None, [40, 60])


# -- private pools -------------------------------------------------------------------------------

POOL = {1: PrivatePool(gone_event=99, is_graph=True)}
SHARED = {1: PrivatePool(gone_event=99, is_graph=False)}


@pytest.mark.parametrize("private", [POOL, SHARED])
def test_a_private_pool_keeps_its_memory_until_it_is_gone(private: Mapping[int, PrivatePool]) -> None:
    """A is the graph's, B is not; both are freed. Only B's 30 MiB go back, at the emptying and for C."""
    events = [(ALLOC, 0), (ALLOC, 1), (FREE, 0), (FREE, 1), (EMPTY, 0), (ALLOC, 2)]
    sizes, pools = [30 * MIB, 30 * MIB, 40 * MIB], [1, 0, 0]
    assert held(caching(stream_of(events, sizes, pools, private=private))) == [30, 60, 60, 60, 30, 70]
    gone = {1: PrivatePool(gone_event=4, is_graph=private[1].is_graph)}
    assert held(caching(stream_of(events, sizes, pools, private=gone))) == [30, 60, 60, 60, 0, 40]
    del events[4]
    full = caching(stream_of(events, sizes, pools, private=private), 65 * MIB)
    assert full.failure is not None
    assert (full.failure.reserved_nbytes, full.failure.largest_free_nbytes) == (30 * MIB, 30 * MIB)


def test_nothing_goes_back_while_a_graph_is_captured() -> None:
    """B's 30 MiB are free, outside the pool: a MemPool's request gets them from the device, a capture's fails."""
    events = [(ALLOC, 0), (FREE, 0), (ALLOC, 1)]
    sizes, pools = [30 * MIB, 40 * MIB], [0, 1]
    shared = caching(stream_of(events, sizes, pools, private=SHARED), 50 * MIB)
    assert (shared.failure, shared.num_retries, held(shared)) == (None, 1, [30, 30, 40])
    captured = caching(stream_of(events, sizes, pools, private=POOL), 50 * MIB)
    assert captured.failure is not None
    assert (captured.failure.reserved_nbytes, captured.num_retries) == (30 * MIB, 0)


def test_requests_of_private_pools_age_nothing() -> None:
    """A goes, the graph asks ten times, B goes: both are of an age. So both go back for C, where the older would do."""
    events = [(ALLOC, 0), (ALLOC, 1), (FREE, 0)]
    events += [pair for b in range(2, 12) for pair in ((ALLOC, b), (FREE, b))]
    events += [(FREE, 1), (ALLOC, 12)]
    sizes = [20 * MIB, 22 * MIB] + [2 * MIB] * 10 + [60 * MIB]
    conf = "garbage_collection_threshold:0.25"
    pools = [0, 0] + [1] * 10 + [0]
    assert held(caching(stream_of(events, sizes, pools, private=POOL), 200 * MIB, conf))[-1] == 20 + 60


def test_a_snapshot_says_when_a_private_pool_is_gone() -> None:
    """The graph's segment outlives one emptying, and goes back with the next: it was gone then."""
    owner = {"pool_id": (3, 0)}
    trace = [
        event("segment_alloc", BASE, 30 * MIB, **owner),
        *(event(action, BASE, 30 * MIB, **owner) for action in ("alloc", "free_requested", "free_completed")),
        event("segment_alloc", FAR, 40 * MIB),
        *(event(action, FAR, 40 * MIB) for action in ("alloc", "free_requested", "free_completed")),
        event("segment_free", FAR, 40 * MIB, "empty_cache"),
        event("segment_free", BASE, 30 * MIB, "empty_cache", **owner),
    ]
    trace.insert(9, event("segment_alloc", FARTHER, 2 * MIB))
    trace.insert(10, event("alloc", FARTHER, MIB))
    stream = read(device_traces=[trace], segments=[segment(FARTHER, [block(MIB, MIB, "S"), block(MIB, 0)], "small")])
    (pool,) = stream.private.values()
    assert pool == PrivatePool(gone_event=stream.num_events - 1, is_graph=True)
    replay = replay_caching(stream, None, stream.settings or CachingSettings(), name="caching")
    assert held(replay) == [30, 30, 70, 70, 30, 32, 2]


def test_an_emptied_cache_before_a_graphs_request_is_no_request_made_again() -> None:
    """Without stacks, an emptying and a request that made it look alike; but a graph's request never makes one."""
    owner = {"pool_id": (3, 0)}
    trace = [
        event("segment_alloc", BASE, 30 * MIB),
        *(event(action, BASE, 30 * MIB) for action in ("alloc", "free_requested", "free_completed")),
        event("segment_free", BASE, 30 * MIB),
        event("segment_alloc", FAR, 40 * MIB, **owner),
        event("alloc", FAR, 40 * MIB, **owner),
        {**event("oom", 0, 50 * MIB), "device_free": 0},
    ]
    stream = read(
        device_traces=[trace], segments=[segment(FAR, [block(40 * MIB, 40 * MIB, "G")], segment_pool_id=(3, 0))]
    )
    assert stream.retried == stream.attempts
    own = make_report(stream, names=("caching",)).reference_summary
    assert own is not None and own.replay.failure is not None
    assert own.replay.failure.event_index == stream.failures[0].event_index


# -- limits and settings -------------------------------------------------------------------------


@pytest.mark.parametrize(("device_free", "capacity"), [(10 * MIB, 52 * MIB), (500 * MIB, 42 * MIB + 16 * MIB - 1)])
def test_a_failure_with_room_on_the_device_shows_a_limit_below_it(device_free: int, capacity: int) -> None:
    """42 MiB are held and 16 asked for: with 500 MiB left, it was set_per_process_memory_fraction that said no."""
    trace = snapshot()["device_traces"][0]
    trace = [{**e, "device_free": device_free} if e["action"] == "oom" else e for e in trace]
    stream = read(device_traces=[trace])
    assert recorded_capacity(stream) == capacity
    report = make_report(stream)
    assert report.capacity_source == ("recorded" if device_free < 16 * MIB else "limit")
    own = report.reference_summary
    assert own is not None and own.replay.failure is not None
    assert own.replay.failure.event_index == stream.failures[0].event_index


def test_a_limit_is_not_below_what_was_held() -> None:
    """A graph's request of 50 MiB: its pool's 40 go back and are too few, so it is refused, with nothing held."""
    owner = {"pool_id": (3, 0)}
    settings = snapshot()["allocator_settings"] | {"max_split_size": 20 * MIB}
    trace = [
        event("segment_alloc", BASE, 40 * MIB, **owner),
        *(event(action, BASE, 40 * MIB, **owner) for action in ("alloc", "free_requested", "free_completed")),
        event("segment_free", BASE, 40 * MIB, **owner),
        {**event("oom", 0, 50 * MIB, **owner), "device_free": 500 * MIB},
    ]
    trace += [event("segment_alloc", FAR, 60 * MIB), event("alloc", FAR, 60 * MIB)]
    ended = segment(FAR, [block(60 * MIB, 60 * MIB, "A")])
    stream = read(device_traces=[trace], segments=[ended], allocator_settings=settings)
    assert recorded_capacity(stream) == 60 * MIB
    own = make_report(stream, names=("caching",)).reference_summary
    assert own is not None and own.replay.failure is not None
    assert own.replay.failure.reserved_nbytes == 0
    assert own.replay.failure.event_index == stream.failures[0].event_index


def test_a_threshold_without_a_fraction_does_nothing() -> None:
    """PyTorch judges by a fraction (and collects) only if one was set: that the device was full says it was not.

    A of 25 MiB in two pages of 20. B of 22 needs one more, and is served: judged by a fraction of 60 MiB, 40 held and
    22 asked for would have been too much. C of 30 MiB fails, with nothing left on the device.
    """
    trace = [event("segment_map", BASE, 40 * MIB), event("alloc", BASE, 25 * MIB)]
    trace += [event("segment_map", BASE + 40 * MIB, 20 * MIB), event("alloc", BASE + 25 * MIB, 22 * MIB)]
    trace += [{**event("oom", 0, 30 * MIB), "device_free": 0}]
    settings = snapshot()["allocator_settings"] | {"expandable_segments": True, "garbage_collection_threshold": 0.9}
    blocks = [block(25 * MIB, 25 * MIB, "A"), block(22 * MIB, 22 * MIB, "B"), block(13 * MIB, 0)]
    stream = read(
        device_traces=[trace],
        segments=[segment(BASE, blocks, is_expandable=True)],
        allocator_settings=settings,
    )
    assert recorded_capacity(stream) == 60 * MIB
    own = make_report(stream, names=("expandable",)).reference_summary
    assert own is not None and own.replay.failure is not None
    assert own.replay.failure.event_index == stream.failures[0].event_index
    assert own.replay.failure.reserved_nbytes == 60 * MIB


def test_sizes_below_that_of_a_large_segment_are_refused() -> None:
    with pytest.raises(BadSettings, match=r"max_split_size is 33554432 bytes.* 64 MiB"):
        parse_settings("max_split_size_mb:32,large_segment_size_mb:64")
    with pytest.raises(BadSettings, match=r"max_non_split_rounding is 33554432 bytes.* 64 MiB"):
        parse_settings("large_segment_size_mb:64,max_non_split_rounding_mb:32")


def test_the_rounding_is_as_large_as_a_large_segment() -> None:
    """At max_split_size 64, a free block of 100 MiB serves 70 MiB if segments have 40, and not if they have 20."""
    stream = stream_of([(ALLOC, 0), (FREE, 0), (ALLOC, 1)], [100 * MIB, 70 * MIB])
    assert held(caching(stream, None, "max_split_size_mb:64"))[-1] == 170
    assert held(caching(stream, None, "max_split_size_mb:64,large_segment_size_mb:40"))[-1] == 100
    assert parse_settings("large_segment_size_mb:40").text() == "large_segment_size_mb:40"


def test_expandable_segments_keep_the_settings_that_were_recorded_with_them() -> None:
    """Rounding in two steps, 9 MiB become 12. As advice to others, expandable segments come without max_split_size."""
    stream = stream_of([(ALLOC, 0)], [9 * MIB])
    own = parse_settings("expandable_segments:True,max_split_size_mb:64")
    assert model("expandable", own)(stream, None).settings == own.text()
    alone = model("expandable", parse_settings("max_split_size_mb:64"))(stream, None)
    assert alone.settings == "expandable_segments:True"


# -- expandable segments of which the beginning is lost ------------------------------------------


def test_pages_that_were_mapped_before_the_trace_began() -> None:
    """A of 25 MiB and B of 5 lie in two older pages of 20. A goes and its whole page back; C of 22 comes.

    C takes [0, 22): the page that went, and the first 2 MiB of the next, of which B has [25, 30).
    """
    trace = [
        *(event(action, BASE, 25 * MIB) for action in ("free_requested", "free_completed")),
        event("segment_unmap", BASE, 20 * MIB, "empty_cache"),
        event("segment_map", BASE, 20 * MIB),
        event("alloc", BASE, 22 * MIB),
    ]
    ended = [block(22 * MIB, 22 * MIB, "C"), block(3 * MIB, 0), block(5 * MIB, 5 * MIB, "B"), block(10 * MIB, 0)]
    settings = snapshot()["allocator_settings"] | {"expandable_segments": True}
    stream = read(
        device_traces=[trace],
        segments=[segment(BASE, ended, is_expandable=True)],
        allocator_settings=settings,
    )
    assert stream.initial is not None
    assert [(s.address, s.nbytes, s.is_expandable) for s in stream.initial.segments] == [(BASE, 40 * MIB, True)]
    replay = replay_caching(stream, None, stream.settings or CachingSettings(), name="expandable")
    assert held(replay) == [40, 40, 40, 20, 40]
    assert (replay.num_device_allocs, replay.num_device_frees) == (1, 1)
    assert replay.address is not None
    assert replay.address.tolist() == [BASE, BASE + 25 * MIB, BASE]
    # Another allocator begins with nothing of that.
    assert replay_caching(stream, None, CachingSettings(), name="caching").num_device_allocs > 1


def test_ranges() -> None:
    ranges = Ranges()
    assert ranges.add(100, 50, "a", "first")
    assert ranges.add(200, 50, "a", "second")
    assert ranges.add(150, 50, "a", "between")
    assert ranges.items() == [(100, 150, "first")]
    assert ranges.add(250, 50, "b", "of another pool")
    assert not ranges.add(240, 5, "a", "taken")
    assert not ranges.add(90, 20, "a", "taken")
    assert ranges.take(120, 10)
    assert not ranges.take(120, 10)
    assert not ranges.take(240, 20)
    assert not ranges.take(0, 10)
    assert ranges.take(250, 50)
    assert [(start, nbytes) for start, nbytes, _ in ranges.items()] == [(100, 20), (130, 120)]
    assert ranges.add(120, 5, "a", None) and ranges.add(125, 5, "a", None)
    assert [(start, nbytes) for start, nbytes, _ in ranges.items()] == [(100, 150)]
