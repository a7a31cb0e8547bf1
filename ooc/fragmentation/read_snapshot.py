"""Reads what `torch.cuda.memory._dump_snapshot` writes (torch 2.1 to 2.13).

The file is the pickle of a dict. `device_traces` has, per device, what the allocator did, oldest
first: `alloc` and `free_requested` / `free_completed` (the second may come later, when another
CUDA stream still used the block), `segment_alloc` / `segment_free` (cudaMalloc, cudaFree),
`segment_map` / `segment_unmap` (expandable segments), `oom`, `snapshot`. Sizes of allocs and frees
are as requested; of an `oom`, rounded. `segments` has every segment and its blocks at the end.

Device memory that goes back in mid-run is an act of the program (`empty_cache`) or of the device's limit, which
a replay cannot know of: it becomes an event of the stream. Where a request for device memory follows at once, the
request was the reason, and it is noted as one that was made again.

The trace is a ring: a long run has lost its beginning. Going backwards from the segments at the end
gives those at the beginning; blocks without an `alloc` event were there before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ooc.fragmentation.errors import BadFile
from ooc.fragmentation.ranges import Ranges
from ooc.fragmentation.segments import SMALL_NBYTES, round_request
from ooc.fragmentation.settings import BadSettings, CachingSettings, recorded_settings
from ooc.fragmentation.stream import InitialLayout, OutOfMemory, PrivatePool, Recorded, Segment, Stream, StreamBuilder
from ooc.fragmentation.unpickler import load_plain

SOURCE = "PyTorch CUDA memory snapshot"
MIN_EVENT_NBYTES = 8
"""A trace event takes over twenty bytes of the file; one list counted many times over takes two each time."""
MAX_FRAMES = 512
"""Of a stack, the innermost: the user's lines may lie behind thirty of torch's and a hundred of a library's."""
_GIVES_BACK = ("segment_free", "segment_unmap")
_TAKES = ("segment_alloc", "segment_map")
_EMPTY_CACHE = ("empty_cache", "THCPModule_emptyCache(_object*, _object*)")


def read_snapshot(data: bytes) -> list[Stream]:
    """The streams of all devices that did anything. Raises `BadFile`."""
    document = load_plain(data)
    if isinstance(document, list):
        raise BadFile(
            "the pickle is a list: torch.cuda.memory_snapshot() returns the segments only, and torch before 2.1 "
            "dumped them so. Use torch.cuda.memory._record_memory_history() and _dump_snapshot(FILE)."
        )
    if not isinstance(document, dict):
        raise BadFile(f"the pickle is a {type(document).__name__}, not a memory snapshot, which is a dict")
    for key in ("segments", "device_traces"):
        if not isinstance(document.get(key), list):
            found = ", ".join(sorted(document)[:8])
            raise BadFile(f"the pickle is not a memory snapshot: it has no list {key!r}, but {found or 'nothing'}")
    traces = document["device_traces"]
    num_events = sum(len(trace) for trace in traces if isinstance(trace, list))
    if num_events > len(data) // MIN_EVENT_NBYTES:
        raise BadFile(f"the pickle of {len(data)} bytes claims {num_events} events: it refers to one list many times")
    settings = _settings(document.get("allocator_settings"))
    by_device: dict[int, list[dict[str, Any]]] = {}
    for index, segment in enumerate(document["segments"]):
        _segment_blocks(segment, index)
        by_device.setdefault(segment.get("device", 0), []).append(segment)
    streams = []
    for device in range(max(len(traces), *(d + 1 for d in by_device), 0) if by_device else len(traces)):
        trace = traces[device] if device < len(traces) else []
        if trace or by_device.get(device):
            if not isinstance(trace, list):
                raise BadFile(f"device_traces[{device}] is a {type(trace).__name__}, not a list")
            streams.append(_DeviceReader(device, trace, by_device.get(device, []), settings).read())
    if not streams:
        raise BadFile(
            "the snapshot is empty: no device has a trace or a segment. Call "
            "torch.cuda.memory._record_memory_history() before the work and _dump_snapshot() after it."
        )
    return streams


@dataclass(slots=True, kw_only=True)
class _Counts:
    """What the trace says of device memory, going forward."""

    reserved: int
    peak: int
    num_allocs: int = 0
    num_frees: int = 0
    num_emptied: int = 0
    unknown: dict[str, int] = field(default_factory=dict)


class _DeviceReader:
    """One device's trace and segments, to one stream."""

    def __init__(
        self, device: int, trace: list[Any], segments: list[dict[str, Any]], settings: CachingSettings | None
    ) -> None:
        self.device = device
        self.trace = trace
        self.segments = segments
        self.settings = settings
        self.builder = StreamBuilder()
        # Expandable segments are never picked: pages go back only where everything does.
        self._frees_by_itself = (
            settings is not None
            and not settings.expandable_segments
            and (settings.garbage_collection_threshold > 0 or settings.max_split_nbytes is not None)
        )
        self._is_retry = False
        self._going: list[int] = []  # segments on their way back, as numbers
        self._going_from: set[tuple[int, ...]] = set()  # and their pools
        self._returned: dict[int, tuple[int, ...]] = {}
        self._gone: dict[tuple[int, ...], int] = {}
        self.failures: list[OutOfMemory] = []
        self.end_reserved = sum(segment["total_size"] for segment in segments)
        self.start_segments = self._rewind()
        self._numbers = {address: number for number, address in enumerate(self.start_segments or (), start=1)}
        self._num_segments = len(self._numbers)
        start = self._start_reserved()
        self.adds_up = start >= 0
        self.counts = _Counts(reserved=max(start, 0), peak=max(start, 0))

    def read(self) -> Stream:
        self._forward()
        end_live = self._blocks_without_event()
        builder, counts = self.builder, self.counts
        nbytes, pool, kind, buffer, order, addresses = builder.finish()
        new_index = {int(old): new for new, old in enumerate(order)}
        shift = len(addresses)
        failures = tuple(
            OutOfMemory(
                event_index=f.event_index + shift,
                nbytes=f.nbytes,
                device_free_nbytes=f.device_free_nbytes,
                reserved_nbytes=f.reserved_nbytes,
            )
            for f in self.failures
        )
        sites = [builder.site[i] for i in order]
        initial = self._initial(addresses, nbytes[:shift].tolist(), order[:shift].tolist())
        is_complete = self.start_segments is not None and (initial is not None or not self.start_segments)
        return Stream(
            source=SOURCE,
            device=f"cuda:{self.device}",
            kind=kind,
            buffer=buffer,
            nbytes=nbytes,
            pool=pool,
            num_initial=shift,
            initial=initial,
            attempts=frozenset(new_index[i] for i in builder.attempts),
            failures=failures,
            retried=frozenset(new_index[i] for i in builder.retried),
            returned={new_index[i]: numbers for i, numbers in self._returned.items()} if is_complete else {},
            private={
                number: PrivatePool(
                    gone_event=self._gone.get(owner, builder.num_events) + shift,
                    is_graph=owner[0] != 0,
                )
                for (_, owner), number in builder.pool_numbers()
                if any(owner)
            },
            recorded=Recorded(
                peak_reserved_nbytes=counts.peak if self.adds_up else None,
                end_live_nbytes=end_live,
                end_reserved_nbytes=self.end_reserved,
                num_device_allocs=counts.num_allocs,
                num_device_frees=counts.num_frees,
            ),
            settings=self.settings,
            stack=_stack_reader(sites),
            notes=self._notes(shift),
        ).validate()

    # -- the trace -----------------------------------------------------------------------------

    def _rewind(self) -> dict[int, tuple[int, dict[str, Any]]] | None:
        """Segments before the first event, by address; None if it does not add up.

        The dict beside each size is the segment or event that says its stream and pool. Of expandable segments, what
        was mapped.
        """
        held = Ranges()
        for segment in self.segments:
            if not held.add(segment["address"], segment["total_size"], _whole(segment), segment):
                return None
        for event in reversed(self.trace):
            action = event.get("action") if isinstance(event, dict) else None
            if action in _TAKES or action in _GIVES_BACK:
                address, size = event.get("addr"), event.get("size")
                if not isinstance(address, int) or not isinstance(size, int):
                    return None
                did = held.take(address, size) if action in _TAKES else held.add(address, size, _whole(event), event)
                if not did:
                    return None
        return {address: (size, about) for address, size, about in held.items()}

    def _start_reserved(self) -> int:
        """Bytes held before the first event; negative if the trace and the segments do not belong together."""
        held: int = self.end_reserved
        for event in self.trace:
            action = event.get("action") if isinstance(event, dict) else None
            size = event.get("size") if action in _GIVES_BACK or action in _TAKES else 0
            if not isinstance(size, int):
                return -1
            held += size if action in _GIVES_BACK else -size
        return held

    def _forward(self) -> None:
        builder, counts, trace = self.builder, self.counts, self.trace
        num_events = len(trace)
        for index, event in enumerate(trace):
            try:
                action = event["action"]
                if action == "alloc":
                    buffer = builder.alloc(event["addr"], event["size"], _pool(event), event.get("frames"))
                    if self._is_retry:
                        builder.retried.append(buffer)
                        self._is_retry = False
                    self._asked_by(buffer)
                elif action == "free_completed":
                    builder.free(event["addr"], event["size"], _pool(event))
                elif action == "free_requested":
                    following = trace[index + 1] if index + 1 < num_events else None
                    at_once = (
                        following is not None
                        and following["action"] == "free_completed"
                        and following["addr"] == event["addr"]
                    )
                    if not at_once:
                        builder.release(event["addr"])
                else:
                    self._other(action, event, counts)
                    if action in _GIVES_BACK:
                        self._gave_back(index)
            except (KeyError, TypeError, AttributeError) as error:
                raise BadFile(
                    f"event {index} of device_traces[{self.device}] is not one that PyTorch writes: "
                    f"{type(error).__name__}: {error}"
                ) from None

    def _gave_back(self, index: int) -> None:
        """Note what event `index`, which gives device memory back, says, if it is the last of several in succession.

        Then everything cached has gone back, unless the allocator picks some by itself, as its settings may tell it
        to when it needs a new segment. A failed request needs no note: a replay finds it by itself.
        """
        trace = self.trace
        self._going.append(self._numbers.pop(trace[index]["addr"], 0))
        self._going_from.add(_owner(trace[index]))
        following = trace[index + 1]["action"] if index + 1 < len(trace) else None
        if following in _GIVES_BACK or following == "oom":
            return
        if not any(frame.get("name") in _EMPTY_CACHE for frame in trace[index].get("frames") or ()):
            if following in _TAKES and self._frees_by_itself:
                return
            # A graph's own requests are never the reason: nothing goes back while one is captured.
            self._is_retry = following in _TAKES and not _owner(trace[index + 1])[0]
        self._all_went()
        self.builder.empty()
        self.counts.num_emptied += 1

    def _all_went(self, event_index: int | None = None) -> None:
        """What is on its way back is all that was free: private pools among it are no longer used."""
        for owner in self._going_from:
            if any(owner):
                self._gone.setdefault(owner, self.builder.num_events if event_index is None else event_index)
        self._going.clear()
        self._going_from.clear()

    def _asked_by(self, buffer: int) -> None:
        """Note the segments on their way back as given back for this request."""
        if self._going:
            self._returned[buffer] = tuple(self._going)
            self._going.clear()
            self._going_from.clear()

    def _other(self, action: str, event: Mapping[str, Any], counts: _Counts) -> None:
        if action in ("segment_alloc", "segment_map"):
            counts.reserved += event["size"]
            counts.peak = max(counts.peak, counts.reserved)
            counts.num_allocs += 1
            self._num_segments += 1
            self._numbers[event["addr"]] = self._num_segments
        elif action in ("segment_free", "segment_unmap"):
            counts.reserved -= event["size"]
            counts.num_frees += 1
        elif action == "oom":
            at = self.builder.attempt(event["size"], _pool(event), event.get("frames"))
            if _owner(event)[0]:  # while a graph is captured, not everything goes back
                self._asked_by(self.builder.attempts[-1])
            else:
                self._going_from.discard(_owner(event))  # of its own pool, blocks may go while it is in use
                self.builder.retried.append(self.builder.attempts[-1])
                self._all_went(at)
            self.failures.append(
                OutOfMemory(
                    event_index=at,
                    nbytes=event["size"],
                    device_free_nbytes=event.get("device_free"),
                    reserved_nbytes=counts.reserved,
                )
            )
        elif action != "snapshot":
            counts.unknown[str(action)] = counts.unknown.get(str(action), 0) + 1

    def _blocks_without_event(self) -> int:
        """Add the blocks at the end that no event made. Returns the requested bytes of all active blocks."""
        end_live = 0
        for segment in self.segments:
            for address, block in _blocks(segment):
                if block["state"] == "inactive":
                    continue
                requested = block.get("requested_size", block["size"])
                end_live += requested
                if address not in self.builder.live:
                    self.builder.older(address, requested, _pool(segment), block.get("frames"))
        return end_live

    # -- where things lay at the beginning -----------------------------------------------------

    def _initial(self, addresses: list[int], sizes: list[int], buffers: Sequence[int]) -> InitialLayout | None:
        if self.start_segments is None or not self.start_segments:
            return None
        starts = list(self.start_segments)
        known = {a: block["size"] for segment in self.segments for a, block in _blocks(segment)}
        settings = self.settings or CachingSettings()
        taken = []
        reached = 0
        for position, (address, nbytes) in enumerate(zip(addresses, sizes, strict=True)):
            at = bisect_right(starts, address) - 1
            if at < 0 or address < reached:
                return None
            stop = starts[at] + self.start_segments[starts[at]][0]
            following = addresses[position + 1] if position + 1 < len(addresses) else stop
            size = round_request(nbytes, settings)
            # Where the block is still there at the end its real size is known, unsplit rest included.
            if known.get(address, 0) >= size and self.builder.live.get(address) == buffers[position]:
                size = known[address]
            if address + size > min(stop, max(following, address + 1)):
                return None
            taken.append(size)
            reached = address + size
        return InitialLayout(
            segments=tuple(
                Segment(
                    address=address,
                    nbytes=size,
                    is_small=_is_small(about, size, settings),
                    pool=self.builder.pool_number(_pool(about)),
                    is_expandable=_is_expandable(about),
                )
                for address, (size, about) in self.start_segments.items()
            ),
            address=tuple(addresses),
            block_nbytes=tuple(taken),
        )

    def _notes(self, num_older: int) -> tuple[str, ...]:
        notes = []
        if num_older:
            notes.append(
                f"{num_older} buffers are older than the recording; what happened before it is not known. For the "
                "whole story call _record_memory_history() at the start, with a large max_entries."
            )
        if not self.trace:
            notes.append("no history was recorded: this is a still picture of the end")
        if self.counts.num_emptied:
            notes.append(
                f"{self.counts.num_emptied} times all cached memory went back (empty_cache(), or the device was full): "
                "in the replays it does so, too"
            )
        if self.builder.num_lost_frees:
            notes.append(f"{self.builder.num_lost_frees} frees are missing: an address was handed out twice")
        for action, count in sorted(self.counts.unknown.items()):
            notes.append(f"{count} events of the unknown kind {action!r} were passed over")
        return tuple(notes)


def _settings(document: Any) -> CachingSettings | None:
    if not isinstance(document, Mapping):
        return None
    try:
        return recorded_settings(document)
    except (BadSettings, ValueError, TypeError) as error:
        raise BadFile(f"the snapshot's allocator_settings cannot be read: {error}") from None


def _segment_blocks(segment: Any, index: int) -> None:
    """Check the shape of one entry of `segments`. Raises `BadFile`."""
    try:
        whole = segment["total_size"]
        parts = sum(block["size"] for block in segment["blocks"])
        if not isinstance(segment["address"], int) or not isinstance(segment.get("device", 0), int):
            raise TypeError("address and device must be int")
        if not 0 <= segment.get("device", 0) < 1024:
            raise TypeError(f"device {segment['device']} is out of range")
        for block in segment["blocks"]:
            if block["state"] not in ("active_allocated", "active_awaiting_free", "active_pending_free", "inactive"):
                raise BadFile(f"segments[{index}] has a block in the unknown state {block['state']!r}")
    except (KeyError, TypeError, AttributeError) as error:
        raise BadFile(f"segments[{index}] is not one that PyTorch writes: {type(error).__name__}: {error}") from None
    if parts != whole:
        raise BadFile(f"segments[{index}] has {whole} bytes, but its blocks have {parts}")


def _blocks(segment: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """`(address, block)`; torch before 2.1 left the address out."""
    found, at = [], segment["address"]
    for block in segment["blocks"]:
        found.append((at, block))
        at += block["size"]
    return found


def _pool(event: Mapping[str, Any]) -> tuple[Any, tuple[int, ...]]:
    """CUDA stream and private pool: blocks are never handed from one to another."""
    return event.get("stream", 0), _owner(event)


def _owner(event: Mapping[str, Any]) -> tuple[int, ...]:
    """The private pool: `(n, 0)` of one graph, `(0, n)` of a MemPool or of several graphs; else `(0, 0)`."""
    private = event.get("pool_id") or event.get("segment_pool_id")
    return tuple(private) if isinstance(private, (tuple, list)) and len(private) == 2 else (0, 0)


def _is_expandable(about: Mapping[str, Any]) -> bool:
    return about.get("is_expandable") is True or about.get("action") == "segment_unmap"


def _whole(about: Mapping[str, Any]) -> object:
    """Equal for what may be one range: pages of the same pool. Segments of cudaMalloc never join."""
    return _pool(about) if _is_expandable(about) else object()


def _is_small(about: Mapping[str, Any], nbytes: int, settings: CachingSettings) -> bool:
    kind = about.get("segment_type")
    if kind is not None:
        return bool(kind == "small")
    return nbytes % settings.large_segment_nbytes != 0 if _is_expandable(about) else nbytes <= 2 * SMALL_NBYTES


def _stack_reader(sites: list[object]) -> Callable[[int], tuple[str, ...]]:
    texts: dict[int, str] = {}  # the file has one object for each frame, and many stacks with it

    def text(frame: object) -> str:
        known = texts.get(id(frame))
        if known is None:
            known = texts[id(frame)] = _frame_text(frame)
        return known

    def stack(buffer: int) -> tuple[str, ...]:
        frames = sites[buffer]
        if not isinstance(frames, list):
            return ()
        return tuple(map(text, frames[:MAX_FRAMES]))

    return stack


def _frame_text(frame: Any) -> str:
    if not isinstance(frame, Mapping):
        return "?"
    name, place, line = frame.get("name"), frame.get("filename"), frame.get("line")
    if isinstance(line, int) and line > 0 and isinstance(place, str) and place:
        return f"{name} at {place}:{line}"
    return str(name)[:400]
