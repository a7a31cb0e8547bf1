"""The allocators that the report compares, by name, and the trials of other settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from ooc.fragmentation.caching import replay_caching
from ooc.fragmentation.planned import PLANNERS, replay_chunked, replay_planner
from ooc.fragmentation.replay import Model, NotApplicable, Replay
from ooc.fragmentation.settings import CachingSettings
from ooc.fragmentation.stream import Stream
from ooc.units import KIB, MIB

_CHUNKS = {"chunked-64KiB": 64 * KIB, "chunked-2MiB": 2 * MIB, "chunked-20MiB": 20 * MIB}
ALLOCATORS = ("caching", "expandable", *PLANNERS, *_CHUNKS)
"""Names on the command line."""
MAX_TRIAL_EVENTS = 200_000
"""Longer streams are not replayed again under other settings: a second or two for each trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Settings that may help, and why they may."""

    settings: CachingSettings
    why: str


def model(name: str, settings: CachingSettings) -> Model:
    """The model called `name`; `settings` are PyTorch's, and matter to its two allocators only.

    Raises:
        ValueError: No allocator has this name.
    """
    if name == "caching":
        return partial(replay_caching, settings=replace(settings, expandable_segments=False), name=name)
    if name == "expandable":
        chosen = settings
        if not settings.expandable_segments:
            # What is meant is the setting alone: the others are about segments that this one does away with.
            chosen = replace(
                settings, expandable_segments=True, max_split_nbytes=None, garbage_collection_threshold=0.0
            )
        return partial(replay_caching, settings=chosen, name=name)
    if name in PLANNERS:
        return partial(replay_planner, name=name)
    if name in _CHUNKS:
        return partial(replay_chunked, chunk_nbytes=_CHUNKS[name], name=name)
    raise ValueError(f"no allocator {name!r}. Options: {', '.join(ALLOCATORS)}")


def trials(settings: CachingSettings) -> Iterator[Trial]:
    """Settings of the caching allocator worth trying when it does not do well."""
    base = replace(settings, expandable_segments=False)
    for mebibytes in (512, 128, 32):
        yield Trial(
            settings=replace(base, max_split_nbytes=mebibytes * MIB),
            why=f"blocks of {mebibytes} MiB and more stay whole, so that they can be given back",
        )
    yield Trial(
        settings=replace(base, roundup_power2_divisions=(8,) * 16),
        why="sizes that differ a little share blocks",
    )
    yield Trial(
        settings=replace(base, garbage_collection_threshold=0.8),
        why="old free segments go back before the device is full",
    )


Progress = Callable[[str], None]


def replay_all(
    stream: Stream,
    names: tuple[str, ...],
    settings: CachingSettings,
    capacity: int | None,
    progress: Progress = lambda _: None,
) -> tuple[list[Replay], dict[str, str]]:
    """Replay `stream` through the named allocators. Returns the replays, and why others are missing."""
    replays, missing = [], {}
    for name in names:
        progress(name)
        try:
            replays.append(model(name, settings)(stream, capacity))
        except NotApplicable as error:
            missing[name] = str(error)
    return replays, missing
