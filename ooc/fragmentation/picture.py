"""A picture of the address space over time, and of what each allocator holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ooc.fragmentation.analysis import curve
from ooc.fragmentation.replay import Replay
from ooc.fragmentation.report import Report
from ooc.fragmentation.stream import IntArray, Stream
from ooc.output_files import write_picture
from ooc.units import MIB, format_nbytes

MAX_RECTANGLES = 6000
"""The largest by area; more cannot be told apart at this size."""


def draw(report: Report, path: Path) -> None:
    """Write a PNG: above, what lies where under the reference (or the first that has addresses); below, curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    own = report.reference_summary
    shown = [own.replay] if own is not None and own.replay.address is not None else []
    shown += [s.replay for s in report.summaries if s.replay.address is not None]
    figure, axes = pyplot.subplots(
        2 if shown else 1, 1, figsize=(11, 9 if shown else 5), sharex=True, squeeze=False, layout="constrained"
    )
    if shown:
        _draw_addresses(axes[0][0], shown[0], report.stream)
    _draw_curves(axes[-1][0], report)
    write_picture(figure, path, dpi=130)
    pyplot.close(figure)


def _draw_addresses(axes: Any, replay: Replay, stream: Stream) -> None:
    from matplotlib.collections import PolyCollection

    assert replay.address is not None
    bottoms, row = _rows(replay)
    placed = np.flatnonzero((replay.address >= 0) & (replay.block_nbytes > 0))
    starts = np.maximum(stream.birth[placed], replay.first_event)
    stops = np.minimum(replay.death[placed], replay.last_event)
    area = (stops - starts) * replay.block_nbytes[placed]
    largest = np.sort(np.argsort(-area, kind="stable")[:MAX_RECTANGLES])
    placed, starts, stops = placed[largest], starts[largest], stops[largest]
    lows = row(replay.address[placed]) / MIB
    highs = lows + replay.block_nbytes[placed] / MIB
    corners = np.stack(
        [
            np.stack([starts, lows], 1),
            np.stack([stops, lows], 1),
            np.stack([stops, highs], 1),
            np.stack([starts, highs], 1),
        ],
        1,
    )
    held = _held_rectangles(replay, row)
    axes.add_collection(PolyCollection(held, facecolors="0.88", edgecolors="none"))
    colours = np.log2(np.maximum(stream.nbytes[placed], 1))
    boxes = PolyCollection(list(corners), array=colours, cmap="viridis", edgecolors="white", linewidths=0.15)
    axes.add_collection(boxes)
    if replay.failure is not None:
        axes.axvline(replay.failure.event_index, color="crimson", linewidth=1)
    axes.set_xlim(replay.first_event, max(replay.last_event, replay.first_event + 1))
    axes.set_ylim(0, max(bottoms / MIB, 1e-6) * 1.02)
    axes.set_ylabel("address, MiB (segments stacked)")
    axes.set_title(
        f"{replay.title}: buffers coloured by size, grey is held but free"
        + ("; red line: the request that does not fit" if replay.failure is not None else ""),
        fontsize=10,
    )


def _rows(replay: Replay) -> tuple[int, Callable[[IntArray], IntArray]]:
    """Total height, and a function from addresses to heights in which unused address ranges are left out."""
    ranges = sorted((e.address, e.address + e.nbytes) for e in replay.segments if e.nbytes > 0)
    merged: list[list[int]] = []
    for low, high in ranges:
        if merged and low <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    lows = np.array([low for low, _ in merged] or [0], dtype=np.int64)
    lengths = np.array([high - low for low, high in merged] or [0], dtype=np.int64)
    base = np.concatenate([[0], np.cumsum(lengths)])

    def row(addresses: IntArray) -> IntArray:
        which = np.maximum(np.searchsorted(lows, addresses, side="right") - 1, 0)
        return base[which] + addresses - lows[which]

    return int(base[-1]), row


def _held_rectangles(replay: Replay, row: Callable[[IntArray], IntArray]) -> list[list[tuple[float, float]]]:
    """Segments over time, from the log of what was taken and given back."""
    begun: dict[int, tuple[int, int]] = {}
    found: list[tuple[int, int, int, int]] = []
    for event in replay.segments:
        low, high = event.address, event.address + abs(event.nbytes)
        if event.nbytes > 0:
            begun[low] = (high, event.event_index)
            continue
        for start, (stop, since) in [(s, v) for s, v in begun.items() if s < high and v[0] > low]:
            del begun[start]
            found.append((since, event.event_index, max(start, low), min(stop, high)))
            if start < low:
                begun[start] = (low, since)
            if stop > high:
                begun[high] = (stop, since)
    found += [(since, replay.last_event, start, stop) for start, (stop, since) in begun.items()]
    rectangles: list[list[tuple[float, float]]] = []
    for since, until, start, stop in found:
        bottom = float(row(np.array([start]))[0]) / MIB
        top = bottom + (stop - start) / MIB
        rectangles.append([(since, bottom), (until, bottom), (until, top), (since, top)])
    return rectangles


def _draw_curves(axes: Any, report: Report) -> None:
    for summary in report.summaries:
        points = curve(summary.replay, report.stream)
        axes.plot(
            [p["event"] for p in points],
            [p["reserved_nbytes"] / MIB for p in points],
            label=f"{summary.replay.allocator}, {format_nbytes(summary.replay.peak_reserved_nbytes)}",
            linewidth=1.2,
            drawstyle="steps-post",
        )
    stream = report.stream
    step = max(stream.num_events // 2000, 1)
    axes.fill_between(
        np.arange(0, stream.num_events, step),
        stream.live_nbytes[::step] / MIB,
        color="0.8",
        step="post",
        label="live, as requested",
    )
    if report.capacity_nbytes is not None:
        axes.axhline(report.capacity_nbytes / MIB, color="crimson", linestyle="--", linewidth=1, label="capacity")
    # One allocator far above the others would press them all onto the axis: it leaves the picture at the top.
    own = report.reference_summary
    shown = max(stream.wanted_nbytes, report.capacity_nbytes or 0, own.replay.peak_reserved_nbytes if own else 0)
    highest = max(s.replay.peak_reserved_nbytes for s in report.summaries)
    axes.set_ylim(0, max(min(highest, 2 * shown), 1) / MIB * 1.05)
    axes.set_xlabel("event")
    axes.set_ylabel("held, MiB")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.15))
