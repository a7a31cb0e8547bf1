"""The report on one file, as data: the JSON document, which the table and the tests read too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ooc.fragmentation import analysis
from ooc.fragmentation.advice import Remedy, advice, headline, remedies
from ooc.fragmentation.allocators import ALLOCATORS, MAX_TRIAL_EVENTS, replay_all
from ooc.fragmentation.analysis import CapacityVerdict, Moment, SettingsTrialResult, Summary
from ooc.fragmentation.by_line import Culprit, MemoryHolder, culprits, holders
from ooc.fragmentation.frames import origin_of
from ooc.fragmentation.segments import is_below_device, recorded_capacity
from ooc.fragmentation.settings import CachingSettings
from ooc.fragmentation.stream import Stream

REPORT_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything found out about one stream.

    Attributes:
        stream: What was replayed.
        capacity_nbytes: The limit; None: none was given and the file does not tell.
        capacity_source: "given"; "recorded": what a failure had and left on the device; "limit": what a memory
            fraction can have been at most, since a failure left the device room; or "none".
        reference: The allocator that the program ran with, or for a CPU PyTorch's caching one; its culprits are shown.
        summaries: One per allocator, in the order of `ALLOCATORS`.
        missing: Why other allocators are not among them.
        tried: Other settings of the caching allocator.
        headline: One line: why it failed and what would have fitted; or how much was lost.
        holders_event, holders: Who holds memory of the reference, and after which event: that before the failed
            request, else that with most live.
        culprits: Of the reference, who lies between its free blocks then.
        remedies: What would have helped, least effort first.
        advice: The same in lines of text.
    """

    stream: Stream
    settings: CachingSettings
    capacity_nbytes: int | None
    capacity_source: str
    reference: str
    summaries: tuple[Summary, ...]
    missing: dict[str, str]
    tried: tuple[SettingsTrialResult, ...]
    headline: str
    holders_event: int
    holders: tuple[MemoryHolder, ...]
    culprits: tuple[Culprit, ...]
    remedies: tuple[Remedy, ...]
    advice: tuple[str, ...]

    @property
    def reference_summary(self) -> Summary | None:
        """The reference's row; None if it was not among the allocators asked for."""
        return next((s for s in self.summaries if s.replay.allocator == self.reference), None)

    @property
    def does_not_fit(self) -> bool:
        """True if there is a capacity and the reference (or, without it, every allocator) exceeds it."""
        own = self.reference_summary
        judged = [own] if own is not None else list(self.summaries)
        return bool(judged) and all(summary.outcome is CapacityVerdict.FAILS for summary in judged)


def make_report(
    stream: Stream,
    *,
    names: tuple[str, ...] = ALLOCATORS,
    capacity: int | None = None,
    settings: CachingSettings | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Replay `stream` through the named allocators and judge the results.

    Args:
        capacity: Bytes that the device may give. None: what the file says of a recorded failure.
        settings: Of PyTorch's allocator. None: those in the file, else the defaults.
        progress: Called with the name of what is being replayed.
    """
    chosen = settings or stream.settings or CachingSettings()
    source = "given"
    if capacity is None:
        capacity = recorded_capacity(stream)
        source = "none" if capacity is None else "limit" if is_below_device(stream) else "recorded"
    reference = "expandable" if chosen.expandable_segments else "caching"
    if reference not in names and len(names) == 1:
        reference = names[0]
    replays, missing = replay_all(stream, names, chosen, capacity, progress)
    summaries = [analysis.summarise(replay, stream, capacity) for replay in replays]
    own = next((s for s in summaries if s.replay.allocator == reference), None)
    tried: list[SettingsTrialResult] = []
    if own is not None and own.outcome is not CapacityVerdict.FITS and len(names) > 1:
        progress("other settings")
        tried = analysis.try_settings(stream, chosen, capacity)
        if not tried:
            missing["other settings"] = f"tried for streams of up to {MAX_TRIAL_EVENTS:,} events"
    options = remedies(stream, summaries, tried, own, capacity)
    worst = own.replay.worst_event if own is not None else 0
    fullest = worst if own is None or own.replay.failure is not None else int(stream.live_nbytes.argmax())
    return Report(
        stream=stream,
        settings=chosen,
        capacity_nbytes=capacity,
        capacity_source=source,
        reference=reference,
        summaries=tuple(summaries),
        missing=missing,
        tried=tuple(tried),
        holders_event=fullest,
        headline=headline(stream, own, options, capacity),
        holders=tuple(holders(own.replay, stream, fullest)) if own is not None else (),
        culprits=tuple(culprits(own.replay, stream, worst)) if own is not None else (),
        remedies=tuple(options),
        advice=tuple(advice(stream, options, own, capacity)),
    )


def to_document(report: Report) -> dict[str, Any]:
    """The report as JSON-able data."""
    stream = report.stream
    return {
        "schema": "ooc.fragmentation",
        "schema_version": REPORT_SCHEMA_VERSION,
        "source": stream.source,
        "device": stream.device,
        "notes": list(stream.notes),
        "num_events": stream.num_events,
        "num_buffers": stream.num_buffers,
        "peak_live_nbytes": stream.peak_live_nbytes,
        "wanted_nbytes": stream.wanted_nbytes,
        "settings": report.settings.text(),
        "capacity_nbytes": report.capacity_nbytes,
        "capacity_source": report.capacity_source,
        "recorded_failures": [
            {
                "event": f.event_index,
                "nbytes": f.nbytes,
                "device_free_nbytes": f.device_free_nbytes,
                "reserved_nbytes": f.reserved_nbytes,
            }
            for f in stream.failures
        ],
        "reference": report.reference,
        "fits": None if report.capacity_nbytes is None else not report.does_not_fit,
        "allocators": [_summary_document(summary, stream) for summary in report.summaries],
        "missing": report.missing,
        "other_settings": [
            {
                "settings": t.trial.settings.text(),
                "why": t.trial.why,
                "peak_reserved_nbytes": t.peak_reserved_nbytes,
                "num_retries": t.num_retries,
                "fits": t.fits,
            }
            for t in report.tried
        ],
        "headline": report.headline,
        "holders": [
            {"lines": list(h.origin.lines), "library": h.origin.library, "module": h.origin.module}
            | {"doing": h.origin.doing, "op": h.op, "num_buffers": h.num_buffers, "nbytes": h.nbytes}
            for h in report.holders
        ],
        "culprits": [
            {
                "lines": list(c.origin.lines),
                "library": c.origin.library,
                "module": c.origin.module,
                "doing": c.origin.doing,
                "op": c.op,
                "stack": list(c.stack),
                "num_buffers": c.num_buffers,
                "nbytes": c.nbytes,
                "adjoining_free_nbytes": c.adjoining_free_nbytes,
            }
            for c in report.culprits
        ],
        "remedies": [
            {"text": r.text, "peak_reserved_nbytes": r.peak_nbytes, "gain_nbytes": r.gain_nbytes}
            for r in report.remedies
        ],
        "advice": list(report.advice),
    }


def _summary_document(summary: Summary, stream: Stream) -> dict[str, Any]:
    replay = summary.replay
    failure = replay.failure
    return {
        "allocator": replay.allocator,
        "title": replay.title,
        "settings": replay.settings,
        "outcome": summary.outcome.value,
        "events": [replay.first_event, replay.last_event],
        "peak_reserved_nbytes": replay.peak_reserved_nbytes,
        "mean_external_fraction": analysis.mean_external_fraction(replay),
        "num_device_allocs": replay.num_device_allocs,
        "num_device_frees": replay.num_device_frees,
        "num_maps": replay.num_maps,
        "num_unmaps": replay.num_unmaps,
        "num_retries": replay.num_retries,
        "at_peak": _moment_document(summary.peak),
        "at_worst": _moment_document(summary.worst),
        "failure": None
        if failure is None
        else {
            "event": failure.event_index,
            "nbytes": failure.nbytes,
            "needed_nbytes": failure.needed_nbytes,
            "capacity_nbytes": failure.capacity_nbytes,
            "reserved_nbytes": failure.reserved_nbytes,
            "allocated_nbytes": failure.allocated_nbytes,
            "largest_free_nbytes": failure.largest_free_nbytes,
            "lines": list(origin_of(stream.stack(failure.buffer)).lines),
            "stack": list(stream.stack(failure.buffer)),
        },
        "recorded": {
            name: {"recorded": truth, "replayed": found}
            for name, (truth, found) in analysis.meets_record(replay, stream).items()
        },
        "over_time": analysis.curve(replay, stream),
    }


def _moment_document(moment: Moment) -> dict[str, Any]:
    return {
        "event": moment.event_index,
        "live_nbytes": moment.live_nbytes,
        "internal_nbytes": moment.internal_nbytes,
        "external_nbytes": moment.external_nbytes,
        "largest_free_nbytes": moment.largest_free_nbytes,
        "num_holes": moment.num_holes,
        "trapped_nbytes": moment.trapped_nbytes,
    }
