"""`ooc fragmentation FILE`: what became of the memory, and what would have fitted. Of two files: what changed.

Exit codes: 0 fine, 1 it would not fit in the capacity, 2 a bad file or a bad command line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ooc.units import parse_nbytes
from vmm.printable import printable

if TYPE_CHECKING:
    from ooc.fragmentation.report import Report
    from ooc.fragmentation.settings import CachingSettings

FINE, DOES_NOT_FIT, BAD = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on `parser`."""
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="+",
        help="a memory snapshot, a profiler trace, or a trace of ooc; of two files: what changed from one to the other",
    )
    parser.add_argument("--capacity", metavar="SIZE", help="what the device has, such as 16GiB (default: as recorded)")
    parser.add_argument(
        "--allocator",
        action="append",
        metavar="NAME",
        help="only this one; may be given several times (default: all; a wrong name lists them)",
    )
    parser.add_argument("--alloc-conf", metavar="TEXT", help="settings as in PYTORCH_ALLOC_CONF")
    parser.add_argument("--device", metavar="NAME", help="such as cuda:1 (default: the one with the highest peak)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--png", metavar="FILE", help="write a picture of the address space over time")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with its own arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="ooc fragmentation", description="See where memory went, and what would have fitted.", allow_abbrev=False
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(parsed: argparse.Namespace) -> int:
    """Run the command as parsed. Returns the exit code."""
    from ooc.fragmentation.allocators import ALLOCATORS
    from ooc.fragmentation.errors import BadFile
    from ooc.fragmentation.settings import BadSettings, parse_settings

    try:
        capacity = None if parsed.capacity is None else parse_nbytes(parsed.capacity, what="capacity")
        settings = None if parsed.alloc_conf is None else parse_settings(parsed.alloc_conf)
        unknown = [name for name in parsed.allocator or () if name not in ALLOCATORS]
        if unknown:
            raise BadSettings(f"no allocator {unknown[0]!r}. Options: {', '.join(ALLOCATORS)}")
    except ValueError as error:
        return _complain(str(error))
    try:
        names = tuple(dict.fromkeys(parsed.allocator or ALLOCATORS))
        if len(parsed.file) > 2:
            return _complain(f"{len(parsed.file)} files: it takes one, or two to compare")
        if len(parsed.file) == 2:
            return _compare(parsed, capacity, settings, names)
        return _report(parsed, capacity, settings, names)
    except BadFile as error:
        return _complain(str(error))


def _report(
    parsed: argparse.Namespace, capacity: int | None, settings: CachingSettings | None, names: tuple[str, ...]
) -> int:
    from rich.console import Console

    from ooc.fragmentation.report import to_document
    from ooc.fragmentation.show import PIPE_WIDTH, show

    (file,) = parsed.file
    with Console(stderr=True).status("") as status:
        report, devices = _made(file, parsed, capacity, settings, names, status.update)
        if parsed.png is not None:
            from ooc.fragmentation.picture import draw

            status.update("drawing")
            try:
                draw(report, Path(parsed.png))
            except OSError as error:
                return _complain(f"cannot write {parsed.png}: {error.strerror or error}")
    if parsed.json:
        print(json.dumps({"file": file, "devices": devices, **to_document(report)}, indent=1))
    else:
        show(report, Console(width=None if sys.stdout.isatty() else PIPE_WIDTH), file)
        others = ", ".join(name for name in devices if name != report.stream.device)
        if others:
            print(f"\nAlso in the file: {printable(others)} (--device NAME)")
        if parsed.png is not None:
            print(f"\nPicture: {parsed.png}")
    return DOES_NOT_FIT if report.does_not_fit else FINE


def _compare(
    parsed: argparse.Namespace, capacity: int | None, settings: CachingSettings | None, names: tuple[str, ...]
) -> int:
    """Two files: what changed. The exit code judges the second."""
    from rich.console import Console

    from ooc.fragmentation.difference import compare_reports, difference_document
    from ooc.fragmentation.report import to_document
    from ooc.fragmentation.show import PIPE_WIDTH, show_difference

    if parsed.png is not None:
        return _complain("--png draws one file")
    with Console(stderr=True).status("") as status:
        before, after = (_made(file, parsed, capacity, settings, names, status.update)[0] for file in parsed.file)
    difference = compare_reports(before, after)
    if parsed.json:
        documents = [{"file": f, **to_document(r)} for f, r in zip(parsed.file, (before, after), strict=True)]
        changed = difference_document(difference)
        print(json.dumps({"before": documents[0], "after": documents[1], "changed": changed}, indent=1))
    else:
        console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
        show_difference(difference, console, (parsed.file[0], parsed.file[1]))
    return DOES_NOT_FIT if after.does_not_fit else FINE


def _made(
    file: str,
    parsed: argparse.Namespace,
    capacity: int | None,
    settings: CachingSettings | None,
    names: tuple[str, ...],
    update: Callable[[str], None],
) -> tuple[Report, list[str]]:
    """The report on a file, and the devices that are in it. Raises `BadFile`."""
    from rich.markup import escape

    from ooc.fragmentation.errors import BadFile
    from ooc.fragmentation.readers import read_streams
    from ooc.fragmentation.report import make_report

    update(f"reading {escape(printable(file))}")
    named = {stream.device: stream for stream in read_streams(file)}
    if parsed.device is not None and parsed.device not in named:
        raise BadFile(f"no device {parsed.device!r} in it. Options: {', '.join(named)}", path=file)
    stream = named[parsed.device] if parsed.device else max(named.values(), key=lambda s: s.wanted_nbytes)
    report = make_report(
        stream,
        names=names,
        capacity=capacity,
        settings=settings,
        progress=lambda what: update(f"replaying: {what}"),
    )
    return report, list(named)


def _complain(message: str) -> int:
    print(f"ooc fragmentation: {printable(message)}", file=sys.stderr)
    return BAD
