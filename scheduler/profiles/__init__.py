"""Devices as data: how fast they compute and move bytes, and what that costs in energy.

A profile is a JSON file. `load_profile` takes the name of one that comes with the package, or a path;
`Profile.machine` makes the planner's `Machine` of it, `Profile.op_ns` times an op of known work, and
`retimed` gives a trace that carries its work (`ooc trace` notes it) the times of another device.
Where each figure comes from stands in the file's `source`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from scheduler.plan import Machine
from scheduler.trace import Trace

PROFILE_SCHEMA_VERSION = 1

_HERE = Path(__file__).parent


class ProfileError(ValueError):
    """A file that is not a profile, or a profile that lacks what was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What work costs, after POET (ICML'22, section 5.3): paging's energy is on top of the processor's.

    Attributes:
        flops_per_j: Arithmetic for one joule; None: `compute_w` times the ops' durations counts instead.
        compute_w: Power while an op runs, where `flops_per_j` or the trace's flop counts are missing.
        idle_w: Power while the processor waits. 0 in POET's model.
        load_w, evict_w: Power while a byte is on its way in or out, in addition.
    """

    flops_per_j: float | None
    compute_w: float
    idle_w: float
    load_w: float
    evict_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A device.

    Attributes:
        name, description, source: For people; `source` says where the figures come from.
        memory_nbytes: Memory of the device.
        flops_per_s: Arithmetic rate of an op that is limited by it; None: not known.
        memory_bytes_per_s: Rate at which an op walks through its operands.
        op_overhead_ns: Cost of an op that does nothing.
        load_bytes_per_s, evict_bytes_per_s: Rate of the store, each way alone.
        shared_bytes_per_s: Rate of both ways together; None: they do not share.
        load_latency_ns, evict_latency_ns: Fixed cost of one transfer.
        energy: None where nobody measured it.
    """

    name: str
    description: str
    source: str
    memory_nbytes: int
    flops_per_s: float | None
    memory_bytes_per_s: float
    op_overhead_ns: int
    load_bytes_per_s: float
    evict_bytes_per_s: float
    shared_bytes_per_s: float | None
    load_latency_ns: int
    evict_latency_ns: int
    energy: Energy | None

    def __post_init__(self) -> None:
        for name in ("memory_nbytes", "memory_bytes_per_s", "load_bytes_per_s", "evict_bytes_per_s"):
            _check(getattr(self, name), self.name, name, least=1)
        for name in ("op_overhead_ns", "load_latency_ns", "evict_latency_ns"):
            _check(getattr(self, name), self.name, name, least=0)
        for name in ("flops_per_s", "shared_bytes_per_s"):
            if getattr(self, name) is not None:
                _check(getattr(self, name), self.name, name, least=1)
        for field in fields(Energy) if self.energy is not None else ():
            value = getattr(self.energy, field.name)
            if field.name != "flops_per_j" or value is not None:
                _check(value, self.name, f"energy.{field.name}", least=1 if field.name == "flops_per_j" else 0)

    def machine(self, *, chunk_nbytes: int, num_chunks: int) -> Machine:
        """The planner's view, for a budget of `num_chunks` chunks. The larger latency counts for both ways."""
        return Machine(
            chunk_nbytes=chunk_nbytes,
            num_chunks=num_chunks,
            load_bytes_per_s=self.load_bytes_per_s,
            evict_bytes_per_s=self.evict_bytes_per_s,
            shared_bytes_per_s=self.shared_bytes_per_s,
            latency_ns=max(self.load_latency_ns, self.evict_latency_ns),
        )

    def op_ns(self, flops: int, nbytes: int) -> int:
        """Time of an op that does `flops` of arithmetic and walks through `nbytes`: the slower of the two.

        Raises:
            ProfileError: The op computes, and the profile has no `flops_per_s`.
        """
        if flops and self.flops_per_s is None:
            raise ProfileError(
                f"profile {self.name!r} has no 'flops_per_s', so the times of ops cannot be told. "
                f"Options: a profile that has it; a trace recorded on the device, planned as it is."
            )
        compute_s = flops / self.flops_per_s if self.flops_per_s is not None else 0.0
        return self.op_overhead_ns + math.ceil(max(compute_s, nbytes / self.memory_bytes_per_s) * 1e9)

    def require_energy(self) -> Energy:
        """The energy figures. Raises `ProfileError` where there are none."""
        if self.energy is None:
            having = ", ".join(name for name in profile_names() if load_profile(name).energy is not None)
            raise ProfileError(
                f"profile {self.name!r} has no energy figures. Options: a profile with an 'energy' part ({having}); "
                f"--objective time."
            )
        return self.energy

    def to_json(self) -> str:
        """The profile as JSON text; `profile_from_json` reads it back equal."""
        return json.dumps({"schema": "ooc.profile", "schema_version": PROFILE_SCHEMA_VERSION, **asdict(self)}, indent=2)


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _HERE.glob("*.json")))


def load_profile(name_or_path: str) -> Profile:
    """The profile of that name, or in that file.

    Raises:
        ProfileError: No such name, not readable, or not a profile; says which.
    """
    is_path = name_or_path.endswith(".json") or "/" in name_or_path
    if not is_path and name_or_path not in profile_names():
        raise ProfileError(
            f"there is no profile {name_or_path!r}. Options: {', '.join(profile_names())}; a path to a .json file, "
            f"such as 'ooc profile -o mine.json' writes."
        )
    path = Path(name_or_path) if is_path else _HERE / f"{name_or_path}.json"
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read the profile {path}: {error}") from error
    try:
        return profile_from_json(text)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def profile_from_json(text: str) -> Profile:
    """Read a profile. Raises `ProfileError` naming what is wrong with the text."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # nested too deeply, a number too long
        raise ProfileError(f"not JSON: {error}") from error
    if not isinstance(document, dict) or document.pop("schema", None) != "ooc.profile":
        raise ProfileError("not an ooc profile: its 'schema' is not 'ooc.profile'")
    version = document.pop("schema_version", None)
    if version != PROFILE_SCHEMA_VERSION:
        raise ProfileError(
            f"profile has schema version {version!r}; this version of ooc reads {PROFILE_SCHEMA_VERSION}. "
            f"Measure it again ('ooc profile')."
        )
    _check_fields(document, Profile, "")
    energy = document["energy"]
    if energy is not None:
        if not isinstance(energy, dict):
            raise ProfileError(f"'energy' is {energy!r}; it must be an object or null")
        _check_fields(energy, Energy, "energy.")
        document["energy"] = Energy(**energy)
    return Profile(**document)


def retimed(trace: Trace, profile: Profile) -> Trace:
    """The same step with the op times of another device, from the work that the trace carries.

    Raises:
        ProfileError: The trace does not carry its work.
    """
    costs = op_costs(trace)
    if costs is None:
        raise ProfileError(
            "this trace does not say how much its ops compute, so it cannot be given another device's times. "
            "Options: record it with 'ooc trace --fake'; plan it with the times that it has (--keep-times)."
        )
    ops = tuple(
        replace(op, duration_ns=profile.op_ns(flops, nbytes), host_ns=0)
        for op, flops, nbytes in zip(trace.ops, *costs, strict=True)
    )
    return replace(trace, ops=ops, metadata={**trace.metadata, "times_of": profile.name})


def op_costs(trace: Trace) -> tuple[Sequence[int], Sequence[int]] | None:
    """`(flops, bytes walked through)` of each op, where the trace carries them (`metadata["costs"]`)."""
    costs = trace.metadata.get("costs")
    if not isinstance(costs, Mapping) or not all(
        isinstance(costs.get(key), list | tuple) and len(costs[key]) == len(trace.ops) for key in ("flops", "nbytes")
    ):
        return None
    return costs["flops"], costs["nbytes"]


def energy_j(trace: Trace, predicted: Mapping[str, int], profile: Profile) -> float:
    """Joules of one step under a plan: arithmetic, waiting, and bytes moved.

    Args:
        predicted: A plan's predictions for `trace`; time in them beyond the trace's own ops and the
            stalls (recomputation) counts as computing.

    Raises:
        ProfileError: The profile has no energy figures.
    """
    energy = profile.require_energy()
    costs = op_costs(trace)
    own_s = trace.duration_ns / 1e9
    computing_s = max(predicted["duration_ns"] - predicted["stall_ns"], 0) / 1e9
    if energy.flops_per_j is not None and costs is not None and own_s > 0:
        compute_j = sum(costs[0]) / energy.flops_per_j * (computing_s / own_s)
    else:
        compute_j = computing_s * energy.compute_w
    return (
        compute_j
        + predicted["stall_ns"] / 1e9 * energy.idle_w
        + predicted["loaded_nbytes"] / profile.load_bytes_per_s * energy.load_w
        + predicted["evicted_nbytes"] / profile.evict_bytes_per_s * energy.evict_w
    )


def least_energy_j(trace: Trace, bounds: Mapping[str, int], profile: Profile) -> float:
    """Joules that no plan with these bounds can beat: its ops, and the least bytes moved.

    Args:
        bounds: A plan's (`scheduler.cost.bounds.lower_bounds`).

    Raises:
        ProfileError: The profile has no energy figures.
    """
    least = {name: bounds[name] for name in ("loaded_nbytes", "evicted_nbytes")}
    return energy_j(trace, {**least, "duration_ns": bounds["compute_ns"], "stall_ns": 0}, profile)


def _check(value: Any, profile: str, name: str, *, least: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        raise ProfileError(f"profile {profile!r}: '{name}' is {value!r}; it must be a number of at least {least}")


def _check_fields(document: Mapping[str, Any], kind: type[Profile | Energy], prefix: str) -> None:
    known = {field.name for field in fields(kind)}
    missing, unknown = sorted(known - document.keys()), sorted(document.keys() - known)
    if missing or unknown:
        wrong = [f"lacks '{prefix}{name}'" for name in missing] + [
            f"has an unknown '{prefix}{name}'" for name in unknown
        ]
        raise ProfileError(f"not a complete profile: it {', '.join(wrong)}")
