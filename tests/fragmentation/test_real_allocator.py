"""Snapshots and statistics of PyTorch's real caching allocator, run over a fake CUDA runtime: replayed to the byte.

tests/data/README.md says how they were made.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from ooc.fragmentation import Stream, analysis, make_report
from ooc.fragmentation.read_snapshot import read_snapshot
from ooc.fragmentation.replay import Replay, mapped_in
from ooc.fragmentation.stream import ALLOC, EMPTY, FREE, RELEASE

DATA = Path(__file__).parents[1] / "data" / "real_allocator"
STATS: dict[str, dict[str, Any]] = json.loads((DATA / "memory_stats.json").read_text())
FAILED = [name for name in STATS if STATS[name]["num_ooms"]]
FINISHED = [name for name in STATS if not STATS[name]["num_ooms"]]


def document_of(name: str) -> dict[str, Any]:
    return pickle.loads((DATA / f"{name}.pickle").read_bytes())


def stream_of(name: str) -> Stream:
    (stream,) = read_snapshot((DATA / f"{name}.pickle").read_bytes())
    return stream


def replay_of(stream: Stream) -> Replay:
    """Of the allocator that was recorded, as the report has it."""
    own = make_report(stream, names=(reference(stream),)).reference_summary
    assert own is not None
    return own.replay


def reference(stream: Stream) -> str:
    assert stream.settings is not None
    return "expandable" if stream.settings.expandable_segments else "caching"


def test_the_recordings_show_what_they_are_here_for() -> None:
    assert set(FAILED) == {"out_of_memory", "expandable", "two_streams_full"}
    assert set(FINISHED) == {"two_streams", "graph", "picked_segments"}
    streams = {name: stream_of(name) for name in STATS}
    assert all(stream.num_events > 300 for stream in streams.values())
    assert {name for name in streams if (streams[name].kind == EMPTY).any()} == {
        "expandable",
        "two_streams",
        "two_streams_full",
        "graph",
    }
    assert {name for name in streams if (streams[name].kind == RELEASE).any()} == {"two_streams", "two_streams_full"}
    assert {name for name in streams if streams[name].private} == {"graph"}
    assert {name for name in streams if streams[name].returned} == {"picked_segments"}
    assert streams["two_streams"].retried and STATS["two_streams"]["num_alloc_retries"] > 1
    assert {reference(streams[name]) for name in streams} == {"caching", "expandable"}


@pytest.mark.parametrize("name", STATS)
def test_requested_bytes_after_every_event(name: str) -> None:
    (trace,) = document_of(name)["device_traces"]
    live, after = 0, []
    for entry in trace:
        if entry["action"] in ("alloc", "free_completed"):
            live += entry["size"] if entry["action"] == "alloc" else -entry["size"]
            after.append(live)
    stream = stream_of(name)
    real = [
        int(stream.live_nbytes[i])
        for i in range(stream.num_events)
        if stream.kind[i] in (ALLOC, FREE) and int(stream.buffer[i]) not in stream.attempts
    ]
    assert real == after


@pytest.mark.parametrize("name", STATS)
def test_the_record_is_met(name: str) -> None:
    stream = stream_of(name)
    pairs = analysis.meets_record(replay_of(stream), stream)
    assert set(pairs) >= ({"reserved_at_failure_nbytes"} if name in FAILED else {"peak_reserved_nbytes"})
    assert all(recorded == replayed for recorded, replayed in pairs.values()), pairs


@pytest.mark.parametrize("name", FAILED)
def test_the_failed_request(name: str) -> None:
    """The recording ends with it, so the segments at its end are those that it was refused with."""
    stream, stats = stream_of(name), STATS[name]
    blocks = [block for segment in document_of(name)["segments"] for block in segment["blocks"]]
    failure = replay_of(stream).failure
    assert failure is not None
    assert failure.event_index == stream.failures[0].event_index == stream.num_events - 2
    assert failure.reserved_nbytes == stats["reserved_bytes"]["current"]
    assert failure.allocated_nbytes == stats["active_bytes"]["current"]
    assert failure.largest_free_nbytes == max(block["size"] for block in blocks if block["state"] == "inactive")


@pytest.mark.parametrize("name", FINISHED)
def test_memory_stats(name: str) -> None:
    stream, stats = stream_of(name), STATS[name]
    replay = replay_of(stream)
    end = analysis.moment(replay, stream, stream.num_events - 1)
    assert end.live_nbytes == stats["requested_bytes"]["current"]
    assert end.live_nbytes + end.internal_nbytes == stats["active_bytes"]["current"]
    assert end.trapped_nbytes == stats["inactive_split_bytes"]["current"]
    assert int(replay.allocated_nbytes.max()) == stats["active_bytes"]["peak"]
    assert replay.peak_reserved_nbytes == stats["reserved_bytes"]["peak"]
    assert replay.num_device_allocs == stats["num_device_alloc"]
    assert replay.num_device_frees == stats["num_device_free"]
    if name != "picked_segments":  # what the settings pick, and what a retry gives back, look alike in a file
        assert replay.num_retries == stats["num_alloc_retries"]


@pytest.mark.parametrize("name", FINISHED)
def test_the_blocks_at_the_end(name: str) -> None:
    """Each segment, cut as the real one; which address it has is the device's business."""
    stream = stream_of(name)
    replay = replay_of(stream)
    assert replay.address is not None
    alive = analysis.alive_in(replay, stream, stream.num_events - 1)
    used = {int(replay.address[b]): int(replay.block_nbytes[b]) for b in alive}
    ours = []
    for low, high in mapped_in(replay, stream.num_events - 1):
        at, cut = low, []
        for start in sorted(address for address in used if low <= address < high):
            cut += [(start - at, "free")] * (start > at) + [(used[start], "used")]
            at = start + used[start]
        ours.append(cut + [(high - at, "free")] * (high > at))
    real = [
        [(block["size"], "free" if block["state"] == "inactive" else "used") for block in segment["blocks"]]
        for segment in document_of(name)["segments"]
    ]
    assert sorted(ours) == sorted(real)


@pytest.mark.parametrize("share_lost", [0.1, 0.35, 0.6, 0.85])
@pytest.mark.parametrize("name", sorted(set(STATS) - {"picked_segments"}))
def test_a_ring_that_lost_its_beginning(name: str, share_lost: float) -> None:
    """What was there before is rebuilt from the segments at the end, those of pages that were mapped too."""
    document = document_of(name)
    (trace,) = document["device_traces"]
    (stream,) = read_snapshot(
        pickle.dumps({**document, "device_traces": [trace[int(len(trace) * share_lost) :]]}),
    )
    assert stream.num_initial > 5
    assert stream.initial is not None
    pairs = analysis.meets_record(replay_of(stream), stream)
    assert all(recorded == replayed for recorded, replayed in pairs.values()), pairs


@pytest.mark.parametrize(("name", "capacity"), [("two_streams", 144 << 20), ("picked_segments", 90 << 20)])
def test_told_the_capacity_the_model_does_the_same_by_itself(name: str, capacity: int) -> None:
    """What the file says went back, the model gives back of its own accord: the settings and the limit say when."""
    stream = stream_of(name)
    as_recorded = replay_of(stream)
    own = make_report(stream, names=("caching",), capacity=capacity).reference_summary
    assert own is not None
    assert own.outcome is analysis.CapacityVerdict.FITS
    assert own.replay.num_device_frees == STATS[name]["num_device_free"]
    assert own.replay.num_retries == STATS[name]["num_alloc_retries"]
    assert own.replay.reserved_nbytes.tolist() == as_recorded.reserved_nbytes.tolist()
