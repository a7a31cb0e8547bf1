"""Reads the Chrome trace that `torch.profiler` writes with `profile_memory=True`, plain or gzip.

Each allocation and free is an instant event `[memory]`: 'Bytes' (negative for a free), 'Addr',
'Device Type' (0 CPU, 1 CUDA), 'Device Id', and the running 'Total Allocated', which is the truth
that a replay is held against. The file is read event by event, so its size costs time, not memory.

What the allocation was for comes from the operators and, with `with_stack=True`, the Python
functions that were running on the same thread at that moment.

`[OutOfMemory]` is a request that failed; a replay tries it again.

On CUDA, 'Bytes' is the block, rounding included, not the request; internal fragmentation of the
real run is therefore already in it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ooc.fragmentation.errors import BadFile
from ooc.fragmentation.line_notes import with_lines
from ooc.fragmentation.stream import OutOfMemory, Recorded, Stream, StreamBuilder

SOURCE = "Chrome trace of torch.profiler"
PIECE_CHARS = 1 << 20
MAX_ITEM_CHARS = 1 << 26
"""Longest single entry; an event has a few hundred characters, the longest header list a few thousand."""
MAX_FRAMES = 512
_DEVICE_NAMES = {0: "cpu", 1: "cuda", 20: "privateuse1", 12: "xpu", 13: "mps"}

# Time, sequence, device key, thread key, bytes, address, total allocated, total reserved.
_Event = tuple[float, int, int, int, int, int, int, int]
_FAILED = -2
"""Stands for the address of a request that failed."""


def top_level_items(path: Path) -> Iterator[tuple[str, Any]]:
    """The entries of the JSON object in `path`: `(key, value)`, where lists of objects come item by item.

    A file that is itself a list gives its items under the key "traceEvents". Raises `BadFile`.
    """
    with open(path, "rb") as raw:
        is_gzip = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rt", encoding="utf-8") if is_gzip else open(path, encoding="utf-8") as text:
            yield from _Reader(text).items()
    except UnicodeDecodeError as error:
        raise BadFile(f"not text: byte {error.start} is not UTF-8") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadFile(f"the gzip file is damaged or cut off: {error}") from None


def read_kineto(path: Path) -> list[Stream]:
    """The streams of all devices with memory events. Raises `BadFile`."""
    memory: list[_Event] = []
    spans: dict[tuple[Any, Any], list[tuple[float, float, str]]] = {}
    threads: dict[tuple[Any, Any], int] = {}
    num_events = 0
    for key, value in top_level_items(path):
        if key != "traceEvents":
            continue
        num_events += 1
        if not isinstance(value, dict):
            raise BadFile(f"traceEvents[{num_events - 1}] is a {type(value).__name__}, not an object")
        try:
            thread = (value.get("pid"), value.get("tid"))
            if value.get("name") in ("[memory]", "[OutOfMemory]"):
                memory.append(_memory_event(value, len(memory), threads.setdefault(thread, len(threads))))
            elif value.get("cat") in ("cpu_op", "python_function", "user_annotation") and value.get("ph") == "X":
                start = float(value["ts"])
                spans.setdefault(thread, []).append((start, start + float(value.get("dur", 0)), str(value["name"])))
        except (KeyError, TypeError, ValueError) as error:
            raise BadFile(
                f"traceEvents[{num_events - 1}] is not one that torch.profiler writes: {type(error).__name__}: {error}"
            ) from None
    if not memory:
        what = f"{num_events} events, none of them '[memory]'" if num_events else "no traceEvents"
        raise BadFile(
            f"the trace has {what}. Profile with torch.profiler.profile(profile_memory=True) and "
            "export_chrome_trace(FILE)."
        )
    memory.sort()
    stacks = _stacks(memory, {threads[t]: s for t, s in spans.items() if t in threads})
    return [
        _device_stream(device, [(event, stacks.get(event[1], ())) for event in memory if event[2] == device])
        for device in sorted({event[2] for event in memory})
    ]


def _memory_event(value: dict[str, Any], sequence: int, thread: int) -> _Event:
    arguments = value["args"]
    kind, index = int(arguments["Device Type"]), int(arguments.get("Device Id", -1))
    address = _FAILED if value["name"] == "[OutOfMemory]" else arguments["Addr"]
    numbers = [arguments["Bytes"], address, arguments.get("Total Allocated", 0), arguments.get("Total Reserved", 0)]
    if set(map(type, numbers)) != {int} or not 0 <= kind < 256 or not -1 <= index < 1024:
        raise ValueError(f"Bytes, Addr and totals are {numbers}, device {kind}:{index}")
    return (float(value["ts"]), sequence, kind * 4096 + index + 1, thread, *numbers)


def _device_stream(device: int, events: list[tuple[_Event, tuple[str, ...]]]) -> Stream:
    builder = StreamBuilder()
    kind, index = device // 4096, device % 4096 - 1
    first = events[0][0]
    # Live before the first event, by the profiler's own count.
    base = first[6] - (first[4] if first[5] != _FAILED else 0)
    total, peak, mismatches, held, at_failure = base, base, 0, 0, []
    for (_, _, _, _, nbytes, address, recorded_total, reserved), stack in events:
        held = max(held, reserved)
        if address == _FAILED:
            at_failure.append((builder.attempt(nbytes, site=stack), nbytes, reserved))
            continue
        if nbytes > 0:
            builder.alloc(address, nbytes, site=stack)
        elif nbytes < 0:
            builder.free(address, -nbytes)
        total += nbytes
        mismatches += recorded_total != total
        peak = max(peak, recorded_total)
    unseen = base - builder.older_nbytes
    if unseen > 0:  # live before, and still at the end: the file says only how much
        builder.older(-1, unseen, site=("allocated before the profiler started",))
    nbytes_, pool, kinds, buffers, order, addresses = builder.finish()
    sites = [builder.site[i] for i in order]
    name = _DEVICE_NAMES.get(kind, f"device type {kind}")
    notes = []
    if name == "cpu":
        notes.append("a CPU's memory: the models say what their allocators would make of this stream")
    else:
        notes.append("the profiler records blocks as PyTorch's allocator rounded them, not the requests")
    if addresses:
        notes.append(f"{base} bytes are older than the profile")
    if unseen < 0:
        notes.append(f"buffers of {-unseen} bytes were freed that the profiler never counted")
    if mismatches:
        notes.append(f"{mismatches} of {len(events)} running totals differ: threads allocated at the same moment")
    if builder.num_lost_frees:
        notes.append(f"{builder.num_lost_frees} frees are missing: an address was handed out twice")
    new_index = {int(old): new for new, old in enumerate(order)}
    return Stream(
        source=SOURCE,
        device=name if index < 0 else f"{name}:{index}",
        kind=kinds,
        buffer=buffers,
        nbytes=nbytes_,
        pool=pool,
        num_initial=len(addresses),
        attempts=frozenset(new_index[buffer] for buffer in builder.attempts),
        failures=tuple(
            OutOfMemory(
                event_index=at + len(addresses), nbytes=nbytes, device_free_nbytes=None, reserved_nbytes=reserved
            )
            for at, nbytes, reserved in at_failure
        ),
        recorded=Recorded(
            peak_live_nbytes=peak, end_live_nbytes=events[-1][0][6], peak_reserved_nbytes=held if held else None
        ),
        stack=_stack_reader(sites),
        notes=tuple(notes),
    ).validate()


def _stack_reader(sites: list[Any]) -> Callable[[int], tuple[str, ...]]:
    return lambda buffer: sites[buffer] or ()


def _stacks(memory: list[_Event], spans: dict[int, list[tuple[float, float, str]]]) -> dict[int, tuple[str, ...]]:
    """Per allocation (by sequence number), what was running on its thread, innermost first."""
    found: dict[int, tuple[str, ...]] = {}
    shared: dict[tuple[str, ...], tuple[str, ...]] = {}
    for thread, running in spans.items():
        running.sort(key=lambda span: (span[0], -span[1]))
        events = (event for event in memory if event[3] == thread and event[4] > 0)
        begun: list[tuple[float, float, str]] = []
        position = 0
        for event in events:
            now = event[0]
            while position < len(running) and running[position][0] <= now:
                while begun and begun[-1][1] < running[position][0]:
                    begun.pop()
                begun.append(running[position])
                position += 1
            while begun and begun[-1][1] < now:
                begun.pop()
            # Spans nest, but for rounding: one that ended within an outer one that goes on is left out.
            names = with_lines(name for _, stop, name in reversed(begun[-MAX_FRAMES:]) if stop >= now)
            found[event[1]] = shared.setdefault(names, names)
    return found


class _Reader:
    """Reads a JSON text in pieces, one entry at a time."""

    def __init__(self, text: IO[str]) -> None:
        self.text = text
        self.buffer = ""
        self.position = 0
        self.consumed = 0  # characters before the buffer
        self.is_over = False
        self.decode = json.JSONDecoder().raw_decode

    def items(self) -> Iterator[tuple[str, Any]]:
        opening = self._character()
        if opening == "[":
            for item in self._list():
                yield "traceEvents", item
        elif opening == "{":
            yield from self._object()
        else:
            raise BadFile("not JSON: it begins with neither { nor [")
        if self._peek():
            raise self._error("something follows the end of the JSON text")

    def _object(self) -> Iterator[tuple[str, Any]]:
        if self._peek() == "}":
            self.position += 1
            return
        while True:
            key = self._value()
            if not isinstance(key, str) or self._character() != ":":
                raise self._error("not JSON: a key and a colon were expected")
            if self._peek() == "[":
                self.position += 1
                for item in self._list():
                    yield key, item
            else:
                yield key, self._value()
            if self._next_is("}"):
                return

    def _list(self) -> Iterator[Any]:
        if self._peek() == "]":
            self.position += 1
            return
        while True:
            yield self._value()
            if self._next_is("]"):
                return

    def _next_is(self, closing: str) -> bool:
        character = self._character()
        if character not in (",", closing):
            raise self._error(f"not JSON, or cut off: ',' or '{closing}' was expected, not {character!r}")
        return character == closing

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, stop = self.decode(self.buffer, self.position)
                # A number at the end of what was read may go on in the next piece.
                if stop < len(self.buffer) or self.is_over:
                    self.position = stop
                    return value
            except (json.JSONDecodeError, RecursionError) as error:
                if isinstance(error, RecursionError) or self.is_over or len(self.buffer) > MAX_ITEM_CHARS:
                    raise self._error("not JSON, or cut off within an entry") from None
            self._more()

    def _character(self) -> str:
        character = self._peek()
        self.position += 1
        return character

    def _peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self.position < len(self.buffer) and self.buffer[self.position] in " \t\r\n":
                self.position += 1
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if self.is_over:
                return ""
            self._more()

    def _more(self) -> None:
        # At least doubled, so that a long entry is not decoded once per piece.
        piece = self.text.read(max(PIECE_CHARS, len(self.buffer) - self.position))
        self.is_over = not piece
        self.consumed += self.position
        self.buffer = self.buffer[self.position :] + piece
        self.position = 0

    def _error(self, message: str) -> BadFile:
        return BadFile(f"{message} (at character {self.consumed + self.position})")
