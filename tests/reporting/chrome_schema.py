"""What Chrome's Trace Event Format and Perfetto's reading of it ask of a file, checked event by event.

Written from the published description of the format ("Trace Event Format", by the Chromium project) and from
Perfetto's documentation of what it takes of it (slices on a track nest; a flow binds to the slice around it).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

_OF_EVERY_PHASE = ("name", "ph", "pid", "tid", "ts")
_METADATA = {"process_name": str, "process_sort_index": int, "thread_name": str}
_MAX_EXACT = 1 << 53
"""Numbers in JSON are doubles to who reads them: ids and times in nanoseconds beyond this would be others."""


def problems(text: str) -> list[str]:
    """What is wrong with a trace; empty: nothing."""
    found: list[str] = []

    def refuse(name: str) -> float:
        found.append(f"{name} is not JSON")
        return 0.0

    trace = json.loads(text, parse_constant=refuse)
    names: dict[tuple[int, int], str] = {}
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    counters: dict[tuple[int, str], float] = {}
    starts: dict[tuple[str, str, int], dict[str, Any]] = {}
    ends: dict[tuple[str, str, int], dict[str, Any]] = {}
    for number, event in enumerate(trace["traceEvents"]):
        place = f"event {number} {event.get('name')!r}"
        found += [f"{place} has no {key!r}" for key in _OF_EVERY_PHASE if key not in event]
        found += _bad_numbers(place, event)
        track = event["pid"], event["tid"]
        match event["ph"]:
            case "M":
                (value,) = event["args"].values()
                if not isinstance(value, _METADATA.get(event["name"], ())):
                    found.append(f"{place} says {value!r}")
                if event["name"] == "thread_name":
                    names[track] = value
            case "X":
                if not event.get("cat") or event["dur"] < 0:
                    found.append(f"{place} has no category, or takes less than no time")
                slices[track].append((_ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])))
            case "C":
                found += [f"{place} counts {v!r}" for v in event["args"].values() if type(v) is not int or v < 0]
                key = event["pid"], event["name"]
                if event["ts"] < counters.get(key, -math.inf):
                    found.append(f"{place} goes back in time")
                counters[key] = event["ts"]
            case "s" | "f":
                ids = event["cat"], event["name"], event["id"]
                side = starts if event["ph"] == "s" else ends
                if ids in side:
                    found.append(f"{place}: a second flow with the id {ids}")
                if event["ph"] == "f" and event.get("bp") != "e":
                    found.append(f"{place} binds to the next slice, not to the one around it")
                side[ids] = event
            case phase:
                found.append(f"{place} has the phase {phase!r}")
    found += [f"track {track} has slices and no name" for track in slices if track not in names]
    found += [
        f"slices overlap on {names.get(track)!r}: {pair}" for track in slices for pair in _crossing(slices[track])
    ]
    found += [f"flow {ids} has one end" for ids in starts.keys() ^ ends.keys()]
    for ids in starts.keys() & ends.keys():
        if ends[ids]["ts"] < starts[ids]["ts"]:
            found.append(f"flow {ids} ends before it starts")
        for event in (starts[ids], ends[ids]):
            if not _has_slice_around(slices[event["pid"], event["tid"]], _ns(event["ts"])):
                found.append(f"flow {ids}: no slice around its {event['ph']!r}")
    return found


def _bad_numbers(place: str, event: dict[str, Any]) -> list[str]:
    found = []
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0 or value * 1000 > _MAX_EXACT * 8:
            found.append(f"{place}: {key} is {value!r}")
    for key in ("pid", "tid", "id"):
        value = event.get(key, 0)
        if type(value) is not int or not 0 <= value < _MAX_EXACT:
            found.append(f"{place}: {key} is {value!r}")
    return found


def _ns(us: float) -> int:
    """As Perfetto reads a time: cut off to whole nanoseconds. It drops slices that cross by one of them."""
    return int(us * 1000) if math.isfinite(us) else 0


def _crossing(slices: list[tuple[int, int]]) -> list[Any]:
    """Pairs of which neither holds the other and that have time in common."""
    open_ones: list[tuple[int, int]] = []
    found = []
    for start, stop in sorted(slices, key=lambda s: (s[0], -s[1])):
        while open_ones and open_ones[-1][1] <= start:
            open_ones.pop()
        if open_ones and stop > open_ones[-1][1]:
            found.append((open_ones[-1], (start, stop)))
        open_ones.append((start, stop))
    return found


def _has_slice_around(slices: list[tuple[int, int]], time_ns: int) -> bool:
    return any(start <= time_ns <= stop for start, stop in slices)
