"""The settings of PyTorch's caching allocator, as `PYTORCH_ALLOC_CONF` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ooc.units import MIB

NUM_DIVISION_CLASSES = 16
"""`roundup_power2_divisions` has one entry for each power of two from 1 MiB; the last also holds for all above."""


class BadSettings(ValueError):
    """Settings that PyTorch would not accept either, or that the models do not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingSettings:
    """What the models of PyTorch's allocator take into account.

    Attributes:
        max_split_nbytes: Blocks of at least this size are never split; None: all may be.
        max_non_split_rounding_nbytes: By how much an unsplittable block may exceed a request; where only the size of
            large segments is given, this is as large.
        roundup_power2_divisions: Per power of two from 1 MiB to 32 GiB, into how many steps it is
            divided when rounding; 0 and 1 mean none.
        garbage_collection_threshold: Share of the capacity above which old free segments are given
            back before new ones are taken; 0: never. PyTorch applies it only after
            `torch.cuda.set_per_process_memory_fraction`; the model wherever a capacity is given.
        expandable_segments: One growing segment per pool instead of many.
        per_process_memory_fraction: Of the device's memory, as the text gives it; None: not in the text. The models
            take bytes as their capacity; they only have to know that it is such a limit.
        large_segment_nbytes: Size of the segments that serve requests between 1 and 10 MiB.
    """

    max_split_nbytes: int | None = None
    max_non_split_rounding_nbytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_DIVISION_CLASSES
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    per_process_memory_fraction: float | None = None
    large_segment_nbytes: int = 20 * MIB

    def __post_init__(self) -> None:
        least = self.large_segment_nbytes
        for name, nbytes in (
            ("max_split_size", self.max_split_nbytes),
            ("max_non_split_rounding", self.max_non_split_rounding_nbytes),
        ):
            if nbytes is not None and nbytes < least:
                raise BadSettings(
                    f"{name} is {nbytes} bytes; PyTorch refuses less than a large segment of {least // MIB} MiB"
                )
        if not 0 <= self.garbage_collection_threshold < 1:
            raise BadSettings(
                f"garbage_collection_threshold is {self.garbage_collection_threshold}; it must be in [0, 1)"
            )
        if len(self.roundup_power2_divisions) != NUM_DIVISION_CLASSES:
            raise BadSettings(f"roundup_power2_divisions has {len(self.roundup_power2_divisions)} entries, not 16")

    @property
    def has_fraction(self) -> bool:
        """Whether a capacity is one that `set_per_process_memory_fraction` sets: collecting implies it."""
        return self.per_process_memory_fraction is not None or self.garbage_collection_threshold > 0

    def divisions(self, nbytes: int) -> int:
        """Into how many steps the power of two below `nbytes` is divided; 0 or 1: not at all."""
        index = nbytes.bit_length() - 1 - 20
        return self.roundup_power2_divisions[min(max(index, 0), NUM_DIVISION_CLASSES - 1)]

    def text(self) -> str:
        """As one would write it into `PYTORCH_ALLOC_CONF`; empty for the defaults."""
        parts = []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.max_split_nbytes is not None:
            parts.append(f"max_split_size_mb:{self.max_split_nbytes // MIB}")
        if self.max_non_split_rounding_nbytes != self.large_segment_nbytes:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding_nbytes // MIB}")
        if self.large_segment_nbytes != 20 * MIB:
            parts.append(f"large_segment_size_mb:{self.large_segment_nbytes // MIB}")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold:g}")
        if self.per_process_memory_fraction is not None:
            parts.append(f"per_process_memory_fraction:{self.per_process_memory_fraction:g}")
        if any(divisions > 1 for divisions in self.roundup_power2_divisions):
            parts.append(f"roundup_power2_divisions:{_divisions_text(self.roundup_power2_divisions)}")
        return ",".join(parts)


def parse_settings(text: str) -> CachingSettings:
    """Settings from text in the form of `PYTORCH_ALLOC_CONF`.

    Keys that do not change where memory lies (backend, pinned memory) are passed over.

    Raises:
        BadSettings: An entry that is not `key:value`, an unknown key, or a value out of range.
    """
    values: dict[str, Any] = {}
    for entry in _entries(text):
        key, colon, value = entry.partition(":")
        if not colon:
            raise BadSettings(f"{entry!r} is not of the form key:value")
        try:
            _apply(values, key.strip(), value.strip())
        except (ValueError, IndexError) as error:
            if isinstance(error, BadSettings):
                raise
            raise BadSettings(f"{entry!r}: {value.strip()!r} is not a value for {key.strip()}") from None
    return _with_rounding(values)


def recorded_settings(document: Mapping[str, Any]) -> CachingSettings:
    """Settings from the `allocator_settings` of a snapshot: the values in force, then those only in the text."""
    text = next((v for k, v in document.items() if k.endswith("ALLOC_CONF") and isinstance(v, str)), "")
    values: dict[str, Any] = {}
    for entry in _entries(text):
        key, _, value = entry.partition(":")
        if key.strip() in _ONLY_IN_THE_TEXT:
            _apply(values, key.strip(), value.strip())
    split = document.get("max_split_size", -1)
    if isinstance(split, int) and 0 < split < 1 << 62:
        values["max_split_nbytes"] = split
    threshold = document.get("garbage_collection_threshold", 0.0)
    if isinstance(threshold, float):
        values["garbage_collection_threshold"] = threshold
    values["expandable_segments"] = document.get("expandable_segments") is True
    divisions = document.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping) and divisions:
        given = [int(v) for _, v in sorted(divisions.items(), key=lambda item: int(item[0]))]
        values["roundup_power2_divisions"] = tuple((given + [given[-1]] * NUM_DIVISION_CLASSES)[:NUM_DIVISION_CLASSES])
    return _with_rounding(values)


_ONLY_IN_THE_TEXT = ("large_segment_size_mb", "max_non_split_rounding_mb", "per_process_memory_fraction")
_WITHOUT_EFFECT = frozenset(
    {
        "backend",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)


def _apply(values: dict[str, Any], key: str, value: str) -> None:
    if key == "max_split_size_mb":
        values["max_split_nbytes"] = int(value) * MIB
    elif key == "max_non_split_rounding_mb":
        values["max_non_split_rounding_nbytes"] = int(value) * MIB
    elif key == "large_segment_size_mb":
        values["large_segment_nbytes"] = int(value) * MIB
    elif key == "garbage_collection_threshold":
        values["garbage_collection_threshold"] = float(value)
    elif key == "per_process_memory_fraction":
        values["per_process_memory_fraction"] = float(value)
    elif key == "expandable_segments":
        values["expandable_segments"] = {"True": True, "False": False}.get(value) or _only("False", value)
    elif key == "roundup_power2_divisions":
        values["roundup_power2_divisions"] = _divisions(value)
    elif key not in _WITHOUT_EFFECT:
        raise BadSettings(f"unknown allocator setting {key!r}")


def _with_rounding(values: dict[str, Any]) -> CachingSettings:
    if "large_segment_nbytes" in values:
        values.setdefault("max_non_split_rounding_nbytes", values["large_segment_nbytes"])
    return CachingSettings(**values)


def _only(wanted: str, value: str) -> bool:
    if value != wanted:
        raise ValueError(value)
    return False


def _divisions(value: str) -> tuple[int, ...]:
    """`4`, or `[64:8,256:4,>:1]`: up to and at 64 MiB 8, at 256 MiB 4, above 1 (what lies between keeps 0)."""
    if not value.startswith("["):
        return (int(value),) * NUM_DIVISION_CLASSES
    found = [0] * NUM_DIVISION_CLASSES
    last = -1
    for position, pair in enumerate(value.strip("[]").split(",")):
        bound, _, number = (part.strip() for part in pair.partition(":"))
        if bound == ">":
            found[last + 1 :] = [int(number)] * (NUM_DIVISION_CLASSES - last - 1)
            continue
        mebibytes = int(bound)
        if mebibytes < 1 or mebibytes & (mebibytes - 1):
            raise BadSettings(f"roundup_power2_divisions: {bound} MiB is not a power of two")
        last = min(mebibytes.bit_length() - 1, NUM_DIVISION_CLASSES - 1)
        if position == 0:
            found[:last] = [int(number)] * last
        found[last] = int(number)
    return tuple(found)


def _divisions_text(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    return "[" + ",".join(f"{1 << i}:{d}" for i, d in enumerate(divisions[:-1])) + f",>:{divisions[-1]}]"


def _entries(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    entries, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            entries.append(text[start:position])
            start = position + 1
    entries.append(text[start:])
    return [entry.strip() for entry in entries if entry.strip()]
