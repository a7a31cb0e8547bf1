"""Snapshots against what torch itself makes and reads, and what a program that empties its cache leaves in one."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from ooc.fragmentation import analysis
from ooc.fragmentation.caching import replay_caching
from ooc.fragmentation.read_snapshot import read_snapshot
from ooc.fragmentation.replay import Replay
from ooc.fragmentation.settings import CachingSettings, parse_settings
from ooc.fragmentation.stream import ALLOC, EMPTY, FREE, Stream
from tests.fragmentation.cases import BASE, MIB, block, event, segment, snapshot, stream_of

DATA = Path(__file__).parents[1] / "data"
FROM_CPU_PROFILES = ("snapshot_cnn_cpu.pickle", "snapshot_encoder_cpu.pickle")
FAR = BASE + (1 << 32)


def read(document: dict[str, Any]) -> Stream:
    (stream,) = read_snapshot(pickle.dumps(document))
    return stream


def caching(stream: Stream, capacity: int | None = None) -> Replay:
    return replay_caching(stream, capacity, stream.settings or CachingSettings(), name="caching")


def assert_record_met(stream: Stream) -> None:
    pairs = analysis.meets_record(caching(stream), stream)
    assert "peak_reserved_nbytes" in pairs
    assert "num_device_frees" in pairs
    assert all(recorded == replayed for recorded, replayed in pairs.values()), pairs


# -- what torch makes and reads ------------------------------------------------------------------


@pytest.mark.parametrize("name", FROM_CPU_PROFILES)
def test_snapshots_that_torch_makes_of_real_cpu_runs(name: str) -> None:
    """Requested bytes after every event, worked out by address from the end backwards."""
    data = (DATA / name).read_bytes()
    document = pickle.loads(data)
    (trace,) = (t for t in document["device_traces"] if t)
    live = sum(b["requested_size"] for s in document["segments"] for b in s["blocks"] if b["state"] != "inactive")
    after = []
    for entry in reversed(trace):
        if entry["action"] == "alloc":
            after.append(live)
            live -= entry["size"]
        elif entry["action"] == "free_completed":
            after.append(live)
            live += entry["size"]
    (stream,) = read_snapshot(data)
    assert len(after) > 50
    assert stream.live_nbytes[stream.num_initial :].tolist() == after[::-1]
    assert stream.peak_live_nbytes == max([live, *after])
    assert stream.recorded.end_live_nbytes == after[0]


def test_our_handmade_snapshot_is_one_to_torchs_own_viewer() -> None:
    """It adds up what is held and free in a snapshot; so do we, and differently where blocks are rounded up."""
    document = snapshot()
    told = _memory_viz.segsum(document)
    assert "segments: 3\n" in told
    assert "total_reserved: 42.0MiB" in told
    assert re.search(r"total_allocated: 17\.0MiB", told)
    stream = read(document)
    replay = caching(stream)
    assert replay.reserved_nbytes[-3] == 42 * MIB
    assert stream.recorded.end_live_nbytes == 17 * MIB + 1000
    assert "raise OutOfMemoryError # 16.0MiB requested, 3.0MiB free in CUDA" in _memory_viz.trace(document)


def test_actions_are_those_that_torch_writes() -> None:
    """A kind of event that torch's own documentation lists and we pass over would be a hole in the replay."""
    from torch.cuda import memory

    listed = re.search(r"action: Literal\[(.*?)\]", memory._snapshot.__doc__ or "", re.DOTALL)
    assert listed is not None
    actions = re.findall(r'^\s*"(\w+)"', listed[1], re.MULTILINE)
    assert {"alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom"} <= set(actions)
    document = snapshot()
    document["device_traces"][0] += [event(action, FAR, 512) for action in actions if action.startswith("snap")]
    assert not [note for note in read(document).notes if "unknown kind" in note]
    for action in actions:
        at_end = {**event(action, FAR, 2 * MIB), "device_free": 0}
        assert not [note for note in read_with(at_end).notes if "unknown kind" in note]


def read_with(entry: dict[str, Any]) -> Stream:
    document = snapshot()
    document["device_traces"][0].append(entry)
    return read(document)


# -- a cache that is emptied in mid-run ----------------------------------------------------------


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_what_is_wholly_free_goes_back(conf: str) -> None:
    """A of 30 MiB goes back, B's segment of 20 stays for its 5 MiB; then A's size is taken anew.

    Expandable, in pages of 20 MiB: A at [0, 30), B at [30, 35). Of A's place the whole page [0, 20) goes; the next
    request takes [0, 30) again, for which that page is all that has to come back.
    """
    stream = stream_of([(ALLOC, 0), (ALLOC, 1), (FREE, 0), (EMPTY, 0), (ALLOC, 2)], [30 * MIB, 5 * MIB, 30 * MIB])
    replay = replay_caching(stream, None, parse_settings(conf), name="caching")
    held = [nbytes // MIB for nbytes in replay.reserved_nbytes.tolist()]
    if conf:
        assert held == [40, 40, 40, 20, 40]
    else:
        assert held == [30, 50, 50, 20, 50]
        assert (replay.num_device_allocs, replay.num_device_frees, replay.num_retries) == (3, 1, 0)


def emptied(
    following: list[dict[str, Any]], segments: list[dict[str, Any]], *, frame: str = "", **settings: Any
) -> dict[str, Any]:
    """A of 30 MiB and B of 40 come and go, then their segments go back, then `following`."""
    sizes = {BASE: 30 * MIB, FAR: 40 * MIB}
    trace = []
    for address, size in sizes.items():
        trace += [event("segment_alloc", address, size), event("alloc", address, size)]
    for address, size in sizes.items():
        trace += [event("free_requested", address, size), event("free_completed", address, size)]
    trace += [event("segment_free", address, size, frame) for address, size in sizes.items()]
    document = snapshot()
    document["allocator_settings"] |= settings
    return {**document, "device_traces": [[*trace, *following]], "segments": segments}


def taken(size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Events of a request of `size` that takes a segment, and the segments at the end."""
    return [event("segment_alloc", BASE, size), event("alloc", BASE, size)], [segment(BASE, [block(size, size, "C")])]


@pytest.mark.parametrize("frame", ["", "empty_cache"])
def test_an_emptied_cache_is_emptied_in_the_replay(frame: str) -> None:
    """Without the emptying, C of 25 MiB would lie in A's 30: 70 MiB at the end instead of 26."""
    document = emptied(*taken(26 * MIB), frame=frame)
    stream = read(document)
    assert stream.kind.tolist() == [ALLOC, ALLOC, FREE, FREE, EMPTY, ALLOC]
    assert_record_met(stream)
    assert stream.recorded.peak_reserved_nbytes == 70 * MIB
    assert int(caching(stream).reserved_nbytes[-1]) == 26 * MIB
    assert any("1 times all cached memory went back" in note for note in stream.notes)


def test_emptied_at_the_very_end() -> None:
    stream = read(emptied([], []))
    assert stream.kind.tolist()[-1] == EMPTY
    assert_record_met(stream)
    assert int(caching(stream).reserved_nbytes[-1]) == 0


def test_a_trace_that_begins_with_the_emptying() -> None:
    """As of a program that warms up, empties its cache and only then records: what goes back is older."""
    document = emptied(*taken(26 * MIB))
    document["device_traces"][0] = document["device_traces"][0][8:]
    document["segments"].append(segment(FAR + (1 << 30), [block(2 * MIB, 2 * MIB, "W")]))
    stream = read(document)
    assert stream.kind.tolist() == [ALLOC, EMPTY, ALLOC]
    assert_record_met(stream)
    assert stream.recorded.peak_reserved_nbytes == 72 * MIB


def test_what_the_allocator_frees_by_itself_is_left_to_the_model() -> None:
    """Before a request that failed, and where settings let it pick old blocks; a call of empty_cache is one anyhow."""
    failed = [{**event("oom", 0, 80 * MIB), "device_free": 70 * MIB}]
    assert EMPTY not in read(emptied(failed, [])).kind
    following, segments = taken(26 * MIB)
    assert EMPTY not in read(emptied(following, segments, garbage_collection_threshold=0.8)).kind
    assert EMPTY not in read(emptied(following, segments, max_split_size=64 * MIB)).kind
    assert EMPTY in read(emptied(following, segments, frame="empty_cache", max_split_size=64 * MIB)).kind


# -- where older buffers lay ---------------------------------------------------------------------


def test_an_address_that_a_larger_buffer_has_at_the_end() -> None:
    """X and Y of 4 MiB are older; Z of 8 MiB takes both their places. The replay begins in the recorded segment."""
    y = BASE + 4 * MIB
    trace = [
        *(event(action, BASE, 4 * MIB) for action in ("free_requested", "free_completed")),
        *(event(action, y, 4 * MIB) for action in ("free_requested", "free_completed")),
        event("alloc", BASE, 8 * MIB),
    ]
    whole = segment(BASE, [block(8 * MIB, 8 * MIB, "Z"), block(24 * MIB, 0)])
    stream = read({**snapshot(), "device_traces": [trace], "segments": [whole]})
    assert stream.initial is not None
    assert stream.initial.block_nbytes == (4 * MIB, 4 * MIB)
    assert_record_met(stream)
    assert caching(stream).reserved_nbytes.tolist() == [32 * MIB] * 5
