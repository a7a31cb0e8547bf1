"""Streams and snapshots worked out on paper, for the tests of ooc.fragmentation."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from ooc.fragmentation import Stream, analysis, parse_settings
from ooc.fragmentation.caching import replay_caching
from ooc.fragmentation.replay import Replay, mapped_in
from ooc.fragmentation.stream import ALLOC, FREE

DATA = Path(__file__).parents[1] / "data"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PROFILES = ("kineto_cnn_cpu.json.gz", "kineto_encoder_cpu.json.gz")


def stream_of(events: list[tuple[int, int]], sizes: list[int], pools: list[int] | None = None, **more: Any) -> Stream:
    """A stream from `(kind, buffer)` pairs, and more of what a `Stream` takes."""
    return Stream(
        source="test",
        device="test",
        kind=np.array([kind for kind, _ in events], dtype=np.int8),
        buffer=np.array([buffer for _, buffer in events], dtype=np.int64),
        nbytes=np.array(sizes, dtype=np.int64),
        pool=np.array(pools or [0] * len(sizes), dtype=np.int64),
        stack=lambda buffer: (f"buffer {'ABCDEFGH'[buffer % 8]}",),
        **more,
    ).validate()


def caching(stream: Stream, capacity: int | None = None, conf: str = "") -> Replay:
    return replay_caching(stream, capacity, parse_settings(conf), name="caching")


# A 3 MiB, B 4 MiB and C 12 MiB come; A goes; D of 5 MiB comes.
#
# Caching: A is large and under 10 MiB, so a segment of 20 MiB is taken: A [0, 3), B [3, 7), and C gets all
# of [7, 20), because what would remain of the 13 MiB, 1 MiB, is not more than 1 MiB. A leaves a hole of
# 3 MiB; D does not fit into it, so a second segment of 20 MiB is taken: D [0, 5), 15 MiB free behind it.
# Then: held 40; live 4 + 12 + 5 = 21; handed out 4 + 13 + 5 = 22, so internal 1; external 3 + 15 = 18.
BY_HAND = stream_of([(ALLOC, 0), (ALLOC, 1), (ALLOC, 2), (FREE, 0), (ALLOC, 3)], [3 * MIB, 4 * MIB, 12 * MIB, 5 * MIB])


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
