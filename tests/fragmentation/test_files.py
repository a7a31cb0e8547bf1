"""What the readers make of snapshots, profiles and our own traces.

The snapshot here is written by hand in PyTorch's format, with segments and blocks worked out on paper; the profiles are
PyTorch's own, of CPU runs (tests/data/README.md).
"""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ooc.fragmentation import (
    ALLOCATORS,
    BadFile,
    CachingSettings,
    analysis,
    make_report,
    read_streams,
)
from ooc.fragmentation.allocators import model
from ooc.fragmentation.stream import ALLOC, FREE, RELEASE
from tests.fragmentation.cases import BASE, DATA, MIB, PROFILES, caching, check, event, snapshot, written
from tests.scheduler.random_traces import random_trace

# -- snapshots -------------------------------------------------------------------------------------


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
    """Held 42 MiB and 3 free on the device: 45. Of 33 MiB live with the request, chunks that a GPU can map hold all."""
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
    assert any("--chunk 2MiB" in line for line in report.advice)


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
            "fragmentation/test_files.py" in text
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
