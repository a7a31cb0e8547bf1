"""What the report says first, and what to do: each option as it can be typed on the machine that the file is from."""

from __future__ import annotations

from dataclasses import dataclass

from ooc.fragmentation.analysis import CapacityVerdict, SettingsTrialResult, Summary
from ooc.fragmentation.frames import origin_of
from ooc.fragmentation.planned import THRESHOLD_NBYTES, pool_nbytes, roomy_budget_nbytes, small_pools_nbytes
from ooc.fragmentation.replay import Failure
from ooc.fragmentation.segments import is_below_device
from ooc.fragmentation.stream import Stream
from ooc.units import KIB, MIB, format_nbytes

VARIABLE = "PYTORCH_ALLOC_CONF"
"""The variable's name since torch 2.9; before, and still as an alias, PYTORCH_CUDA_ALLOC_CONF."""

OLDER_NAME = f"torch before 2.9 reads these settings from PYTORCH_CUDA_ALLOC_CONF instead of {VARIABLE}."

_CHUNKS = {"chunked-64KiB": 64 * KIB, "chunked-2MiB": 2 * MIB, "chunked-20MiB": 20 * MIB}
_GRANULE = {"cuda": 2 * MIB}
"""Chunks are multiples of this; elsewhere, of a page."""
_SMALLEST_CHUNK_NBYTES = 64 * KIB

MIN_GAIN = 0.02
"""Without a capacity, what holds less by a smaller share is not worth a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing to do about it.

    Attributes:
        text: What to type, and why it helps.
        peak_nbytes: What would have been held with it.
        gain_nbytes: How much less than with the allocator that the program ran with; None: not comparable.
        needs: What beyond an environment variable it takes: 0 nothing, 1 a line in the script, 2 to run within ooc.
        pool_nbytes: Of `peak_nbytes`, what the budget in `text` is for: tensors large enough for chunks. Small ones are
            held beside it. None: no budget is typed.
    """

    text: str
    peak_nbytes: int
    gain_nbytes: int | None
    needs: int
    pool_nbytes: int | None = None

    def line(self) -> str:
        """For people."""
        gain = ""
        if self.gain_nbytes is not None and self.gain_nbytes != 0:
            more = "less" if self.gain_nbytes > 0 else "more"
            gain = f", {format_nbytes(abs(self.gain_nbytes))} {more}"
        beside = ""
        if self.pool_nbytes is not None and self.pool_nbytes < self.peak_nbytes:
            small = format_nbytes(self.peak_nbytes - self.pool_nbytes)
            beside = f" with {small} for tensors below {format_nbytes(THRESHOLD_NBYTES)}, which no budget counts"
        return f"{self.text} (peak {format_nbytes(self.peak_nbytes)}{beside}{gain})"


def remedies(
    stream: Stream,
    summaries: list[Summary],
    tried: list[SettingsTrialResult],
    own: Summary | None,
    capacity: int | None,
) -> list[Remedy]:
    """What fits where our own does not, or, without a capacity, holds at least 2 % less; least effort first.

    On a CPU, only what there is on a CPU: no settings of CUDA's allocator. Static plans are rows of the table, but no
    setting of PyTorch's makes one, so they are no remedy.
    """
    is_cuda = stream.device.startswith("cuda")
    if own is not None and (own.outcome is CapacityVerdict.FITS or (capacity is None and not is_cuda)):
        return []
    held = own.replay.peak_reserved_nbytes if own is not None else None
    found = []

    def add(text: str, peak: int, fits: bool | None, needs: int, pool: int | None = None) -> None:
        helps = bool(fits) if capacity is not None else held is not None and peak <= held * (1 - MIN_GAIN)
        if helps:
            gain = None if held is None else held - peak
            found.append(Remedy(text=text, peak_nbytes=peak, gain_nbytes=gain, needs=needs, pool_nbytes=pool))

    for summary in summaries:
        replay, fits = summary.replay, summary.outcome is CapacityVerdict.FITS
        if summary is own:
            continue
        if replay.allocator == "expandable" and is_cuda:
            add(f"{VARIABLE}={replay.settings}", replay.peak_reserved_nbytes, fits, 0)
        elif replay.allocator == "caching" and is_cuda:
            text = f"{VARIABLE}={replay.settings}" if replay.settings else f"unset {VARIABLE}"
            add(text, replay.peak_reserved_nbytes, fits, 0)
        elif (chunk := _CHUNKS.get(replay.allocator)) and chunk % _GRANULE.get(stream.device.split(":")[0], 1) == 0:
            pool = pool_nbytes(stream, chunk)
            add(_command(stream, pool, chunk), replay.peak_reserved_nbytes, fits, 2, pool)
    for trial in tried if is_cuda else ():
        settings = trial.trial.settings
        text = f"{VARIABLE}={settings.text()}: {trial.trial.why}"
        if settings.garbage_collection_threshold and settings.per_process_memory_fraction is None:
            text += "; it takes effect after torch.cuda.set_per_process_memory_fraction(1.0)"
        add(text, trial.peak_reserved_nbytes, trial.fits, int(";" in text))
    return sorted(found, key=lambda r: (r.needs, r.peak_nbytes, r.text))


def advice(stream: Stream, options: list[Remedy], own: Summary | None, capacity: int | None) -> list[str]:
    """What to do, most useful first, in lines of text."""
    wanted = stream.wanted_nbytes
    if capacity is not None and wanted > capacity:
        missing = wanted - capacity
        first = (
            f"No allocator can fit this: {format_nbytes(wanted)} are live at once, {format_nbytes(missing)} more than "
            f"the capacity of {format_nbytes(capacity)}."
        )
        second = (
            f"Hold less at once: a smaller batch, checkpointing, or what keeps the rest outside: "
            f"{_outside(stream, own, capacity).line()}."
        )
        return [first, second]
    lines = []
    if own is not None and own.outcome is CapacityVerdict.FITS:
        spare = (capacity or 0) - own.replay.peak_reserved_nbytes
        lines.append(f"{own.replay.title}: it fits, with {format_nbytes(spare)} to spare.")
        if own.replay.num_retries:
            lines.append(
                f"But only after giving free segments back and asking again, {own.replay.num_retries} times; each one "
                "waits for the device."
            )
    if options:
        lines.append("What would have fitted:" if capacity is not None else "What would have held less:")
        lines += [f"  {option.line()}" for option in options]
        if any(VARIABLE in option.text for option in options):
            lines.append(OLDER_NAME)
    elif own is not None and own.outcome is CapacityVerdict.FAILS:
        lines.append(
            f"No setting fits, though only {format_nbytes(wanted)} are live at once. Hold less at "
            f"once, or keep the rest outside: {_outside(stream, own, capacity or 0).line()}."
        )
    elif own is not None and capacity is None and not stream.device.startswith("cuda"):
        pool = _command(stream, roomy_budget_nbytes(stream))
        lines.append(f"With less memory: `ooc fit {script_of(stream)}` finds the smallest budget that works.")
        lines.append(
            f"With enough of it: `{pool}` moves nothing, and gives no page back to the kernel from step to step; "
            "whether that saves time, `ooc run --diagnose` measures."
        )
    elif own is not None and capacity is None:
        lines.append("No setting tried holds less by 2 % or more.")
    return lines


def headline(stream: Stream, own: Summary | None, options: list[Remedy], capacity: int | None) -> str:
    """One line: why it failed and what would have fitted; or, where nothing failed, how much was lost."""
    if own is None:
        return f"At most {format_nbytes(stream.wanted_nbytes)} were live at once."
    failure = own.replay.failure
    if failure is None:
        return _fine(stream, own, capacity)
    place = origin_of(stream.stack(failure.buffer)).texts()[0]
    asked = f"Out of memory: {format_nbytes(failure.nbytes)} were asked for"
    asked += f" by {place}" if stream.stack(failure.buffer) else ""
    return f"{asked}. {_reason(stream, failure)} {_remedy(stream, options, own, failure)}"


def _fine(stream: Stream, own: Summary, capacity: int | None) -> str:
    held, live = own.peak.live_nbytes + own.peak.internal_nbytes + own.peak.external_nbytes, own.peak.live_nbytes
    lost = f"{format_nbytes(held)} held for {format_nbytes(live)} in use"
    share = f", {(held - live) / held:.0%} lost" if held else ""
    if capacity is None and not stream.device.startswith("cuda"):
        return (
            f"Nothing failed. At most {format_nbytes(stream.wanted_nbytes)} were live at once. (On a CPU the C library "
            "holds the memory; the rows of PyTorch's CUDA allocator say what that would have held.)"
        )
    if capacity is None:
        return f"Nothing failed. At its peak: {lost}{share}."
    again = "; a request failed when it was recorded, but not within this capacity" if stream.failures else ""
    return f"Fits in {format_nbytes(capacity)}. At its peak: {lost}{share}{again}."


def _reason(stream: Stream, failure: Failure) -> str:
    free = failure.reserved_nbytes - failure.allocated_nbytes
    left = max(failure.capacity_nbytes - failure.reserved_nbytes, 0)
    limit = "a memory fraction of at most " if is_below_device(stream) else ""
    of = f"{limit}{format_nbytes(failure.capacity_nbytes)}"
    if failure.allocated_nbytes + failure.nbytes > failure.capacity_nbytes:
        more = failure.allocated_nbytes + failure.nbytes - failure.capacity_nbytes
        return (
            f"Too much is live at once: {format_nbytes(failure.allocated_nbytes)} of {of} were in use, so "
            f"{format_nbytes(more)} are missing whatever the allocator does with the rest."
        )
    if free + left >= failure.nbytes and free > left:
        return (
            f"Fragmentation: {format_nbytes(free)} of the {format_nbytes(failure.reserved_nbytes)} held were free, "
            f"but in pieces of at most {format_nbytes(failure.largest_free_nbytes)}, and {format_nbytes(left)} of {of} "
            "were left to take."
        )
    return (
        f"The allocator needed {format_nbytes(failure.needed_nbytes)} more for it, and {format_nbytes(left)} of {of} "
        f"were left; {format_nbytes(free)} that it held were free, in pieces of at most "
        f"{format_nbytes(failure.largest_free_nbytes)}."
    )


def _remedy(stream: Stream, options: list[Remedy], own: Summary, failure: Failure) -> str:
    if options:
        return f"It would have fitted with {options[0].line()}."
    outside = f"keep the rest outside: {_outside(stream, own, failure.capacity_nbytes).line()}"
    if stream.wanted_nbytes > failure.capacity_nbytes:
        lack = stream.wanted_nbytes - failure.capacity_nbytes
        return f"No setting helps: hold {format_nbytes(lack)} less at once, or {outside}."
    return f"No setting tried helps: hold less at once, or {outside}."


def _outside(stream: Stream, own: Summary | None, capacity: int) -> Remedy:
    """A run within a budget that keeps in memory what fits, and the rest outside. The last resort: it costs time."""
    small = small_pools_nbytes(stream)
    budget = _within(stream, capacity - small)
    peak = budget + small
    gain = None if own is None else own.replay.peak_reserved_nbytes - peak
    return Remedy(text=_command(stream, budget), peak_nbytes=peak, gain_nbytes=gain, needs=2, pool_nbytes=budget)


def _command(stream: Stream, budget_nbytes: int, chunk_nbytes: int | None = None) -> str:
    device = " --device cuda" if stream.device.startswith("cuda") else ""
    chunk = "" if chunk_nbytes is None else f" --chunk {_typed(chunk_nbytes)}"
    return f"ooc run{device} --budget {_typed(budget_nbytes)}{chunk} {script_of(stream)}"


def _within(stream: Stream, capacity: int) -> int:
    """A budget for a pool where so much is left for it, less what else a device holds."""
    chunk = _GRANULE.get(stream.device.split(":")[0], _SMALLEST_CHUNK_NBYTES)
    return max((capacity - capacity // 16) // chunk, 1) * chunk


def _typed(nbytes: int) -> str:
    return f"{nbytes // MIB}MiB" if nbytes % MIB == 0 else f"{-(-nbytes // KIB)}KiB"


def script_of(stream: Stream) -> str:
    """The script's file as its stacks have it, where they do: the outermost frame of a module run as a program."""
    for buffer in range(min(stream.num_buffers, 200)):
        for frame in reversed(stream.stack(buffer)):
            name, _, place = frame.rpartition(" at ")
            if not name:
                place, _, name = frame.rpartition(": ")
                place = place.rpartition("(")[0] + ":0"
            path = place.rpartition(":")[0]
            if name == "<module>" and path.endswith(".py") and origin_of((frame,)).lines:
                return path
    return "train.py"
