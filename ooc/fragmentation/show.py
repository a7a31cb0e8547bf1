"""The report on a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ooc.fragmentation.analysis import CapacityVerdict, Summary, meets_record
from ooc.fragmentation.difference import Difference
from ooc.fragmentation.frames import Origin, op_of, origin_of
from ooc.fragmentation.report import Report
from ooc.units import format_nbytes
from vmm.printable import printable

PIPE_WIDTH = 120
"""Columns where the output is no terminal; the table has about 115."""

MAX_CULPRITS_SHOWN = 5
MAX_HOLDERS_SHOWN = 5
MAX_LINE_CHANGES_SHOWN = 8


def show(report: Report, console: Console, path: str) -> None:
    """Print the report: the answer in one line, the table, who holds memory, what is in the way, what to do."""
    stream = report.stream
    style = "bold red" if report.does_not_fit else "bold"
    console.print(f"[{style}]{_shown(report.headline)}[/]", soft_wrap=True, highlight=False)
    console.print(
        f"[bold]{_shown(path)}[/]: {_shown(stream.source)}, {_shown(stream.device)}", soft_wrap=True, highlight=False
    )
    console.print(
        f"{stream.num_events:,} events, {stream.num_buffers:,} buffers; most live at once "
        f"{format_nbytes(stream.wanted_nbytes)}; capacity {_capacity(report)}",
        soft_wrap=True,
        highlight=False,
    )
    for note in stream.notes:
        console.print(f"note: {_shown(note)}", soft_wrap=True, highlight=False)
    console.print(_table(report))
    for name, reason in report.missing.items():
        console.print(f"not shown: {name}: {_shown(reason)}", soft_wrap=True, highlight=False)
    own = report.reference_summary
    if own is not None:
        _show_record(own, report, console)
        _show_worst(own, report, console)
    if report.advice:
        console.print("\n[bold]What to do[/]")
        for line in report.advice:
            console.print(_shown(line), soft_wrap=True, highlight=False)


def show_difference(difference: Difference, console: Console, paths: tuple[str, str]) -> None:
    """Print what changed from one file to the other: the answer in one line, figures, lines of the program."""
    console.print(f"[bold]{_shown(difference.headline)}[/]", soft_wrap=True, highlight=False)
    console.print(f"before: {_shown(paths[0])}\nafter:  {_shown(paths[1])}", soft_wrap=True, highlight=False)
    if difference.settings:
        console.print(f"settings: {_shown(difference.settings)}", soft_wrap=True, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    for figure in difference.figures:
        text = format_nbytes if figure.is_nbytes else str
        table.add_row(figure.name, text(figure.before), text(figure.after), _signed(figure.before, figure.after, text))
    console.print(table)
    if difference.lines:
        console.print("\n[bold]Who holds more or less[/] (each at its worst moment)", highlight=False)
    for line in difference.lines[:MAX_LINE_CHANGES_SHOWN]:
        change = _signed(line.before_nbytes, line.after_nbytes, format_nbytes)
        console.print(
            f"  {change} ({format_nbytes(line.before_nbytes)}, then {format_nbytes(line.after_nbytes)})",
            soft_wrap=True,
            highlight=False,
        )
        _show_origin(line.origin, "", console)


def _signed(before: int, after: int, text: Callable[[int], str]) -> str:
    return "" if before == after else ("+" if after > before else "-") + text(abs(after - before))


def _shown(text: str) -> str:
    """Text of a file: neither markup of rich's nor an escape sequence of the terminal's."""
    return escape(printable(text))


def _capacity(report: Report) -> str:
    if report.capacity_nbytes is None:
        return "not given (--capacity SIZE judges)"
    source = {
        "recorded": " (as recorded: held + free on the device)",
        "limit": " (at most: the device had room when a request failed, so a memory fraction was set)",
    }
    return format_nbytes(report.capacity_nbytes) + source.get(report.capacity_source, "")


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("allocator", no_wrap=True)
    for column in ("peak held", "live then", "internal", "external", "largest free", "device calls", "map calls"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for summary in report.summaries:
        replay, peak = summary.replay, summary.peak
        part = "*" if replay.last_event - replay.first_event < report.stream.num_events else ""
        largest = "any" if peak.largest_free_nbytes is None else format_nbytes(peak.largest_free_nbytes)
        table.add_row(
            replay.allocator + part,
            format_nbytes(replay.peak_reserved_nbytes),
            format_nbytes(peak.live_nbytes),
            format_nbytes(peak.internal_nbytes),
            format_nbytes(peak.external_nbytes),
            largest,
            str(replay.num_device_allocs + replay.num_device_frees),
            str(replay.num_maps + replay.num_unmaps),
            _verdict(summary),
        )
    if any(s.replay.last_event - s.replay.first_event < report.stream.num_events for s in report.summaries):
        table.caption = "* only the part of the stream around its peak"
        table.caption_justify = "left"
    return table


def _verdict(summary: Summary) -> str:
    if summary.outcome is CapacityVerdict.UNKNOWN:
        return ""
    if summary.outcome is CapacityVerdict.FITS:
        retries = summary.replay.num_retries
        return "[green]fits[/]" + (f", {retries} retries" if retries else "")
    return "[red]does not fit[/]"


def _show_record(own: Summary, report: Report, console: Console) -> None:
    pairs = meets_record(own.replay, report.stream)
    if not pairs:
        return
    console.print(f"\n[bold]Against the file[/] (model '{own.replay.allocator}')")
    for name, (recorded, replayed) in pairs.items():
        if name.startswith("num_"):
            text = f"{recorded}, replayed {replayed}"
        elif recorded == replayed:
            text = f"{format_nbytes(recorded)}, replayed exactly"
        else:
            text = f"{format_nbytes(recorded)}, replayed {format_nbytes(replayed)}"
            text += f" ({(replayed - recorded) / recorded:+.2%})" if recorded else ""
        console.print(f"  {name.removesuffix('_nbytes').replace('_', ' ')}: {text}", soft_wrap=True, highlight=False)


def _show_worst(own: Summary, report: Report, console: Console) -> None:
    failure, worst = own.replay.failure, own.worst
    if failure is not None:
        console.print(f"\n[bold red]First request that does not fit[/] (event {failure.event_index:,})")
        console.print(
            f"  {format_nbytes(failure.nbytes)} asked for, {format_nbytes(failure.needed_nbytes)} needed at once; "
            f"held {format_nbytes(failure.reserved_nbytes)} of {format_nbytes(failure.capacity_nbytes)}, "
            f"of which {format_nbytes(failure.reserved_nbytes - failure.allocated_nbytes)} are free, but the largest "
            f"free block has {format_nbytes(failure.largest_free_nbytes)}",
            soft_wrap=True,
            highlight=False,
        )
        _show_origin(origin_of(stack := report.stream.stack(failure.buffer)), op_of(stack), console)
    if report.holders:
        console.print(
            f"\n[bold]What holds memory[/] after event {report.holders_event:,}", soft_wrap=True, highlight=False
        )
        for holder in report.holders[:MAX_HOLDERS_SHOWN]:
            console.print(
                f"  {_buffers(holder.num_buffers)}, {format_nbytes(holder.nbytes)}", soft_wrap=True, highlight=False
            )
            _show_origin(holder.origin, holder.op, console)
    if report.culprits:
        console.print(
            f"\n[bold]What lies between the free blocks[/] after event {worst.event_index:,} "
            f"({worst.num_holes} free blocks, {format_nbytes(worst.trapped_nbytes or 0)} of them trapped)",
            soft_wrap=True,
        )
        for culprit in report.culprits[:MAX_CULPRITS_SHOWN]:
            console.print(
                f"  {_buffers(culprit.num_buffers)}, {format_nbytes(culprit.nbytes)}, beside "
                f"{format_nbytes(culprit.adjoining_free_nbytes)} free",
                soft_wrap=True,
                highlight=False,
            )
            _show_origin(culprit.origin, culprit.op, console)


def _buffers(number: int) -> str:
    return "1 buffer" if number == 1 else f"{number:,} buffers"


def _show_origin(origin: Origin, op: str, console: Console) -> None:
    for text in origin.texts(op):
        console.print(f"    {_shown(text)}", soft_wrap=True, highlight=False)
